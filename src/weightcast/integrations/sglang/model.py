"""One rank's model of a running SGLang as an engine: tries an offer, installs through its own loader, goes back.

Invariant: a load is what SGLang does in a session of its own, begun and ended around the calls of the loader. An
install without any of these goes without the session, once its two steps were seen to do nothing to this model.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from weightcast.errors import InstallError
from weightcast.host import device as host_device
from weightcast.integrations.plugin.acceptance import Acceptance, acceptance
from weightcast.integrations.plugin.checkpoint_header import reference
from weightcast.integrations.plugin.dry_run import dry_run, present, twin
from weightcast.integrations.plugin.model import Agree, LoaderEngine, Tensors, alone
from weightcast.integrations.sglang import internals


class SglangModel(LoaderEngine):
    """Made in a scheduler process, once its model is loaded. `runner` is its ModelRunner.

    `flush` empties every cache, and says whether it could. Raises UnsupportedError if this SGLang lacks what is leant
    on, or if the model's loader can't be tried. With `unsupported` features every offer is refused.
    """

    def __init__(
        self,
        runner: Any,
        *,
        unsupported: Sequence[str],
        flush: Callable[[], bool],
        is_alone: bool = True,
        agree: Agree = alone,
    ) -> None:
        internals.require(runner, "model", "model_config", "weight_updater", "server_args")
        internals.require(runner.weight_updater, "begin_weight_update", "end_weight_update")
        model: nn.Module = runner.model
        self._session: Any = runner.weight_updater
        self._is_in_session = False
        self._idle_steps: dict[str, bool] = {}
        """Which steps of a session were seen to leave the model alone: they ask each of its modules, for no less time
        than many installs by copies take."""
        self._flush = flush
        self.device = next(model.parameters()).device

        def make_acceptance() -> Acceptance:
            self._idle_steps.clear()
            config = runner.model_config
            known = reference(config.model_path, revision=config.revision, cache_dir=runner.server_args.download_dir)
            return acceptance(model, functools.partial(dry_run, model, _without_memory), known, is_alone=is_alone)

        super().__init__(model, make_acceptance, unsupported, agree)

    def _begin_load(self, calls: Mapping[str, int]) -> None:
        if len(self._idle_steps) < 2 or not all(self._idle_steps.values()):
            self._begin_session()

    def _begin_session(self) -> None:
        self._is_in_session = True
        self._do("begin", self._session.begin_weight_update)

    def _load_some(self, tensors: Tensors) -> None:
        if not self._is_in_session:
            self._begin_session()
        super()._load_some(tensors)

    def _finish_load(self) -> list[str]:
        self._end_load()
        host_device.synchronize(self.device)
        return []

    def _end_load(self) -> None:
        if self._is_in_session:
            self._is_in_session = False
            self._do("end", functools.partial(self._session.end_weight_update, run_post_load=False))

    def _do(self, name: str, step: Callable[[], None]) -> None:
        """A step of a session; the first time it is observed."""
        if name in self._idle_steps:
            step()
            return
        self._idle_steps[name] = False
        before = _held(self._model)
        with _Operations() as operations:
            step()
        after = _held(self._model)
        self._idle_steps[name] = (
            not operations.num and len(before) == len(after) and all(map(operator.is_, before, after))
        )

    def _drop_caches(self) -> None:
        if not self._flush():
            raise InstallError("the caches of the former weights could not be dropped", torn=True)


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations, whatever they are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


def _held(model: nn.Module) -> list[object]:
    """All that its modules and their methods for weights refer to, their parameters and submodules among them."""
    found: list[object] = []
    for layer in model.modules():
        for held in (vars(layer), layer._parameters, layer._buffers, layer._modules):
            found += held.values()
        found += getattr(vars(layer).get("quant_method"), "__dict__", {}).values()
    return found


def _without_memory(layer: nn.Module, _: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The layer's tensors as they are, but for their memory: SGLang serves unquantised weights as it loads them."""
    parameters = {name: twin(tensor) for name, tensor in present(layer._parameters).items()}
    # Loaders read maps of experts and the like, which are integers.
    buffers = {name: twin(t) if t.is_floating_point() else t for name, t in present(layer._buffers).items()}
    return parameters, buffers
