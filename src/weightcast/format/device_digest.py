"""`nh-128`, the digest of a bucket's payload, on a GPU.

With Triton, a dependency of torch for CUDA, a kernel reads each byte once, also if it copies it into the bucket first;
without it torch computes it, with many reads. The digests are equal. Nothing here waits for the device.
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
"""Of the kernel: a program computes its keys once."""

Kernel: TypeAlias = Callable[..., None]
"""Signature of `digest_kernel.launch`."""


@functools.cache
def kernel(device: torch.device) -> Kernel | None:
    """Triton's, if it is installed and computes there what torch computes.

    It is tried once, which compiles all that later launches run, and waits. `tests/pretended` replaces it.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    words = torch.arange(-PROGRAM_STEPS * STEP_WORDS, 3, dtype=torch.int64, device=device) * -(2**40 + 1)
    try:
        from weightcast.format.digest_kernel import launch

        if not torch.equal(_run(launch, words), torch_digest(words)):
            raise ArithmeticError("its digest is not torch's")
        # With tables it is another kernel: else it would be compiled, or fail, within a publish.
        bucket = torch.zeros(words.numel(), dtype=torch.int64, device=device)
        copied = bucket[:-1].view(torch.uint8), words[:-1].view(torch.uint8)
        digest = CopyAndDigest(bucket.view(torch.uint8), [copied[0]], [copied[1]]).run(launch)
        if not (torch.equal(*copied) and torch.equal(digest, torch_digest(bucket))):
            raise ArithmeticError("its copies are not torch's")
    except Exception as exc:  # whatever a compiler may raise
        logger.warning("Triton's kernel is not used on %s, torch digests buckets more slowly: %s", device, exc)
        return None
    return launch


class CopyAndDigest:
    """Fills a payload from tensors, and digests it. Made once for these memories, and run for each update.

    Memory: tables on the device, of 32 bytes for each tensor and 16 for each 16 KiB.
    """

    def __init__(self, payload: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """`payload`: all that is digested, uint8, in whole words. `targets`: views of it that don't overlap."""
        words = payload.view(torch.int64)
        start_address, end = payload.data_ptr(), words.numel()
        copied = []
        self.others: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs that are no plain copies of whole words: they are to be copied before it runs."""
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
        # What lies between is only read.
        ends = [0, *(base + num_words for _, base, num_words, _ in copied)]
        starts = [*(base for _, base, _, _ in copied), end]
        between = [(start_address + 8 * a, a, b - a, 0) for a, b in zip(ends, starts, strict=True) if a < b]
        segments = torch.tensor(sorted(copied + between, key=lambda segment: segment[1]), dtype=torch.int64)
        firsts = torch.arange(0, _num_programs(words) * PROGRAM_STEPS) * STEP_WORDS
        bases, ends_of = segments[:, 1].contiguous(), segments[:, 1] + segments[:, 2]
        steps = [torch.searchsorted(ends_of, firsts, right=True), torch.searchsorted(bases, firsts + STEP_WORDS)]
        # One copy for both tables; what is copied from there is over before the host goes on.
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
    """The digest as two int64 on the payload's device; its length is a multiple of 8."""
    words = payload.view(torch.int64)
    if payload.is_cuda and words.numel() and (launch := kernel(payload.device)) is not None:
        return _run(launch, words)
    return torch_digest(words)


def _run(launch: Kernel, words: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    partial = torch.empty(_num_programs(words), 2, dtype=torch.int64, device=words.device)
    # Triton launches on the thread's current GPU, whatever it is given: an engine checks other GPUs' buckets too.
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        launch(words, partial, STEP_WORDS, PROGRAM_STEPS, *tables)
    return partial.sum(dim=0)


def _num_programs(words: torch.Tensor) -> int:
    return -(-words.numel() // (PROGRAM_STEPS * STEP_WORDS))
