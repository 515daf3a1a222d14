"""From a real Megatron-core trainer to an engine's server: both go on greedily with the same tokens.

vLLM and SGLang run in environments of their own, which scripts/test-vllm and scripts/test-sglang make.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines.process import python_of

from megatron_core import rank

pytestmark = pytest.mark.megatron


@pytest.mark.parametrize("case", ["tp2-pp2-te", "ep2-te", "deepseek-ep2"])
def test_the_reference_server_goes_on_as_the_trainer_does(case: str, tmp_path: Path) -> None:
    assert_goes_on_as_the_trainer(case, "reference", tmp_path)


@pytest.mark.parametrize("case", ["tp2-pp2-te", "ep2-te"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_real_engine_goes_on_as_the_trainer_does(engine: str, case: str, tmp_path: Path) -> None:
    python_of(engine)
    assert_goes_on_as_the_trainer(case, engine, tmp_path)


def assert_goes_on_as_the_trainer(case: str, engine: str, directory: Path) -> None:
    reports = rank.run(case, directory, f"serve {engine}")
    first, second = reports[0]["continued"]
    assert len(first[0]) == rank.NUM_NEW
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first != second
    assert [report["continued"][1][0] for report in reports] == [second[0]] * len(reports)
