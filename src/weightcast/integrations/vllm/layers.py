"""One layer of a vLLM model during a reload: filled beside its live tensors, then packed by vLLM and copied into them.

Invariants: the live tensors stay where they are, so that captured graphs stay valid; from the first call of its loaders
to the last one a layer takes the memory of its own tensors once more, and before and after that none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weightcast.errors import InstallError
from weightcast.integrations.plugin.dry_run import present
from weightcast.integrations.vllm import internals

Tensors = dict[str, torch.Tensor]


def is_packed(layer: nn.Module) -> bool:
    """Whether vLLM may keep its weights in another form than a checkpoint's. Others can be loaded in place."""
    vllm = internals.require()
    return isinstance(getattr(layer, "quant_method", None), vllm.quant_method) and not vllm.is_attention(layer)


def is_cpu_experts(layer: nn.Module) -> bool:
    """Whether it holds unquantised experts in host memory, which vLLM packs while their method has no kernel."""
    is_unquantised = isinstance(getattr(layer, "quant_method", None), internals.require().experts_method)
    return is_unquantised and all(parameter.is_cpu for parameter in layer.parameters(recurse=False))


def in_checkpoint_form(layer: nn.Module) -> tuple[Tensors, Tensors]:
    """Its parameters and buffers without memory, as vLLM noted them at start-up; not those that vLLM leaves live."""
    vllm = internals.require()
    parameters, buffers = (
        {name: without_memory(tensor, layer) for name, tensor in noted.items() if name not in vllm.kept_tensors}
        for noted in vllm.layer_info(layer).restore_metadata
    )
    return parameters, buffers


def without_memory(tensor: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """A tensor of the same class and attributes, with the loader that it had at start-up."""
    vllm = internals.require()
    with torch.device("meta"):
        made = vllm.with_layer(vllm.made_of(tensor), layer)
    # After a reload by vLLM itself its record keeps the loader of that reload, which would load nothing.
    made.weight_loader = vllm.original_loader(made)  # type: ignore[attr-defined]
    return made


class Filling:
    """A packed layer that is to be filled by `num_calls` calls of its loaders; the last one has vLLM pack it.

    Raises what vLLM raises, and InstallError at a call too many. `internals.put_live_back` undoes a filling that is
    under way.
    """

    def __init__(self, name: str, layer: nn.Module, num_calls: int) -> None:
        self._name = name
        self._layer = layer
        self._num_calls = num_calls
        self._num_done = 0
        self._info: Any = internals.require().layer_info(layer)
        self._set_aside()

    @property
    def is_whole(self) -> bool:
        return self._num_done == self._num_calls

    def __str__(self) -> str:
        return f"{self._name} ({self._num_done} of {self._num_calls} parts)"

    def _set_aside(self) -> None:
        layer, info, kept = self._layer, self._info, internals.require().kept_tensors
        info.kernel_tensors = present(layer._parameters), present(layer._buffers)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        live: tuple[Any, Any] = layer._parameters, layer._buffers
        for held, made in zip(live, in_checkpoint_form(layer), strict=True):
            for name in present(held).keys() - kept:
                del held[name]
            for name, tensor in made.items():
                tensor.weight_loader = self._loader(name, tensor.weight_loader)  # type: ignore[attr-defined]
            held.update(made)

    def _loader(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            del param  # whoever calls may hold the one without memory
            if self.is_whole:
                raise InstallError(f"more came for {self._name} than when the offer was tried", torn=True)
            result = original(self._filled(name), *args, **kwargs)
            self._num_done += 1
            if self._num_done == self._num_calls:
                self._pack()
            return result

        return load

    def _filled(self, name: str) -> torch.Tensor:
        """The tensor that is filled, with memory from the first call on."""
        tensor: torch.Tensor = getattr(self._layer, name)
        if tensor.is_meta:
            with self._info.restore_device:
                tensor = internals.require().made_of(tensor)
            setattr(self._layer, name, tensor)
        return tensor

    def _pack(self) -> None:
        method: Any = self._layer.quant_method
        kernel = getattr(method, "moe_kernel", None)
        if is_cpu_experts(self._layer):
            method.moe_kernel = None  # or vLLM would leave them packed as they were
        try:
            internals.require().pack(self._layer, self._info)
        except BaseException:
            if kernel is not None:
                method.moe_kernel = kernel
            raise
