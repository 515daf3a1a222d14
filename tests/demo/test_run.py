"""The demo from outside: it does what it says, and whichever way it ends, nothing of it is left."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Sequence

import pytest
from demo.watched import Demo

Start = Callable[..., Demo]

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

WARMING, A_STEP = "^warm start", r"^ +2  "
MANY_STEPS = ("--steps", "100000", "--engines", "1")
TWO_RANKS = ("--trainer-ranks", "2", "--transport", "gloo")
TRAINER, ENGINE = "rl_demo.trainer", "weightcast.cli serve"


@pytest.fixture(scope="module")
def whole_runs(start: Start) -> dict[str, Demo]:
    """Two runs at the same time: most of a run is waiting for imports."""
    return {
        "one rank": start("--steps", "2"),
        "two ranks": start("--steps", "2", "--engines", "1", *TWO_RANKS),
    }


@pytest.mark.parametrize(("name", "transport", "num_engines"), [("one rank", "ipc", 2), ("two ranks", "gloo", 1)])
def test_a_whole_run(whole_runs: dict[str, Demo], name: str, transport: str, num_engines: int) -> None:
    demo = whole_runs[name]
    assert demo.end() == 0, demo.text
    demo.assert_nothing_left()
    for line in (
        r"reward: 0\.\d+ at the start, [01]\.\d+ at the end",
        r"every engine serves exactly .*; 2 steps are too few",
        r"report\.html",
    ):
        assert re.search(line, demo.text), demo.text
    report = json.loads((demo.output / "report.json").read_bytes())
    publishes = [step["report"] for step in report["steps"]]
    assert [publish["version"] for publish in publishes] == [0, 1, 2]
    for publish in publishes:
        assert sorted(name for name, engine in publish["engines"].items() if engine["ok"]) == sorted(urls(report))
    assert len(urls(report)) == num_engines
    assert not report["failures"]
    assert report["settings"]["transport"] == transport
    assert sorted(path.name for path in demo.output.iterdir()) == ["report.html", "report.json"]


def urls(report: dict[str, object]) -> list[str]:
    checks = report["checks"]
    assert isinstance(checks, list)
    return [check["engine"] for check in checks]


def test_a_signal_leaves_nothing(start: Start) -> None:
    """An impatient Ctrl-C during the warm start, SIGTERM to another run between two steps."""
    warming, stepping = start(*MANY_STEPS), start(*MANY_STEPS)
    for demo, number, moment, times in ((warming, signal.SIGINT, WARMING, 5), (stepping, signal.SIGTERM, A_STEP, 1)):
        demo.wait_for_line(moment)
        for _ in range(times):
            demo.send(number)
        assert demo.end() == 128 + number
        demo.assert_nothing_left()
        assert not demo.output.exists()


def test_an_interrupt_at_the_first_child_leaves_nothing(start: Start) -> None:
    demo = start(*MANY_STEPS)
    demo.wait_for(lambda: bool(demo.pids("rl_demo.trainer")), "the trainer")
    demo.send(signal.SIGINT)
    assert demo.end() == 128 + signal.SIGINT
    demo.assert_nothing_left()


@pytest.mark.parametrize(
    ("options", "moment", "num_processes"),
    [(TWO_RANKS, WARMING, 4), pytest.param((), A_STEP, 3, marks=pytest.mark.full)],
    ids=["warming", "stepping"],
)
def test_killing_the_demo_ends_its_children(
    start: Start, options: Sequence[str], moment: str, num_processes: int
) -> None:
    """While two trainer ranks learn and the engine starts, and while everything works."""
    demo = start(*MANY_STEPS, *options)
    demo.wait_for_line(moment)
    assert len(demo.pids()) >= num_processes
    demo.send(signal.SIGKILL)
    demo.end()
    demo.assert_nothing_left()


@pytest.mark.parametrize(
    ("options", "moment", "victim", "reason"),
    [
        (TWO_RANKS, WARMING, (TRAINER, " 1 "), "trainer rank 1 was ended by SIGKILL"),
        ((), A_STEP, (ENGINE,), "engine 0 was ended by SIGKILL|PublishError"),
        pytest.param((), WARMING, (TRAINER,), "trainer was ended by SIGKILL", marks=pytest.mark.full),
        pytest.param(
            TWO_RANKS, A_STEP, (TRAINER, " 1 "), "trainer rank 1 was ended by SIGKILL", marks=pytest.mark.full
        ),
    ],
    ids=["rank-warming", "engine-stepping", "trainer-warming", "rank-stepping"],
)
def test_a_child_that_is_killed_ends_the_demo(
    start: Start, options: Sequence[str], moment: str, victim: Sequence[str], reason: str
) -> None:
    demo = start(*MANY_STEPS, *options)
    demo.wait_for_line(moment)
    demo.look()
    [pid] = demo.pids(*victim)
    os.kill(pid, signal.SIGKILL)
    assert demo.end() == 1
    assert re.search(f"FAILED: ({reason})", demo.text), demo.text
    demo.assert_nothing_left()


@pytest.mark.parametrize(
    "options",
    [
        ("--steps", "0"),
        ("--trainer-ranks", "9"),
        pytest.param(("--engines", "0"), marks=pytest.mark.full),
        pytest.param(("--seed", "-1"), marks=pytest.mark.full),
    ],
)
def test_senseless_numbers_are_refused(start: Start, options: tuple[str, str]) -> None:
    demo = start(*options)
    assert demo.end() == 2
    assert options[0] in demo.text
    demo.assert_nothing_left()
