"""The pages of costs and planning are made of measured JSON, and of what the command prints today."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


def test_the_page_of_costs_is_of_the_results() -> None:
    import costs
    import costs_page

    results = json.loads(costs.RESULTS.read_text())
    assert (ROOT / "docs" / "costs.md").read_text() == costs_page.page(results)
    assert (ROOT / "bench" / "parts.json").read_bytes() == costs_page.parts_of(results["parts/"]).encode() + b"\n"


@pytest.mark.cluster
def test_planning_shows_what_the_command_prints() -> None:
    import costs_page

    text = (ROOT / "docs" / "planning.md").read_text()
    assert text.count("publish   ") >= 4
    assert costs_page.with_outputs(text) == text


def test_fits_find_what_points_were_made_of() -> None:
    import costs_page

    assert costs_page.power([(x, 3 * x**1.5) for x in (1, 2, 5, 10)]) == pytest.approx(1.5)
    start, slope, miss = costs_page.linear([(x, 2 + 0.5 * x) for x in (1, 2, 5, 10)])
    assert (start, slope) == (pytest.approx(2), pytest.approx(0.5))
    assert miss == pytest.approx(0, abs=1e-9)


def test_stand_ins_take_a_publish() -> None:
    import costs

    found = costs.with_stand_ins(2, 64 * 4096)
    assert 0 < found["range"][0] <= found["seconds"] <= found["range"][1]
    assert found["cpu"] > 0


OTHER = """
import os, time
if os.fork():
    os._exit(0)
while time.process_time() < 0.3:
    pass
"""


def test_what_others_take_is_counted() -> None:
    from others import Others

    with Others() as others:
        start = time.perf_counter()
        # It ends at once; what it has forked is nobody's child, and holds the pipe until its work is done.
        subprocess.run([sys.executable, "-c", OTHER], stdout=subprocess.PIPE, check=True)
        seconds = time.perf_counter() - start
    assert others.cores * seconds > 0.2


def test_a_process_that_has_just_ended_takes_nothing() -> None:
    from others import cpu_seconds

    ended = subprocess.Popen([sys.executable, "-c", ""])
    assert cpu_seconds(os.getpid()) > 0
    ended.wait()
    assert cpu_seconds(ended.pid) == 0
