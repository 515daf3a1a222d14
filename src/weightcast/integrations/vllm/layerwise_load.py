"""One install: packed layers are filled and packed by vLLM one after another, all others are loaded in place.

This is vLLM's layerwise reload, by its own parts, but for how it learns that a layer is whole: vLLM calls every loader
twice, first to count what it would copy; here the dry run of the offer has counted the calls.

Invariants: when it returns or raises, every layer has its live tensors and none is on the meta device; nothing that was
received is kept. It costs the memory of the layers that are under way, never that of the model.

Two faults of the stock reload on CPUs, where weights are packed once more for the CPU's kernels, are worked round:

- A layer whose parameter belongs to an earlier layer (a tied `lm_head`) keeps a packed copy of the former weights: it
  is processed again, from the parameter that both share.
- Unquantised experts are packed only while their method has no kernel: it is taken away, and made anew by the reload.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weightcast.errors import UnsupportedError
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.layers import Filling, is_cpu_experts, is_packed


class Reload:
    """Installs into `model`, whose layers must stay the same modules; their tensors may change."""

    def __init__(self, model: nn.Module, vllm_config: Any) -> None:
        self._model: Any = model
        self._vllm_config = vllm_config
        self._packed = {name: layer for name, layer in model.named_modules() if is_packed(layer)}
        self._attention: list[Any] = [layer for layer in model.modules() if internals.require().is_attention(layer)]
        self._tied = list(_ties(model))

    def require_work_rounds(self) -> None:
        """Raises UnsupportedError if a layer that a work-round is for lacks what the work-round needs."""
        experts: list[Any] = [layer for layer in self._packed.values() if is_cpu_experts(layer)]
        methods = [layer.quant_method for layer in experts]
        lacking = {f"{type(method).__name__}.moe_kernel" for method in methods if not hasattr(method, "moe_kernel")}
        lacking |= {f"{type(layer).__name__}.cpu_linear" for layer in self._tied if "cpu_linear" not in vars(layer)}
        if lacking:
            raise UnsupportedError(
                f"vLLM {internals.version()} packs weights on a CPU in another way than weightcast knows: "
                f"it has no {', '.join(sorted(lacking))}"
            )

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]], calls: Mapping[str, int]) -> list[str]:
        """Load `tensors`, whole; returns, in words, which layers were called for less often than `calls` says.

        Raises what the model's loader raises. The weights are then of no version, but another load can heal them.
        """
        with internals.require().current_config(self._vllm_config):
            # Somebody's reload that was left half-way would go on with what it has buffered.
            self.abort()
            try:
                with _without_collections():
                    return self._filled(tensors, calls)
            except BaseException:
                self.abort()
                raise

    def _filled(self, tensors: Iterable[tuple[str, torch.Tensor]], calls: Mapping[str, int]) -> list[str]:
        fillings = [Filling(name, self._packed[name], number) for name, number in calls.items()]
        self._model.load_weights(tensors)
        missing = [str(filling) for filling in fillings if not filling.is_whole]
        if missing:
            self.abort()
        else:
            self._finish()
        return missing

    def abort(self) -> None:
        """End a reload that is under way: every layer gets its live tensors back, what is buffered goes. Idempotent."""
        vllm = internals.require()
        for layer in self._model.modules():
            info = vllm.layer_info(layer)
            if info.kernel_tensors is not None:
                vllm.put_live_back(layer, info)
            if info.kernel_tensors is not None or info.can_load():
                info.reset()
        vllm.loading_layers.clear()
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload

    def _finish(self) -> None:
        """Have vLLM compute what it keeps of the weights of several layers."""
        for layer in self._attention:
            layer.process_weights_after_loading(self._vllm_config.model_config.dtype)
        for layer in self._tied:
            layer.quant_method.process_weights_after_loading(layer)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """A full garbage collection looks at all that vLLM keeps, 0.1 s and more, and an install leaves it nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _ties(model: nn.Module) -> Iterator[Any]:
    """Packed layers in host memory with a parameter that belongs to an earlier layer as well."""
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(p) for p in layer.parameters(recurse=False) if p.is_cpu and p.numel()}
        if own & seen and is_packed(layer):
            yield layer
        seen |= own
