"""An undo copy of one rank's model: its values in host memory, and how its layers were put together.

Costs host memory of the size of this rank's parameters and buffers, and the time to copy them, per install. What an
engine keeps beside these, packed for its kernels, is not copied: the old packed weights live on beside the new ones
until the copy is dropped. Storage addresses are kept, so that captured graphs stay valid.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from weightcast.host import copy as host_copy

_OWN_CONTAINERS = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
"""Of a module's attributes, these are copied; of others the reference is kept."""


def snapshot(model: nn.Module) -> Callable[[], None]:
    """Copy now; the result puts everything back, also in the middle of a load. It may be called more than once."""
    saved = [(subject, _copied(vars(subject))) for subject in _subjects(model)]
    live = [*model.parameters(), *model.buffers()]
    values = [tensor.data for tensor in live]
    with torch.inference_mode():
        copies = [value.to("cpu", copy=True) for value in values]

    def restore() -> None:
        for subject, attributes in saved:
            subject.__dict__.clear()
            subject.__dict__.update(_copied(attributes))
        for tensor, value in zip(live, values, strict=True):
            tensor.data = value
        with torch.inference_mode():
            host_copy.copy_all(values, copies)

    return restore


def _subjects(model: nn.Module) -> Iterator[Any]:
    """The modules, and what they delegate the packing of their weights to."""
    for layer in model.modules():
        yield layer
        for name in ("quant_method", "impl"):
            helper = vars(layer).get(name)
            if hasattr(helper, "__dict__"):
                yield helper


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(value) if name in _OWN_CONTAINERS else value for name, value in attributes.items()}
