"""Engines that join, leave and are restarted between publishes: the next one works, nothing of old groups stays."""

from __future__ import annotations

import signal

import httpx
import pytest

from faults.actors import DEADLINE_SECONDS
from faults.conftest import GLOO, IPC, Footprints, Stage, assert_serves, eventually, is_free, on, over_both
from faults.engine_actor import EngineProcess

pytestmark = pytest.mark.cluster


def is_ready(engine: EngineProcess) -> bool:
    return httpx.get(f"{engine.url}/weight_ready?max_behind=1", timeout=DEADLINE_SECONDS, trust_env=False).is_success


@over_both
def test_engines_join_and_leave(stage: Stage) -> None:
    first, second = stage.engines(2)
    publisher = stage.publisher(first, second)
    assert publisher.publish(1)["failures"] == {}
    with_two = Footprints(publisher, first, second)

    third = stage.engine()
    publisher.ask("add", third.url)
    assert publisher.publish(2)["failures"] == {}
    for engine in (first, second, third):
        assert_serves(engine, "1", 2)
    with_three = Footprints(third)

    publisher.ask("remove", third.url)
    assert publisher.publish(3)["failures"] == {}
    for engine, version, content in ((first, "2", 3), (second, "2", 3), (third, "1", 2)):
        assert_serves(engine, version, content)
    eventually(lambda: is_free(third), "an engine that was let go is free")
    with_two.assert_settled()

    publisher.ask("add", third.url)
    publisher.ask("remove", first.url)
    assert publisher.publish(4)["failures"] == {}
    for engine, version, content in ((first, "2", 3), (second, "3", 4), (third, "3", 4)):
        assert_serves(engine, version, content)
    with_two.assert_settled()
    with_three.assert_settled()


@pytest.mark.parametrize("wire", [on(GLOO), on(IPC, full=True)])
def test_every_engine_in_turn_is_restarted(stage: Stage) -> None:
    """Ended or killed between two publishes, back on its port: it catches up, and the others keep nothing of it."""
    engines = stage.engines(2)
    publisher = stage.publisher(*engines)
    assert publisher.publish(0)["failures"] == {}
    before = Footprints(publisher)
    for content, end in enumerate(("close", "kill", "close", "kill"), start=1):
        victim = engines.pop(0)
        survivors = Footprints(*engines)
        getattr(victim, end)()
        engines.append(stage.engine(victim.port))
        assert publisher.publish(content)["failures"] == {}
        for engine in engines:
            assert_serves(engine, str(content), content)
        survivors.assert_settled()
    before.assert_settled()


@pytest.mark.parametrize("wire", [on(GLOO)])
def test_engine_that_is_away_is_named_and_comes_back(stage: Stage) -> None:
    staying, leaving = stage.engines(2)
    publisher = stage.publisher(staying, leaving)
    assert publisher.publish(0)["failures"] == {}
    leaving.close()
    for content in (1, 2):
        assert set(publisher.publish(content)["failures"]) == {leaving.url}
        assert_serves(staying, str(content), content)
    back = stage.engine(leaving.port)
    assert publisher.publish(3)["failures"] == {}
    for engine in (staying, back):
        assert_serves(engine, "3", 3)


@over_both
def test_engine_that_was_stopped_is_not_ready_before_it_has_caught_up(stage: Stage) -> None:
    """It slept while versions were published, of which it knows nothing when it goes on."""
    staying, sleeping = stage.engines(2)
    publisher = stage.publisher(staying, sleeping, deadline_seconds=6.0)
    assert publisher.publish(0)["failures"] == {}
    assert is_ready(sleeping)
    sleeping.signal(signal.SIGSTOP)
    for content in (1, 2):
        assert set(publisher.publish(content)["failures"]) == {sleeping.url}
    sleeping.signal(signal.SIGCONT)
    assert not is_ready(sleeping)
    assert is_ready(staying)
    assert publisher.publish(3)["failures"] == {}
    for engine in (staying, sleeping):
        assert_serves(engine, "3", 3)
        assert is_ready(engine)
    publisher.kill()
    eventually(lambda: is_free(sleeping), "it has lost its publisher")
    assert is_ready(sleeping), "without a publisher there is no later version"
