"""Memcpy: it copies what it says, also when the buffers are smaller."""

from __future__ import annotations

import numpy
import pytest
from publishing import baselines
from publishing.baselines import Memcpy


@pytest.mark.parametrize("num_bytes", [2, 1000, 1001, 1 << 20])
def test_it_copies_everything(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0
    plain_copy = numpy.copyto

    def counting_copy(target: numpy.ndarray, source: numpy.ndarray) -> None:
        nonlocal copied
        copied += target.nbytes
        plain_copy(target, source)

    monkeypatch.setattr(numpy, "copyto", counting_copy)
    monkeypatch.setattr(baselines, "MAX_MEMCPY_BYTES", 4096)
    copier = Memcpy(num_bytes)
    copied = 0
    assert copier.seconds() > 0
    assert copied == num_bytes + num_bytes % 2
    assert copier.all_threads_seconds() > 0
