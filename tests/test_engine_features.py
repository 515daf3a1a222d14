"""The page says of each engine's features what the table of the tests says, and the tests are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_features import FEATURES, Run, page

ROOT = Path(__file__).parents[1]
RUNS = [cell for feature in FEATURES for cell in (*feature.vllm, *feature.sglang) if isinstance(cell, Run)]


def test_the_page_has_the_table() -> None:
    assert page() in (ROOT / "docs" / "compatibility.md").read_text(), f"put this into the page:\n{page()}"


@pytest.mark.parametrize("cell", RUNS, ids=lambda cell: f"{cell.file}-{cell.word}")
def test_what_is_said_to_be_run_is_in_a_test(cell: Run) -> None:
    assert cell.word in (ROOT / "tests" / cell.file).read_text()
