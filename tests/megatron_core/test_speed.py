"""Moonlight-16B-A3B scaled down, from four ranks: bucket by bucket against one gather for each parameter."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_core import speed_ranks

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def test_five_and_ten_times_as_fast_as_parameter_by_parameter(tmp_path: Path) -> None:
    result = speed_ranks.run(tmp_path)
    print(result)
    assert result["num_tensors"] > 5000
    assert result["old"] / result["ours"] >= 5
    assert result["old_beside"] / result["ours_beside"] >= 10
