"""Copies between tensors in host memory without torch's team of threads.

torch copies every large tensor with all its threads and a barrier. Where publisher and engines share a host these teams
share its cores, and each barrier waits for a thread that has none: a copy of many tensors takes many times as long.
Here the calling thread copies; a copy as large as an install is shared out, in pieces, with one wait at its end.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

PLAIN_BYTES = 64 << 10
"""From here on a plain copy is worth a call of its own; below, torch uses no team and batches."""

_PIECE_BYTES = 4 << 20
_BATCH_TENSORS = 2048
_BYTES_PER_THREAD = 64 << 20
_MAX_THREADS = 4
"""Fewer than these fill a memory channel's bandwidth, and other ranks copy beside them."""
_TYPES = (torch.Tensor, torch.nn.Parameter)
_num_bytes = operator.attrgetter("nbytes")
_is_cpu = operator.attrgetter("is_cpu")

Job: TypeAlias = Callable[[], None]


def is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `copy_plain` may take this pair: large, both in host memory, contiguous, one dtype, equal shapes."""
    return (
        target.nbytes >= PLAIN_BYTES
        and target.dtype == source.dtype
        and target.shape == source.shape
        and not target.dtype.is_complex
        and type(target) in _TYPES
        and type(source) in _TYPES
        and target.is_cpu
        and source.is_cpu
        and target.is_contiguous()
        and source.is_contiguous()
        and not (source.is_neg() or target.is_neg())
    )


def copy_plain(target: torch.Tensor, source: torch.Tensor, start_bytes: int, size_bytes: int) -> None:
    """Copy those bytes of a pair that `is_plain` accepts. Other Python threads run meanwhile."""
    ctypes.memmove(target.data_ptr() + start_bytes, source.data_ptr() + start_bytes, size_bytes)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`torch._foreach_copy_`, for tensors on any device and of any dtype; raises RuntimeError as that does.

    A target that autograd has saved for a backward pass is not noticed.
    """
    PreparedCopies(targets, sources).run()


class PreparedCopies:
    """`copy_all` of the same tensors, as often as wanted: what each pair needs is found out once.

    The tensors are kept; they must keep their memory and their form.
    """

    def __init__(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._tensors = targets, sources
        self._jobs: list[Job] = []
        self._num_bytes = 0
        """In host memory: what more than one thread may share."""
        if not all(map(_is_cpu, itertools.chain(targets, sources))):
            # Copies of a GPU belong to the caller's stream: other threads have streams of their own. One call for each
            # pair of dtypes: torch before 2.11 writes all targets as if they were of the first one's, where sources are
            # of one.
            by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for target, source in zip(targets, sources, strict=True):
                by_dtypes.setdefault((target.dtype, source.dtype), []).append((target, source))
            self._jobs = [functools.partial(_copy_batch, *zip(*pairs, strict=True)) for pairs in by_dtypes.values()]
            return
        sizes = list(map(_num_bytes, targets))
        self._num_bytes = sum(sizes)
        if max(sizes, default=0) < PLAIN_BYTES:
            self._jobs = list(_batches(targets, sources))
            return
        moves: list[tuple[int, int, int]] = []
        other_targets, other_sources = list[torch.Tensor](), list[torch.Tensor]()
        for size, target, source in zip(sizes, targets, sources, strict=True):
            if size >= PLAIN_BYTES and is_plain(target, source):
                moves.append((target.data_ptr(), source.data_ptr(), size))
            else:
                other_targets.append(target)
                other_sources.append(source)
        self._jobs = [*_pieces(moves), *_batches(other_targets, other_sources)]

    def run(self) -> None:
        """Copy. Raises RuntimeError as torch does."""
        # Not torch's number of threads, which an engine may have set to one: it computes nothing while it is copied to.
        num_cores = len(os.sched_getaffinity(0))
        _run(iter(self._jobs), min(num_cores, _MAX_THREADS, self._num_bytes // _BYTES_PER_THREAD))


def _copy_batch(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode():
        torch._foreach_copy_(list(targets), list(sources))


def _batches(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Iterator[Job]:
    for start in range(0, len(targets), _BATCH_TENSORS):
        part = slice(start, start + _BATCH_TENSORS)
        yield functools.partial(_copy_batch, targets[part], sources[part])


def _pieces(moves: Iterable[tuple[int, int, int]]) -> Iterator[Job]:
    """Jobs of about _PIECE_BYTES; `moves`: to which address, from which, and how many bytes."""
    parts, part_bytes = list[tuple[int, int, int]](), 0
    for target, source, num_bytes in moves:
        for start in range(0, num_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, num_bytes - start)
            parts.append((target + start, source + start, size))
            part_bytes += size
            if part_bytes >= _PIECE_BYTES:
                yield functools.partial(_move, parts)
                parts, part_bytes = [], 0
    if parts:
        yield functools.partial(_move, parts)


def _move(parts: Sequence[tuple[int, int, int]]) -> None:
    for target, source, size_bytes in parts:
        ctypes.memmove(target, source, size_bytes)


def _run(jobs: Iterator[Job], num_threads: int) -> None:
    """Run every job, in this thread and in helpers that take the next one each; raise what one of them raised."""
    lock, errors = threading.Lock(), list[BaseException]()

    def work() -> None:
        while True:
            with lock:
                job = None if errors else next(jobs, None)
            if job is None:
                return
            try:
                job()
            except BaseException as exc:
                errors.append(exc)

    helpers = [threading.Thread(target=work, name="weightcast-copy", daemon=True) for _ in range(num_threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        # Not kept here too: an error that this frame refers to would keep its frames, and the tensors in them.
        del errors[1:]
        raise errors.pop()
