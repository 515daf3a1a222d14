"""TorchRL's vLLM objects as an `Engine`: a model of this process, or workers behind `collective_rpc`.

Invariants: the prefix cache is reset after every load and before the version counts as served; workers behind one
`collective_rpc` install one version, all or none; tensors that a model keeps from a load never change afterwards.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from weightcast import registry
from weightcast.format.manifest import WeightVersion
from weightcast.integrations.plugin.model import undo_copy
from weightcast.integrations.plugin.refusal import Refusal
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.relay import Relay

logger = logging.getLogger(__name__)


def engine_for(vllm_engine: Any, *, transport: str = "ipc://", undo: bool = True) -> DirectModel | RemoteEngine:
    """Return the engine for a vLLM object. `transport`: from this process to workers in other processes.

    `undo`: workers in other processes keep a host copy of the live weights while they load.

    Raises TypeError for an object other than a vLLM engine.
    """
    # TorchRL's wrapper of an LLM forwards only generation.
    vllm_engine = getattr(vllm_engine, "llm_instance", vllm_engine)
    if hasattr(vllm_engine, "collective_rpc"):
        return RemoteEngine(vllm_engine, transport=transport, undo=undo)
    return DirectModule(vllm_engine) if isinstance(_model_of(vllm_engine), nn.Module) else DirectModel(vllm_engine)


class DirectModel:
    """An `Engine` that calls the `load_weights` of a vLLM model in this process.

    The model gets copies, which it may keep. Host memory: one version during a load.
    """

    def __init__(self, vllm_engine: Any) -> None:
        self._vllm_engine = vllm_engine
        self._refusal = Refusal(vllm_engine)

    def specs(self) -> None:
        """Return None, since the model's loader does not list its tensors."""

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the tensors. Raises what the model's `load_weights` raises; then the engine refuses to generate."""
        pairs, model = [(name, tensor.clone()) for name, tensor in tensors], _model_of(self._vllm_engine)
        with self._refusing():
            model.load_weights(pairs)

    def commit(self, version: WeightVersion) -> None:
        with self._refusing():
            reset_prefix_cache(self._vllm_engine)
        self._refusal.end()

    def discard(self) -> None:
        """Do nothing, since no state is kept."""

    def close(self) -> None:
        """Do nothing, since the engine is the caller's."""

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Context of an install's step; if it fails, the engine refuses to generate."""
        try:
            yield
        except BaseException as exc:
            self._refusal.begin(f"an update failed half-way: {exc}")
            raise


class DirectModule(DirectModel):
    """A `DirectModel` whose model is an `nn.Module`, so that an install can be undone. Host memory: an undo copy."""

    def snapshot(self) -> Callable[[], None]:
        restore, was_whole = undo_copy(_model_of(self._vllm_engine)), not self._refusal.why

        def put_back() -> None:
            restore()
            reset_prefix_cache(self._vllm_engine)
            if was_whole:
                self._refusal.end()

        return put_back


class RemoteEngine(Relay):
    """vLLM's workers in other processes: all of them install the version that this process has read, or none."""

    def __init__(self, vllm_engine: Any, *, transport: str, undo: bool) -> None:
        self._vllm_engine = vllm_engine
        clients, options = registry.engine_clients(vllm_engine), PublishOptions(undo=undo)
        super().__init__(clients, transport=transport, options=options)

    @property
    def is_torn(self) -> bool:
        """True while the engine refuses to generate."""
        return bool(Refusal(self._vllm_engine).why)

    def commit(self, version: WeightVersion) -> None:
        super().commit(version)
        self.require_all()  # TorchRL asks for the version again
        if not inspect.iscoroutinefunction(getattr(self._vllm_engine, "reset_prefix_cache", None)):
            reset_prefix_cache(self._vllm_engine)


def reset_prefix_cache(vllm_engine: Any) -> None:
    """Reset the prefix cache, as TorchRL does: twice if the engine refuses, then log a warning.

    Cached prefixes are keyed by the prompt, not by the weights that made them.
    """
    reset = getattr(vllm_engine, "reset_prefix_cache", None)
    if callable(reset) and reset() is False and reset() is False:
        logger.warning(
            "vLLM could not reset its prefix cache after new weights were loaded, since running requests use parts of "
            "it; later prompts may reuse these until the requests end"
        )


def _model_of(vllm_engine: Any) -> Any:
    inner = getattr(vllm_engine, "llm_engine", vllm_engine)
    try:
        model = inner.model_executor.driver_worker.model_runner.model
    except AttributeError as exc:
        raise TypeError(
            f"{type(vllm_engine).__name__} is not a vLLM engine: it has neither collective_rpc nor "
            "[.llm_engine].model_executor.driver_worker.model_runner.model"
        ) from exc
    return model
