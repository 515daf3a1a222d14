"""One install by vLLM's layerwise reload, which fuses, slices, packs and copies into the tensors that are live.

Invariants: when it returns or raises, every layer has its live tensors and none is on the meta device; nothing that was
received is kept. It costs the memory of the layers that are under way, never that of the model.

Two faults of the stock reload on CPUs, where weights are packed once more for the CPU's kernels, are worked round:

- A layer whose parameter belongs to an earlier layer (a tied `lm_head`) keeps a packed copy of the former weights: it
  is processed again, from the parameter that both share.
- Unquantised experts are packed only while their method has no kernel: it is taken away, and made anew by the reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weightcast.errors import UnsupportedError
from weightcast.integrations.vllm import internals


def reload(
    model: Any, vllm_config: Any, tensors: Iterable[tuple[str, torch.Tensor]], expected: Mapping[str, int]
) -> list[str]:
    """Load `tensors`, whole; returns, in words, which layers got fewer elements than `expected` says.

    Raises what the model's loader raises. The model's weights are then of no version, but a reload can heal them.
    """
    vllm = internals.require()
    kernels: dict[Any, Any] = {}
    with vllm.current_config(vllm_config):
        # Somebody's reload that was left half-way would go on with what it has buffered.
        abort(model)
        try:
            for layer in _packed_experts(model):
                kernels[layer] = layer.quant_method.moe_kernel
                layer.quant_method.moe_kernel = None
            vllm.begin_reload(model)
            model.load_weights(tensors)
            short = list(_short(model, expected))
            vllm.end_reload(model, vllm_config.model_config)
            for layer in _packed_ties(model):
                layer.quant_method.process_weights_after_loading(layer)
        except BaseException:
            abort(model)
            for layer, kernel in kernels.items():
                if layer.quant_method.moe_kernel is None:
                    layer.quant_method.moe_kernel = kernel
            raise
    return short


def abort(model: nn.Module) -> None:
    """End a reload that is under way: every layer gets its live tensors back. Idempotent."""
    vllm = internals.require()
    for layer in model.modules():
        info = vllm.layer_info(layer)
        if info.kernel_tensors is not None:
            vllm.put_live_back(layer, info)
    forget(model)


def forget(model: nn.Module) -> None:
    """Let go of what a reload has noted and buffered. Every layer must have its live tensors."""
    vllm = internals.require()
    for layer in model.modules():
        vllm.layer_info(layer).reset()
        vllm.loading_layers.discard(layer)
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload


def require_work_rounds(model: nn.Module) -> None:
    """Raises UnsupportedError if a layer that a work-round is for lacks what the work-round needs."""
    lacking = [
        f"{type(layer.quant_method).__name__}.moe_kernel"
        for layer in _experts(model)
        if not hasattr(layer.quant_method, "moe_kernel")
    ]
    lacking += [f"{type(layer).__name__}.cpu_linear" for layer in _ties(model) if "cpu_linear" not in vars(layer)]
    if lacking:
        raise UnsupportedError(
            f"vLLM {internals.version()} packs weights on a CPU in another way than weightcast knows: "
            f"it has no {', '.join(sorted(set(lacking)))}"
        )


def _short(model: nn.Module, expected: Mapping[str, int]) -> Iterator[str]:
    """Layers that are not complete. A layer that is complete has been processed, and its record reset."""
    for prefix, layer in model.named_modules():
        info, whole = internals.require().layer_info(layer), expected.get(prefix, 0)
        if info.can_load() and info.load_numel < whole:
            yield f"{prefix} ({info.load_numel} of {whole} elements)"


def _experts(model: nn.Module) -> Iterator[Any]:
    """Layers of unquantised experts in host memory."""
    for layer in model.modules():
        is_unquantised = isinstance(getattr(layer, "quant_method", None), internals.require().experts_method)
        if is_unquantised and all(parameter.is_cpu for parameter in layer.parameters(recurse=False)):
            yield layer


def _packed_experts(model: nn.Module) -> list[Any]:
    return [layer for layer in _experts(model) if layer.quant_method.moe_kernel is not None]


def _ties(model: nn.Module) -> Iterator[Any]:
    """Layers in host memory with a parameter that belongs to an earlier layer as well."""
    seen: set[int] = set()
    for layer in model.modules():
        own = {id(p) for p in layer.parameters(recurse=False) if p.is_cpu and p.numel()}
        if own & seen and isinstance(getattr(layer, "quant_method", None), internals.require().quant_method):
            yield layer
        seen |= own


def _packed_ties(model: nn.Module) -> list[Any]:
    return [layer for layer in _ties(model) if "cpu_linear" in vars(layer)]
