"""One of two trainer ranks is killed or stands still in a publish: all ranks say so, every engine keeps one version."""

from __future__ import annotations

import signal

import pytest

from faults.conftest import (
    GLOO,
    IPC,
    Footprints,
    Stage,
    assert_one_whole_version,
    assert_serves,
    eventually,
    is_free,
    over,
)
from faults.engine_actor import EngineProcess
from faults.publisher_actor import publish_together

DEADLINE_SECONDS = 6.0
OLD, NEW = 1, 2
EARLY, LATE = ["offer", "mid-bucket"], ["before seal", "paused", "after commit"]
"""Before and after the last bucket was gathered: from then on the publishing rank needs no other."""


def assert_old_or_whole(engines: list[EngineProcess], phase: str) -> None:
    for engine in engines:
        if phase in EARLY:
            assert_serves(engine, "1", OLD)
        else:
            assert_one_whole_version(engine, {"1": OLD, "2": NEW})


@pytest.mark.parametrize(
    ("wire", "phase"), over({GLOO: ["mid-bucket"]}, full={GLOO: ["offer", *LATE], IPC: ["mid-bucket"]})
)
def test_other_rank_killed(stage: Stage, phase: str) -> None:
    engines = stage.engines(2)
    publishing, other = ranks = stage.trainer_ranks(2, *engines, deadline_seconds=DEADLINE_SECONDS)
    assert publish_together(ranks, OLD, 1)["failures"] == {}
    footprints = Footprints(*engines)
    publishing.ask("stop at", phase)
    for rank in ranks:
        rank.tell("publish", NEW, 2)
    publishing.hear("at")
    other.kill()
    publishing.tell("go")
    kind, text = publishing.hear("published")["error"]
    assert kind in ("PeerDiedError", "PeerTimeoutError")
    assert "trainer rank 1" in text
    assert_old_or_whole(engines, phase)
    kind, text = publishing.publish(3)["error"]
    assert "trainer rank 1" in text
    assert_old_or_whole(engines, phase)
    publishing.close()

    restarted = stage.trainer_ranks(2, *engines, deadline_seconds=DEADLINE_SECONDS)
    outcome = publish_together(restarted, 4)
    assert outcome["failures"] == {}
    for engine in engines:
        assert_serves(engine, str(outcome["version"]), 4)
    footprints.assert_settled()


@pytest.mark.parametrize(
    ("wire", "phase"), over({GLOO: ["mid-bucket"]}, full={GLOO: ["offer", *LATE], IPC: ["mid-bucket"]})
)
def test_other_rank_stopped_and_woken(stage: Stage, phase: str) -> None:
    engines = stage.engines(2)
    publishing, other = ranks = stage.trainer_ranks(2, *engines, deadline_seconds=DEADLINE_SECONDS)
    assert publish_together(ranks, OLD, 1)["failures"] == {}
    footprints = Footprints(*ranks, *engines)
    publishing.ask("stop at", phase)
    for rank in ranks:
        rank.tell("publish", NEW, 2)
    publishing.hear("at")
    other.signal(signal.SIGSTOP)
    publishing.tell("go")
    kind, text = publishing.hear("published")["error"]
    assert kind == "PeerTimeoutError"
    assert "trainer rank 1" in text
    assert_old_or_whole(engines, phase)
    other.signal(signal.SIGCONT)
    assert "error" in other.hear("published")
    assert publish_together(ranks, 3, 3)["failures"] == {}
    for engine in engines:
        assert_serves(engine, "3", 3)
    footprints.assert_settled()


@pytest.mark.parametrize(("wire", "phase"), over({}, full={GLOO: [*EARLY, *LATE], IPC: ["mid-bucket"]}))
def test_publishing_rank_killed(stage: Stage, phase: str) -> None:
    engines = stage.engines(2)
    publishing, other = ranks = stage.trainer_ranks(2, *engines, deadline_seconds=DEADLINE_SECONDS)
    assert publish_together(ranks, OLD, 1)["failures"] == {}
    publishing.ask("stop at", phase)
    for rank in ranks:
        rank.tell("publish", NEW, 2)
    publishing.hear("at")
    publishing.kill()
    kind, text = other.hear("published")["error"]
    assert kind in ("PeerDiedError", "PeerTimeoutError")
    assert "trainer rank 0" in text
    for engine in engines:
        eventually(lambda engine=engine: is_free(engine), "the dead publisher's hold and pause end")
    assert_old_or_whole(engines, phase)
    other.close()

    restarted = stage.trainer_ranks(2, *engines, deadline_seconds=DEADLINE_SECONDS)
    outcome = publish_together(restarted, 3)
    assert outcome["failures"] == {}
    for engine in engines:
        assert_serves(engine, str(outcome["version"]), 3)
