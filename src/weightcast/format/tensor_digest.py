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

import operator
import re
from collections.abc import Iterator, Sequence

import torch

from weightcast.format.bucket_digest import mixed
from weightcast.format.geometry import Region, is_inside, row_major, start_elements, whole
from weightcast.native.tables import digest_words

SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
"""Digits of pi: nothing up the sleeve."""
_BLOCK_BITS = 12
_BLOCK_WORDS = 1 << _BLOCK_BITS
_OFFSET = (1 << 32) + 1
_MAX_DEVICE_ELEMENTS = 1 << 21
_WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def tensor_digest(
    tensor: torch.Tensor, region: Region | None = None, shape: Sequence[int] | None = None, *, threads: int = 1
) -> str:
    """The digest of `tensor` as 32 hex digits; with `region` and `shape`, its share as that region of a global tensor.

    Any strides, any device, any dtype of 1 to 16 bytes. In host memory it is read in place, without the GIL, by at most
    so many threads; copied before, if its values are lazy conjugates or negatives. On a GPU it is computed there, 2 Mi
    elements at a time, with one wait at the end.
    Raises ValueError if only one of region and shape is given, if they don't fit the tensor, or if the tensor reaches
    outside of its storage.
    """
    if (region is None) != (shape is None):
        raise ValueError("give both region and shape (a region has its place in a global shape), or neither")
    region, shape = region or whole(tensor.shape), tuple(tensor.shape if shape is None else shape)
    if region.sizes != tuple(tensor.shape) or not is_inside(region, shape):
        raise ValueError(
            f"a tensor of shape {list(tensor.shape)} is not the region at {list(region.offsets)} of sizes "
            f"{list(region.sizes)} in a tensor of shape {list(shape)}"
        )
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.numel():
        return of_lanes([0, 0])
    if tensor.device.type == "cpu":
        return of_lanes(digest_words(tensor, start_elements(region, shape), row_major(shape), threads=threads))
    blocks = _blocks(tensor, region.offsets, _MAX_DEVICE_ELEMENTS)
    return of_lanes(torch.stack([_device_lanes(*block, shape) for block in blocks]).sum(dim=0).tolist())


def add(a: str, b: str) -> str:
    """The digest of two disjoint parts of a tensor together. Raises ValueError for what is not a digest."""
    return of_lanes([*map(operator.add, lanes_of(a), lanes_of(b))])


def lanes_of(digest: str) -> tuple[int, int]:
    """The two lanes of a digest. Raises ValueError for what is not a digest."""
    if re.fullmatch("[0-9a-fA-F]{32}", digest) is None:
        raise ValueError(f"{digest!r} is not a tensor digest: expected 32 hex digits")
    return int(digest[:16], 16), int(digest[16:], 16)


def of_lanes(lanes: Sequence[int]) -> str:
    """The digest of two lanes, each modulo 2**64."""
    return "".join(f"{lane % (1 << 64):016x}" for lane in lanes)


def _blocks(
    tensor: torch.Tensor, offsets: tuple[int, ...], most: int
) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
    """Cut into pieces of bounded size, each with its offsets in the global tensor."""
    numel = tensor.numel()
    if numel <= most:
        yield tensor, offsets
        return
    dim = next(d for d, size in enumerate(tensor.shape) if size > 1)
    step = max(1, tensor.shape[dim] * most // numel)
    for start in range(0, tensor.shape[dim], step):
        part = tensor.narrow(dim, start, min(step, tensor.shape[dim] - start))
        yield from _blocks(part, (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]), most)


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
