"""A GPU, NCCL and CUDA's driver without hardware, for tests of order and of waits."""

from __future__ import annotations

from pretended.lazy_gpu import LazyGpu
from pretended.lazy_nccl import LazyNccl

__all__ = ["LazyGpu", "LazyNccl"]
