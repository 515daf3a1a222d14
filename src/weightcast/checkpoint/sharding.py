"""Sharded parameters (DTensor of FSDP2, tensor parallelism, HSDP, or mixed) as blocks of their global tensors.

A sharded parameter is represented by a stand-in: a tensor of its global shape without data. The checkpoint's views of
the stand-in are mapped back to this rank's shard. Invariants: no communication, no copy; a local tensor whose shape
differs from its placements is an error. torch.distributed is never imported here: a process that has a DTensor has
imported it already.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from weightcast.format.bucket import DTYPE_NAMES, narrow
from weightcast.format.geometry import Region, common, relative
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Held, TensorPart

Runs: TypeAlias = list[tuple[int, int]]
"""Indices along one dim, in the order of the local tensor: ranges from a start, each of a size."""


def fsdp_parts(module: nn.Module, class_name: str) -> list[Any]:
    """Return the submodules of this class of `torch.distributed.fsdp`."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), class_name, None)
    return [] if kind is None else [part for part in module.modules() if isinstance(part, kind)]


def as_dtensor(tensor: torch.Tensor) -> Any | None:
    """Return the tensor if it is a DTensor, else None."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, without padding, or a plain tensor itself."""
    distributed = as_dtensor(tensor)
    return tensor if distributed is None else distributed._local_tensor


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor of which this rank may hold only a part."""
    distributed = as_dtensor(tensor)
    if distributed is None:
        return False
    mesh = distributed.device_mesh
    return mesh.size() > 1 or mesh.get_coordinate() is None


def with_local(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a DTensor with this `local` tensor, sharded like another DTensor. No communication."""
    distributed = as_dtensor(tensor)
    assert distributed is not None
    made: torch.Tensor = type(distributed).from_local(
        local,
        distributed.device_mesh,
        distributed.placements,
        run_check=False,
        shape=distributed.shape,
        stride=distributed.stride(),
    )
    return made


def part(name: str, tensor: torch.Tensor) -> TensorPart:
    """Return this rank's part of a sharded tensor, with the global spec. Raises what `block` raises."""
    own = block(name, tensor)
    return TensorPart(TensorSpec(name, DTYPE_NAMES[own.local.dtype], tuple(tensor.shape)), own.local.device, own.boxes)


def add_whole(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Add this rank's part of `whole` to `target`, which may be sharded."""
    if not is_sharded(target):
        local_tensor(target).add_(whole)
        return
    whole = whole.expand(target.shape)
    for region, memory in block("", target).boxes:
        memory.add_(narrow(whole, region))


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """This rank's part of a sharded parameter: `boxes` of `local`, each with its region in the global tensor.

    `standin` has the global shape, is contiguous and has no data.
    """

    name: str
    standin: torch.Tensor
    local: torch.Tensor
    boxes: tuple[Held, ...]


def block(name: str, tensor: torch.Tensor) -> Block:
    """Return this rank's block of a DTensor.

    Raises ValueError for a partial sum, and if the local tensor's shape differs from the placements.
    """
    distributed = as_dtensor(tensor)
    assert distributed is not None
    local, mesh, placements = local_tensor(tensor).detach(), distributed.device_mesh, distributed.placements
    for placement in placements:
        if placement.is_partial():
            raise ValueError(
                f"{name!r} has the placements {placements}, and a partial sum can't be published: finish the training "
                "step, or reduce it with tensor.redistribute(placements=[Replicate()]) or [Shard(0)]"
            )
        if not placement.is_replicate() and not placement.is_shard() and not _is_strided(placement):
            raise ValueError(
                f"{name!r} has the placements {placements}, of which {placement} is not supported; supported: Shard, "
                "Replicate"
            )
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
            f"{name!r} of shape {list(tensor.shape)} with the placements {placements} must have the local shape "
            f"{sizes} at {tuple(coordinate)} of the mesh {tuple(mesh.shape)}, but this rank has {list(local.shape)}: "
            "publish a DTensor that torch has made (fully_shard, parallelize_module, distribute_tensor)"
        )
    return Block(name, standin, local, tuple(_boxes(dims, local)))


class Blocks:
    """The sharded parameters of a module."""

    def __init__(self) -> None:
        self._of_key: dict[Hashable, Block] = {}
        self._of_storage: dict[int, Block] = {}

    def standin(self, key: Hashable, make: Callable[[], Block]) -> torch.Tensor:
        """Return the stand-in for a key, one for each: it identifies tied parameters, whose shards may be empty."""
        if key not in self._of_key:
            added = make()
            self._of_key[key] = self._of_storage[added.standin.untyped_storage()._cdata] = added
        return self._of_key[key].standin

    def owner(self, view: torch.Tensor) -> Block | None:
        """Return the sharded parameter to whose stand-in a view belongs; None for a view of memory."""
        return self._of_storage.get(view.untyped_storage()._cdata) if view.is_meta else None

    def require_slices(self, views: Mapping[str, torch.Tensor]) -> None:
        """Raise ValueError, on every rank alike, for a view that is not a slice of its stand-in."""
        for name, view in views.items():
            if view.is_meta and (owner := self.owner(view)) is not None and _slice(owner.standin, view) is None:
                raise ValueError(
                    f"{name!r} is not a plain slice of the sharded {owner.name!r}: publish from a module in which that "
                    "parameter is not sharded, or write your own Source"
                )


def _is_strided(placement: Any) -> bool:
    return type(placement).__name__ == "_StridedShard"


def runs(
    shape: Sequence[int], mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Any]
) -> list[Runs]:
    """Return the runs of each dim of a tensor at a coordinate of the mesh, with the semantics of `torch.chunk`.

    Mesh axes are applied from left to right. A `_StridedShard` whose split factor is the number of shards to its right
    (FSDP2 over tensor parallelism) is applied after those, which gives FSDP2's shards also for uneven sizes.
    """
    held: list[Runs] = [[(0, size)] for size in shape]
    late = []
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim, factor = placement.dim % len(shape), placement.split_factor if _is_strided(placement) else 1
        to_the_right = zip(mesh_shape[axis + 1 :], placements[axis + 1 :], strict=True)
        num_shards = math.prod(n for n, p in to_the_right if not p.is_replicate() and p.dim == placement.dim)
        if _is_strided(placement) and factor == num_shards:
            late.append((axis, dim))
        else:
            held[dim] = _cut(held[dim], factor, mesh_shape[axis], coordinate[axis])
    for axis, dim in reversed(late):
        held[dim] = _cut(held[dim], 1, mesh_shape[axis], coordinate[axis])
    return held


def _cut(held: Runs, factor: int, num_chunks: int, index: int) -> Runs:
    """Chunk `index` of each of `factor` chunks, joined."""
    total, found = sum(size for _, size in held), Runs()
    for outer in range(factor):
        outer_start, outer_size = _chunk(total, factor, outer)
        start, size = _chunk(outer_size, num_chunks, index)
        start += outer_start
        for run_start, run_size in held:
            low, high = max(start, 0), min(start + size, run_size)
            if low < high and found and sum(found[-1]) == run_start + low:
                found[-1] = (found[-1][0], found[-1][1] + high - low)
            elif low < high:
                found.append((run_start + low, high - low))
            start -= run_size
    return found


def _chunk(total: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return start and size of a chunk; the last chunks may be shorter, or empty."""
    size = -(-total // num_chunks)
    start = min(size * index, total)
    return start, min(size, total - start)


def _boxes(dims: Sequence[Runs], local: torch.Tensor) -> Iterator[Held]:
    for choice in itertools.product(*(range(len(dim)) for dim in dims)):
        offsets, part = [], local
        for dim, (held, number) in enumerate(zip(dims, choice, strict=True)):
            offsets.append(held[number][0])
            part = part.narrow(dim, sum(size for _, size in held[:number]), held[number][1])
        yield Region(tuple(offsets), tuple(part.shape)), part


def held(owner: Block, view: torch.Tensor) -> list[Held]:
    """Return this rank's regions, with memory, of `view`: a slice of the block's stand-in with dims in any order."""
    found = _slice(owner.standin, view)
    assert found is not None
    region, dims = found
    parts = []
    for box, memory in owner.boxes:
        both = common(region, box)
        if both is None:
            continue
        part, inside = narrow(memory, relative(both, box)), relative(both, region)
        offsets = tuple(0 if dim is None else inside.offsets[dim] for dim in dims)
        sizes = tuple(1 if dim is None else inside.sizes[dim] for dim in dims)
        strides = [1 if dim is None else part.stride(dim) for dim in dims]
        parts.append((Region(offsets, sizes), part.as_strided(sizes, strides)))
    return parts


def _slice(whole: torch.Tensor, view: torch.Tensor) -> tuple[Region, list[int | None]] | None:
    """Return a view's region in a contiguous tensor, and by dim of the view the tensor's dim.

    The dim is None for a dim of size 1. Returns None if the view is not a slice.
    """
    rest, offsets = int(view.storage_offset()), []
    for stride, size in zip(whole.stride(), whole.shape, strict=True):
        offsets.append(rest // stride if size > 1 else 0)
        rest -= offsets[-1] * stride
    along = {s: dim for dim, (s, size) in enumerate(zip(whole.stride(), whole.shape, strict=True)) if size > 1}
    sizes, dims = [1] * whole.ndim, list[int | None]()
    for stride, size in zip(view.stride(), view.shape, strict=True):
        dim = along.get(stride) if size > 1 else None
        if dim is not None and dim not in dims and offsets[dim] + size <= whole.shape[dim]:
            sizes[dim] = size
        elif size > 1:
            return None
        dims.append(dim)
    return Region(tuple(offsets), tuple(sizes)), dims
