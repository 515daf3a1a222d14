"""When a run is a success, and what its report says."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from demo import runs
from rl_demo import report
from rl_demo.messages import Checked, DemoSettings, Evaluated, Event, RunEnded, Stepped

VOID = {"meta", "br"}


def without(kind: type[Event]) -> list[Event]:
    return [event for event in runs.events() if not isinstance(event, kind)]


def test_a_good_run_has_no_failures() -> None:
    found = runs.result(*runs.events())
    assert found.failures() == []
    assert len(found.updates) == 4
    assert found.typical(lambda step: step.report.seconds.pause) == 0.006
    reward, publishes = found.summary()
    assert reward == "reward: 0.300 at the start, 0.900 at the end"
    assert publishes.startswith("5 versions published to 2 engines during generation; 12 of 32 rollouts went on")
    assert "median publish 30 ms, pause 6 ms" in publishes


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
    assert [step["report"]["version"] for step in found["steps"]] == [0, 1, 2, 3, 4]
    assert all(step["report"]["engines"][runs.ENGINES[0]]["ok"] for step in found["steps"])
    assert found["steps"][1]["report"]["seconds"]["pause"] == 0.006
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
    html = report.render(runs.result(*events))
    balance = Balance()
    balance.feed(html)
    balance.close()
    assert balance.open == []
    assert not re.search(r"<script|<link|<img|\bsrc=|\bhref=\"[^#]|url\([^#]|@import", html)
    for drawing in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ElementTree.fromstring(drawing)


def test_the_page_shows_the_run() -> None:
    html = report.render(runs.result(*runs.events()))
    assert len(re.findall("<svg", html)) == 1
    assert "0.300 at the start, 0.900 at the end" in html
    for words in ("evaluation at the end: 0.90", "Time to publish, by stage", "offer", "Pause of the engine"):
        assert words in html
    assert html.count(">equal<") == 2
    assert html.count("<td>v4</td>") == 2


def test_a_reward_that_few_steps_leave_behind_is_not_called_a_success() -> None:
    found = runs.result(
        *(event for event in runs.events() if event != runs.evaluated("end", 0.9)), runs.evaluated("end", 0.2)
    )
    assert found.failures() == ["the reward rose by -0.100, less than 0.1"]
    found.settings = DemoSettings(seed=0, num_steps=4, min_reward_gain=None)
    assert not found.failures()
    assert "4 steps are too few to judge the reward" in found.success()
    assert "passed" not in report.render(found)


def test_one_of_a_kind_is_not_many() -> None:
    found = runs.result(*runs.events())
    found.settings = DemoSettings(seed=0, num_steps=4, num_layers=1, answers_per_prompt=1)
    assert "<p>Qwen3, 1 layer, hidden size " in report.render(found)
    assert "1 answer for each of 32 prompts a step" in report.render(found)


def test_what_engines_say_is_escaped() -> None:
    html = report.render(runs.result(*without(RunEnded), RunEnded(problem="<b>&")))
    assert "<b>&" not in html
    assert "&lt;b&gt;&amp;" in html


def test_the_plots_have_the_values_of_the_run() -> None:
    reward, stages, pause = report.draw(runs.result(*runs.events())).axes
    assert list(reward.lines[0].get_ydata()) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert [line.get_ydata()[0] for line in reward.lines[1:]] == [0.3, 0.9]
    heights = [[bar.get_height() for bar in bars] for bars in stages.containers]
    assert [row[0] for row in heights] == pytest.approx([1, 2, 3, 4, 5, 6, 9]), "the last is the rest of 30 ms"
    tops = [bar.get_y() + bar.get_height() for bar in stages.containers[-1]]
    assert tops == pytest.approx([30] * 4)
    assert [bar.get_height() for bar in pause.patches] == pytest.approx([6] * 4)


def test_stages_that_overlap_leave_no_rest() -> None:
    step = runs.step(1)
    step.report.seconds.total = 0.001
    _, stages, _ = report.draw(runs.result(step)).axes
    assert [bar.get_height() for bar in stages.containers[-1]] == [0]


def test_one_slow_publish_does_not_flatten_the_others() -> None:
    slow = runs.step(17)
    slow.report.seconds.send = 3.0
    result = runs.result(*(runs.step(number) for number in range(1, 17)), slow)
    _, stages, pause = report.draw(result).axes
    assert 0.03 * 1e3 < stages.get_ylim()[1] < 60
    assert [text.get_text() for text in stages.texts] == ["3,017"], "the height of what is cut stands there"
    assert not pause.texts
