"""Sharded parameters (DTensor of FSDP2, tensor parallelism, HSDP, or mixed) as blocks of their global tensors.

A sharded parameter is stood in for by a tensor of its global shape without data; what a checkpoint has of the stand-in
is mapped back to what this rank holds. Invariants: no communication, no copy; a local tensor whose shape is not what
its placements say is an error, never guessed. torch.distributed is never imported here: a DTensor has brought it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from weightcast.format.geometry import Region

Runs: TypeAlias = list[tuple[int, int]]
"""Indices along one dim, in the order of the local tensor: ranges from a start, each of a size."""


def as_dtensor(tensor: torch.Tensor) -> Any | None:
    """The tensor if it is a DTensor, else None."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, without padding; a plain tensor itself."""
    distributed = as_dtensor(tensor)
    return tensor if distributed is None else distributed._local_tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor of which this rank may hold less than all."""
    distributed = as_dtensor(tensor)
    if distributed is None:
        return False
    mesh = distributed.device_mesh
    return mesh.size() > 1 or mesh.get_coordinate() is None


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in its storage, as those of subclasses that compute them (quantised ones) don't.

    Nor do a storage's that was freed, as frameworks do with gathered parameters.
    """
    if tensor.layout != torch.strided or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    end = (int(tensor.storage_offset()) + last + 1) * tensor.itemsize
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() >= end


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """What this rank holds of a sharded parameter: boxes of its memory, each with its offsets in the global tensor.

    `standin` has the global shape, is contiguous and has no data.
    """

    name: str
    standin: torch.Tensor
    local: torch.Tensor
    boxes: tuple[tuple[tuple[int, ...], torch.Tensor], ...]


def block(name: str, tensor: torch.Tensor) -> Block:
    """Raises ValueError for a partial sum, and if the local tensor's shape is not what the placements say."""
    distributed = as_dtensor(tensor)
    assert distributed is not None
    local, mesh, placements = local_tensor(tensor).detach(), distributed.device_mesh, distributed.placements
    _check_placements(name, placements)
    standin = torch.empty(tuple(tensor.shape), dtype=local.dtype, device="meta")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return Block(name, standin, local, ())
    dims = runs(tuple(tensor.shape), tuple(mesh.shape), coordinate, placements)
    sizes = [sum(size for _, size in dim) for dim in dims]
    if 0 in sizes and local.numel() == 0:
        return Block(name, standin, local, ())
    if sizes != list(local.shape):
        raise ValueError(
            f"{name!r} {list(tensor.shape)} with the placements {placements} should be {sizes} at {tuple(coordinate)} "
            f"of the mesh {tuple(mesh.shape)}, but this rank holds {list(local.shape)}: publish from a DTensor that "
            "was made by torch (fully_shard, parallelize_module, distribute_tensor)"
        )
    return Block(name, standin, local, tuple(_boxes(dims, local)))


class Blocks:
    """The sharded parameters of a module."""

    def __init__(self) -> None:
        self._of_key: dict[Hashable, Block] = {}
        self._of_storage: dict[int, Block] = {}

    def standin(self, key: Hashable, make: Callable[[], Block]) -> torch.Tensor:
        """The same one for the same key: tied parameters are told by it, since empty shards have no memory."""
        if key not in self._of_key:
            added = make()
            self._of_key[key] = self._of_storage[added.standin.untyped_storage()._cdata] = added
        return self._of_key[key].standin

    def owner(self, view: torch.Tensor) -> Block | None:
        """The sharded parameter that a view stands for; None for a view of memory."""
        return self._of_storage.get(view.untyped_storage()._cdata) if view.is_meta else None

    def require_slices(self, views: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError, on every rank alike, for a view that `held` could not express."""
        for name, view in views.items():
            owner = self.owner(view)
            if owner is not None and _dims_of(owner.standin, view) is None:
                raise ValueError(
                    f"{name!r} is no plain slice of the sharded {owner.name!r}: publish from a module whose parameter "
                    "is not sharded, or write a Source of your own"
                )


def _check_placements(name: str, placements: Sequence[Any]) -> None:
    for placement in placements:
        if placement.is_partial():
            raise ValueError(
                f"{name!r} has the placements {placements}: a partial sum is no weight yet; finish the training step, "
                "or reduce it: tensor.redistribute(placements=[Replicate()]) or [Shard(0)]"
            )
        if not placement.is_replicate() and not placement.is_shard() and not _is_strided(placement):
            raise ValueError(
                f"{name!r} has the placements {placements}, of which {placement} is unknown; known: Shard, Replicate"
            )


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def runs(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[Runs]:
    """What of each dim of a tensor is held at a coordinate of the mesh, with the semantics of `torch.chunk`.

    Axes cut from left to right. A `_StridedShard` whose factor counts the shards to the right of it (FSDP2 over tensor
    parallelism) stands for a cut that came after those: cut in that order, uneven sizes too come out as FSDP2 cut them.
    """
    held: list[Runs] = [[(0, size)] for size in shape]
    late = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = placement.dim % len(shape)
        if _is_strided(placement) and placement.split_factor == _num_shards(placements, mesh_shape, axis):
            late.append((axis, dim))
        else:
            factor = placement.split_factor if _is_strided(placement) else 1
            held[dim] = _cut(held[dim], factor, mesh_shape[axis], coordinate[axis])
    for axis, dim in reversed(late):
        held[dim] = _cut(held[dim], 1, mesh_shape[axis], coordinate[axis])
    return held


def _num_shards(placements: Sequence[Any], mesh_shape: Sequence[int], axis: int) -> int:
    """Into how many shards the axes to the right of this one cut the dim that it cuts."""
    right = range(axis + 1, len(placements))
    dim = placements[axis].dim
    return math.prod(mesh_shape[k] for k in right if not placements[k].is_replicate() and placements[k].dim == dim)


def _cut(held: Runs, factor: int, num_chunks: int, index: int) -> Runs:
    """Chunk `index` of each of `factor` chunks, joined."""
    total, found = sum(size for _, size in held), Runs()
    for outer in range(factor):
        start, size = _chunk(total, factor, outer)
        inner_start, inner_size = _chunk(size, num_chunks, index)
        for piece in _take(held, start + inner_start, inner_size):
            if found and sum(found[-1]) == piece[0]:
                found[-1] = (found[-1][0], found[-1][1] + piece[1])
            else:
                found.append(piece)
    return found


def _chunk(total: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Start and size of a chunk; the last ones may be shorter, or empty."""
    size = -(-total // num_chunks)
    start = min(size * index, total)
    return start, min(size, total - start)


def _take(held: Runs, start: int, size: int) -> Iterator[tuple[int, int]]:
    """What positions from `start` on are of these runs."""
    for run_start, run_size in held:
        low, high = max(start, 0), min(start + size, run_size)
        if low < high:
            yield run_start + low, high - low
        start -= run_size


def _boxes(dims: Sequence[Runs], local: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    for choice in itertools.product(*(range(len(dim)) for dim in dims)):
        part = local
        for dim, (held, number) in enumerate(zip(dims, choice, strict=True)):
            before = sum(size for _, size in held[:number])
            part = part.narrow(dim, before, held[number][1])
        yield tuple(dim[number][0] for dim, number in zip(dims, choice, strict=True)), part


def held(owner: Block, view: torch.Tensor) -> list[tuple[Region, torch.Tensor]]:
    """This rank's parts of `view`, a slice of the block's stand-in with its dims in any order: regions, and memory."""
    starts, dims = _starts(owner.standin, view), _dims_of(owner.standin, view)
    assert dims is not None
    sizes = [1] * owner.standin.ndim
    for dim, size in zip(dims, view.shape, strict=True):
        if dim is not None:
            sizes[dim] = size
    common = (_common(starts, sizes, offsets, part) for offsets, part in owner.boxes)
    return [_turned(dims, lows, part) for lows, part in filter(None, common)]


def _common(
    starts: Sequence[int], sizes: Sequence[int], offsets: Sequence[int], part: torch.Tensor
) -> tuple[list[int], torch.Tensor] | None:
    """What a slice and a box of the parameter have in common, and where in the slice it begins; None for nothing."""
    lows = []
    for dim, (start, size, offset) in enumerate(zip(starts, sizes, offsets, strict=True)):
        low, high = max(start, offset), min(start + size, offset + part.shape[dim])
        if high <= low:
            return None
        part = part.narrow(dim, low - offset, high - low)
        lows.append(low - start)
    return lows, part


def _turned(dims: Sequence[int | None], lows: Sequence[int], part: torch.Tensor) -> tuple[Region, torch.Tensor]:
    """A part of the parameter as a region of a view that has these dims of it."""
    offsets = tuple(0 if dim is None else lows[dim] for dim in dims)
    sizes = tuple(1 if dim is None else part.shape[dim] for dim in dims)
    strides = [1 if dim is None else part.stride(dim) for dim in dims]
    return Region(offsets, sizes), part.as_strided(sizes, strides)


def _dims_of(whole: torch.Tensor, view: torch.Tensor) -> list[int | None] | None:
    """For each dim of the view the dim of the contiguous tensor that it runs along, None for one of size 1."""
    along = {s: dim for dim, (s, size) in enumerate(zip(whole.stride(), whole.shape, strict=True)) if size > 1}
    starts = _starts(whole, view)
    dims: list[int | None] = []
    for stride, size in zip(view.stride(), view.shape, strict=True):
        dim = along.get(stride) if size > 1 else None
        if size > 1 and (dim is None or dim in dims or starts[dim] + size > whole.shape[dim]):
            return None
        dims.append(dim)
    return dims


def _starts(whole: torch.Tensor, view: torch.Tensor) -> list[int]:
    """Where the view begins, as an index of the contiguous tensor."""
    rest, starts = int(view.storage_offset()), []
    for stride, size in zip(whole.stride(), whole.shape, strict=True):
        start = rest // stride if size > 1 else 0
        starts.append(start)
        rest -= start * stride
    return starts


def fsdp_modules(module: nn.Module) -> list[nn.Module]:
    """The parts that FSDP2 has wrapped."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]


def reshard(fsdp_modules: Iterable[nn.Module]) -> None:
    """Have FSDP2 put its shards back where a forward pass has left whole parameters, which no optimizer updates."""
    for module in fsdp_modules:
        module.reshard()  # type: ignore[operator]
