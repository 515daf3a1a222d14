"""The kernel of `device_digest`, in Triton: copies pieces into a bucket and digests its words in one read of each.

A program processes some chunks of the bucket and stores its two sums, which another launch adds up, so that no memory
has to be zeroed before. It runs on GPUs, and with TRITON_INTERPRET=1 on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from weightcast.format.bucket_digest import CHUNK_WORDS, SEEDS

# Separate constants, since a kernel can't read a tuple of its module.
_KEY_0, _KEY_1, _NUMBER_0, _NUMBER_1 = (tl.constexpr(seed) for seed in SEEDS)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mixed(seed, index):  # type: ignore[no-untyped-def]
    """Compute `bucket_digest.mixed` of unsigned words."""
    z = index.to(tl.uint64) + seed + 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _lane(words, key):  # type: ignore[no-untyped-def]
    """Compute one lane of each chunk: a product of 32 x 32 bits for each word."""
    low = words.to(tl.uint32) + key.to(tl.uint32)[None, :]
    high = (words >> 32).to(tl.uint32) + (key >> 32).to(tl.uint32)[None, :]
    return tl.sum(low.to(tl.uint64) * high.to(tl.uint64), axis=1)


# Not specialised by the number of words, so that all buckets run the variants that were compiled in the first trial.
@triton.jit(do_not_specialize=["num_words"])  # type: ignore[untyped-decorator, unused-ignore]
def _copy_and_digest(  # type: ignore[no-untyped-def]
    bucket,
    partial,
    num_words,
    steps,
    segments,
    HAS_TABLE: tl.constexpr,
    PROGRAM_STEPS: tl.constexpr,
    STEP_CHUNKS: tl.constexpr,
    CHUNK_WORDS: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, CHUNK_WORDS).to(tl.int64)
    key_0, key_1 = _mixed(_KEY_0, column), _mixed(_KEY_1, column)
    low = tl.zeros([STEP_CHUNKS], tl.uint64)
    high = tl.zeros([STEP_CHUNKS], tl.uint64)
    for step in range(p * PROGRAM_STEPS, (p + 1) * PROGRAM_STEPS):
        chunk = step * STEP_CHUNKS + tl.arange(0, STEP_CHUNKS).to(tl.int64)
        k = chunk[:, None] * CHUNK_WORDS + column[None, :]
        if HAS_TABLE:
            words = tl.zeros([STEP_CHUNKS, CHUNK_WORDS], tl.int64)
            for number in range(tl.load(steps + 2 * step), tl.load(steps + 2 * step + 1)):
                row = segments + 4 * number
                source = tl.load(row).to(tl.pointer_type(tl.int64))
                base, size = tl.load(row + 1), tl.load(row + 2)
                is_here = (k >= base) & (k < base + size)
                found = tl.load(source + (k - base), mask=is_here, other=0)
                tl.store(bucket + k, found, mask=is_here & (k < base + size * tl.load(row + 3)))
                words += found
        else:
            words = tl.load(bucket + k, mask=k < num_words, other=0)
        x = _lane(words.to(tl.uint64, bitcast=True), key_0) + _mixed(_NUMBER_0, chunk)
        y = _lane(words.to(tl.uint64, bitcast=True), key_1) + _mixed(_NUMBER_1, chunk)
        is_chunk = chunk * CHUNK_WORDS < num_words
        low += tl.where(is_chunk, x * y, 0)
        high += tl.where(is_chunk, tl.umulhi(x, y), 0)
    # The length is part of the digest.
    num_bytes = tl.where(p == 0, num_words, 0).to(tl.int64) * 8
    tl.store(partial + 2 * p, tl.sum(low, axis=0).to(tl.int64, bitcast=True) + num_bytes)
    tl.store(partial + 2 * p + 1, tl.sum(high, axis=0).to(tl.int64, bitcast=True))


def launch(
    bucket: torch.Tensor,
    partial: torch.Tensor,
    step_words: int,
    program_steps: int,
    steps: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> None:
    """Queue it on the current stream. All tensors are int64, of one device; `bucket`: the payload's words.

    `partial`: where the two sums of each program go, which takes `program_steps` times `step_words` of the bucket.
    `segments`: of each the address of its first word, its place in the bucket in words, its number of words, and
    whether it is copied there or lies there; they tile the bucket, in order. `steps`: of each step of each program the
    first of its segments, and the first behind them. Without tables the bucket is digested as it is.
    """
    kernel: Any = _copy_and_digest[(partial.shape[0],)]
    has_table, tables = steps is not None, (steps, segments) if steps is not None else (bucket, bucket)
    sizes = program_steps, step_words // CHUNK_WORDS, CHUNK_WORDS
    kernel(bucket, partial, bucket.numel(), *tables, has_table, *sizes)
