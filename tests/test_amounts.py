"""Sizes and counts as people read them."""

from __future__ import annotations

import pytest

from weightcast.format.amounts import count, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1_000, "1.00 kB"),
        (2_700_000, "2.70 MB"),
        (12_345_678, "12.3 MB"),
        (999_499_999, "999 MB"),
        (999_500_000, "1.00 GB"),
        (1_192_099_840, "1.19 GB"),
        (61_064_245_248, "61.1 GB"),
        (1_342_000_000_000, "1,342 GB"),
    ],
)
def test_size(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 tensors"), (1, "1 tensor"), (2, "2 tensors"), (2_005, "2,005 tensors")]
)
def test_count(number: int, text: str) -> None:
    assert count(number, "tensor") == text
