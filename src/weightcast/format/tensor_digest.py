"""The per-tensor digest for `verify`: 128 bits over (position, value bits) that can be added up shard by shard.

Definition. Every element is cut into k words of min(itemsize, 4) bytes, lowest bytes first (a little-endian memory
image; complex numbers are their real part, then their imaginary part). Word j of the element whose row-major index in
the global tensor is e has the position p = k * e + j and the value s, its bits as a signed integer. With all
arithmetic modulo 2**64, lane c in {0, 1} is

    S_c = sum over all words of  A_c(p mod 4096) * B_c(p div 4096) * (s + 2**32 + 1)
    A_c(i) = mix(SEEDS[c] + i) | 1        B_c(h) = mix(SEEDS[2 + c] + h) | 1

where mix is the output function of splitmix64. The digest is S_0 and S_1 as 16 hex digits each; of no words it is zero.

Invariants: equal bits at equal positions give equal digests whatever the bucket, device, strides or sharding; the
digests of regions that tile a tensor add up (`add`) to the tensor's own; a change of any single word always changes
the digest, because its weight is odd. It is a check against mistakes, not against an adversary. dtype and shape are
not part of it: compare them first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from weightcast.format.bucket_digest import mixed
from weightcast.format.geometry import Region, is_inside, row_major, start_elements, whole

_MASK = (1 << 64) - 1
SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
"""Digits of pi: nothing up the sleeve."""
_INCREMENT, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""Those of splitmix64."""
_BLOCK_BITS = 12
_BLOCK_WORDS = 1 << _BLOCK_BITS
_SCATTER_WORDS = 1 << 14
_CHUNK_WORDS = 64 * _BLOCK_WORDS
_MAX_PIECE_ELEMENTS = 1 << 22
_OFFSET = (1 << 32) + 1
_MAX_DEVICE_ELEMENTS = 1 << 21
_WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}
_Words = np.ndarray[Any, np.dtype[Any]]


def tensor_digest(tensor: torch.Tensor, region: Region | None = None, shape: Sequence[int] | None = None) -> str:
    """The digest of `tensor` as 32 hex digits; with `region` and `shape`, its share as that region of a global tensor.

    Any strides, any device, any dtype of 1 to 16 bytes. Reads in pieces: extra memory is below the bytes of 16 Mi
    elements whatever the tensor's size. One thread. On a GPU it is computed there, 2 Mi elements at a time, with one
    wait at the end.
    Raises ValueError if only one of region and shape is given, or if they don't fit the tensor.
    """
    if (region is None) != (shape is None):
        raise ValueError("give both region and shape (a region has its place in a global shape), or neither")
    region, shape = region or whole(tensor.shape), tuple(tensor.shape if shape is None else shape)
    if region.sizes != tuple(tensor.shape) or not is_inside(region, shape):
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} is not the region at {list(region.offsets)} of sizes "
            f"{list(region.sizes)} in a tensor of shape {list(shape)}"
        )
    most = _MAX_DEVICE_ELEMENTS if tensor.is_cuda else _MAX_PIECE_ELEMENTS
    blocks = _blocks(tensor.detach().resolve_conj().resolve_neg(), region.offsets, most)
    if tensor.is_cuda:
        on_device = [_device_lanes(block, offsets, shape) for block, offsets in blocks]
        if not on_device:
            return _hex(np.zeros(2, dtype=np.uint64))
        return _hex(torch.stack(on_device).sum(dim=0).cpu().numpy().view(np.uint64))
    lanes = np.zeros(2, dtype=np.uint64)
    for block, offsets in blocks:
        lanes += _block_lanes(block, offsets, shape)
    return _hex(lanes)


def add(a: str, b: str) -> str:
    """The digest of two disjoint parts of a tensor together. Raises ValueError for what is not a digest."""
    for digest in (a, b):
        if re.fullmatch("[0-9a-fA-F]{32}", digest) is None:
            raise ValueError(f"{digest!r} is not a tensor digest: expected 32 hex digits")
    first, second = (np.frombuffer(bytes.fromhex(digest), dtype=">u8") for digest in (a, b))
    return _hex(first + second)


def _hex(lanes: _Words) -> str:
    return "".join(f"{lane:016x}" for lane in lanes.tolist())


def _blocks(
    tensor: torch.Tensor, offsets: tuple[int, ...], most: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Cut into pieces of bounded size, each with its offsets in the global tensor."""
    numel = tensor.numel()
    if numel == 0:
        return
    if numel <= most:
        yield tensor, offsets
        return
    dim = next(d for d, size in enumerate(tensor.shape) if size > 1)
    step = max(1, tensor.shape[dim] * most // numel)
    for start in range(0, tensor.shape[dim], step):
        part = tensor.narrow(dim, start, min(step, tensor.shape[dim] - start))
        yield from _blocks(part, (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), most)


def _block_lanes(block: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> _Words:
    """The lanes of one piece: run by run where runs of consecutive positions are long, else all positions at once."""
    words = block.contiguous().cpu().reshape(-1).view(_WORD_DTYPES[block.itemsize]).numpy()
    words_per_element = words.size // block.numel()
    first_elements, run_elements = _runs(offsets, tuple(block.shape), shape)
    firsts, run_words = first_elements * words_per_element, run_elements * words_per_element
    if run_words < _BLOCK_WORDS and firsts.size > 1:
        return _scattered_lanes(words, firsts, run_words)
    lanes = np.zeros(2, dtype=np.uint64)
    for number, first in enumerate(firsts.tolist()):
        for part in _run_parts(words[number * run_words : (number + 1) * run_words], first):
            lanes += _part_lanes(*part)
    return lanes


def _device_lanes(block: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """The lanes of one piece on a GPU, as two int64, from all positions at once. Waits for nothing."""
    words = block.contiguous().reshape(-1).view(_WORD_DTYPES[block.itemsize]).to(torch.int64).view(block.numel(), -1)
    region, words_per_element = Region(offsets, tuple(block.shape)), words.shape[1]
    elements = torch.zeros((), dtype=torch.int64, device=block.device) + start_elements(region, shape)
    for size, stride in zip(block.shape, row_major(shape), strict=True):
        elements = elements.unsqueeze(-1) + torch.arange(size, device=block.device) * stride
    positions = elements.view(-1, 1) * words_per_element + torch.arange(words_per_element, device=block.device)
    columns, rows, values = positions & (_BLOCK_WORDS - 1), positions >> _BLOCK_BITS, words + _OFFSET
    weights = [(mixed(SEEDS[lane], columns) | 1) * (mixed(SEEDS[2 + lane], rows) | 1) for lane in range(2)]
    return torch.stack([(values * weight).sum() for weight in weights])


def _runs(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: Sequence[int]) -> tuple[_Words, int]:
    """The first global index of every run of consecutive indexes in a region, and the elements of each run."""
    dim = max((d for d in range(len(shape)) if sizes[d] != shape[d]), default=0)
    strides = row_major(shape)
    firsts = np.array([start_elements(Region(offsets, sizes), shape)], dtype=np.int64)
    for d in range(dim):
        firsts = (firsts[:, None] + np.arange(sizes[d], dtype=np.int64) * strides[d]).reshape(-1)
    return firsts, math.prod(sizes[dim:])


def _run_parts(words: _Words, first: int) -> Iterator[tuple[_Words, int, int]]:
    """Cut a run at block boundaries into matrices of (words, first block, first column): a head, chunks, a tail."""
    position, end = 0, words.size
    while position < end:
        block, column = divmod(first + position, _BLOCK_WORDS)
        if column or end - position < _BLOCK_WORDS:
            num_words = min(_BLOCK_WORDS - column, end - position)
            yield words[position : position + num_words].reshape(1, -1), block, column
        else:
            num_words = min(end - position, _CHUNK_WORDS) // _BLOCK_WORDS * _BLOCK_WORDS
            yield words[position : position + num_words].reshape(-1, _BLOCK_WORDS), block, 0
        position += num_words


def _part_lanes(words: _Words, block: int, column: int) -> _Words:
    num_rows, num_columns = words.shape
    values, blocks = words.astype(np.int64), np.arange(block, block + num_rows, dtype=np.uint64)
    lanes = np.zeros(2, dtype=np.uint64)
    for lane in range(2):
        weights = _COLUMN_WEIGHTS[lane][column : column + num_columns]
        rows = np.einsum("rc,c->r", values, weights).view(np.uint64)
        rows += np.array([int(weights.sum()) * _OFFSET & _MASK], dtype=np.uint64)
        lanes[lane] = (rows * _weights(SEEDS[2 + lane], blocks)).sum()
    return lanes


def _scattered_lanes(words: _Words, firsts: _Words, run_words: int) -> _Words:
    lanes = np.zeros(2, dtype=np.uint64)
    num_runs = max(1, _SCATTER_WORDS // run_words)
    for start in range(0, firsts.size, num_runs):
        positions = (firsts[start : start + num_runs, None] + np.arange(run_words, dtype=np.int64)).reshape(-1)
        values = words[start * run_words : start * run_words + positions.size].astype(np.int64).view(np.uint64)
        values += np.uint64(_OFFSET)
        columns, blocks = positions & (_BLOCK_WORDS - 1), positions >> _BLOCK_BITS
        first, last = int(blocks[0]), int(blocks[-1])
        for lane in range(2):
            terms = values * _COLUMN_WEIGHTS[lane].view(np.uint64)[columns]
            if last - first < positions.size:
                terms *= _weights(SEEDS[2 + lane], np.arange(first, last + 1, dtype=np.uint64))[blocks - first]
            else:
                terms *= _weights(SEEDS[2 + lane], blocks.astype(np.uint64))
            lanes[lane : lane + 1] += terms.sum()  # a slice, since a scalar warns where it wraps around
    return lanes


def _weights(seed: int, indexes: _Words) -> _Words:
    """mix(seed + index) | 1, with splitmix64's increment and output function."""
    z = indexes + np.uint64((seed + _INCREMENT) & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FACTORS[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


_COLUMN_WEIGHTS = [_weights(seed, np.arange(_BLOCK_WORDS, dtype=np.uint64)).view(np.int64) for seed in SEEDS[:2]]
