"""From a real Megatron-core trainer to engines' servers, which then answer as one that was started from its weights.

Of two servers one starts from what mbridge exports of the trainer after a step, the other after the next. What each
answers from then on depends on what was last published alone, and is bit for bit what the server answers that was
started from it. Megatron itself, whose arithmetic is another, chooses the same tokens. vLLM and SGLang run in
environments of their own, which scripts/test-vllm and scripts/test-sglang make.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_engines.process import python_of

from megatron_core import rank

SECONDS = 550.0
"""With the start of two servers on a machine that does other things too."""

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(600)]


@pytest.mark.parametrize("case", ["tp2-pp2-te", "deepseek-ep2-te"])
def test_the_reference_server_answers_as_if_started_from_the_trainer(case: str, tmp_path: Path) -> None:
    assert_answers_as_started("reference", case, tmp_path)


@pytest.mark.parametrize(
    ("engine", "case"),
    [
        ("vllm", "tp2-pp2-te"),
        ("sglang", "ep2-te"),
        pytest.param("vllm", "ep2-te", marks=pytest.mark.full),
        pytest.param("sglang", "tp2-pp2-te", marks=pytest.mark.full),
    ],
)
def test_a_real_engine_answers_as_if_started_from_the_trainer(engine: str, case: str, tmp_path: Path) -> None:
    python_of(engine)
    assert_answers_as_started(engine, case, tmp_path)


def assert_answers_as_started(engine: str, case: str, directory: Path) -> None:
    reports = rank.run(case, directory, f"serve {engine}", seconds=SECONDS)
    (first, second), *updated = reports[0]["served"]
    assert len(first["tokens"]) == len(first["logprobs"]) == rank.NUM_NEW
    assert first["logprobs"] != second["logprobs"]
    assert updated == [[second, second], [first, first]]
    own = [first["tokens"], second["tokens"]]
    assert [report["own"] for report in reports] == [own] * len(reports)
