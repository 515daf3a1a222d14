"""Manifests that are valid, the tiling proof against a count of elements, and what a manifest says of itself."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.errors import ManifestError
from weightcast.format.geometry import Region, check_tiling
from weightcast.format.manifest import (
    ITEMSIZE_BYTES,
    MAX_ALIASES,
    MAX_NAME_BYTES,
    MAX_VERSION,
    Manifest,
    TensorSpec,
    WeightVersion,
    decode,
    encode,
)
from weightcast.format.plan import plan
from weightcast.testing.payloads import DTYPES, PAYLOADS, Payload


@pytest.mark.parametrize("payload", PAYLOADS, ids=str)
def test_what_is_planned_comes_back(payload: Payload) -> None:
    manifest = payload.manifest()
    back = Manifest.decode(manifest.encode())
    assert back == manifest
    assert back.digest() == manifest.digest()
    assert back.encode() == manifest.encode()


def test_the_digest_tells_manifests_apart() -> None:
    digests = {payload.manifest().digest() for payload in PAYLOADS}
    assert len(digests) == len(PAYLOADS)
    assert all(len(d) == 64 for d in digests)


def test_every_dtype_has_torchs_own_size() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == {n: ITEMSIZE_BYTES[n] for n in DTYPES}


def test_limits_are_inclusive() -> None:
    specs = [
        TensorSpec("x" * MAX_NAME_BYTES, "int8", (1,) * 16),
        TensorSpec("a", "int8", (4,), aliases=tuple(f"alias.{i}" for i in range(MAX_ALIASES))),
    ]
    manifest = plan(specs, 4096)
    assert Manifest.decode(manifest.encode()) == manifest
    assert decode(encode(WeightVersion("a" * 32, MAX_VERSION)), WeightVersion).number == MAX_VERSION


def test_what_a_manifest_says_of_itself() -> None:
    manifest = plan([TensorSpec("a", "bfloat16", (100,)), TensorSpec("b", "uint8", (0,))], 4096)
    assert manifest.num_bytes == 200
    assert manifest.buckets == (256,)
    assert manifest.max_bucket_bytes == 256
    assert plan([], 4096).max_bucket_bytes == 0
    assert TensorSpec("a", "int8", (1,), aliases=("b", "c")).names == ("a", "b", "c")


def test_a_region_knows_whether_it_is_the_whole() -> None:
    assert Region((0, 0), (2, 3)).covers((2, 3))
    assert Region((), ()).covers(())
    assert not Region((1, 0), (2, 3)).covers((3, 3))
    assert not Region((1, 0), (2, 3)).covers((2, 3))
    assert Region((4, 4), (2, 3)).numel == 6


regions = st.builds(
    lambda o, s: Region(tuple(o), tuple(s)),
    st.lists(st.integers(0, 3), min_size=2, max_size=2),
    st.lists(st.integers(1, 3), min_size=2, max_size=2),
)


@given(st.lists(regions, max_size=8), st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_the_tiling_proof_agrees_with_counting(found: list[Region], shape: tuple[int, int]) -> None:
    inside = [r for r in found if all(o + s <= n for o, s, n in zip(r.offsets, r.sizes, shape, strict=True))]
    count = np.zeros(shape, dtype=int)
    for r in inside:
        count[r.offsets[0] : r.offsets[0] + r.sizes[0], r.offsets[1] : r.offsets[1] + r.sizes[1]] += 1
    if (count == 1).all():
        check_tiling(inside, shape, "w")
        return
    with pytest.raises(ManifestError) as caught:
        check_tiling(inside, shape, "w")
    assert caught.value.fault in ("coverage", "overlap")


PINWHEEL = [Region((0, 0), (1, 2)), Region((0, 2), (2, 1)), Region((2, 1), (1, 2)), Region((1, 0), (2, 1))]


def test_regions_that_no_plane_parts_can_tile() -> None:
    check_tiling([*PINWHEEL, Region((1, 1), (1, 1))], (3, 3), "w")
    with pytest.raises(ManifestError, match="overlap"):
        check_tiling([*PINWHEEL, Region((0, 0), (1, 1))], (3, 3), "w")


@pytest.mark.parametrize("grid", [(65536, 1), (256, 256), (16, 4096), (2, 32768)])
def test_the_largest_grid_of_shards_is_proved_quickly(grid: tuple[int, int]) -> None:
    """A mesh over two dims, as many pieces as a tensor may have."""
    parts = [Region((i, 3 * j), (1, 3)) for i in range(grid[0]) for j in range(grid[1])]
    np.random.default_rng(0).shuffle(parts)  # type: ignore[arg-type]
    start = time.process_time()
    check_tiling(parts, (grid[0], 3 * grid[1]), "w")
    assert time.process_time() - start < 10
