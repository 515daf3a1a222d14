"""Layouts of Megatron parameters: views of a shard, and their regions in the tensors of a Hugging Face checkpoint.

A layout splits the local tensor of one rank into parts: each is a view of that memory, with its region in one of the
checkpoint's tensors. Publishing reads the views, loading writes to them.

Invariants: no copy and no communication; the parts of a local tensor have each of its elements at most once, and leave
out only padding; a local tensor of an unexpected shape is an error. Sizes have names, which are looked up in the
model's table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from weightcast.format.geometry import Region, whole

Sizes: TypeAlias = Mapping[str, int]
"""Sizes and switches of a model by name (see `mapping.sizes_of`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Axis:
    """This rank's index among the `size` ranks over which a parameter is sharded."""

    rank: int = 0
    size: int = 1


ALONE = Axis()


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutPart:
    """A view of a local tensor, and its region of tensor number `number` of a rule.

    The view has the region's sizes, but its rows may be split into two dims.
    """

    number: int
    region: Region
    view: torch.Tensor


class Whole:
    """Replicated on every rank: norms, routers, biases of row-parallel layers."""

    def __init__(self, *dims: str) -> None:
        self._dims = dims

    def shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        """Return the shapes of the checkpoint's tensors."""
        return [tuple(sizes[dim] for dim in self._dims)]

    def local_shape(self, sizes: Sizes, axis: Axis) -> tuple[int, ...]:
        """Return the shape of a rank's tensor. Raises ValueError if the sizes can't be sharded evenly."""
        return self.shapes(sizes)[0]

    def parts(self, sizes: Sizes, axis: Axis, local: torch.Tensor) -> Iterator[LayoutPart]:
        """Yield the parts of a local tensor. Raises ValueError if it has another shape."""
        _require_shape(local, self.local_shape(sizes, axis))
        yield LayoutPart(0, whole(local.shape), local)


class Columns(Whole):
    """Sharded along dim 1: row-parallel layers."""

    def local_shape(self, sizes: Sizes, axis: Axis) -> tuple[int, ...]:
        rows, columns = self.shapes(sizes)[0]
        return rows, local_size(columns, axis)

    def parts(self, sizes: Sizes, axis: Axis, local: torch.Tensor) -> Iterator[LayoutPart]:
        _require_shape(local, self.local_shape(sizes, axis))
        yield LayoutPart(0, Region((0, axis.rank * local.shape[1]), tuple(local.shape)), local)


class Rows:
    """Sharded along dim 0: column-parallel layers, also fused ones.

    `rows`: names of the sizes of dim 0 of the checkpoint's tensors. `dims`: names of their other sizes. Megatron's rows
    are in `blocks` blocks, each of which has an equal share of every tensor, one after another. `whole`: ranks may also
    have the unsharded tensor, which the local shape shows. `joined`: the checkpoint has one tensor, the concatenation.
    """

    def __init__(
        self, rows: str | Sequence[str], *dims: str, blocks: str = "", whole: bool = False, joined: bool = False
    ) -> None:
        self._rows = (rows,) if isinstance(rows, str) else tuple(rows)
        self._dims, self._blocks, self._whole, self._joined = dims, blocks, whole, joined

    def shapes(self, sizes: Sizes) -> list[tuple[int, ...]]:
        each = [sizes[rows] for rows in self._rows]
        return [(rows, *self._rest(sizes)) for rows in ([sum(each)] if self._joined else each)]

    def local_shape(self, sizes: Sizes, axis: Axis) -> tuple[int, ...]:
        return (local_size(sum(sizes[rows] for rows in self._rows), axis), *self._rest(sizes))

    def parts(self, sizes: Sizes, axis: Axis, local: torch.Tensor) -> Iterator[LayoutPart]:
        total = sum(sizes[rows] for rows in self._rows)
        if self._whole and local.ndim and local.shape[0] == total:
            axis = ALONE
        _require_shape(local, self.local_shape(sizes, axis))
        yield from self._cut(sizes, axis, local)

    def _rest(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple(sizes[dim] for dim in self._dims)

    def _num_blocks(self, sizes: Sizes, axis: Axis) -> int:
        return sizes[self._blocks] if self._blocks else 1

    def _cut(self, sizes: Sizes, axis: Axis, local: torch.Tensor) -> Iterator[LayoutPart]:
        """Yield the intersections of this rank's rows with each run."""
        begin, end, row = axis.rank * local.shape[0], (axis.rank + 1) * local.shape[0], 0
        for number, offset, size in self._runs(sizes, axis):
            low, high = max(row, begin), min(row + size, end)
            if low < high:
                view = local.narrow(0, low - begin, high - low)
                region = Region((offset + low - row, *(0 for _ in view.shape[1:])), tuple(view.shape))
                yield LayoutPart(number, region, view)
            row += size

    def _runs(self, sizes: Sizes, axis: Axis) -> Iterator[tuple[int, int, int]]:
        """Yield runs of all ranks' rows, in order: number of the checkpoint's tensor, first row, number of rows."""
        num_blocks = self._num_blocks(sizes, axis)
        for block in range(num_blocks):
            first = 0
            for number, rows in enumerate(self._rows):
                size = local_size(sizes[rows], Axis(block, num_blocks))
                yield 0 if self._joined else number, first + block * size, size
                first += sizes[rows] if self._joined else 0


class Gated(Rows):
    """Fused gate and up: each rank has its rows of gate, then those of up, so there is one block for each rank."""

    def _num_blocks(self, sizes: Sizes, axis: Axis) -> int:
        return axis.size


class Alternating(Gated):
    """Fused gate and up, whose rows alternate in the checkpoint; each view has two dims in place of the rows."""

    def __init__(self, rows: str, *dims: str) -> None:
        super().__init__((rows, rows), *dims, joined=True)

    def _cut(self, sizes: Sizes, axis: Axis, local: torch.Tensor) -> Iterator[LayoutPart]:
        region = Region((axis.rank * local.shape[0], *(0 for _ in local.shape[1:])), tuple(local.shape))
        yield LayoutPart(0, region, torch.unflatten(local, 0, (2, -1)).transpose(0, 1))


class Vocabulary(Rows):
    """Sharded along dim 0 with padding at the end, which is left out: embeddings and the output layer."""

    def parts(self, sizes: Sizes, axis: Axis, local: torch.Tensor) -> Iterator[LayoutPart]:
        rows, rest = sizes[self._rows[0]], self._rest(sizes)
        if not local.ndim or tuple(local.shape[1:]) != rest or local.shape[0] * axis.size < rows:
            raise ValueError(
                f"its local shape is {list(local.shape)}; {axis.size} such shards must have at least the shape "
                f"{[rows, *rest]} together"
            )
        yield from self._cut(sizes, axis, local)


class GatedQuery(Rows):
    """Fused q, k and v by query group, with an output gate for each head. The queries of a group come before its gates;
    in the checkpoint each head's query comes before its gate."""

    def __init__(self, *dims: str) -> None:
        super().__init__(("gated_query", "key", "key"), *dims, blocks="groups")

    def _runs(self, sizes: Sizes, axis: Axis) -> Iterator[tuple[int, int, int]]:
        head_dim = sizes["head_dim"]
        heads = local_size(sizes["heads"], Axis(size=sizes["groups"]))
        for group in range(sizes["groups"]):
            for half in (0, 1):
                for head in range(group * heads, (group + 1) * heads):
                    yield 0, (2 * head + half) * head_dim, head_dim
            yield 1, group * head_dim, head_dim
            yield 2, group * head_dim, head_dim


class DeltaNetInput(Rows):
    """The input projection of a gated delta net: query, key, value, gate (z), beta and alpha.

    Each rank has its heads of query, then those of key, and so on. The checkpoint has two tensors, (query, key, value,
    gate) and (beta, alpha), each ordered by key head.
    """

    def __init__(self, *dims: str) -> None:
        super().__init__(("delta_qkvz", "delta_ba"), *dims)

    def _runs(self, sizes: Sizes, axis: Axis) -> Iterator[tuple[int, int, int]]:
        num_heads = sizes["delta_key_heads"]
        ratio = local_size(sizes["delta_value_heads"], Axis(size=num_heads))
        key, value = sizes["delta_key_dim"], ratio * sizes["delta_value_dim"]
        local_heads = local_size(num_heads, axis)
        for first in range(0, num_heads, local_heads):
            for number, lengths in enumerate(((key, key, value, value), (ratio, ratio))):
                offset = 0
                for length in lengths:
                    for head in range(first, first + local_heads):
                        yield number, head * sum(lengths) + offset, length
                    offset += length


ShardLayout: TypeAlias = Whole | Rows


def local_size(size: int, axis: Axis) -> int:
    """Return the local part of a size. Raises ValueError if it can't be divided evenly."""
    if size % axis.size:
        raise ValueError(f"a size of {size} can't be divided into {axis.size} equal shards")
    return size // axis.size


def _require_shape(local: torch.Tensor, shape: Sequence[int]) -> None:
    if tuple(local.shape) != tuple(shape):
        raise ValueError(f"its local shape is {list(local.shape)}; by hf_config it must be {list(shape)}")


def in_stack(part: LayoutPart, expert: int) -> LayoutPart:
    """Return the part for a checkpoint with all experts in one tensor of transposed matrices: (expert, in, out)."""
    region = Region((expert, *reversed(part.region.offsets)), (1, *reversed(part.region.sizes)))
    view = part.view.movedim(-1, 0) if len(part.region.sizes) > 1 else part.view
    return LayoutPart(part.number, region, view[None])


def unstacked(local: torch.Tensor, num_experts: int, shape: Sequence[int], *, transposed: bool) -> list[torch.Tensor]:
    """Split a local tensor of several experts into views of `shape`: (out, in).

    `transposed`: each expert's matrix is stored as (in, out). This is the layout of Megatron's GroupedMLP, whose
    parameter has two dims but is stored expert by expert.
    """
    rows, columns = shape
    stack = (num_experts, columns, rows) if transposed else (num_experts, rows, columns)
    if local.numel() != num_experts * rows * columns or (local.ndim == 3 and tuple(local.shape) != stack):
        raise ValueError(
            f"its local shape is {list(local.shape)}; by hf_config it must have the elements of {list(stack)}"
        )
    experts = local.view(stack)
    return list((experts.transpose(1, 2) if transposed else experts).unbind())
