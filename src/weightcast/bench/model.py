"""A plain nn.Module that holds given tensors under their checkpoint names, each in memory of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.manifest import TensorSpec

_TILE_ELEMENTS = 65536


def build_model(specs: Iterable[TensorSpec], device: str = "cpu") -> nn.Module:
    """A module tree with one zeroed parameter for each spec; every page of it is resident when this returns."""
    root = nn.Module()
    for spec in specs:
        *path, leaf = spec.name.split(".")
        parent = root
        for part in path:
            parent = _child(parent, part)
        tensor = torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device=device).zero_()
        parent.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
    return root


def _child(parent: nn.Module, name: str) -> nn.Module:
    if name not in parent._modules:
        parent.add_module(name, nn.Module())
    child = parent._modules[name]
    assert child is not None
    return child


def local_tensors(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """The memory of every parameter that is held here: all of it, or this rank's shard."""
    return {name: _local(parameter.data) for name, parameter in model.named_parameters()}


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(tensors: Iterable[torch.Tensor], seed: int) -> None:
    """Give every tensor values of its own, the same for the same seed."""
    tile = torch.randn(_TILE_ELEMENTS, generator=torch.Generator().manual_seed(seed))
    tiles: dict[torch.dtype, torch.Tensor] = {}
    for index, tensor in enumerate(tensors):
        if tensor.dtype not in tiles:
            tiles[tensor.dtype] = torch.cat([tile, tile]).to(tensor.dtype)
        start = index * 7919 % _TILE_ELEMENTS
        for chunk in torch.split(tensor.view(-1), _TILE_ELEMENTS):
            chunk.copy_(tiles[tensor.dtype][start : start + chunk.numel()])


def change(tensors: Sequence[torch.Tensor]) -> None:
    """Stand in for an optimizer step: every value becomes another one, in place."""
    torch._foreach_neg_(list(tensors))
