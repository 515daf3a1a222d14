"""SIGKILL and SIGSTOP at every phase of an update, in real processes: who survives serves one whole version."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable

import pytest

from faults.actors import DEADLINE_SECONDS, EngineProcess
from faults.conftest import Stage, assert_serves, expected_digests, served, weight_info

PHASES = ["init", "offer", "mid-bucket", "before seal", "paused", "load", "after commit"]
OLD, NEW = 1, 2


def eventually(check: Callable[[], bool], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def is_free(engine: EngineProcess) -> bool:
    info = weight_info(engine)
    return not info["holder"] and not info["paused"]


def assert_one_whole_version(engine: EngineProcess, contents: dict[str, int]) -> None:
    found, digests = served(engine)
    assert found in contents
    assert digests == expected_digests(contents[found])


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


@pytest.mark.parametrize("phase", PHASES)
def test_publisher_killed(stage: Stage, phase: str) -> None:
    engines = [stage.engine(), stage.engine()]
    publisher = stage.publisher(*engines)
    if phase == "init":
        publisher.ask("stop at", phase)
    else:
        assert publisher.publish(OLD, 1)["failures"] == {}
        (engines[0] if phase == "load" else publisher).ask("stop at", phase)
    publisher.tell("publish", NEW, 2)
    (engines[0] if phase == "load" else publisher).hear("at")
    names = {name for name in sockets_of(publisher.pid) if "weightcast" in name}
    assert len(names) >= 2, "the link's and the transport's listeners"
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
    assert not [name for name in os.listdir("/dev/shm") if "weightcast" in name]

    successor = stage.publisher(*engines)
    assert successor.publish(3, None)["failures"] == {}
    for engine in engines:
        assert_serves(engine, weight_info(engine)["weight_version"], 3)
        assert weight_info(engine)["run"] == successor.run


@pytest.mark.parametrize("phase", PHASES)
def test_engine_killed(stage: Stage, phase: str) -> None:
    engines = [stage.engine(), stage.engine()]
    victim, survivor = engines
    publisher = stage.publisher(*engines, deadline_seconds=10.0)
    if phase != "init":
        assert publisher.publish(OLD, 1)["failures"] == {}
    (victim if phase == "load" else publisher).ask("stop at", phase)
    publisher.tell("publish", NEW, 2)
    (victim if phase == "load" else publisher).hear("at")
    port = victim.port
    victim.kill()
    publisher.tell("go")
    outcome = publisher.hear("published")
    assert set(outcome["failures"]) <= {victim.url}
    if phase not in ("after commit", "paused"):
        # In the other two the stop may have been on the survivor's way, when the victim was through already.
        assert victim.url in outcome["failures"]
        assert outcome["failures"][victim.url][0] in ("PeerDiedError", "PeerTimeoutError")
    assert_serves(survivor, "2", NEW)

    restarted = stage.engine(port)
    assert publisher.publish(3, 3)["failures"] == {}
    assert_serves(survivor, "3", 3)
    assert_serves(restarted, "3", 3)


@pytest.mark.parametrize("phase", ["offer", "mid-bucket", "before seal"])
def test_engine_stopped_and_woken(stage: Stage, phase: str) -> None:
    """A stalled engine is dropped and named; woken later, it must not install what has been overwritten since."""
    engines = [stage.engine(), stage.engine()]
    victim, survivor = engines
    publisher = stage.publisher(*engines, deadline_seconds=1.5)
    assert publisher.publish(OLD, 1)["failures"] == {}
    publisher.ask("stop at", phase)
    publisher.tell("publish", NEW, 2)
    publisher.hear("at")
    victim.signal(signal.SIGSTOP)
    publisher.tell("go")
    outcome = publisher.hear("published")
    assert set(outcome["failures"]) == {victim.url}
    assert_serves(survivor, "2", NEW)
    again = publisher.publish(3, 3)
    assert set(again["failures"]) == {victim.url}
    victim.signal(signal.SIGCONT)
    eventually(lambda: is_free(victim), "the woken engine notices that its link is gone")
    assert_one_whole_version(victim, {"1": OLD})
    assert_serves(survivor, "3", 3)
    assert publisher.publish(4, 4)["failures"] == {}
    assert_serves(victim, "4", 4)
    assert_serves(survivor, "4", 4)


@pytest.mark.parametrize("phase", ["offer", "before seal", "paused"])
def test_publisher_stopped_and_woken(stage: Stage, phase: str) -> None:
    """A silent publisher loses its lease: its engines generate again; woken, it learns so, and publishes again."""
    engine = stage.engine()
    publisher = stage.publisher(engine, lease_seconds=1.0)
    assert publisher.publish(OLD, 1)["failures"] == {}
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
