"""Geometry: whatever the specs, every byte travels exactly once, aligned, and groups stay together where they fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.errors import IncompatibleWeightsError, ManifestError
from weightcast.format.geometry import ALIGNMENT_BYTES, Region, align, whole
from weightcast.format.manifest import ITEMSIZE_BYTES, Manifest, Piece, TensorRecord, TensorSpec
from weightcast.format.plan import plan
from weightcast.serving.admission import require_fit
from weightcast.testing.payloads import PAYLOADS, Payload

dtypes = st.sampled_from(sorted(ITEMSIZE_BYTES))
shapes = st.lists(st.integers(0, 12), max_size=4).map(tuple) | st.lists(st.integers(1, 2000), max_size=1).map(tuple)
bucket_sizes = st.integers(256, 6000)


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(st.lists(st.text(min_size=1, max_size=4), unique=True, max_size=12))
    found = []
    while names:
        name = names.pop()
        aliases = tuple(names.pop() for _ in range(min(len(names), draw(st.integers(0, 2)))))
        group = draw(st.sampled_from(["", "", "a", "b"]))
        found.append(TensorSpec(name, draw(dtypes), draw(shapes), aliases=aliases, group=group))
    return found


@st.composite
def cuts(draw: st.DrawFn, region: Region, depth: int = 3) -> list[Region]:
    """A tiling of `region` by straight cuts, in any order."""
    dims = [d for d, size in enumerate(region.sizes) if size > 1]
    if depth == 0 or not dims or draw(st.booleans()):
        return [region]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, region.sizes[dim] - 1))
    low, high = (_part(region, dim, *span) for span in ((0, at), (at, region.sizes[dim] - at)))
    return draw(st.permutations([*draw(cuts(low, depth - 1)), *draw(cuts(high, depth - 1))]))


def _part(region: Region, dim: int, start: int, size: int) -> Region:
    offsets, sizes = list(region.offsets), list(region.sizes)
    offsets[dim], sizes[dim] = offsets[dim] + start, size
    return Region(tuple(offsets), tuple(sizes))


def piece_bytes(record: TensorRecord, piece: Piece) -> int:
    return math.prod(piece.region.sizes) * ITEMSIZE_BYTES[record.dtype]


def assert_every_byte_once(manifest: Manifest) -> None:
    """Counts, in arrays: how often each element is carried, how often each byte of a bucket is used."""
    used = [np.zeros(size, dtype=np.int32) for size in manifest.buckets]
    for record in manifest.tensors:
        carried = np.zeros(record.shape, dtype=np.int32)
        for piece in record.pieces:
            region = piece.region
            carried[tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))] += 1
            num_bytes = piece_bytes(record, piece)
            assert piece.offset_bytes % ALIGNMENT_BYTES == 0
            assert piece.offset_bytes + num_bytes <= manifest.buckets[piece.bucket]
            used[piece.bucket][piece.offset_bytes : piece.offset_bytes + num_bytes] += 1
        assert (carried == 1).all()
    for bytes_used in used:
        assert (bytes_used <= 1).all()
        assert _longest_gap(bytes_used) < ALIGNMENT_BYTES


def _longest_gap(used: np.ndarray) -> int:
    return max((len(run) for run in "".join(map(str, used.tolist())).split("1")), default=0)


def assert_sizes(manifest: Manifest, bucket_size_bytes: int) -> None:
    assert all(0 < size <= bucket_size_bytes and size % ALIGNMENT_BYTES == 0 for size in manifest.buckets)


def assert_groups_together(manifest: Manifest, bucket_size_bytes: int) -> None:
    groups: dict[str, list[TensorRecord]] = {}
    for record in manifest.tensors:
        if record.group:
            groups.setdefault(record.group, []).append(record)
    capacity = bucket_size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    for members in groups.values():
        buckets = {p.bucket for r in members for p in r.pieces}
        if sum(align(piece_bytes(r, p)) for r in members for p in r.pieces) <= capacity:
            assert len(buckets) <= 1


@given(specs(), bucket_sizes)
def test_any_specs(found: list[TensorSpec], bucket_size_bytes: int) -> None:
    manifest = plan(found, bucket_size_bytes)
    assert [TensorSpec(r.name, r.dtype, r.shape, r.aliases, r.group) for r in manifest.tensors] == found
    assert_every_byte_once(manifest)
    assert_sizes(manifest, bucket_size_bytes)
    assert_groups_together(manifest, bucket_size_bytes)
    assert Manifest.decode(manifest.encode()) == manifest
    assert manifest.num_bytes == sum(math.prod(s.shape) * ITEMSIZE_BYTES[s.dtype] for s in found)


@given(specs(), bucket_sizes, st.data())
def test_any_regions(found: list[TensorSpec], bucket_size_bytes: int, data: st.DataObject) -> None:
    regions = {s.name: data.draw(cuts(whole(s.shape))) for s in found}
    manifest = plan(found, bucket_size_bytes, origins=[regions])
    assert_every_byte_once(manifest)
    assert_sizes(manifest, bucket_size_bytes)
    assert_groups_together(manifest, bucket_size_bytes)
    for record in manifest.tensors:
        for piece in record.pieces:
            assert any(_inside(piece.region, region) for region in regions[record.name])


@given(specs(), bucket_sizes, st.integers(2, 4), st.data())
def test_any_regions_from_any_origins(
    found: list[TensorSpec], bucket_size_bytes: int, num_origins: int, data: st.DataObject
) -> None:
    """Each origin's buckets hold its own regions and no others; together they hold everything once.

    All origins but the first must have a bucket.
    """
    origins: list[dict[str, list[Region]]] = [{} for _ in range(num_origins)]
    for spec in found:
        for region in data.draw(cuts(whole(spec.shape))):
            data.draw(st.sampled_from(origins)).setdefault(spec.name, []).append(region)
    if any(not any(region.numel for regions in held.values() for region in regions) for held in origins[1:]):
        with pytest.raises(ManifestError, match="each but the first with a bucket") as caught:
            plan(found, bucket_size_bytes, origins=origins)
        assert caught.value.fault == "origin"
        return
    manifest = plan(found, bucket_size_bytes, origins=origins)
    assert_every_byte_once(manifest)
    assert_sizes(manifest, bucket_size_bytes)
    assert Manifest.decode(manifest.encode()) == manifest
    assert [number for span in manifest.spans for number in span] == list(range(len(manifest.buckets)))
    bucket_origins = manifest.bucket_origins
    for record in manifest.tensors:
        for piece in record.pieces:
            held = origins[bucket_origins[piece.bucket]][record.name]
            assert any(_inside(piece.region, region) for region in held)
    assert_rounds(manifest)
    for origin, regions in enumerate(origins):
        assert_alone(manifest, origin, regions, bucket_size_bytes)


def assert_rounds(manifest: Manifest) -> None:
    """Each origin's buckets in order, and never one origin two rounds ahead of another that has buckets left."""
    origins, num_sent = manifest.bucket_origins, [0] * len(manifest.spans)
    assert sorted(manifest.rounds) == list(range(len(manifest.buckets)))
    for number in manifest.rounds:
        origin = origins[number]
        assert number == manifest.spans[origin][num_sent[origin]]
        num_sent[origin] += 1
        left = [sent for sent, span in zip(num_sent, manifest.spans, strict=True) if sent < len(span)]
        assert num_sent[origin] - min(left, default=num_sent[origin]) <= 1


def assert_alone(manifest: Manifest, origin: int, regions: dict[str, list[Region]], bucket_size_bytes: int) -> None:
    """What is laid out of an origin depends on nothing that another origin holds."""
    span, part = manifest.spans[origin], manifest.of_origin(origin)
    assert part.buckets == manifest.buckets[span.start : span.stop]
    assert (part.origins, part.tensors, part.digest_kind) == ((), (), manifest.digest_kind)
    for group in {record.load_group for record in manifest.tensors}:
        own = [
            (record, piece)
            for record in manifest.tensors
            for piece in record.pieces
            if record.load_group == group and piece.bucket in span
        ]
        if sum(align(piece_bytes(*each)) for each in own) <= bucket_size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES:
            assert len({piece.bucket for _, piece in own}) <= 1


def _inside(inner: Region, outer: Region) -> bool:
    return all(
        o <= i and i + isz <= o + osz
        for i, isz, o, osz in zip(inner.offsets, inner.sizes, outer.offsets, outer.sizes, strict=True)
    )


@given(dtypes, st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), st.integers(256, 1024))
def test_pieces_of_a_split_tensor_are_row_major_blocks_in_order(
    dtype: str, shape: tuple[int, ...], bucket_size_bytes: int
) -> None:
    """Concatenated, the pieces are the tensor's own bytes: what a receiver needs to put it together with one cursor."""
    (record,) = plan([TensorSpec("w", dtype, shape)], bucket_size_bytes).tensors
    order = np.arange(math.prod(shape)).reshape(shape)
    where = [
        tuple(slice(o, o + s) for o, s in zip(p.region.offsets, p.region.sizes, strict=True)) for p in record.pieces
    ]
    assert np.concatenate([order[w].reshape(-1) for w in where]).tolist() == list(range(math.prod(shape)))


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
def test_the_payload_table(payload: Payload) -> None:
    manifest = payload.manifest()
    assert_every_byte_once(manifest)
    assert_sizes(manifest, payload.bucket_size_bytes)
    assert_groups_together(manifest, payload.bucket_size_bytes)


def test_exact_boundaries() -> None:
    manifest = next(p for p in PAYLOADS if p.name == "exact_boundary").manifest()
    assert manifest.buckets == (4096, 4096, 4096, 2304, 2304)
    places = {r.name: [(p.bucket, p.offset_bytes) for p in r.pieces] for r in manifest.tensors}
    assert places == {
        "whole": [(0, 0)],
        "one_less": [(1, 0)],
        "one_more": [(2, 0), (3, 0)],
        "first_half": [(3, 256)],
        "second_half": [(4, 0)],
        "rest": [(4, 2048)],
    }


def test_members_of_a_group_move_to_the_place_of_its_first() -> None:
    sizes = {"q_a": ("attn", 256), "other": ("", 512), "kv_a": ("attn", 256)}
    manifest = plan([TensorSpec(n, "uint8", (s,), group=g) for n, (g, s) in sizes.items()], 512)
    assert {r.name: r.pieces[0].bucket for r in manifest.tensors} == {"q_a": 0, "kv_a": 0, "other": 1}


def test_a_bucket_too_small_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="bucket_size_bytes is 255; it must be at least 256"):
        plan([], 255)


@pytest.mark.parametrize(
    ("found", "fault"),
    [
        ([TensorSpec("a", "float12", (3,))], "dtype"),
        ([TensorSpec("a", "int8", (-3,))], "shape"),
        ([TensorSpec("a", "int8", (-3, -3))], "shape"),
        ([TensorSpec("a", "int8", (1 << 60,))], "shape"),
        ([TensorSpec("a", "int8", (3,)), TensorSpec("a", "int8", (4,))], "duplicate"),
        ([TensorSpec("", "int8", (3,))], "name"),
        ([TensorSpec("a", "int8", (1 << 50,))], "count"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_specs_are_named_at_once(found: list[TensorSpec], fault: str) -> None:
    with pytest.raises(ManifestError) as caught:
        plan(found, 4096)
    assert caught.value.fault == fault


@pytest.mark.parametrize(
    ("regions", "fault"),
    [
        ([Region((0,), (3,))], "coverage"),
        ([Region((0,), (3,)), Region((2,), (2,))], "coverage"),
        ([Region((0,), (2,)), Region((1,), (2,))], "overlap"),
        ([Region((2,), (4,))], "region"),
        ([Region((0, 0), (4, 1))], "region"),
        ([Region((-1,), (4,))], "region"),
    ],
    ids=["hole", "doubled", "overlap and hole", "outside", "other dims", "negative"],
)
def test_regions_that_do_not_tile_are_refused(regions: Sequence[Region], fault: str) -> None:
    with pytest.raises(ManifestError, match="'w'") as caught:
        plan([TensorSpec("w", "int8", (4,))], 4096, origins=[{"w": regions}])
    assert caught.value.fault == fault


# --- require_fit --------------------------------------------------------------------------------

A = TensorSpec("a", "bfloat16", (2, 3))
B = TensorSpec("b", "float32", (4,))
TIED = TensorSpec("embed", "bfloat16", (5,), aliases=("head",))


def problems_of(offered: list[TensorSpec], held: list[TensorSpec], **options: Any) -> list[str]:
    try:
        require_fit(offered, held, **options)
    except IncompatibleWeightsError as exc:
        return list(exc.problems)
    return []


def spec(name: str, dtype: str = "bfloat16", shape: tuple[int, ...] = (5,), *aliases: str) -> TensorSpec:
    return TensorSpec(name, dtype, shape, aliases=aliases)


@given(specs(), st.randoms(use_true_random=False))
def test_what_an_engine_has_is_accepted_in_any_order(found: list[TensorSpec], random: object) -> None:
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert problems_of(shuffled, found) == []


@pytest.mark.parametrize(
    ("offered", "problems"),
    [
        ([], ["missing tensor 'a' bfloat16[2, 3]", "missing tensor 'b' float32[4]"]),
        ([A, B, spec("c")], ["unknown tensor 'c' bfloat16[5]"]),
        ([A], ["missing tensor 'b' float32[4]"]),
        ([spec("a", "bfloat16", (3, 2)), B], ["'a' has the shape [3, 2], the engine has [2, 3]"]),
        ([spec("a", "float32", (2, 3)), B], ["'a' is float32, the engine has bfloat16"]),
        (
            [spec("a", "int8", (6,)), spec("x")],
            [
                "'a' has the shape [6], the engine has [2, 3]",
                "'a' is int8, the engine has bfloat16",
                "unknown tensor 'x' bfloat16[5]",
                "missing tensor 'b' float32[4]",
            ],
        ),
    ],
)
def test_every_problem_is_named(offered: list[TensorSpec], problems: list[str]) -> None:
    assert problems_of(offered, [A, B]) == problems


def test_a_cast_must_be_asked_for() -> None:
    asked: list[tuple[str, str]] = []

    def can_cast(offered: str, held: str) -> bool:
        asked.append((offered, held))
        return offered == "float32"

    assert problems_of([spec("a", "float32", (2, 3)), B], [A, B], can_cast=can_cast) == []
    assert asked == [("float32", "bfloat16")]
    assert problems_of([spec("a", "float32", (6,)), B], [A, B], can_cast=can_cast) == [
        "'a' has the shape [6], the engine has [2, 3]"
    ]
    assert problems_of([spec("a", "int8", (2, 3)), B], [A, B], can_cast=can_cast) == [
        "'a' is int8, the engine has bfloat16"
    ]


@pytest.mark.parametrize("offered", [spec("embed"), spec("head"), spec("head", "bfloat16", (5,), "embed"), TIED])
def test_any_name_of_a_tied_tensor_is_enough(offered: TensorSpec) -> None:
    assert problems_of([offered], [TIED]) == []


def test_a_tied_tensor_offered_twice_is_a_problem() -> None:
    (problem,) = problems_of([spec("embed"), spec("head")], [TIED])
    assert problem.startswith(
        "'head' and 'embed' both match the engine's 'embed', which ties them: tie them in the trainer"
    )


def test_one_offered_tensor_may_fill_two_of_the_engine() -> None:
    assert problems_of([TIED], [spec("embed"), spec("head")]) == []
