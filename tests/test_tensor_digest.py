"""The tensor digest: its definition word by word, and sums over any tiling, device layout and kind of value."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from pretended import LazyGpu

from weightcast.format import tensor_digest as module
from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.geometry import Region
from weightcast.format.tensor_digest import add, tensor_digest

ZERO = "0" * 32


def random_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    high = 2 if dtype == torch.bool else 256
    num_bytes = math.prod(shape) * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, high, (num_bytes,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).reshape(tuple(shape))


def splitmix64(state: int) -> int:
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def by_definition(tensor: torch.Tensor, region: Region, shape: Sequence[int]) -> str:
    """The docstring of the module, one word after the other, with Python's integers."""
    width = min(tensor.itemsize, 4)
    words_per_element = tensor.itemsize // width
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = struct.unpack(f"<{len(data) // width}{'_bh_i'[width]}", data)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    lanes = [0, 0]
    for number, index in enumerate(itertools.product(*map(range, region.sizes))):
        element = sum((o + i) * s for o, i, s in zip(region.offsets, index, strides, strict=True))
        for j in range(words_per_element):
            high, low = divmod(words_per_element * element + j, 4096)
            value = words[number * words_per_element + j] + (1 << 32) + 1
            for lane in range(2):
                weight = (splitmix64(module.SEEDS[lane] + low) | 1) * (splitmix64(module.SEEDS[2 + lane] + high) | 1)
                lanes[lane] += weight * value
    return "".join(f"{lane % (1 << 64):016x}" for lane in lanes)


def by_numpy(tensor: torch.Tensor, region: Region, shape: Sequence[int]) -> str:
    """The same of many words at once."""
    width = min(tensor.itemsize, 4)
    data = tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy()
    words = data.view(f"<i{width}").reshape(tensor.numel(), -1).astype(np.int64).view(np.uint64)
    elements = np.zeros(region.sizes, np.uint64)
    for d, (offset, size) in enumerate(zip(region.offsets, region.sizes, strict=True)):
        steps = np.arange(offset, offset + size, dtype=np.uint64) * np.uint64(math.prod(shape[d + 1 :]))
        elements += steps.reshape(-1, *[1] * (tensor.ndim - d - 1))
    positions = elements.reshape(-1, 1) * np.uint64(words.shape[1]) + np.arange(words.shape[1], dtype=np.uint64)
    lanes = []
    for lane in range(2):
        weights = mixed(module.SEEDS[lane], positions & np.uint64(4095))
        weights *= mixed(module.SEEDS[2 + lane], positions >> np.uint64(12))
        lanes.append(int((weights * (words + np.uint64((1 << 32) + 1))).sum()))
    return "".join(f"{lane:016x}" for lane in lanes)


def mixed(seed: int, indexes: np.ndarray) -> np.ndarray:
    z = indexes + np.uint64((seed + 0x9E3779B97F4A7C15) % (1 << 64))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def whole(tensor: torch.Tensor) -> Region:
    return Region((0,) * tensor.ndim, tuple(tensor.shape))


def part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(region.offsets, region.sizes, strict=True))]


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (7, 5), (2, 0, 3), (4099,), (2, 3, 700)], ids=str)
def test_it_is_what_the_definition_says(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(shape, dtype)
    assert tensor_digest(tensor) == by_definition(tensor, whole(tensor), shape)


@pytest.mark.parametrize(
    ("region", "shape"),
    [
        (Region((1, 2), (3, 2)), (5, 7)),
        (Region((0, 1, 0), (2, 1, 5)), (2, 3, 5)),
        (Region((1, 4000), (2, 300)), (3, 5000)),
        (Region((100, 3), (900, 1)), (1000, 50)),
        (Region((2, 1000), (1, 4500)), (3, 6000)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64], ids=str)
def test_a_region_is_what_the_definition_says(region: Region, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = random_bits(region.sizes, dtype)
    assert tensor_digest(tensor, region, shape) == by_definition(tensor, region, shape)


def test_golden_digests() -> None:
    """A change of the definition is a change of the protocol."""
    assert tensor_digest(torch.arange(10, dtype=torch.int16).view(2, 5)) == "2f7494cb6c7c2ba995c44179eace2edb"
    assert tensor_digest(torch.arange(10_000).bfloat16()) == "4948f8bd838b2e487164e5ed08625a80"
    assert tensor_digest(torch.tensor([1 - 2j, 3j], dtype=torch.complex128)) == "c863877d8d3b44b6c712a6cf28c238d2"
    assert tensor_digest(torch.empty(0, 3)) == ZERO


@hypothesis.given(st.data())
def test_the_sum_over_any_tiling_is_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 70), max_size=3)))
    dtype = data.draw(st.sampled_from([torch.bool, torch.bfloat16, torch.float32, torch.complex128]))
    tensor = random_bits(shape, dtype, seed=data.draw(st.integers(0, 9)))
    total = ZERO
    for region in data.draw(st.permutations(tiles(data, whole(tensor)))):
        total = add(total, tensor_digest(part(tensor, region), region, shape))
    assert total == tensor_digest(tensor)


def tiles(data: st.DataObject, region: Region) -> list[Region]:
    dims = [d for d, size in enumerate(region.sizes) if size > 1]
    if not dims or data.draw(st.booleans()):
        return [region]
    dim = data.draw(st.sampled_from(dims))
    at = data.draw(st.integers(1, region.sizes[dim] - 1))
    low, high = list(region.sizes), list(region.sizes)
    low[dim], high[dim] = at, region.sizes[dim] - at
    moved = list(region.offsets)
    moved[dim] += at
    return tiles(data, Region(region.offsets, tuple(low))) + tiles(data, Region(tuple(moved), tuple(high)))


@hypothesis.given(st.data())
def test_any_strides_at_any_place_are_what_the_definition_says(data: st.DataObject) -> None:
    """Dims in any order in memory, with gaps, repeated or of one element; positions above 2**40."""
    shape = data.draw(st.lists(st.integers(1, 6), max_size=4))
    if shape and data.draw(st.booleans()):
        shape[data.draw(st.integers(0, len(shape) - 1))] = data.draw(st.integers(1, 900 // math.prod(shape) + 1))
    order = data.draw(st.permutations(range(len(shape))))
    pads = data.draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    dtype = data.draw(st.sampled_from([*TORCH_DTYPES.values()]))
    memory = random_bits([shape[d] + pad for d, pad in zip(order, pads, strict=True)], dtype)
    tensor = memory[tuple(slice(0, shape[d]) for d in order)].permute([order.index(d) for d in range(len(shape))])
    if shape and data.draw(st.booleans()):
        dim = data.draw(st.integers(0, len(shape) - 1))
        tensor = tensor.narrow(dim, 0, 1).expand(shape)
    offsets = data.draw(st.lists(st.integers(0, 5), min_size=len(shape), max_size=len(shape)))
    if shape:
        offsets[0] += data.draw(st.sampled_from([0, 1 << 40]))
    region = Region(tuple(offsets), tuple(shape))
    around = [offset + size + data.draw(st.integers(0, 5)) for offset, size in zip(offsets, shape, strict=True)]
    expected = by_definition(tensor, region, around)
    assert tensor_digest(tensor, region, around, threads=data.draw(st.sampled_from([1, 3]))) == expected
    assert by_numpy(tensor, region, around) == expected


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128], ids=str)
def test_large_tensors_are_cut_for_threads(dtype: torch.dtype) -> None:
    """Long runs, short ones, columns of rows that are far apart, and one element of each row."""
    grid = random_bits((1100, 640), dtype)
    for tensor in (
        grid.view(-1)[5:],
        grid[:, 3:600],
        grid.t(),
        grid.view(-1, 16).t(),
        grid[:, 7],
        grid[:1].expand(1100, 640),
    ):
        region = Region((3, 1 << 20)[: tensor.ndim], tuple(tensor.shape))
        around = [offset + size + 2 for offset, size in zip(region.offsets, region.sizes, strict=True)]
        expected = by_numpy(tensor, region, around)
        for threads in (1, 4):
            assert tensor_digest(tensor, region, around, threads=threads) == expected


def test_a_tensor_that_reaches_outside_of_its_storage_is_refused() -> None:
    for make in (lambda: torch.zeros(100), lambda: torch.zeros(10, 10).t(), lambda: torch.zeros(100)[50:]):
        for num_bytes in (0, 16):
            tensor = make()
            tensor.untyped_storage().resize_(num_bytes)
            with pytest.raises(ValueError, match=f"bytes reaches outside of its storage of {num_bytes} bytes"):
                tensor_digest(tensor)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex128], ids=str)
def test_strides_do_not_show(dtype: torch.dtype) -> None:
    grid = random_bits((60, 90), dtype)
    for view in (grid.t(), grid[::3, 5:40], grid[:, 7], grid[:1].expand(4, 90)):
        assert tensor_digest(view) == tensor_digest(view.clone(memory_format=torch.contiguous_format))


def test_lazy_conjugates_and_negatives_are_values() -> None:
    tensor = torch.tensor([1 + 2j, -3j])
    assert tensor_digest(tensor.conj()) == tensor_digest(tensor.conj().resolve_conj())
    assert tensor_digest(tensor.conj().imag) == tensor_digest(torch.tensor([-2.0, 3.0]))


def test_parameters_have_digests_too() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert tensor_digest(parameter) == tensor_digest(torch.ones(3))


def test_bit_patterns_count_not_values() -> None:
    zero, negative = torch.tensor([0.0]), torch.tensor([-0.0])
    assert tensor_digest(zero) != tensor_digest(negative)
    payloads = [torch.tensor([bits], dtype=torch.int32).view(torch.float32) for bits in (0x7FC00000, 0x7FC00001)]
    assert payloads[0].isnan() & payloads[1].isnan()
    assert tensor_digest(payloads[0]) != tensor_digest(payloads[1])


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
def test_any_single_changed_bit_shows(dtype: torch.dtype) -> None:
    data = torch.zeros(3 * dtype.itemsize, dtype=torch.uint8)
    seen = {tensor_digest(data.view(dtype))}
    flips = range(1) if dtype == torch.bool else range(8)
    for byte, flip in itertools.product(range(len(data)), flips):
        changed = data.clone()
        changed[byte] = 1 << flip
        seen.add(tensor_digest(changed.view(dtype)))
    assert len(seen) == 1 + len(data) * len(flips)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_pairs_of_changes_do_not_cancel(dtype: torch.dtype) -> None:
    """Signs are the highest bits, where sums modulo 2**64 of odd multiples would cancel."""
    tensor = torch.rand(200).to(dtype)
    seen = {tensor_digest(tensor)}
    pairs = list(itertools.combinations(range(0, 200, 5), 2))
    for a, b in pairs:
        changed = tensor.clone()
        changed[a], changed[b] = -changed[a], -changed[b]
        seen.add(tensor_digest(changed))
    assert len(seen) == 1 + len(pairs)


def test_positions_count() -> None:
    rows = torch.rand(3, 4096)
    assert tensor_digest(rows) != tensor_digest(rows[[1, 0, 2]])
    assert tensor_digest(rows) != tensor_digest(rows.roll(1))
    assert tensor_digest(torch.zeros(5)) != tensor_digest(torch.zeros(6))


def test_wrong_arguments() -> None:
    tensor = torch.ones(2, 3)
    with pytest.raises(ValueError, match="give both region and shape"):
        tensor_digest(tensor, Region((0, 0), (2, 3)))
    with pytest.raises(ValueError, match="give both region and shape"):
        tensor_digest(tensor, shape=(2, 3))
    for region in (Region((0, 0), (3, 2)), Region((3, 0), (2, 3)), Region((-1, 0), (2, 3)), Region((0,), (6,))):
        with pytest.raises(ValueError, match="is not the region"):
            tensor_digest(tensor, region, (4, 3))
    with pytest.raises(ValueError, match="not a tensor digest"):
        add("12", ZERO)
    for digest in (" " * 16 + "0" * 16, "x" * 32, "_".join("0" * 16) + "0"):
        with pytest.raises(ValueError, match="not a tensor digest"):
            add(ZERO, digest)


@pytest.mark.gpu
def test_the_device_does_not_show() -> None:
    tensor = random_bits((300, 70), torch.bfloat16)
    assert tensor_digest(tensor.cuda()) == tensor_digest(tensor)
    assert tensor_digest(tensor.cuda().t()) == tensor_digest(tensor.t())


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=TORCH_DTYPES)
def test_a_gpu_computes_what_a_cpu_does_and_is_waited_for_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole, in regions of long and of short runs, in many parts; on a GPU that does nothing until it is waited for."""
    monkeypatch.setattr(module, "_MAX_DEVICE_ELEMENTS", 3000)
    tensor = random_bits((90, 130), dtype)
    for region, shape in (
        (None, None),
        (Region((3, 0), (90, 130)), (100, 130)),
        (Region((1000, 70_000), (90, 130)), (4000, 90_000)),
    ):
        with LazyGpu() as gpu:
            waits = gpu.num_waits
            assert tensor_digest(gpu.tensor(tensor), region, shape) == tensor_digest(tensor, region, shape)
            assert gpu.num_waits == waits + 1
    with LazyGpu() as gpu:
        assert tensor_digest(gpu.tensor(tensor.t()[3:]), None, None) == tensor_digest(tensor.t()[3:])
        assert tensor_digest(gpu.tensor(tensor[:0])) == "0" * 32
