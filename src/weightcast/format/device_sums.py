"""`sum-64x2` on the device of a payload: the sum of w[i], and of (i + 1) * w[i], modulo 2**64, of its 64-bit words w.

With Triton, which torch for CUDA brings, a kernel reads each byte once, also where it copies it into the bucket first;
without it torch's own sums read it twice. The sums are the same. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

logger = logging.getLogger(__name__)

_PROGRAM_WORDS = 8192
_SUM_COLUMNS = 4096

Kernel: TypeAlias = Callable[..., None]
"""As `sum_kernel.launch`."""


@functools.cache
def kernel(device: torch.device) -> Kernel | None:
    """Triton's, if it is installed and does there what torch does, which is tried once: that compiles it, and waits.

    `weightcast.testing.LazyGpu` puts another one here.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    words = torch.arange(-_PROGRAM_WORDS, 3, dtype=torch.int64, device=device) * -(2**40)
    try:
        from weightcast.format.sum_kernel import launch

        if not torch.equal(_run(launch, words, 2), _torch_sums(words)):
            raise ArithmeticError("its sums are not torch's")
        # With tables it is another kernel: else it would be compiled, or fail, within a publish.
        bucket = torch.zeros(words.numel(), dtype=torch.int64, device=device)
        copied = bucket[:-1].view(torch.uint8), words[:-1].view(torch.uint8)
        sums = CopyAndSum(bucket.view(torch.uint8), [copied[0]], [copied[1]]).run(launch)
        if not (torch.equal(*copied) and torch.equal(sums, _torch_sums(bucket))):
            raise ArithmeticError("its copies are not torch's")
    except Exception as exc:  # whatever a compiler may raise
        logger.warning("Triton's kernel is not used on %s, buckets are read twice for their digest: %s", device, exc)
        return None
    return launch


class CopyAndSum:
    """Fills a payload from tensors, and sums it. Made once for these memories, and run for each update.

    Memory: tables on the device, of 32 bytes for each tensor and 16 for each 64 KiB.
    """

    def __init__(self, payload: torch.Tensor, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """`payload`: all that is summed, uint8, in whole words. `targets`: views of it that don't overlap."""
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
        segments = copied + between
        programs = [(k, first) for k, s in enumerate(segments) for first in range(0, s[2], _PROGRAM_WORDS)]
        numbers = torch.tensor([*itertools.chain(*programs), *itertools.chain(*segments)], dtype=torch.int64)
        # One copy for both tables; what is copied from there is over before the host goes on.
        table = torch.empty(numbers.numel(), dtype=torch.int64, device=payload.device).copy_(numbers)
        self._words = words
        self._programs = table[: 2 * len(programs)].view(-1, 2)
        self._segments = table[2 * len(programs) :].view(-1, 4)

    def run(self, launch: Kernel | None = None) -> torch.Tensor:
        """Copy and sum: two launches, by default of the device's `kernel`. Returns two int64 on the device."""
        launch = launch or kernel(self._words.device)
        return _run(launch, self._words, self._programs.shape[0], self._programs, self._segments)


def device_sums(payload: torch.Tensor) -> torch.Tensor:
    """The sums as two int64 on the payload's device; its length is a multiple of 8."""
    words = payload.view(torch.int64)
    if payload.is_cuda and words.numel() and (launch := kernel(payload.device)) is not None:
        return _run(launch, words, -(-words.numel() // _PROGRAM_WORDS))
    return _torch_sums(words)


def _torch_sums(words: torch.Tensor) -> torch.Tensor:
    num_full = words.numel() // _SUM_COLUMNS * _SUM_COLUMNS
    sums = _matrix_sums(words[:num_full].view(-1, _SUM_COLUMNS), 0)
    return sums + _matrix_sums(words[num_full:].view(1, -1), num_full)


def _run(launch: Kernel | None, words: torch.Tensor, num_programs: int, *tables: torch.Tensor) -> torch.Tensor:
    assert launch is not None
    partial = torch.empty(num_programs, 2, dtype=torch.int64, device=words.device)
    # Triton launches on the thread's current GPU, whatever it is given: an engine checks other GPUs' buckets too.
    with torch.cuda.device_of(words):  # type: ignore[no-untyped-call]
        launch(words, partial, _PROGRAM_WORDS, *tables)
    return partial.sum(dim=0)


def _matrix_sums(matrix: torch.Tensor, first: int) -> torch.Tensor:
    """Row and column sums of a matrix of words give both in two reads, without a temporary of the payload's size."""
    num_rows, num_columns = matrix.shape
    if matrix.numel() == 0:
        return torch.zeros(2, dtype=torch.int64, device=matrix.device)
    by_column, by_row = matrix.sum(dim=0), matrix.sum(dim=1)
    columns = torch.arange(first + 1, first + 1 + num_columns, device=matrix.device)
    rows = torch.arange(num_rows, device=matrix.device) * num_columns
    return torch.stack([by_column.sum(), (by_column * columns).sum() + (by_row * rows).sum()])
