"""Sharded parameters (DTensor of FSDP2, tensor parallelism, HSDP, or mixed) as blocks of their global tensors.

A sharded parameter is stood in for by a tensor of its global shape without data; what a checkpoint has of the stand-in
is mapped back to what this rank holds. Invariants: no communication, no copy; a block whose shape is not what its
placements say is an error and never guessed. torch.distributed.tensor is never imported here: a DTensor has brought it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from weightcast.manifest import Region


def as_dtensor(tensor: torch.Tensor) -> Any | None:
    """The tensor if it is a DTensor, else None."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, without padding; a plain tensor itself."""
    distributed = as_dtensor(tensor)
    return tensor if distributed is None else distributed._local_tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank may hold less than all of it."""
    distributed = as_dtensor(tensor)
    return distributed is not None and distributed.device_mesh.size() > 1


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """What this rank holds of a sharded parameter. `standin`: its global shape, contiguous, without data."""

    name: str
    standin: torch.Tensor
    offsets: tuple[int, ...]
    local: torch.Tensor


def block(name: str, tensor: torch.Tensor) -> Block:
    """Raises ValueError for a tensor that still has to be reduced, or whose block is not what its placements say."""
    distributed = as_dtensor(tensor)
    assert distributed is not None
    local, placements = local_tensor(tensor).detach(), distributed.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(
            f"{name!r} has the placements {placements}: a partial sum is no weight yet; reduce it first (redistribute "
            "it to Shard or Replicate)"
        )
    coordinate = distributed.device_mesh.get_coordinate()
    standin = torch.empty(tuple(tensor.shape), dtype=local.dtype, device="meta")
    if coordinate is None:  # this rank is not in the mesh
        return Block(name, standin, (0,) * tensor.ndim, local.new_empty((0,) * tensor.ndim))
    offsets, sizes = _block_of(tuple(tensor.shape), distributed.device_mesh.shape, coordinate, placements)
    if 0 in sizes and local.numel() == 0:
        return Block(name, standin, (0,) * tensor.ndim, local.new_empty((0,) * tensor.ndim))
    if sizes != tuple(local.shape):
        raise ValueError(
            f"{name!r} {list(tensor.shape)} with the placements {placements} should be {list(sizes)} at "
            f"{coordinate} of the mesh {tuple(distributed.device_mesh.shape)}, but this rank holds {list(local.shape)}"
        )
    return Block(name, standin, offsets, local)


def _block_of(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of the block at a coordinate of the mesh.

    `_StridedShard` says that its axis cuts what axes to the right of it have cut already (FSDP over tensor
    parallelism), so those come after the plain shards, from the right; in that order each cut is of a contiguous block.
    """
    plain = [
        axis for axis, placement in enumerate(placements) if _dim(placement) is not None and not _strides(placement)
    ]
    strided = [axis for axis, placement in enumerate(placements) if _strides(placement)]
    offsets, sizes = [0] * len(shape), list(shape)
    for axis in (*plain, *reversed(strided)):
        dim = _dim(placements[axis])
        assert dim is not None
        dim %= len(shape)
        chunk = -(-sizes[dim] // mesh_shape[axis])
        start = min(chunk * coordinate[axis], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def _dim(placement: Any) -> int | None:
    """The dim that a placement cuts; None for a replica."""
    return None if placement.is_replicate() else int(placement.dim)


def _strides(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def held(owner: Block, view: torch.Tensor, name: str) -> tuple[Region, torch.Tensor] | None:
    """This rank's part of `view`, which is a view of the block's stand-in: its region, and the memory; None for none.

    Raises ValueError, naming it, for a view that is no slice of the parameter with its dims in another order.
    """
    dims = _dims_of(owner.standin, view)
    if dims is None:
        raise ValueError(
            f"{name!r} is no plain slice of the sharded {owner.name!r}: publish from a module whose parameter is not "
            "sharded, or write a Source of your own"
        )
    starts, taken = _starts(owner.standin, view), {dim for dim in dims if dim is not None}
    if owner.local.numel() == 0 or view.numel() == 0:
        return None
    local, lows, sizes = owner.local, [], []
    for dim, start in enumerate(starts):
        size = view.shape[dims.index(dim)] if dim in taken else 1
        low = max(start, owner.offsets[dim])
        high = min(start + size, owner.offsets[dim] + owner.local.shape[dim])
        if high <= low:
            return None
        local = local.narrow(dim, low - owner.offsets[dim], high - low)
        lows.append(low - start)
        sizes.append(high - low)
    order = [dim for dim in dims if dim is not None]
    rest = [dim for dim in range(owner.standin.ndim) if dim not in taken]
    local = local.permute(*order, *rest)
    for _ in rest:
        local = local.squeeze(-1)
    for position in [position for position, dim in enumerate(dims) if dim is None]:
        local = local.unsqueeze(position)
    region = Region(
        offsets=tuple(0 if dim is None else lows[dim] for dim in dims),
        sizes=tuple(1 if dim is None else sizes[dim] for dim in dims),
    )
    return region, local


def _dims_of(whole: torch.Tensor, view: torch.Tensor) -> list[int | None] | None:
    """For each dim of the view the dim of the contiguous tensor that it runs along, None for one of size 1."""
    strides = {
        stride: dim for dim, (stride, size) in enumerate(zip(whole.stride(), whole.shape, strict=True)) if size > 1
    }
    dims: list[int | None] = []
    starts = _starts(whole, view)
    for stride, size in zip(view.stride(), view.shape, strict=True):
        dim = strides.get(stride) if size > 1 else None
        if size > 1 and (dim is None or dim in dims or starts[dim] + size > whole.shape[dim]):
            return None
        dims.append(dim)
    return dims


def _starts(whole: torch.Tensor, view: torch.Tensor) -> list[int]:
    """Where the view begins, as an index of the contiguous tensor."""
    rest, starts = int(view.storage_offset()), []
    for stride, size in zip(whole.stride(), whole.shape, strict=True):
        start = rest // stride if size > 1 and stride else 0
        starts.append(start)
        rest -= start * stride
    return starts


def reshard(modules: Iterator[nn.Module] | Sequence[nn.Module]) -> None:
    """Have FSDP2 put its shards back where a forward pass has left whole parameters, which no optimizer updates."""
    for module in modules:
        module.reshard()  # type: ignore[operator]


def fsdp_modules(module: nn.Module) -> list[nn.Module]:
    """The parts that FSDP2 has wrapped."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]
