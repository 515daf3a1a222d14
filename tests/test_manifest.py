"""Manifests that are valid, the tiling proof against a count of elements, and what a manifest says of itself."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcast.errors import ManifestError
from weightcast.format.geometry import CheckSteps, Region, check_tiling, merged, runs_as_blocks
from weightcast.format.manifest import (
    ITEMSIZE_BYTES,
    MAX_ALIASES,
    MAX_NAME_BYTES,
    MAX_VERSION,
    Manifest,
    Piece,
    TensorRecord,
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


def test_records_become_columns_and_come_back() -> None:
    """Tensors in one piece, in two, in one that is a part of a bucket's, without elements, tied, and in a group."""
    records = (
        TensorRecord("one", "int8", (256,), aliases=("other",), pieces=(Piece(1, 0, Region((0,), (256,))),)),
        TensorRecord(
            "two", "int8", (512,), pieces=(Piece(0, 0, Region((0,), (256,))), Piece(1, 256, Region((256,), (256,))))
        ),
        TensorRecord("none", "int8", (0, 4), group="g"),
        TensorRecord("scalar", "float64", (), group="g", pieces=(Piece(1, 512, Region((), ())),)),
        TensorRecord("alike", "int8", (256,), pieces=(Piece(0, 256, Region((0,), (256,))),)),
    )
    manifest = Manifest.of(records, (512, 768))
    back = Manifest.decode(manifest.encode())
    assert manifest.tensors == back.tensors == records
    assert back == manifest
    assert back.num_bytes == 256 + 512 + 8 + 256
    assert len(back.forms) == 4


def test_a_tensor_in_one_piece_is_no_object_of_the_encoding() -> None:
    """A peer decodes a manifest in one call, with the GIL: each object takes it about ten times as long as a number."""
    encodings = [plan([TensorSpec(f"w{i}", "int8", (4,)) for i in range(n)], 1 << 20).encode() for n in (10, 1000)]
    assert encodings[0].count(b"{") == encodings[1].count(b"{")
    assert encodings[0].count(b"[") == encodings[1].count(b"[")


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


def _mesh(shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[Region]:
    """Shards as of DTensor: in each dim of equal size, but for the last ones."""
    chunks = [-(-size // parts) for size, parts in zip(shape, sizes, strict=True)]
    starts = [range(0, size, chunk) for size, chunk in zip(shape, chunks, strict=True)]
    return [
        Region(offsets, tuple(min(c, n - o) for o, c, n in zip(offsets, chunks, shape, strict=True)))
        for offsets in itertools.product(*starts)
    ]


def _hosts(shape: tuple[int, int], sizes: tuple[int, int], num_hosts: int) -> list[Region]:
    """Shards of a mesh whose ranks are on hosts in any order, merged by host: no plane need part these."""
    shards = _mesh(shape, sizes)
    owners = np.random.default_rng(7).integers(num_hosts, size=len(shards))
    return [
        region
        for host in range(num_hosts)
        for region in merged([shard for shard, owner in zip(shards, owners, strict=True) if owner == host])
    ]


LEGAL_TILINGS = {
    "rows": ((50_000, 64), _mesh((50_000, 64), (1024, 1))),
    "fsdp and tensor parallel": ((4096, 4096), _mesh((4096, 4096), (64, 8))),
    "experts, fsdp and tensor parallel": ((256, 2048, 7168), _mesh((256, 2048, 7168), (32, 8, 4))),
    "a flat parameter's shards": (
        (61, 97, 13),
        [
            r
            for start in range(0, 61 * 97 * 13, 601)
            for r in runs_as_blocks((61, 97, 13), start, min(start + 601, 76921))
        ],
    ),
    "megatron's qkv, a group at a time": (
        (8 * 384, 512),
        [
            Region((g * 384 + at, 128 * c), (n, 128))
            for g in range(8)
            for at, n in ((0, 256), (256, 64), (320, 64))
            for c in range(4)
        ],
    ),
    "hosts in any order": ((512, 512), _hosts((512, 512), (16, 16), 4)),
    "many hosts in any order": ((512, 512), _hosts((512, 512), (32, 32), 64)),
}


@pytest.mark.parametrize("kind", LEGAL_TILINGS)
def test_tilings_of_trainers_are_proved_however_many_tensors_have_them(kind: str) -> None:
    shape, parts = LEGAL_TILINGS[kind]
    num_tensors = 20
    steps = CheckSteps(num_tensors * len(parts))
    for _ in range(num_tensors):
        check_tiling(parts, shape, "w", steps)


@pytest.mark.parametrize("grid", [(65536, 1), (256, 256), (16, 4096), (2, 32768)])
def test_the_largest_grid_of_shards_is_proved_quickly(grid: tuple[int, int]) -> None:
    """A mesh over two dims, as many pieces as a tensor may have."""
    parts = [Region((i, 3 * j), (1, 3)) for i in range(grid[0]) for j in range(grid[1])]
    np.random.default_rng(0).shuffle(parts)  # type: ignore[arg-type]
    start = time.process_time()
    check_tiling(parts, (grid[0], 3 * grid[1]), "w")
    assert time.process_time() - start < 10


DECODE_IN_THREADS = """
import sys, threading
import msgspec
from weightcast.format.manifest import convert, decode

sys.setswitchinterval(1e-6)
for _ in range(100):
    leaf = msgspec.defstruct("Leaf", [("a", int), ("b", str)])
    middle = msgspec.defstruct("Middle", [("leaf", leaf), ("leaves", list[leaf])])
    top = msgspec.defstruct("Top", [("middle", middle), ("others", dict[str, middle])])
    value = {"middle": {"leaf": {"a": 1, "b": "x"}, "leaves": [{"a": 2, "b": "y"}]}, "others": {}}
    data, barrier = msgspec.json.encode(value), threading.Barrier(8)

    def read(number):
        barrier.wait()
        assert (decode(data, top) if number % 2 else convert(value, top)).middle.leaves[0].b == "y"

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_decode_a_message_for_the_first_time_at_once() -> None:
    """As the threads of a fleet do. In a process of its own, since msgspec would crash it."""
    ran = subprocess.run([sys.executable, "-c", DECODE_IN_THREADS], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
