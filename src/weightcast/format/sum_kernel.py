"""The kernel of `device_sums`, in Triton: copies pieces into a bucket and sums the bucket's words in one read of each.

A program takes a part of a segment. Its sums leave it as they are, and are added up in another launch, so that nothing
has to be zero before. Runs on hardware, and with TRITON_INTERPRET=1 on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK_WORDS = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _copy_and_sum(  # type: ignore[no-untyped-def]
    bucket,
    partial,
    num_words,
    programs,
    segments,
    HAS_TABLE: tl.constexpr,
    PROGRAM_WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    p = tl.program_id(0).to(tl.int64)
    if HAS_TABLE:
        row = segments + 4 * tl.load(programs + 2 * p)
        first = tl.load(programs + 2 * p + 1)
        source = tl.load(row).to(tl.pointer_type(tl.int64))
        base, num_words = tl.load(row + 1), tl.load(row + 2)
        num_copied = num_words * tl.load(row + 3)
    else:
        first = p * PROGRAM_WORDS
        source = bucket
        base = 0
    plain = tl.zeros([BLOCK_WORDS], tl.int64)
    weighted = tl.zeros([BLOCK_WORDS], tl.int64)
    for start in range(0, PROGRAM_WORDS, BLOCK_WORDS):
        k = first + start + tl.arange(0, BLOCK_WORDS).to(tl.int64)
        words = tl.load(source + k, mask=k < num_words, other=0)
        if HAS_TABLE:
            tl.store(bucket + base + k, words, mask=k < num_copied)
        plain += words
        # By the place in the bucket, modulo 2**64.
        weighted += words * (base + k + 1)
    tl.store(partial + 2 * p, tl.sum(plain, axis=0))
    tl.store(partial + 2 * p + 1, tl.sum(weighted, axis=0))


def launch(
    bucket: torch.Tensor,
    partial: torch.Tensor,
    program_words: int,
    programs: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> None:
    """Queue it on the current stream. All tensors are int64, of one device; `bucket`: the payload's words.

    `partial`: where the two sums of each program go. `programs`: of each its segment, and its first word there.
    `segments`: of each the address of its first word, its place in the bucket in words, its number of words, and
    whether it is copied there or lies there. Without them the bucket is one segment, in programs of `program_words`.
    """
    kernel: Any = _copy_and_sum[(partial.shape[0],)]
    has_table, tables = programs is not None, (programs, segments) if programs is not None else (bucket, bucket)
    kernel(bucket, partial, bucket.numel(), *tables, has_table, program_words, _BLOCK_WORDS)
