"""Memcpy: it copies what it says, also when the buffers are smaller."""

from __future__ import annotations

import pytest
import torch

from weightcast.bench import memcpy
from weightcast.bench.memcpy import Memcpy


@pytest.mark.parametrize("num_bytes", [2, 1000, 1001, 1 << 20])
def test_it_copies_everything(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0
    plain_copy = torch.Tensor.copy_

    def counting_copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        nonlocal copied
        copied += target.nbytes
        return plain_copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", counting_copy)
    monkeypatch.setattr(memcpy, "MAX_BUFFER_BYTES", 4096)
    copier = Memcpy(num_bytes)
    copied = 0
    assert copier.seconds() > 0
    assert copied == num_bytes + num_bytes % 2
    assert copier.one_thread_seconds() > 0
