"""The layers of one load: packed ones are filled and packed by vLLM one after another, all others are loaded in place.

This is vLLM's layerwise reload, with vLLM's own functions, except for the detection that a layer is complete: vLLM
calls every loader twice, first to count the copies; here the dry run of the offer has counted the calls. A packed layer
is filled in extra memory, then packed by vLLM and copied to its live tensors.

Invariants: after a load, also a failed one, every layer has its live tensors at their addresses, so that captured
graphs stay valid, and none is on the meta device; no received tensor is kept. From the first to the last call of its
loaders a packed layer needs the memory of its tensors once more.

Two faults of the stock reload on CPUs, where weights are packed for the CPU's kernels, are worked around:

- A layer whose parameter belongs to an earlier layer (a tied `lm_head`) keeps a packed copy of the former weights: it
  is processed again, from the shared parameter.
- Unquantised experts are packed only while their method has no kernel: it is removed, and the reload makes it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from weightcast.errors import InstallError
from weightcast.host.closing import on_failure
from weightcast.integrations.plugin.dry_run import present, twin
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.expert_placement import Placement, with_placement

Tensors = dict[str, torch.Tensor]
Packing = Callable[[str], AbstractContextManager[None]]
"""The context in which vLLM packs a filled layer, given its name."""
_PRODUCT_BYTES = 16 << 20
"""Amount of a packed table that is read at a time."""


class Filling:
    """A packed layer that is filled by `num_calls` calls of its loaders, after which vLLM packs it.

    Raises what vLLM raises, and InstallError for an additional call. `internals.put_live_back` undoes an unfinished
    one.
    """

    def __init__(
        self, name: str, layer: nn.Module, num_calls: int, packing: Packing, placement: Placement | None
    ) -> None:
        self._name = name
        self._packing = packing
        self._layer = layer
        self._num_calls = num_calls
        self._num_done = 0
        self._info: Any = internals.require().layer_info(layer)
        self._info.kernel_tensors = present(layer._parameters), present(layer._buffers)
        self._info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
        live: tuple[Any, Any] = layer._parameters, layer._buffers
        for held, made in zip(live, in_checkpoint_form(layer), strict=True):
            for tensor_name in present(held).keys() - internals.require().kept_tensors:
                del held[tensor_name]
            for tensor_name, tensor in made.items():
                loader = self._loader(tensor_name, tensor.weight_loader)  # type: ignore[attr-defined]
                tensor.weight_loader = with_placement(loader, placement)  # type: ignore[attr-defined]
            held.update(made)

    @property
    def is_done(self) -> bool:
        return self._num_done == self._num_calls

    def __str__(self) -> str:
        return f"{self._name} ({self._num_done} of {self._num_calls} parts)"

    def _loader(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, assigned=())
        def load(param: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            del param  # it may be the parameter without memory
            if self.is_done:
                raise InstallError(
                    f"the loader was called more often for {self._name} than in the dry run of the offer: publish "
                    "again",
                    torn=True,
                )
            tensor: torch.Tensor = getattr(self._layer, name)
            if tensor.is_meta:  # it gets memory at the first call
                with self._info.restore_device:
                    tensor = internals.require().made_of(tensor)
                setattr(self._layer, name, tensor)
            result = original(tensor, *args, **kwargs)
            self._num_done += 1
            if self._num_done == self._num_calls:
                self._pack()
            return result

        return load

    def _pack(self) -> None:
        method: Any = self._layer.quant_method
        kernel = getattr(method, "moe_kernel", None)
        if is_cpu_experts(self._layer):
            method.moe_kernel = None  # otherwise vLLM would not pack them again

        def put_kernel_back() -> None:
            if kernel is not None:
                method.moe_kernel = kernel

        with on_failure(put_kernel_back), self._packing(self._name):
            internals.require().pack(self._layer, self._info)


def is_packed(layer: nn.Module) -> bool:
    """Return whether vLLM may keep a layer's weights in another form than the checkpoint's. Others load in place."""
    vllm = internals.require()
    return isinstance(getattr(layer, "quant_method", None), vllm.quant_method) and not vllm.is_attention(layer)


def has_plain_weights(layer: nn.Module) -> bool:
    """Return whether vLLM computes only with a layer's parameters and buffers, in the checkpoint's form.

    A layer that vLLM may pack has plain weights if the method for unquantised weights does not change them. On a CPU
    this method passes the weights to a function, which may use packed weights in place of its argument.
    """
    if not is_packed(layer):
        return True
    vllm = internals.require()
    if type(layer.quant_method) not in (vllm.linear_method, vllm.embedding_method):
        return False
    parameters = present(layer._parameters)
    if not all(parameter.is_cpu for parameter in parameters.values()):
        return not hasattr(layer, "cpu_linear")
    weight = parameters.get("weight")
    return "cpu_linear" in vars(layer) and weight is not None and _uses_what_it_is_given(layer, weight)


def _uses_what_it_is_given(layer: Any, weight: torch.Tensor) -> bool:
    """Return whether the layer's function uses the weight that it is called with, tried with a weight of one row."""
    if weight.ndim != 2 or not weight.numel():
        return False
    with torch.inference_mode():
        x = torch.ones_like(weight[:1])
        x[:, 1:] = 0
        try:
            products = [layer.cpu_linear(x, torch.full_like(x, value), None) for value in (1, 2)]
        except Exception:
            return False
    return [product.shape == (1, 1) and product.item() for product in products] == [1, 2]


def has_packed_copy(layer: nn.Module) -> bool:
    """Return whether vLLM computes logits with a packed copy of this table, and keeps the table for look-ups."""
    is_table = type(getattr(layer, "quant_method", None)) is internals.require().embedding_method
    return is_table and "cpu_linear" in vars(layer) and not has_plain_weights(layer)


def packed_copy_fault(layer: Any, vllm_config: Any) -> str:
    """Return how a layer's packed copy differs from its table, or "".

    The packed copy is read by computing with it: its product with a row of the unit matrix is a column of the table. If
    a value differs from the table's (for example, a kernel treats subnormal numbers as 0), vLLM packs the table again,
    and the two packed copies are compared. Time: a few times that of the logits of as many tokens as the table has
    columns. Memory, if a value differs: another packed copy.
    """
    table: torch.Tensor = layer.weight.data
    num_columns = table.shape[1]
    packed_again: Any = None
    at_once = max(1, _PRODUCT_BYTES // max(table[:, :1].nbytes, 1))
    with internals.require().current_config(vllm_config), torch.inference_mode():
        for start in range(0, num_columns, at_once):
            columns = table[:, start : start + at_once].t()
            units = torch.zeros(len(columns), num_columns, dtype=table.dtype)
            units[:, start : start + at_once].fill_diagonal_(1)
            found = layer.quant_method.apply(layer, units)
            if torch.equal(found, columns):
                continue
            if packed_again is None:
                packed_again = nn.Module()
                packed_again.register_parameter("weight", nn.Parameter(table, requires_grad=False))
                layer.quant_method.process_weights_after_loading(packed_again)
            expected = layer.quant_method.apply(packed_again, units)
            differing = ~torch.isclose(found, expected, rtol=0, atol=0, equal_nan=True)
            if differing.any():
                column, row = differing.nonzero()[0].tolist()
                return (
                    f"has a packed copy that differs from it, first in row {row}, column {start + column}: found "
                    f"{found[column, row].item()}, expected {expected[column, row].item()}"
                )
    return ""


def is_cpu_experts(layer: nn.Module) -> bool:
    """Return whether a layer holds unquantised experts in host memory, which vLLM packs while they have no kernel."""
    is_unquantised = isinstance(getattr(layer, "quant_method", None), internals.require().experts_method)
    return is_unquantised and all(parameter.is_cpu for parameter in layer.parameters(recurse=False))


def in_checkpoint_form(layer: nn.Module) -> tuple[Tensors, Tensors]:
    """Return a layer's parameters and buffers without memory, as recorded by vLLM at start-up, except live ones."""
    vllm = internals.require()
    recorded, kept = vllm.layer_info(layer).restore_metadata, vllm.kept_tensors
    parameters, buffers = (
        {name: without_memory(tensor, layer) for name, tensor in tensors.items() if name not in kept}
        for tensors in recorded
    )
    return parameters, buffers


def without_memory(tensor: torch.Tensor, layer: nn.Module) -> torch.Tensor:
    """Return a `twin`, with the loader that the tensor had at start-up."""
    vllm = internals.require()
    made = vllm.with_layer(twin(tensor), layer)
    # After a reload by vLLM itself its record has the loader of that reload, which would load nothing.
    made.weight_loader = vllm.original_loader(made)  # type: ignore[attr-defined]
    return made
