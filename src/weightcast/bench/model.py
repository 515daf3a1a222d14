"""A plain nn.Module that holds given tensors under their checkpoint names, each in memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from weightcast.bucket import TORCH_DTYPES
from weightcast.manifest import TensorSpec

_TILE_ELEMENTS = 65536


def build_model(specs: Iterable[TensorSpec]) -> nn.Module:
    """A module tree with one zeroed parameter for each spec; every page of it is resident when this returns."""
    root = nn.Module()
    for spec in specs:
        *path, leaf = spec.name.split(".")
        parent = root
        for part in path:
            parent = _child(parent, part)
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype]).zero_()
        parent.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def _child(parent: nn.Module, name: str) -> nn.Module:
    if name not in parent._modules:
        parent.add_module(name, nn.Module())
    child = parent._modules[name]
    assert child is not None
    return child


def fill(model: nn.Module, seed: int) -> None:
    """Give every parameter values of its own, the same for the same seed."""
    tile = torch.randn(_TILE_ELEMENTS, generator=torch.Generator().manual_seed(seed))
    tiles = {dtype: torch.cat([tile, tile]).to(dtype) for dtype in {p.dtype for p in model.parameters()}}
    for index, parameter in enumerate(model.parameters()):
        start = index * 7919 % _TILE_ELEMENTS
        for chunk in torch.split(parameter.data.view(-1), _TILE_ELEMENTS):
            chunk.copy_(tiles[parameter.dtype][start : start + chunk.numel()])


def change(tensors: Sequence[torch.Tensor]) -> None:
    """Stand in for an optimizer step: every value becomes another one, in place."""
    torch._foreach_neg_(list(tensors))
