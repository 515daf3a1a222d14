"""Copies between tensors in host memory without torch's team of threads.

torch copies every large tensor with all its threads and a barrier. Where publisher and engines share a host these teams
share its cores, and each barrier waits for a thread that has none: a copy of many tensors takes many times as long.
Here the calling thread copies; only a copy as large as an install is shared out, in pieces, with one wait at its end.
"""

from __future__ import annotations

import ctypes
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch

PLAIN_BYTES = 64 << 10
"""From here on a plain copy is worth a call of its own; below, torch uses no team and batches."""

_PIECE_BYTES = 4 << 20
_BYTES_PER_THREAD = 128 << 20
_num_bytes = operator.attrgetter("nbytes")
_TYPES = (torch.Tensor, torch.nn.Parameter)

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Piece: TypeAlias = tuple[torch.Tensor, torch.Tensor, int, int]


def is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `copy_plain` may take this pair: large, both in host memory, contiguous, one dtype, equal shapes."""
    return (
        target.nbytes >= PLAIN_BYTES
        and target.dtype == source.dtype
        and target.shape == source.shape
        and not target.dtype.is_complex
        and type(target) in _TYPES
        and type(source) in _TYPES
        and target.device.type == source.device.type == "cpu"
        and target.is_contiguous()
        and source.is_contiguous()
    )


def copy_plain(target: torch.Tensor, source: torch.Tensor, start_bytes: int, size_bytes: int) -> None:
    """Copy those bytes of a pair that `is_plain` accepts. Other Python threads run meanwhile."""
    ctypes.memmove(target.data_ptr() + start_bytes, source.data_ptr() + start_bytes, size_bytes)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """`torch._foreach_copy_`, for tensors on any device and of any dtype; raises RuntimeError as that does.

    A target that autograd has saved for a backward pass is not noticed.
    """
    if not targets:
        return
    if max(map(_num_bytes, targets)) < PLAIN_BYTES:
        torch._foreach_copy_(list(targets), list(sources))
        return
    plain: list[Pair] = []
    others: list[Pair] = []
    for pair in zip(targets, sources, strict=True):
        (plain if is_plain(*pair) else others).append(pair)
    if others:
        torch._foreach_copy_([target for target, _ in others], [source for _, source in others])
    if plain:
        _copy_shared(plain)


def _copy_shared(pairs: Sequence[Pair]) -> None:
    num_threads = min(torch.get_num_threads(), sum(target.nbytes for target, _ in pairs) // _BYTES_PER_THREAD)
    work, lock = _pieces(pairs), threading.Lock()
    helpers = [threading.Thread(target=_copy_pieces, args=(work, lock), daemon=True) for _ in range(num_threads - 1)]
    for helper in helpers:
        helper.start()
    try:
        _copy_pieces(work, lock)
    finally:
        for helper in helpers:
            helper.join()


def _pieces(pairs: Sequence[Pair]) -> Iterator[Piece]:
    for target, source in pairs:
        num_bytes = target.nbytes
        for start in range(0, num_bytes, _PIECE_BYTES):
            yield target, source, start, min(_PIECE_BYTES, num_bytes - start)


def _copy_pieces(work: Iterator[Piece], lock: threading.Lock) -> None:
    while True:
        with lock:
            piece = next(work, None)
        if piece is None:
            return
        copy_plain(*piece)
