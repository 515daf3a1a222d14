"""The geometry of shards, compared with torch's own and with brute force; real ranks are in sources/."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard, _StridedShard

from weightcast.checkpoint import sharding
from weightcast.checkpoint.sharding import Block, Blocks, held, runs
from weightcast.format.geometry import runs_as_blocks


def coordinates(mesh: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, mesh))


def indices(dim: sharding.Runs) -> list[int]:
    return [index for start, size in dim for index in range(start, start + size)]


PLAIN: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((2, 3), (Shard(0), Shard(1))),
    ((2, 3), (Shard(0), Shard(0))),
    ((2, 3), (Replicate(), Shard(1))),
    ((2, 2, 2), (Replicate(), Shard(1), Shard(0))),
]


@pytest.mark.parametrize(("mesh", "placements"), PLAIN, ids=str)
@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (3, 1), (0, 4)])
def test_plain_shards_lie_where_torch_says(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    for coordinate in coordinates(mesh):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        found = runs(shape, mesh, coordinate, placements)
        assert [sum(size for _, size in dim) for dim in found] == list(sizes)
        if 0 not in sizes:
            assert found == [[(offset, size)] for offset, size in zip(offsets, sizes, strict=True)]


@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("size", [12, 9, 7, 2])
def test_a_strided_shard_of_any_factor_has_the_indices_that_torch_says(size: int, factor: int) -> None:
    placement, taken = _StridedShard(0, split_factor=factor), []
    for coordinate in range(3):
        _, expected = placement.local_shard_size_and_offset(size, 3, coordinate, 1)
        (dim,) = runs((size,), (3,), (coordinate,), (placement,))
        assert indices(dim) == list(expected)  # type: ignore[arg-type]
        taken += indices(dim)
    assert sorted(taken) == list(range(size))


@pytest.mark.parametrize("size", [16, 9, 7, 3])
@pytest.mark.parametrize(("num_dp", "num_tp"), [(2, 2), (4, 2), (2, 3)])
def test_fsdp_cuts_what_tensor_parallelism_has_cut(size: int, num_dp: int, num_tp: int) -> None:
    """Also where sizes are so uneven that cutting from left to right would come out differently."""
    placements = (Replicate(), _StridedShard(0, split_factor=num_tp), Shard(0))
    of_tp = [chunk.tolist() for chunk in torch.arange(size).tensor_split(_ends(size, num_tp))]
    for replica, dp, tp in coordinates((2, num_dp, num_tp)):
        mine = of_tp[tp]
        expected = torch.tensor(mine).tensor_split(_ends(len(mine), num_dp))[dp].tolist()
        (dim,) = runs((size,), (2, num_dp, num_tp), (replica, dp, tp), placements)
        assert indices(dim) == expected
        assert len(dim) <= 1 or not expected


def _ends(size: int, num_chunks: int) -> list[int]:
    """Where `torch.chunk` cuts, if the empty chunks that it leaves out are counted."""
    chunk = -(-size // num_chunks)
    return [min(chunk * k, size) for k in range(1, num_chunks)]


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "narrow": lambda t: t[1:4, :, 2:],
    "select": lambda t: t[2],
    "select last": lambda t: t[:, :, 1],
    "element": lambda t: t[3, 2, 1],
    "transposed": lambda t: t.transpose(0, 2),
    "gate": lambda t: t[1].chunk(2, dim=1)[1].t(),
    "with dims of one": lambda t: t[:, 1:2, None].permute(3, 2, 1, 0),
    "nothing": lambda t: t[:, 2:2],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_ranks_part_of_a_view_is_what_the_view_has_of_it(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """All ranks' parts, put together, are the view; each is memory of the rank."""
    whole = torch.arange(5 * 3 * 4).reshape(5, 3, 4)
    mesh, placements = (2, 3, 2), (_StridedShard(0, split_factor=2), Shard(2), Shard(1))
    standin = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    found = torch.full(view(whole).shape, -1)
    for coordinate in coordinates(mesh):
        dims = runs(whole.shape, mesh, coordinate, placements)
        local = whole[torch.meshgrid(*(torch.tensor(indices(dim), dtype=torch.long) for dim in dims), indexing="ij")]
        block = Block("w", standin, local, tuple(sharding._boxes(dims, local)) if local.numel() else ())
        for region, part in held(block, view(standin)):
            assert tuple(part.shape) == region.sizes
            assert part.untyped_storage()._cdata == local.untyped_storage()._cdata
            assert region.numel
            box = found[tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))]
            assert (box == -1).all()
            box.copy_(part)
    assert torch.equal(found, view(whole))


NO_SLICES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "merged dims": lambda t: t.view(5, 12),
    "split dim": lambda t: t.view(5, 3, 2, 2),
    "every other": lambda t: t[:, :, ::2],
    "expanded": lambda t: t[:, :, :1].expand(5, 3, 4),
}


@pytest.mark.parametrize("view", NO_SLICES.values(), ids=NO_SLICES)
def test_a_view_that_is_no_slice_is_refused(
    view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = torch.empty(5, 3, 4)
    blocks = Blocks()
    standin = blocks.standin(id(tensor), lambda: Block("fused", tensor.to("meta"), tensor, ()))
    assert blocks.standin(id(tensor), lambda: Block("again", tensor.to("meta"), tensor, ())) is standin
    blocks.require_slices({"a": standin[1], "other": tensor})
    with pytest.raises(ValueError, match="'b' is not a plain slice of the sharded 'fused'"):
        blocks.require_slices({"a": standin[1], "b": view(standin)})


# --- runs of elements ---


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4), (1, 5), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)])
def test_a_run_of_elements_is_these_blocks(shape: tuple[int, ...]) -> None:
    """Every run of a tensor, its elements in order, in no more blocks than the dims call for."""
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(numbers.numel() + 1), 2):
        blocks = list(runs_as_blocks(shape, start, stop))
        assert len(blocks) <= max(1, 2 * len(shape) - 1)
        found = [
            numbers[tuple(slice(o, o + s) for o, s in zip(block.offsets, block.sizes, strict=True))] for block in blocks
        ]
        assert [number for part in found for number in part.flatten().tolist()] == list(range(start, stop))
        assert [tuple(part.shape) for part in found] == [block.sizes for block in blocks]


def test_a_tensor_without_elements_has_no_blocks() -> None:
    assert list(runs_as_blocks((3, 0, 2), 0, 0)) == []
