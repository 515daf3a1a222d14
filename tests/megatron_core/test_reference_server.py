"""From a real Megatron-core trainer to the reference server: both go on greedily with the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_core import rank

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("case", ["tp2-pp2-te", "ep2-te", "deepseek-ep2"])
def test_the_server_goes_on_as_the_trainer_does(case: str, tmp_path: Path) -> None:
    reports = rank.run(case, tmp_path, "serve")
    first, second = reports[0]["continued"]
    assert len(first[0]) == rank.NUM_NEW
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first != second
    assert [report["continued"][1][0] for report in reports] == [second[0]] * len(reports)
