"""`nh-128`, the digest of a bucket's payload, on a GPU.

With Triton, a dependency of torch for CUDA, one kernel copies and digests, and reads each byte once; without it torch
computes the digest, with many reads. The digests are equal. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from weightcast.format.bucket_digest import CHUNK_WORDS, torch_digest

logger = logging.getLogger(__name__)

STEP_WORDS, PROGRAM_STEPS = 8 * CHUNK_WORDS, 4
"""Steps of one program of the kernel, which computes its keys only once."""

Kernel: TypeAlias = Callable[..., None]
"""Signature of `digest_kernel.launch`."""


@functools.cache
def kernel(device: torch.device) -> Kernel | None:
    """Return Triton's kernel, if it is installed and its digests on this device equal torch's; else None.

    The first call tries it, which compiles all variants, and waits. `tests/pretended` replaces this function.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    words = torch.arange(-PROGRAM_STEPS * STEP_WORDS, 3, dtype=torch.int64, device=device) * -(2**40 + 1)
    try:
        from weightcast.format.digest_kernel import launch

        if not torch.equal(_run(launch, words), torch_digest(words)):
            raise ArithmeticError("its digest is not torch's")
        # The variant with tables is compiled separately: try it here, so that it can't fail within a publish.
        bucket = torch.zeros(words.numel(), dtype=torch.int64, device=device)
        copied = bucket[:-1].view(torch.uint8), words[:-1].view(torch.uint8)
        digest = CopyAndDigest(bucket.view(torch.uint8), [copied[0]], [copied[1]]).run(launch)
        if not (torch.equal(*copied) and torch.equal(digest, torch_digest(bucket))):
            raise ArithmeticError("its copies are not torch's")
    except Exception as exc:  # a compiler may raise anything
        logger.warning("Triton's kernel can't be used on %s, so torch digests buckets, more slowly: %s", device, exc)
        return None
    return launch


class CopyAndDigest:
    """Fills a payload from tensors, and digests it. Made once for these addresses, and run for each update.

    Memory: tables on the device, 32 bytes for each tensor and 16 bytes for each 16 KiB.
    """

    def __init__(self, payload: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """`payload`: uint8, whole words, all of it is digested. `targets`: views of it that don't overlap."""
        words = payload.view(torch.int64)
        start_address, end = payload.data_ptr(), words.numel()
        copied = []
        self.others: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs that are not plain copies of whole words, which the caller must copy before `run`."""
        for target, source in zip(targets, sources, strict=True):
            if not target.numel():
                continue
            place, from_address = target.data_ptr() - start_address, source.data_ptr()
            is_plain = (
                target.dtype == source.dtype
                and source.device == target.device
                and source.shape == target.shape
                and not (source.is_conj() or source.is_neg())
                and not (place % 8 or from_address % 8 or target.nbytes % 8)
                and target.is_contiguous()
                and source.is_contiguous()
            )
            if is_plain:
                copied.append((from_address, place // 8, target.nbytes // 8, 1))
            else:
                self.others.append((target, source))
        copied.sort(key=lambda segment: segment[1])
        # The words between the targets are only digested.
        ends = [0, *(base + num_words for _, base, num_words, _ in copied)]
        starts = [*(base for _, base, _, _ in copied), end]
        between = [(start_address + 8 * a, a, b - a, 0) for a, b in zip(ends, starts, strict=True) if a < b]
        segments = torch.tensor(sorted(copied + between, key=lambda segment: segment[1]), dtype=torch.int64)
        firsts = torch.arange(0, _num_programs(words) * PROGRAM_STEPS) * STEP_WORDS
        bases, ends_of = segments[:, 1].contiguous(), segments[:, 1] + segments[:, 2]
        steps = [torch.searchsorted(ends_of, firsts, right=True), torch.searchsorted(bases, firsts + STEP_WORDS)]
        # One synchronous copy to the device for both tables.
        numbers = torch.cat([torch.stack(steps, dim=1).flatten(), segments.flatten()])
        table = torch.empty(numbers.numel(), dtype=torch.int64, device=payload.device).copy_(numbers)
        self._words = words
        self._steps, self._segments = table[: 2 * firsts.numel()], table[2 * firsts.numel() :]

    def run(self, launch: Kernel | None = None) -> torch.Tensor:
        """Copy and digest: two launches, by default of the device's `kernel`. Returns two int64 on the device."""
        launch = launch or kernel(self._words.device)
        assert launch is not None
        return _run(launch, self._words, self._steps, self._segments)


def device_digest(payload: torch.Tensor) -> torch.Tensor:
    """Return the digest as two int64 on the payload's device. The payload's length must be a multiple of 8."""
    words = payload.view(torch.int64)
    if payload.is_cuda and words.numel() and (launch := kernel(payload.device)) is not None:
        return _run(launch, words)
    return torch_digest(words)


def _run(launch: Kernel, words: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    partial = torch.empty(_num_programs(words), 2, dtype=torch.int64, device=words.device)
    # Triton launches on the thread's current GPU, which may differ from that of the tensors.
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        launch(words, partial, STEP_WORDS, PROGRAM_STEPS, *tables)
    return partial.sum(dim=0)


def _num_programs(words: torch.Tensor) -> int:
    return -(-words.numel() // (PROGRAM_STEPS * STEP_WORDS))
