"""The public contract over buckets on a GPU that does nothing before it is waited for: streaming, by reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightcast.testing import LazyGpu, TransportContract


class TestMemoryOnGpu(TransportContract):
    url = "memory://"

    @pytest.fixture(autouse=True)
    def _gpu(self) -> Iterator[None]:
        with LazyGpu() as gpu:
            self.device = gpu.device
            yield
