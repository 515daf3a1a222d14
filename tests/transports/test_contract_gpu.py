"""The public contract over buckets on a GPU that does nothing before it is waited for: by reference, and shared."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
from pretended import LazyGpu
from pretended.lazy_nccl import LazyNccl

from weightcast.testing import TransportContract
from weightcast.testing.leftovers import nothing_left


class TestMemoryOnGpu(TransportContract):
    url = "memory://"

    @pytest.fixture(autouse=True)
    def _close_what_was_made(self) -> Iterator[None]:
        """And see that the driver has nothing of it any more."""
        with LazyGpu() as gpu, nothing_left():
            self.device = gpu.device
            with contextlib.ExitStack() as self.stack:
                yield
            # What is queued, and nobody has waited for, still refers to its memory.
            gpu.synchronize(gpu.device)
            if not gpu.libcuda.is_clean:
                gc.collect()
            assert gpu.libcuda.is_clean


class TestIpcOnGpu(TestMemoryOnGpu):
    url = "ipc://"


class TestNcclOnGpu(TransportContract):
    url = "nccl://127.0.0.1:0"

    @pytest.fixture(autouse=True)
    def _close_what_was_made(self) -> Iterator[None]:
        with LazyGpu() as gpu, LazyNccl(gpu), nothing_left():
            self.device = gpu.device
            with contextlib.ExitStack() as self.stack:
                yield
