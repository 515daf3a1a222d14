"""Moonlight-16B-A3B scaled down, from four ranks: bucket by bucket against one gather for each parameter; memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_core import speed_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]


PYTHON_BYTES = 24 << 20
"""What the records of 5,000 tensors, code that is imported and threads may take besides buffers."""


def test_five_and_ten_times_as_fast_as_parameter_by_parameter_and_in_three_buckets(tmp_path: Path) -> None:
    result = speed_ranks.run(tmp_path)
    print(result)
    publishing, *others = result["extra_bytes"]
    assert publishing <= 3 * speed_ranks.BUCKET_BYTES + PYTHON_BYTES < result["num_bytes"]
    assert max(others) <= speed_ranks.BUCKET_BYTES + PYTHON_BYTES
    assert result["num_tensors"] > 5000
    assert result["old"] / result["ours"] >= 5
    assert result["old_beside"] / result["ours_beside"] >= 10
