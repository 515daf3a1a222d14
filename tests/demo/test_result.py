"""When a run is a success, and what its report says."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from demo import runs

from weightcast.demo import page, report, svg
from weightcast.demo.events import Checked, Evaluated, Event, RunEnded, Stepped

VOID = {"meta", "br"}


def without(kind: type[Event]) -> list[Event]:
    return [event for event in runs.events() if not isinstance(event, kind)]


def test_a_good_run_has_no_failures() -> None:
    found = runs.result(*runs.events())
    assert found.failures() == []
    assert found.reward_gain == pytest.approx(0.6)
    assert (found.num_rollouts, found.num_spanning, len(found.updates)) == (32, 12, 4)
    assert found.typical(lambda step: step.seconds.pause) == 0.006


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        ([], "ended before"),
        (without(RunEnded), "ended before"),
        (without(Evaluated), "ended before"),
        (without(Checked), "0 of 2 engines"),
        ([*runs.events(), runs.check(runs.ENGINES[0], "another token")], "3 of 2 engines"),
        ([*without(Checked), runs.check("a"), runs.check("b", "another token")], "b: another token"),
        ([*runs.events(), RunEnded(problem="PublishError: engine 1")], "PublishError: engine 1"),
        ([*runs.events(), runs.evaluated("end", 0.31)], "rose by 0.010"),
    ],
)
def test_a_bad_run_says_why(events: list[Event], failure: str) -> None:
    assert failure in runs.result(*events).failures()[0]


def test_the_report_is_written_whole_and_replaces_the_last_one(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    for events in (runs.events(), [*runs.events(), RunEnded(problem="stopped")]):
        paths = report.write(runs.result(*events), directory)
    assert sorted(directory.iterdir()) == sorted(paths) == [directory / "report.html", directory / "report.json"]
    found = json.loads(paths[0].read_bytes())
    assert found["failures"] == ["stopped"]
    assert [step["versions"][runs.ENGINES[0]] for step in found["steps"]] == [0, 1, 2, 3, 4]
    assert found["steps"][1]["seconds"]["pause"] == 0.006
    assert found["start"]["reward"] == 0.3


class Balance(HTMLParser):
    """Every tag is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("events", [runs.events(), [], without(Stepped), without(Checked)])
def test_the_page_is_well_formed_and_needs_nothing_else(events: list[Event]) -> None:
    html = page.render(runs.result(*events))
    balance = Balance()
    balance.feed(html)
    balance.close()
    assert balance.open == []
    assert not re.search(r"<script|<link|<img|\bsrc=|\bhref=|url\(|@import", html)
    for drawing in re.findall(r"<svg.*?</svg>", html):
        ElementTree.fromstring(drawing)


def test_the_page_shows_the_run() -> None:
    html = page.render(runs.result(*runs.events()))
    assert len(re.findall("<svg", html)) == 3
    assert "0.30 → 0.90" in html
    assert html.count("<circle") == 4
    assert html.count(">equal<") == 2
    for colour in set(re.findall(r"var\(--(c-[a-z]+)\)", html)):
        assert f"--{colour}:" in html


def test_what_engines_say_is_escaped() -> None:
    html = page.render(runs.result(*without(RunEnded), RunEnded(problem="<b>&")))
    assert "<b>&" not in html
    assert "&lt;b&gt;&amp;" in html


def test_bars_are_as_high_as_their_values() -> None:
    drawing = ElementTree.fromstring(svg.stacked([1, 2], {"pack": [1.0, 2.0], "send": [3.0, 0.0]}, unit=" ms"))
    heights = [float(bar.get("height", "nan")) for bar in drawing.iter("rect")]
    assert len(heights) == 3, "an empty part has no bar"
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.02)
    assert heights[2] == pytest.approx(3 * heights[0], abs=0.02)


@pytest.mark.parametrize(
    ("largest", "top"), [(0, 1), (0.7, 0.8), (1, 1), (1.2, 1.5), (2.3, 2.5), (2.6, 3), (70, 80), (95, 100)]
)
def test_nice_top(largest: float, top: float) -> None:
    assert svg.nice_top(largest) == pytest.approx(top)
