"""SIGKILL and SIGSTOP at every phase of an update, in real processes: who survives serves one whole version."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import pytest

from faults.conftest import (
    GLOO,
    IPC,
    LARGE_GLOO,
    Footprints,
    Stage,
    Wire,
    assert_one_whole_version,
    assert_serves,
    eventually,
    is_free,
    over,
    served,
    weight_info,
)

PHASES = ["init", "offer", "mid-bucket", "before seal", "paused", "load", "after commit"]
OLD, NEW = 1, 2
STALL_SECONDS = 6.0
CUT_SECONDS = 6.0
"""A deadline that nobody needs: a connection's end is seen at once. Threads of a broken group may last as long."""


def sockets_of(pid: int) -> set[str]:
    """The names of the Unix sockets that a process has open."""
    inodes = set()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{number}").removeprefix("socket:[").removesuffix("]"))
    return {fields[7] for fields in unix_sockets() if fields[6] in inodes and len(fields) > 7}


def unix_sockets() -> list[list[str]]:
    with open("/proc/net/unix") as f:
        return [line.split() for line in f][1:]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="published"),
        pytest.param({"trains_on": True}, id="in the background"),
        pytest.param({"delta": "always"}, id="as deltas"),
    ],
)
@pytest.mark.parametrize(
    ("wire", "phase"),
    over({IPC: PHASES, LARGE_GLOO: ["mid-bucket"]}, full={GLOO: PHASES, LARGE_GLOO: ["offer"]}),
)
def test_publisher_killed(stage: Stage, wire: Wire, phase: str, options: dict[str, Any]) -> None:
    in_memory = set(os.listdir("/dev/shm"))  # also of others on this machine
    engines = stage.engines(2)
    publisher = stage.publisher(*engines, deadline_seconds=STALL_SECONDS, **options)
    footprints = None
    if phase == "init":
        publisher.ask("stop at", phase)
    else:
        assert publisher.publish(OLD, 1)["failures"] == {}
        footprints = Footprints(*engines)
        (engines[0] if phase == "load" else publisher).ask("stop at", phase)
    publisher.tell("publish", NEW, 2)
    (engines[0] if phase == "load" else publisher).hear("at")
    names = {name for name in sockets_of(publisher.pid) if "weightcast" in name}
    assert len(names) == (1 if wire is IPC else 0), "the links' listener"
    publisher.kill()
    if phase == "load":
        engines[0].tell("go")
    for engine in engines:
        eventually(lambda engine=engine: is_free(engine), "the dead publisher's hold and pause end")
        if phase in ("paused", "load", "after commit"):
            # The engines go on independently: the one that was not stopped may be through.
            assert_one_whole_version(engine, {"1": OLD, "2": NEW})
        elif phase == "init":
            assert_serves(engine, "default", 0)
        else:
            assert_serves(engine, "1", OLD)
    if phase == "load":
        assert_serves(engines[0], "2", NEW)
    if phase == "paused":
        assert "1" in {served(engine)[0] for engine in engines}
    assert not names & {fields[-1] for fields in unix_sockets()}
    assert not {name for name in os.listdir("/dev/shm") if "weightcast" in name} - in_memory, "files with a name"

    successor = stage.publisher(*engines)
    assert successor.publish(3, None)["failures"] == {}
    for engine in engines:
        assert_serves(engine, weight_info(engine)["weight_version"], 3)
        assert weight_info(engine)["run"] == successor.run
    if footprints is not None:
        footprints.assert_settled()


@pytest.mark.parametrize(
    ("wire", "phase"),
    over(
        {IPC: PHASES, GLOO: ["before seal"], LARGE_GLOO: ["mid-bucket"]},
        full={GLOO: ["init", "offer", "mid-bucket", "paused", "load", "after commit"], LARGE_GLOO: ["offer"]},
    ),
)
@pytest.mark.parametrize("delta", [None, pytest.param("always", id="as deltas")])
def test_engine_killed(stage: Stage, phase: str, delta: str | None) -> None:
    """One of three: the others get the version in the same publish; who was connected is not waited for."""
    deadline_seconds = STALL_SECONDS if phase == "init" else CUT_SECONDS
    engines = stage.engines(3)
    survivor, victim, other = engines
    publisher, footprints = stage.publisher(*engines, deadline_seconds=deadline_seconds, delta=delta), None
    if phase != "init":
        if delta:  # whose memory has descriptors from the second publish on
            assert publisher.publish(OLD, 0)["failures"] == {}
        assert publisher.publish(OLD, 1)["failures"] == {}
        footprints = Footprints(publisher, survivor, other)
    (victim if phase == "load" else publisher).ask("stop at", phase)
    publisher.tell("publish", NEW, 2)
    (victim if phase == "load" else publisher).hear("at")
    port = victim.port
    victim.kill()
    publisher.tell("go")
    began = time.monotonic()
    outcome = publisher.hear("published")
    assert phase == "init" or time.monotonic() - began < CUT_SECONDS
    assert set(outcome["failures"]) <= {victim.url}
    if phase not in ("after commit", "paused"):
        # In the other two the stop may have been on the survivor's way, when the victim was through already.
        assert victim.url in outcome["failures"]
        assert outcome["failures"][victim.url][0] in ("PeerDiedError", "PeerTimeoutError")
    for engine in (survivor, other):
        assert_serves(engine, "2", NEW)

    restarted = stage.engine(port)
    assert publisher.publish(3, 3)["failures"] == {}
    for engine in (survivor, restarted, other):
        assert_serves(engine, "3", 3)
    if footprints is not None:
        footprints.assert_settled()


@pytest.mark.parametrize(
    ("wire", "phase"),
    over(
        {IPC: ["before seal"], LARGE_GLOO: ["mid-bucket"]},
        full={IPC: ["offer", "mid-bucket"], GLOO: ["offer", "mid-bucket", "before seal"], LARGE_GLOO: ["offer"]},
    ),
)
def test_engine_stopped_and_woken(stage: Stage, phase: str) -> None:
    """A stalled engine is dropped and named; woken later, it must not install what has been overwritten since."""
    engines = stage.engines(3)
    survivor, victim, other = engines
    publisher = stage.publisher(*engines, deadline_seconds=STALL_SECONDS)
    assert publisher.publish(OLD, 1)["failures"] == {}
    footprints = Footprints(publisher, *engines)
    publisher.ask("stop at", phase)
    publisher.tell("publish", NEW, 2)
    publisher.hear("at")
    victim.signal(signal.SIGSTOP)
    publisher.tell("go")
    outcome = publisher.hear("published")
    assert set(outcome["failures"]) == {victim.url}
    for engine in (survivor, other):
        assert_serves(engine, "2", NEW)
    again = publisher.publish(3, 3)
    assert set(again["failures"]) == {victim.url}
    victim.signal(signal.SIGCONT)
    eventually(lambda: is_free(victim), "the woken engine notices that its link is gone")
    assert_one_whole_version(victim, {"1": OLD})
    for engine in (survivor, other):
        assert_serves(engine, "3", 3)
    assert publisher.publish(4, 4)["failures"] == {}
    for engine in engines:
        assert_serves(engine, "4", 4)
    footprints.assert_settled()


@pytest.mark.parametrize(
    ("wire", "phase"),
    over(
        {IPC: ["offer", "before seal", "paused"], LARGE_GLOO: ["mid-bucket"]},
        full={IPC: ["mid-bucket"], GLOO: ["offer", "before seal", "paused"]},
    ),
)
def test_publisher_stopped_and_woken(stage: Stage, phase: str) -> None:
    """A silent publisher loses its lease: its engines generate again; woken, it learns so, and publishes again."""
    engine = stage.engine()
    publisher = stage.publisher(engine, lease_seconds=1.0)
    assert publisher.publish(OLD, 1)["failures"] == {}
    footprints = Footprints(publisher, engine)
    publisher.ask("stop at", phase)
    publisher.tell("publish", NEW, 2)
    publisher.hear("at")
    publisher.signal(signal.SIGSTOP)
    eventually(lambda: is_free(engine), "the lease ends")
    assert_serves(engine, "1", OLD)
    publisher.signal(signal.SIGCONT)
    publisher.tell("go")
    outcome = publisher.hear("published")
    assert set(outcome["failures"]) == {engine.url}
    assert_serves(engine, "1", OLD)
    assert publisher.publish(3, 3)["failures"] == {}
    assert_serves(engine, "3", 3)
    footprints.assert_settled()


@pytest.mark.parametrize(
    ("wire", "phase"),
    over(
        {IPC: ["before seal"], LARGE_GLOO: ["offer", "mid-bucket"]},
        full={
            IPC: ["mid-bucket", "offer"],
            GLOO: ["offer", "mid-bucket", "before seal"],
        },
    ),
)
def test_the_link_of_one_engine_is_cut(stage: Stage, phase: str) -> None:
    """The engine that lost it is named, and joins the next publish.

    With every bucket there and checked, nothing more has to come over it: it may be missed in the next.
    """
    engines = stage.engines(3)
    victim = engines[1]
    publisher = stage.publisher(*engines, deadline_seconds=CUT_SECONDS)
    assert publisher.publish(OLD, 1)["failures"] == {}
    footprints = Footprints(publisher, *engines)
    publisher.ask("stop at", phase)
    publisher.tell("publish", NEW, 2)
    publisher.hear("at")
    victim.ask("cut", "link")
    publisher.tell("go")
    failures = publisher.hear("published")["failures"]
    is_needless = phase == "before seal"
    assert set(failures) == {victim.url} or (is_needless and not failures)
    for engine in engines:
        if engine.url not in failures:
            assert_serves(engine, "2", NEW)
        elif phase != "before seal":
            assert_serves(engine, "1", OLD)
        else:  # it may have been told to install before it knew
            assert_one_whole_version(engine, {"1": OLD, "2": NEW})
    failures = publisher.publish(3, 3)["failures"]
    assert not failures or (is_needless and set(failures) == {victim.url})
    assert publisher.publish(4, 4)["failures"] == {}
    for engine in engines:
        assert_serves(engine, "4", 4)
    footprints.assert_settled()


@pytest.mark.parametrize(("wire", "phase"), over({LARGE_GLOO: ["mid-bucket"]}, full={LARGE_GLOO: ["offer"]}))
def test_broken_group_of_living_engines_is_mended_within_the_publish(stage: Stage, phase: str) -> None:
    """Data connections break, everybody lives and says so: a new group, and nobody misses the version."""
    engines = stage.engines(3)
    publisher = stage.publisher(*engines, deadline_seconds=CUT_SECONDS)
    assert publisher.publish(OLD, 1)["failures"] == {}
    footprints = Footprints(publisher, *engines)
    publisher.ask("stop at", phase)
    publisher.tell("publish", NEW, 2)
    publisher.hear("at")
    engines[1].ask("cut", "data")
    publisher.tell("go")
    assert publisher.hear("published")["failures"] == {}
    for engine in engines:
        assert_serves(engine, "2", NEW)
    footprints.assert_settled()
