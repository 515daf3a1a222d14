"""The demo from outside: it does what it says, and whichever way it ends, nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable

import pytest
from demo.watched import Demo

Start = Callable[..., Demo]

pytestmark = pytest.mark.timeout(240)

A_STEP = r"^ +2  "
MANY_STEPS = ("--steps", "100000", "--engines", "1")


def test_a_whole_run(start: Start) -> None:
    demo = start("--steps", "2")
    assert demo.end() == 0, demo.text
    demo.assert_nothing_left()
    for line in (r"reward: 0\.\d+ at the start, [01]\.\d+ at the end", r"passed: every engine", r"report\.html"):
        assert re.search(line, demo.text), demo.text
    report = json.loads((demo.output / "report.json").read_bytes())
    assert [step["versions"] for step in report["steps"]] == [dict.fromkeys(urls(report), n) for n in range(3)]
    assert len(urls(report)) == 2
    assert not report["failures"]
    assert sorted(path.name for path in demo.output.iterdir()) == ["report.html", "report.json"]


def urls(report: dict[str, object]) -> list[str]:
    checks = report["checks"]
    assert isinstance(checks, list)
    return [check["engine"] for check in checks]


@pytest.mark.parametrize(
    ("number", "moment", "times"),
    [
        (signal.SIGINT, "^a Qwen3", 1),
        (signal.SIGINT, "^warm start", 5),
        (signal.SIGINT, "^step", 1),
        (signal.SIGTERM, A_STEP, 1),
    ],
    ids=["interrupt-starting", "interrupt-warming-impatiently", "interrupt-publishing", "terminate-stepping"],
)
def test_a_signal_leaves_nothing(start: Start, number: signal.Signals, moment: str, times: int) -> None:
    demo = start(*MANY_STEPS)
    demo.wait_for_line(moment)
    for _ in range(times):
        demo.send(number)
    assert demo.end() == 128 + number
    demo.assert_nothing_left()
    assert not demo.output.exists()


def test_an_interrupt_at_the_first_child_leaves_nothing(start: Start) -> None:
    demo = start(*MANY_STEPS)
    demo.wait_for(lambda: bool(demo.pids("weightcast.demo.trainer")), "the trainer")
    demo.send(signal.SIGINT)
    assert demo.end() == 128 + signal.SIGINT
    demo.assert_nothing_left()


@pytest.mark.parametrize("moment", ["^a Qwen3", A_STEP], ids=["starting", "stepping"])
def test_killing_the_demo_ends_its_children(start: Start, moment: str) -> None:
    demo = start(*MANY_STEPS)
    demo.wait_for_line(moment)
    demo.wait_for(lambda: len(demo.pids()) >= 3, "three processes")
    demo.send(signal.SIGKILL)
    demo.end()
    demo.assert_nothing_left()


@pytest.mark.parametrize("victim", ["weightcast.demo.trainer", "weightcast.cli serve"], ids=["trainer", "engine"])
def test_a_child_that_is_killed_ends_the_demo(start: Start, victim: str) -> None:
    demo = start(*MANY_STEPS)
    demo.wait_for_line(A_STEP)
    demo.look()
    [pid] = demo.pids(victim)
    os.kill(pid, signal.SIGKILL)
    assert demo.end() == 1
    name = "trainer" if "trainer" in victim else "engine 0"
    assert f"FAILED: {name} was ended by SIGKILL" in demo.text or "FAILED: PublishError" in demo.text
    demo.assert_nothing_left()


@pytest.mark.parametrize("options", [("--steps", "0"), ("--engines", "0"), ("--seed", "-1")])
def test_senseless_numbers_are_refused(start: Start, options: tuple[str, str]) -> None:
    demo = start(*options)
    assert demo.end() == 2
    assert options[0] in demo.text
    demo.assert_nothing_left()
