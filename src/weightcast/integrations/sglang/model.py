"""One rank's model of a running SGLang as an engine: dry runs, installs through its own loader, undo.

Invariant: a load makes the same calls as SGLang's own weight update session, begun and ended around the install.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.errors import InstallError, UnsupportedError, listed
from weightcast.format.manifest import TensorSpec
from weightcast.host import device as host_device
from weightcast.integrations.plugin.acceptance import Acceptance, acceptance
from weightcast.integrations.plugin.checkpoint_header import reference
from weightcast.integrations.plugin.draft import DraftNames, ModelWithDraft, draft_names
from weightcast.integrations.plugin.dry_run import DryRunOutcome, dry_run, twin
from weightcast.integrations.plugin.model import LoaderEngine, has_own
from weightcast.integrations.sglang import internals
from weightcast.integrations.sglang.adapters import SglangAdapters
from weightcast.serving.install_map import layers_of


class SglangModel(LoaderEngine):
    """The model of a scheduler process, created once it is loaded. `runner`: SGLang's ModelRunner.

    `draft`: that of a draft model that is updated with it. `flush`: empties every cache, and returns whether it could.
    Raises UnsupportedError if this SGLang lacks a required name, or if a model's loader fails in a dry run. With
    `unsupported` features every offer is refused.
    """

    def __init__(
        self,
        runner: Any,
        *,
        unsupported: Sequence[str],
        flush: Callable[[], bool],
        draft: Any = None,
        is_alone: bool = True,
    ) -> None:
        runners = [runner] if draft is None else [runner, draft]
        for each in runners:
            internals.require(each, "model", "model_config", "weight_updater", "server_args", "lora_manager")
            internals.require(each.weight_updater, "begin_weight_update", "end_weight_update")
        model: nn.Module = runner.model
        of_draft: Sequence[TensorSpec] = ()
        if draft is not None and not unsupported:
            found = _of_draft(draft, runner)
            of_draft = found.own
            model = ModelWithDraft(model, draft.model, found.names)
        self._sessions: list[Any] = [each.weight_updater for each in runners]
        self._is_in_session = False
        self._flush = flush
        self.device = next(model.parameters()).device
        started_with = weakref.WeakValueDictionary(layers_of(model))

        def started_from() -> Sequence[TensorSpec] | None:
            specs = _header(runner)
            return None if specs is None else [*specs, *of_draft]

        has_adapters = runner.lora_manager is not None
        self.adapters = SglangAdapters(runner.lora_manager, runner.server_args, started_from) if has_adapters else None

        def make_acceptance() -> Acceptance:
            layers = layers_of(model)
            strange = [name for name, layer in layers.items() if started_with.get(name) is not layer and has_own(layer)]
            if strange:
                raise UnsupportedError(
                    f"{listed(strange)} took another layer's place since SGLang has loaded the model, and SGLang may "
                    "compute with the former layer: put it back, or restart SGLang"
                )
            return acceptance(model, functools.partial(_dry_run, model), started_from(), is_alone=is_alone)

        super().__init__(model, make_acceptance, unsupported)

    def _begin_load(self, calls: Mapping[str, int]) -> None:
        self._is_in_session = True
        for session in self._sessions:
            session.begin_weight_update()

    def _finish_load(self) -> list[str]:
        self._end_load()
        host_device.synchronize(self.device)
        return []

    def _end_load(self) -> None:
        if self._is_in_session:
            self._is_in_session = False
            for session in self._sessions:
                session.end_weight_update(run_post_load=False)

    def _drop_caches(self) -> None:
        if not self._flush():
            raise InstallError(
                "SGLang could not drop the caches of the former weights, since requests were running: publish again",
                torn=True,
            )


def _header(runner: Any) -> Sequence[TensorSpec] | None:
    """Return the tensors of a runner's checkpoint."""
    config = runner.model_config
    return reference(config.model_path, revision=config.revision, cache_dir=runner.server_args.download_dir)


def _of_draft(draft: Any, runner: Any) -> DraftNames:
    """Return the names of a draft model's tensors. Raises UnsupportedError if they can't be known."""
    path, main_path = draft.model_config.model_path, runner.model_config.model_path
    remedy = f"start SGLang with {internals.KEEP_DRAFT}"
    specs = _header(draft)
    if specs is None or _header(runner) is None:
        raise UnsupportedError(
            f"an engine with a draft model is updated only if the headers of {main_path} and {path} can be read: save "
            f"both as safetensors, or {remedy}"
        )
    # A small model has a checkpoint of its own, even if that is the main model's.
    is_in_model = path == main_path and not draft.spec_algorithm.is_standalone()
    return draft_names(draft.model, runner.model, specs, _dry_run, is_in_model=is_in_model, remedy=remedy)


def _dry_run(model: nn.Module, specs: Sequence[TensorSpec]) -> DryRunOutcome:
    return dry_run(model, _without_memory, specs)


def _without_memory(layer: nn.Module, _: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the layer's tensors without memory, in their present form, since SGLang does not repack plain weights."""
    parameters = {name: twin(t) for name, t in layer._parameters.items() if t is not None}
    # Loaders read integer buffers, such as maps of experts.
    buffers = {name: twin(t) if t.is_floating_point() else t for name, t in layer._buffers.items() if t is not None}
    return parameters, buffers
