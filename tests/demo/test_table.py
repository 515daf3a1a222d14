"""What is seen of a run, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from demo import runs
from rich.console import Console
from rl_demo.messages import Checked, RunEnded
from rl_demo.table import LiveTable, describe, print_event, sparkline, view


def show(console: Console) -> str:
    with view(console) as shown:
        for event in runs.events():
            shown(event)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    text = show(Console(file=io.StringIO(), width=120))
    assert "\x1b" not in text
    lines = text.splitlines()
    [header] = [number for number, line in enumerate(lines) if line.startswith("step")]
    rows = [line.split() for line in lines[header + 1 :] if line[:1] == " "]
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[4][1:5] == ["0.400", "v4", "v4", "2.50"]
    assert rows[4][5:] == ["1.0", "2.0", "3.0", "4.0", "5.0", "6.0", "9.0", "30.0"], (
        "stages and rest add up to the total"
    )
    assert sum(line.startswith("warm start") for line in lines) == 4
    assert sum("equals the trainer's model" in line for line in lines) == 2


def test_a_live_table_on_a_terminal() -> None:
    text = show(Console(file=io.StringIO(), force_terminal=True, width=80, height=40, _environ={"TERM": "xterm"}))
    assert "\x1b" in text
    last = text[text.rindex("gather") - 40 :]
    for word in ("gather", "offer", "pause", "total", "v4", "reward at the end", "equals the trainer's model"):
        assert word in last
    assert "…" not in last, "nothing is cut off"
    assert "warm start" not in last


def test_the_terminal_decides() -> None:
    with view(Console(file=io.StringIO())) as shown:
        assert shown.func is print_event
    with view(Console(file=io.StringIO(), force_terminal=True)) as shown:
        assert isinstance(shown.__self__, LiveTable)


def test_an_engine_that_did_not_take_a_version_is_seen() -> None:
    console = Console(file=io.StringIO(), width=120)
    step = runs.step(1)
    step.report.engines[runs.ENGINES[1]].ok = False
    print_event(console, step)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().split()[2:4] == ["v1", "failed"]


def test_descriptions() -> None:
    assert "DIFFERS" in describe(runs.check("http://x", "another token"))
    assert isinstance(runs.check("http://x"), Checked)
    assert "time" in describe(RunEnded(is_early=True))
    assert describe(RunEnded()) == ""


@pytest.mark.parametrize(("values", "line"), [([], ""), ([0, 0.5, 1], " ▄█"), ([-1, 2], " █")])
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line
