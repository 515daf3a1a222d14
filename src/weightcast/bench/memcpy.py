"""One memcpy of as many bytes as are published: what the machine's memory can do, measured beside what we do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy
import torch

MAX_BUFFER_BYTES = 2 << 30


class Memcpy:
    """Copies `num_bytes` between two warm buffers, as memcpy does it: one thread. On a GPU: device to device.

    Memory: twice `num_bytes`, at most twice MAX_BUFFER_BYTES; beyond that the buffers, which no cache could hold, are
    copied repeatedly until `num_bytes` have been.
    """

    def __init__(self, num_bytes: int, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._numel = -(-num_bytes // 2)
        size = min(self._numel, MAX_BUFFER_BYTES // 2)
        self._source = torch.ones(size, dtype=torch.bfloat16, device=device)
        self._target = torch.empty(size, dtype=torch.bfloat16, device=device)
        self.seconds()

    def seconds(self) -> float:
        """Copy once; return how long it took. numpy's copy of a contiguous array is one call of memcpy."""
        if self._device.type != "cpu":
            return self.all_threads_seconds()
        target, source = (tensor.view(torch.int16).numpy() for tensor in (self._target, self._source))
        return self._timed(numpy.copyto, target, source)

    def all_threads_seconds(self) -> float:
        """The same by torch's `copy_` with torch's default threads."""
        return self._timed(torch.Tensor.copy_, self._target, self._source)

    def _timed(self, copy: Callable[[Any, Any], object], target: Any, source: Any) -> float:
        self._settle()
        left, start = self._numel, time.perf_counter()
        while left > 0:
            size = min(left, len(source))
            copy(target[:size], source[:size])
            left -= size
        self._settle()
        return time.perf_counter() - start

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
