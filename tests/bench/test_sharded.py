"""A bench run with two trainer ranks over gloo: every baseline of both is there, and both ends hold the same weights.

torch keeps the sockets of the last default group that FSDP2 was used with, so that this process would not be clean.
"""

from __future__ import annotations

import os

import pytest
from publishing import report
from publishing.measure import measure
from publishing.meters import children
from publishing.result import BenchSettings

from weightcast.cli import output

pytestmark = pytest.mark.cluster

MIB = 1 << 20


def test_two_trainer_ranks_over_gloo(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(children(os.getpid()))
    settings = BenchSettings(
        transport="gloo",
        shapes="uniform",
        num_tensors=16,
        num_bytes=4 * MIB,
        bucket_size_bytes=MIB,
        num_runs=1,
        trainer_ranks=2,
    )
    result = measure(settings)
    assert set(children(os.getpid())) == before
    assert result.verified
    (run,) = result.runs
    assert result.of_raw == (run.raw_seconds or 0) / run.publish_seconds > 0
    assert result.transfer_of_raw == (run.raw_seconds or 0) / run.transfer_seconds > result.of_raw
    assert result.full_tensor_speedup == pytest.approx((result.full_tensor_seconds or 0) / result.publish_seconds)
    assert result.per_tensor_seconds is None
    assert result.other_ranks_extra_bytes is not None
    assert result.other_ranks_extra_bytes < 64 * MIB + MIB
    output.show(result, False, report.view(result))
    text = capsys.readouterr().out
    assert "uniform over gloo, staged, 2 trainer ranks, 1 engine" in text
    assert "publish reaches" in text
    assert "full_tensor() of each" in text
