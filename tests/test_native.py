"""The native core from Python: tables of copies against torch, digests against their definition, places and members."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fp8_blocks import reference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nh_128 import nh_128

from weightcast.format.bucket_digest import torch_digest
from weightcast.native import _core, tables
from weightcast.native.tables import (
    CHUNK_BYTES,
    CopyTable,
    PackTable,
    added,
    digest,
    digest_words,
    places,
    quantise,
    same_members,
    same_places,
)

THREADS = [1, 3]


def noise(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


# --- fp8 by blocks ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (1, 7), (5, 64), (1000, 1000)], ids=str)
@pytest.mark.parametrize("threads", THREADS)
def test_quantised_blocks_are_those_of_the_reference(dtype: torch.dtype, block: tuple[int, int], threads: int) -> None:
    for shape in ((1, 1), (130, 300), (9, 1001)):
        wide = torch.randn(shape[0], shape[1] + 3) * torch.logspace(-8, 3, shape[1] + 3)
        source = wide.to(dtype)[:, 3:]  # with a stride, and not aligned
        expected, expected_scale = reference(source, block)
        weight, scale = torch.empty_like(expected), torch.empty_like(expected_scale)
        quantise(source, weight, scale, block, threads=threads)
        assert torch.equal(weight.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(scale, expected_scale)


def test_every_value_is_rounded_as_torch_does() -> None:
    bits = torch.arange(0, 1 << 32, 499, dtype=torch.int64).to(torch.int32).view(torch.float32)
    bits = bits[bits.abs() <= 448]
    values = bits[: len(bits) // 1200 * 1200].view(-1, 1200).clone()
    values[:, 0] = 448  # so that the scale of each row is 1
    weight, scale = torch.empty(values.shape, dtype=torch.float8_e4m3fn), torch.empty(len(values), 1)
    quantise(values, weight, scale, (1, 1200))
    assert (scale == 1).all()
    assert torch.equal(weight.view(torch.uint8), values.to(torch.float8_e4m3fn).view(torch.uint8))


def test_values_that_are_not_finite_show_in_the_scale() -> None:
    values = torch.ones(4, 64, dtype=torch.bfloat16)
    values[1, 63], values[2, 0] = float("nan"), -float("inf")
    weight, scale = torch.empty(values.shape, dtype=torch.float8_e4m3fn), torch.empty(4, 2)
    quantise(values, weight, scale, (1, 32))
    assert torch.isfinite(scale).tolist() == [[True, True], [True, False], [False, True], [True, True]]
    assert scale[1].isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    "change",
    [
        lambda source, weight, scale: (source.half(), weight, scale),
        lambda source, weight, scale: (source.t(), weight, scale),
        lambda source, weight, scale: (source, weight[:3], scale),
        lambda source, weight, scale: (source, weight, scale[:, :1]),
        lambda source, weight, scale: (source, weight, scale.double()),
        lambda source, weight, scale: (source.to("meta"), weight, scale),
    ],
)
def test_what_can_not_be_quantised_is_refused(change: Any) -> None:
    values = torch.ones(4, 64)
    source, weight, scale = change(values, torch.empty(4, 64, dtype=torch.float8_e4m3fn), torch.empty(4, 2))
    with pytest.raises(ValueError, match=r"with contiguous columns in host memory"):
        quantise(source, weight, scale, (1, 32))
    for row in ([0] * 11, [8] * 10, [1, 8, 3, 1, 8, 1, 8, 1, 1, 1, 1], [1, 8, 2, 1, 8, 1, 8, 1, 1 << 60, 1, 1]):
        with pytest.raises(ValueError, match=r"row 0 of the table is invalid|expected aligned rows"):
            _core.quantise(np.array(row, np.uint64), 1)


# --- digests ---


@pytest.mark.parametrize("size", [0, 1, 8, 2047, 2048, 2049, 40_000])
@pytest.mark.parametrize("threads", THREADS)
def test_a_digest_is_what_the_wire_format_says(size: int, threads: int) -> None:
    payload = noise(size)
    assert added(digest(payload, threads=threads)) == nh_128(bytes(payload.tolist()))


@pytest.mark.parametrize("size", [256, 3 << 20, (5 << 20) + 768])
def test_a_digest_is_that_of_gpus(size: int) -> None:
    payload = noise(size)
    assert added(digest(payload, threads=3)) == torch_digest(payload.view(torch.int64)).numpy().tobytes()


def test_parts_of_a_digest_add_up_in_any_order() -> None:
    payload = noise(20 * CHUNK_BYTES + 100)
    numbers = np.arange(21)
    whole, parts = digest(payload), [digest(payload, numbers % 3 == k, threads=2) for k in range(3)]
    assert added(*parts) == added(*reversed(parts)) == added(whole)
    assert digest(payload, numbers < 0) == (0, 0)
    assert _core.digest(payload.data_ptr(), payload.nbytes, np.array([[7, 7], [9, 8], [30, 40]]), 1) == (0, 0)


def test_only_bytes_in_host_memory_are_a_payload() -> None:
    for payload in (
        torch.zeros(4),
        torch.zeros(8, dtype=torch.uint8)[::2],
        torch.zeros(8, dtype=torch.uint8, device="meta"),
    ):
        with pytest.raises(ValueError, match=r"expected contiguous torch\.uint8 in host memory"):
            digest(payload)
    freed = torch.zeros(4096, dtype=torch.uint8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="a payload of 4096 bytes reaches outside of its storage of 0 bytes"):
        digest(freed)


# --- copies ---


def strided_like(shape: tuple[int, ...], order: list[int], pads: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of that shape whose dims lie in memory in another order, with gaps."""
    memory = torch.zeros([shape[d] + pad for d, pad in zip(order, pads, strict=True)], dtype=dtype)
    memory = memory[tuple(slice(0, shape[d]) for d in order)]
    return memory.permute([order.index(d) for d in range(len(shape))])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64]))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=5)))
    made = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape))))
        pads = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
        made.append(strided_like(shape, list(order), pads, dtype))
    target, source = made
    source.copy_(torch.arange(source.numel()).reshape(shape) + 1)
    return target, source


@settings(deadline=None)
@given(st.lists(pairs(), max_size=8), st.sampled_from(THREADS))
@example([(torch.zeros(6, 7).t(), torch.randn(7, 6))], 1)
def test_a_table_copies_as_torch_does(found: list[tuple[torch.Tensor, torch.Tensor]], threads: int) -> None:
    targets, sources = [pair[0] for pair in found], [pair[1] for pair in found]
    table = CopyTable(targets, sources)
    table.run(threads=threads)
    copied = [number for number in range(len(found)) if number not in table.others]
    for number in copied:
        assert torch.equal(targets[number], sources[number])
    assert table.num_bytes == sum(targets[number].nbytes for number in copied)
    for number in table.others:
        assert targets[number].is_complex() or targets[number].ndim > 3


@pytest.mark.parametrize("size", [1 << 16, (3 << 20) + 5])
@pytest.mark.parametrize("skew", [0, 1, 8])
@pytest.mark.parametrize("cached", [False, True])
def test_large_copies_are_cut_for_threads(size: int, skew: int, cached: bool) -> None:
    source, target = noise(size + skew)[skew:], torch.zeros(size + 1, dtype=torch.uint8)[1:]
    table = CopyTable([target], [source])
    assert len(table.rows) == -(-size // (1 << 20))
    table.run(threads=4, cached=cached)
    assert torch.equal(target, source)


def test_rows_of_a_matrix_are_cut_for_threads() -> None:
    source = torch.randn(4096, 1024)
    target = torch.zeros(4096, 2048)[:, 512:1536]
    table = CopyTable([target], [source])
    assert len(table.strided) == 16
    table.run(threads=4)
    assert torch.equal(target, source)


def test_what_is_no_copy_of_bytes_is_left_to_torch() -> None:
    base = torch.randn(4, 4, dtype=torch.complex64)
    cases = {
        "cast": (torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16)),
        "broadcast": (torch.zeros(4, 4), torch.zeros(4)),
        "other sizes": (torch.zeros(4), torch.zeros(5)),
        "negated": (torch.zeros(4, 4), torch.imag(base.conj())),
        "conjugated": (torch.zeros(4, 4, dtype=torch.complex64), base.conj()),
        "no memory": (torch.zeros(4, device="meta"), torch.zeros(4, device="meta")),
        "overlapping": ((line := torch.arange(10.0))[1:], line[:-1]),
        "onto itself": (line, line),
    }
    for name, (target, source) in cases.items():
        assert CopyTable([target], [source]).others == [0], name
    table = CopyTable([case[0] for case in cases.values()], [case[1] for case in cases.values()])
    assert table.others == list(range(len(cases)))
    assert (len(table.rows), len(table.strided), table.num_bytes) == (0, 0, 0)


@pytest.mark.parametrize("shape", [(100,), (10, 10)])
@pytest.mark.parametrize("side", [0, 1])
def test_a_table_that_would_reach_outside_of_a_storage_is_refused(shape: tuple[int, ...], side: int) -> None:
    tensors = [torch.zeros(shape), torch.zeros(12, 12)[:10, :10] if len(shape) > 1 else torch.zeros(shape)]
    tensors[side].untyped_storage().resize_(16)
    with pytest.raises(ValueError, match="reaches outside of its tensor's storage, which has 16 bytes"):
        CopyTable(tensors[:1], tensors[1:])
    tensors[side].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="storage was resized or freed"):
        CopyTable(tensors[:1], tensors[1:])


def test_a_table_has_the_places_of_its_targets() -> None:
    sources = [torch.zeros(4), torch.zeros(3, 5).t(), torch.zeros(()), torch.zeros(0, 2), torch.zeros(4).bfloat16()]
    targets = [torch.zeros(source.shape) for source in sources] + [torch.zeros(3, device="meta")]
    assert CopyTable(targets, [*sources, torch.zeros(3)]).places == places(targets)


def test_as_many_sources_as_targets() -> None:
    with pytest.raises(ValueError, match="there are 1 targets and 2 sources"):
        CopyTable([torch.zeros(1)], [torch.zeros(1), torch.zeros(1)])


numbers = st.one_of(st.integers(0, 5), st.integers(0, 2**64 - 1))


@settings(deadline=None)
@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=4), st.integers(0, 6000))
def test_no_table_of_numbers_packs_outside_of_a_payload(rows: list[tuple[int, int, int]], size: int) -> None:
    """Whatever its rows say: it is refused, or zeros are written within."""
    memory = torch.full((size + 128,), 7, dtype=torch.uint8)
    table = np.array([(offset, 0, length) for offset, _, length in rows], np.uint64).reshape(-1, 3)
    with contextlib.suppress(ValueError):
        _core.copy_and_digest(memory.data_ptr() + 64, size, table, 2, False)
    assert (memory[:64] == 7).all()
    assert (memory[64 + size :] == 7).all()


@pytest.mark.parametrize(
    "row",
    [(0, 64, 8), (64, 0, 8), (64, 64, 1 << 48), (64, 64, (1 << 64) - 8)],
    ids=["target", "source", "large", "negative"],
)
def test_tables_that_can_be_none_are_refused(row: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="row 1 of the table is invalid"):
        _core.copy(np.array([(64, 64, 0), row], np.uint64), 1, False)
    strided = np.array(
        [(*row, 1, 0, 0, 1, 0, 0, 1, 0, 0), (64, 64, 8, 1 << 40, 0, 0, 1 << 40, 0, 0, 1, 0, 0)], np.uint64
    )
    for number in range(2):
        with pytest.raises(ValueError, match="row 0 of the table is invalid"):
            _core.copy_strided(strided[number], 1, False)
    with pytest.raises(ValueError, match="expected aligned rows of 3 words"):
        _core.copy(bytes(25), 1, False)
    with pytest.raises(ValueError, match="281474976710656 bytes at 0x40, expected"):
        _core.digest(64, 1 << 48, np.array([[0, 1]]), 1)
    with pytest.raises(ValueError, match=r"8 bytes at .*, expected"):
        _core.digest(0, 8, np.array([[0, 1]]), 1)
    with pytest.raises(ValueError, match="expected aligned rows of 2 words"):
        _core.digest(64, 8, bytes(8), 1)


@pytest.mark.parametrize(
    ("address", "itemsize", "dims"),
    [
        (0, 4, [(1, 4, 1)]),
        (64, 3, [(1, 4, 1)]),
        (64, 32, [(1, 4, 1)]),
        (64, 4, [(0, 4, 1)]),
        (64, 4, [(1 << 46, 0, 1)]),
        (64, 4, [(1 << 40, 0, 1), (1 << 40, 0, 1)]),
        (64, 4, [(2, 1 << 47, 1)]),
        (64, 4, [(2, 1 << 46, 1)] * 3),
        (64, 4, [(1 << 63, 1 << 63, 1)]),
        (64, 4, [(1, 4, 1)] * 65),
    ],
)
def test_elements_that_can_be_nowhere_are_refused(
    address: int, itemsize: int, dims: list[tuple[int, int, int]]
) -> None:
    place = f"0x{address:x}" if address else ".*"
    with pytest.raises(ValueError, match=f"elements of {itemsize} bytes at {place}, expected"):
        _core.digest_words(address, itemsize, 0, np.array(dims, np.uint64), 1)
    with pytest.raises(ValueError, match="expected aligned rows of 3 words"):
        _core.digest_words(64, 4, 0, bytes(25), 1)


def test_elements_of_a_tensor_are_digested_in_place() -> None:
    """By any threads, in any order of dims, and row by row; tests/test_tensor_digest.py compares values."""
    for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128):
        grid = noise(dtype.itemsize * 300 * 500).view(dtype).view(300, 500)
        for tensor, steps in ((grid, (500, 1)), (grid[:, 100:].t(), (1, 500)), (grid[::3, ::7], (1500, 7))):
            part = digest_words(tensor, 5000, steps)
            assert part == digest_words(tensor, 5000, steps, threads=3)
            assert part == digest_words(tensor.t(), 5000, steps[::-1]), "dims in another order"
            rows = [digest_words(row, 5000 + steps[0] * number, steps[1:]) for number, row in enumerate(tensor)]
            assert added(*rows) == added(part)


# --- packing ---


def test_packing_fills_and_digests_in_one_pass() -> None:
    """Small and large tensors, casts and transposes that were copied before, gaps, and what others fill."""
    payload = torch.full((300_000,), 0xAA, dtype=torch.uint8)
    shapes = {
        "large": (0, noise(150_000)),
        "cast": (150_016, torch.randn(5000)),
        "strided": (160_256, torch.randn(30, 40).t()),
        "few": (165_056, noise(5)),
        "column": (165_888, torch.randn(64, 8)),
        "last": (200_192, noise(99_808)),
    }
    targets, sources = [], []
    for name, (at, source) in shapes.items():
        dtype = torch.bfloat16 if name == "cast" else source.dtype
        numel = source.numel() * (2 if name == "column" else 1)
        target = payload[at : at + numel * dtype.itemsize].view(dtype)
        target = target.view(64, 16)[:, 4:12] if name == "column" else target.view(source.shape)
        targets.append(target)
        sources.append(source)
    gaps = [(150_000, 150_016), (160_016, 160_256), (165_061, 165_888), (169_984, 170_000)]
    # A number stands for a contiguous target of its source's dtype.
    numbers = [
        t if name in ("cast", "column") else at for (name, (at, _)), t in zip(shapes.items(), targets, strict=True)
    ]
    tables = [PackTable(payload, into, sources, gaps) for into in (targets, numbers)]
    for table in tables:
        assert table.others == [1]
        # The column's rows lie among bytes that others fill, as does what no row names.
        assert np.flatnonzero(table.missing).tolist() == [*range(165_888 // CHUNK_BYTES, 200_192 // CHUNK_BYTES + 1)]
    for threads, table in itertools.product(THREADS, tables):
        payload.fill_(0xAA)
        targets[1].copy_(sources[1])
        part = table.run(payload, threads=threads)
        for target, source in zip(targets, sources, strict=True):
            assert torch.equal(target, source.to(target.dtype))
        assert all(not payload[start:end].any() for start, end in gaps)
        assert (payload[170_000:200_192] == 0xAA).all()
        assert added(part, digest(payload, table.missing)) == nh_128(bytes(payload.tolist()))


def test_a_table_without_views_fills_any_payload_of_its_size() -> None:
    size, rows = 100_000, torch.randn(40, 30)
    sources = [noise(50_000), rows.t(), torch.randn(100, dtype=torch.complex64).conj(), noise(40_000)]
    starts, gaps = [0, 50_176, 56_064, 60_000], [(50_000, 50_176), (54_976, 56_064), (56_864, 60_000)]
    table = PackTable(torch.empty(size, dtype=torch.uint8, device="meta"), starts, sources, gaps)
    assert table.others == [2]
    for fill in (1, 2):
        payload = torch.full((size + 64,), fill, dtype=torch.uint8)[64:]
        payload[56_064:56_864].view(torch.complex64).copy_(sources[2])
        part = table.run(payload, threads=3)
        for start, source in zip(starts, sources, strict=True):
            assert torch.equal(payload[start : start + source.nbytes].view(source.dtype).view(source.shape), source)
        assert not any(payload[start:end].any() for start, end in gaps)
        assert added(part, digest(payload, table.missing)) == nh_128(bytes(payload.tolist()))
    for other in (size - 8, size + 8):
        with pytest.raises(ValueError, match=f"the payload has {other} bytes, expected {size}"):
            table.run(torch.zeros(other, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"expected contiguous torch\.uint8 in host memory"):
        table.run(torch.empty(size, dtype=torch.uint8, device="meta"))
    with pytest.raises(ValueError, match="reaches outside of the payload, which has 64"):
        PackTable(torch.empty(64, dtype=torch.uint8, device="meta"), [33], [noise(32)])


@pytest.mark.parametrize("gaps", [[(8, 32)], [(0, 8)], [(40, 70)], [(36, 38), (37, 40)]])
def test_pieces_that_overlap_or_end_outside_of_a_payload_are_refused(gaps: list[tuple[int, int]]) -> None:
    payload = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="targets and gaps overlap, or reach outside of the payload of 64 bytes"):
        PackTable(payload, [payload[4:36]], [noise(32)], gaps)
    with pytest.raises(ValueError, match="targets and gaps overlap, or reach outside of the payload of 64 bytes"):
        PackTable(payload, [4], [noise(32)], gaps)
    for number in -1, 33, 1 << 40:
        with pytest.raises(ValueError, match=r"a copy of .* reaches outside of the payload, which has 64"):
            PackTable(payload, [number], [noise(32)])
    for other in torch.zeros(32, dtype=torch.uint8), torch.zeros(32, 2, dtype=torch.uint8)[:, 0]:
        with pytest.raises(ValueError, match=r"a copy of .* bytes at 0x.* reaches outside of the payload, which"):
            PackTable(payload, [other], [noise(32)])


# --- places and members ---


class Answering(torch.nn.Parameter):
    """As engines' classes of parameters, of which some answer each call in Python."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


class Unlisted:
    """A tensor whose class has no table of DLPack's, which older torches don't: its methods are asked."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


@pytest.mark.parametrize("make", [torch.nn.Parameter, Answering, Unlisted, lambda tensor: tensor])
def test_places_change_with_memory_sizes_strides_and_dtypes(make: Any) -> None:
    tensor = torch.arange(24.0).view(4, 6)
    found: list[Any] = [make(tensor), torch.zeros(3)]
    before = places(found)
    assert places(found) == before
    assert same_places(found, before)
    assert not any(same_places(found, other) for other in (before[:-1], before + bytes(8), before[8:], b""))
    tensor.mul_(2)
    assert places(found) == before
    others = [tensor.clone(), tensor.t(), tensor.view(6, 4), tensor[:3], tensor.view(torch.int32), tensor.view(2, 2, 6)]
    for other in others:
        if make in (torch.nn.Parameter, Answering) and not other.is_floating_point():
            continue
        assert places([make(other), found[1]]) != before
        assert not same_places([make(other), found[1]], before)
    assert not same_places(found[::-1], before)
    assert not same_places(found[:1], before)
    assert not same_places([], before)
    assert places([]) == b""


def test_places_see_data_that_was_replaced() -> None:
    net = torch.nn.Linear(4, 4)
    before = places(list(net.parameters()))
    net.weight.data = net.weight.data.clone()
    moved = places(list(net.parameters()))
    assert moved != before
    net.half()
    assert places(list(net.parameters())) != moved


def test_tables_and_places_take_what_dlpack_has_no_word_for() -> None:
    tensors = [
        torch.zeros(3, device="meta"),
        torch.zeros(2, 2, dtype=torch.float8_e4m3fn),
        torch.zeros((), dtype=torch.bool),
        torch.randn(2, 2, dtype=torch.complex64).conj(),
        torch.zeros(0, 3),
        torch.zeros([1] * 9),
        torch.randn(3, requires_grad=True),
    ]
    assert same_places(tensors, places(tensors))
    with pytest.raises((AttributeError, TypeError)):
        places([3])  # type: ignore[list-item]
    with pytest.raises((AttributeError, TypeError)):
        same_places([3], b"")  # type: ignore[list-item]
    with pytest.raises(TypeError):
        same_places(tensors, bytearray(64))  # type: ignore[arg-type]


def test_members_are_the_same_until_one_is_another() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    dicts: list[dict[str, Any]] = [
        register for m in net.modules() for register in (m._parameters, m._buffers, m._modules)
    ]

    def taken() -> tuple[list[int], list[str], list[Any]]:
        return [*map(len, dicts)], [name for d in dicts for name in d], [value for d in dicts for value in d.values()]

    before = taken()
    assert same_members(dicts, *before)
    weight = net[0].weight
    net[0].weight = torch.nn.Parameter(weight.detach())
    assert not same_members(dicts, *before)
    net[0].weight = weight
    assert same_members(dicts, *before), "it is there again"
    bias = net[0]._parameters.pop("bias")
    assert not same_members(dicts, *before)
    net[1]._parameters["bias_of_another"] = bias
    assert not same_members(dicts, *before), "as many, elsewhere"
    del net[1]._parameters["bias_of_another"]
    net[0]._parameters["other"] = bias
    assert not same_members(dicts, *before), "another name"
    with pytest.raises(TypeError):
        same_members([3], [1], ["a"], [1])  # type: ignore[list-item]
    with pytest.raises(IndexError):
        same_members([{"a": 1}], [1], [], [])


# --- threads and memory ---


def test_no_thread_is_left_and_a_process_may_fork() -> None:
    source, target = noise(64 << 20), torch.zeros(64 << 20, dtype=torch.uint8)
    before = len(os.listdir("/proc/self/task"))
    CopyTable([target], [source]).run(threads=4)
    assert len(os.listdir("/proc/self/task")) == before
    expected = digest(source, threads=4)
    child = os.fork()
    if not child:
        os._exit(digest(target, threads=4) != expected)
    assert os.waitpid(child, 0)[1] == 0


def test_the_gil_is_let_go() -> None:
    """No other thread is given a turn here but by the call itself."""
    payload, gate, seen = noise(16 << 20), threading.Lock(), list[int]()
    table = CopyTable([torch.zeros_like(payload)], [payload])
    former = sys.getswitchinterval()
    for call in (table.run, lambda: digest(payload), lambda: digest_words(payload, 0, (1,))):
        gate.acquire()
        thread = threading.Thread(target=lambda: (gate.acquire(), seen.append(1)))
        thread.start()
        sys.setswitchinterval(1000.0)
        try:
            gate.release()
            for _ in range(2000):
                if seen:
                    break
                call()
            assert seen
        finally:
            sys.setswitchinterval(former)
        thread.join()
        gate.release()
        seen.clear()


def test_populated_pages_are_zeros_and_unmapped_ones_an_error() -> None:
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    assert tables.populate(address + 5, 40 * mmap.PAGESIZE) in (True, False)
    assert not any(memory[:])
    if tables.populate(address, mmap.PAGESIZE):
        with pytest.raises(OSError, match="Cannot allocate memory"):
            tables.populate(mmap.PAGESIZE, mmap.PAGESIZE)
    with pytest.raises(ValueError, match=r"bytes at .*, expected at most"):
        tables.populate(0, 5)


def test_without_the_core_the_import_says_what_to_do(tmp_path: Path) -> None:
    """A clone that nothing was built in."""
    package = tmp_path / "weightcast"
    (package / "native").mkdir(parents=True)
    source = Path(tables.__file__).parent
    (package / "__init__.py").write_text("")
    (package / "native" / "__init__.py").write_text((source / "__init__.py").read_text())
    done = subprocess.run(
        [sys.executable, "-c", "import weightcast.native"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "can't load weightcast's native core" in done.stderr
    assert "WEIGHTCAST_CC=ziglang" in done.stderr
