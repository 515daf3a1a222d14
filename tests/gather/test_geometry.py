"""Who brings what, and where it lies in a bucket: no processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from gather.squad import CUTS, MODELS
from weightcast.errors import IncompatibleWeightsError, PeerTimeoutError, StaleVersionError
from weightcast.format.bucket import Layout, narrow, payload_digest
from weightcast.format.geometry import Region, is_run, split
from weightcast.format.manifest import ITEMSIZE_BYTES, TensorSpec, decode, encode
from weightcast.format.plan import plan
from weightcast.native.tables import added, digest
from weightcast.trainer.group.assignment import assign
from weightcast.trainer.group.records import Failure
from weightcast.trainer.packer import HeldRegion, Packer, Shard, held_shards

SPEC = TensorSpec("w", "float32", (6, 4))


def part(offsets: Sequence[int], sizes: Sequence[int]) -> HeldRegion:
    return HeldRegion(0, Region(tuple(offsets), tuple(sizes)))


TOP, BOTTOM, ALL = part((0, 0), (3, 4)), part((3, 0), (3, 4)), part((0, 0), (6, 4))


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([[TOP], [BOTTOM]], [[0], [0]]),
        ([[ALL], [ALL]], [[0], []]),
        ([[], [ALL], [ALL]], [[], [0], []]),
        ([[TOP], [TOP, BOTTOM], [BOTTOM]], [[0], [1], []]),
        ([[], [TOP, BOTTOM], [TOP, BOTTOM]], [[], [0], [1]]),
    ],
)
def test_each_region_is_brought_once(held: list[list[HeldRegion]], expected: list[list[int]]) -> None:
    assigned = assign([SPEC], held, [0] * len(held))
    assert [[each.part for each in parts] for parts in assigned] == expected
    assert all(each.region == held[rank][each.part].region for rank, parts in enumerate(assigned) for each in parts)


def test_what_several_hold_is_shared_out_evenly() -> None:
    specs = [TensorSpec(f"w{n}", "float32", (1001, 1024)) for n in range(3)] + [TensorSpec("s", "float32", (3,))]
    held = [[HeldRegion(n, Region((0,) * len(s.shape), s.shape)) for n, s in enumerate(specs)] for _ in range(4)]
    assigned = assign(specs, held, [0, 0, 0, 0])
    loads = [sum(each.region.numel for each in parts) for parts in assigned]
    assert sum(loads) == sum(math.prod(spec.shape) for spec in specs)
    assert max(loads) - min(loads) <= 3 * 1024 + 3


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
@pytest.mark.parametrize("sizes", [(7, 4), (1, 9, 2), (1, 1), (2, 64), ()])
def test_the_parts_of_a_region_tile_it(sizes: tuple[int, ...], num_parts: int) -> None:
    region = Region(tuple(range(len(sizes))), sizes)
    parts = split(region, num_parts)
    whole = torch.zeros([offset + size for offset, size in zip(region.offsets, sizes, strict=True)], dtype=torch.int64)
    for part in parts:
        narrow(whole, part).add_(1)
    assert bool((narrow(whole, region) == 1).all())
    assert int(whole.sum()) == region.numel
    assert len(parts) == (num_parts if max(sizes, default=0) >= num_parts else 1)


@pytest.mark.parametrize("held", [[[TOP]], [[TOP], []], [[ALL], [TOP]], [[TOP], [part((2, 0), (4, 4))]], [[], []]])
def test_what_does_not_tile_is_named(held: list[list[HeldRegion]]) -> None:
    with pytest.raises(IncompatibleWeightsError, match=r"'w' of shape \[6, 4\]"):
        assign([SPEC], held, [0] * len(held))


def test_regions_that_are_not_of_the_specs() -> None:
    tensor = torch.zeros(3, 4)
    wrong = {"w": [(Region((4, 0), (3, 4)), tensor), (Region((0, 0), (2, 4)), tensor)], "x": []}
    with pytest.raises(IncompatibleWeightsError) as caught:
        held_shards([SPEC], wrong)
    assert len(caught.value.problems) == 3
    assert held_shards([SPEC], {"w": [(Region((6, 0), (0, 4)), tensor[:0])]}) == []


@pytest.mark.parametrize(
    ("piece", "region", "expected"),
    [
        ((6, 4), (2, 4), True),
        ((6, 4), (1, 2), True),
        ((6, 4), (2, 2), False),
        ((3, 6, 4), (1, 2, 4), True),
        ((3, 6, 4), (2, 2, 4), False),
        ((), (), True),
        ((6, 1), (6, 1), True),
    ],
)
def test_what_lies_in_one_run(piece: tuple[int, ...], region: tuple[int, ...], expected: bool) -> None:
    assert is_run(Region((0,) * len(region), region), piece) is expected


@pytest.mark.parametrize("bucket_size_bytes", [256, 4096, 1 << 20])
@pytest.mark.parametrize("cut", ["rows", "columns", "strided"])
def test_what_the_ranks_bring_fills_every_bucket(cut: str, bucket_size_bytes: int) -> None:
    model, size = MODELS["table"](1), 3
    specs = [TensorSpec(n, str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in model.items()]
    layout = Layout(plan(specs, bucket_size_bytes))
    held = [held_shards(specs, {n: CUTS[cut](t, rank, size) for n, t in model.items()}) for rank in range(size)]
    assigned = assign(specs, held, [0] * size)
    brought = [[held[rank][each.part] for each in parts] for rank, parts in enumerate(assigned)]
    assert sum(_bytes(specs, shard) for shards in brought for shard in shards) == layout.manifest.num_bytes
    ends = [Packer(layout, shards) for shards in brought]
    for index, num_bytes in enumerate(layout.manifest.buckets):
        packed, expected = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
        sums, missing = [], None
        for part in ends:
            of_part, unfilled = part.pack(index, packed)
            sums.append(of_part)
            missing = unfilled if missing is None else missing & unfilled
            # The rank that leads an origin, which sees no memory of the others, knows the same of them.
            assert (unfilled == part.slices.unfilled(index)).all()
        assert added(*sums, digest(packed, missing)) == payload_digest(packed)
        for entry, view in zip(layout.entries[index], layout.views(index, expected), strict=True):
            where = zip(entry.piece.region.offsets, entry.piece.region.sizes, strict=True)
            view.copy_(model[entry.record.name][tuple(slice(o, o + s) for o, s in where)])
        assert torch.equal(packed, expected)
        layout.forget_views()


def _bytes(specs: Sequence[TensorSpec], shard: Shard) -> int:
    return shard.region.numel * ITEMSIZE_BYTES[specs[shard.tensor].dtype]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no"), ValueError, "trainer rank 3: no"),
        (TypeError("no"), TypeError, "trainer rank 3: no"),
        (KeyError("no"), None, "trainer rank 3: KeyError: 'no'"),
        (KeyboardInterrupt(), None, "trainer rank 3: KeyboardInterrupt: "),
        (StaleVersionError("old"), StaleVersionError, "trainer rank 3: old"),
        (PeerTimeoutError("late", peer="x"), PeerTimeoutError, "trainer rank 3: late"),
    ],
)
def test_errors_keep_their_kind_where_it_is_known(
    error: BaseException, kind: type[Exception] | None, text: str
) -> None:
    found = decode(encode(Failure.of(error)), Failure).error(3)
    assert str(found) == text
    assert type(found).__name__ == (kind.__name__ if kind else "WeightcastError")
