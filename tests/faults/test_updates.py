"""Everything short of a kill: corrupt bytes, failing loaders, other runs, restarts, roll-backs; real processes."""

from __future__ import annotations

import pytest

from faults.conftest import GLOO, IPC, Stage, Wire, assert_serves, on, over, over_both, over_both_if_full, weight_info


@over_both
def test_corrupt_byte_is_refused_and_the_next_publish_works(stage: Stage, wire: Wire) -> None:
    engines = [stage.engine(), stage.engine()]
    publisher = stage.publisher(*engines)
    assert publisher.publish(1)["failures"] == {}
    publisher.ask("corrupt")
    failures = publisher.publish(2)["failures"]
    assert {kind for kind, _ in failures.values()} == {"IntegrityError"}
    if wire is IPC:
        assert set(failures) == {engine.url for engine in engines}
    for engine in engines:
        # Over gloo the first that refuses has the bucket sent, and packed, anew for the other.
        assert_serves(engine, *(("0", 1) if engine.url in failures else ("1", 2)))
    assert publisher.publish(3)["failures"] == {}
    for engine in engines:
        assert_serves(engine, "2", 3)


@pytest.mark.parametrize(
    ("wire", "install"), over({IPC: ["staged", "streaming"]}, full={GLOO: ["staged", "streaming"]})
)
def test_failing_loader_with_undo_restores_the_old_version(stage: Stage, install: str) -> None:
    engine = stage.engine()
    publisher = stage.publisher(engine, undo=True, install=install)
    assert publisher.publish(1)["failures"] == {}
    engine.ask("fail load", True)
    outcome = publisher.publish(2)
    assert outcome["failures"][engine.url][0] == "InstallError"
    assert_serves(engine, "0", 1)
    engine.ask("fail load", False)
    assert publisher.publish(3)["failures"] == {}
    assert_serves(engine, "2", 3)


@pytest.mark.parametrize(
    ("wire", "install"), over({IPC: ["staged", "streaming"]}, full={GLOO: ["staged", "streaming"]})
)
def test_failing_loader_without_undo_tears_until_healed(stage: Stage, install: str) -> None:
    engines = [stage.engine(), stage.engine()]
    publisher = stage.publisher(*engines, install=install)
    assert publisher.publish(1)["failures"] == {}
    engines[0].ask("fail load", True)
    outcome = publisher.publish(2)
    assert set(outcome["failures"]) == {engines[0].url}
    info = weight_info(engines[0])
    assert info["torn"]
    assert not info["paused"]
    assert_serves(engines[1], "1", 2)
    engines[0].ask("fail load", False)
    assert publisher.publish(3)["failures"] == {}
    for engine in engines:
        assert_serves(engine, "2", 3)


@over_both_if_full
def test_corrupt_stream_tears_or_is_undone(stage: Stage) -> None:
    engine = stage.engine()
    with_undo = stage.publisher(engine, install="streaming", undo=True)
    assert with_undo.publish(1)["failures"] == {}
    with_undo.ask("corrupt")
    assert with_undo.publish(2)["failures"][engine.url][0] == "IntegrityError"
    assert_serves(engine, "0", 1)
    with_undo.close()
    without = stage.publisher(engine, install="streaming")
    assert without.publish(3)["failures"] == {}
    without.ask("corrupt")
    assert without.publish(4)["failures"][engine.url][0] == "IntegrityError"
    assert weight_info(engine)["torn"]
    assert without.publish(5)["failures"] == {}
    assert_serves(engine, weight_info(engine)["weight_version"], 5)


@over_both_if_full
def test_second_publisher_is_refused_or_takes_over(stage: Stage) -> None:
    engine = stage.engine()
    first = stage.publisher(engine)
    assert first.publish(1)["failures"] == {}
    second = stage.publisher(engine)
    kind, text = second.publish(2)["failures"][engine.url]
    assert kind == "EngineBusyError"
    assert first.run in text
    assert_serves(engine, "0", 1)
    assert first.publish(3)["failures"] == {}
    taker = stage.publisher(engine, takeover=True)
    assert taker.publish(4)["failures"] == {}
    assert_serves(engine, weight_info(engine)["weight_version"], 4)
    kind, text = first.publish(5)["failures"][engine.url]
    assert kind == "EngineBusyError"
    assert taker.run in text
    assert taker.publish(6)["failures"] == {}
    assert_serves(engine, weight_info(engine)["weight_version"], 6)


@over_both
def test_takeover_in_the_middle_of_an_update_is_never_a_mix(stage: Stage) -> None:
    engine = stage.engine()
    first = stage.publisher(engine)
    assert first.publish(1, 1)["failures"] == {}
    first.ask("stop at", "before seal")
    first.tell("publish", 2, 2)
    first.hear("at")
    taker = stage.publisher(engine, takeover=True)
    assert taker.publish(3, 3)["failures"] == {}
    first.tell("go")
    assert engine.url in first.hear("published")["failures"]
    assert_serves(engine, "3", 3)
    assert weight_info(engine)["run"] == taker.run


@over_both_if_full
def test_restarted_trainer_publishes_older_content_as_a_new_version(stage: Stage) -> None:
    engines = [stage.engine(), stage.engine()]
    first = stage.publisher(*engines)
    for content in (1, 2, 3):
        assert first.publish(content)["failures"] == {}
    first.close()
    second = stage.publisher(*engines)
    outcome = second.publish(1)
    assert outcome["failures"] == {}
    assert outcome["version"] == 3
    for engine in engines:
        assert_serves(engine, "3", 1)
        assert weight_info(engine)["run"] == second.run


@over_both_if_full
def test_a_replayed_version_is_the_callers_mistake(stage: Stage) -> None:
    engine = stage.engine()
    publisher = stage.publisher(engine)
    assert publisher.publish(1, 5)["failures"] == {}
    assert publisher.publish(2, 5)["error"][0] == "ValueError"
    assert_serves(engine, "5", 1)


@over_both_if_full
def test_a_newcomer_catches_up(stage: Stage) -> None:
    first = stage.engine()
    publisher = stage.publisher(first)
    assert publisher.publish(1)["failures"] == {}
    late = stage.engine()
    publisher.ask("add", late.url)
    assert publisher.publish(2)["failures"] == {}
    for engine in (first, late):
        assert_serves(engine, "1", 2)


@pytest.mark.parametrize(
    ("wire", "install", "num_publishes"),
    [
        on(IPC, "staged", 200, full=True),
        on(IPC, "streaming", 200),
        on(GLOO, "staged", 300),
        on(GLOO, "streaming", 300, full=True),
        on(GLOO, "staged", 2000, full=True),
    ],
)
def test_many_publishes_do_not_leak(stage: Stage, install: str, num_publishes: int) -> None:
    engine = stage.engine(collects=True)
    publisher = stage.publisher(engine, install=install, collects=True)
    for content in range(20):
        assert publisher.publish(content)["failures"] == {}
    before = [actor.footprint() for actor in (publisher, engine)]
    for content in range(num_publishes):
        assert publisher.publish(content)["failures"] == {}
    after = [actor.footprint() for actor in (publisher, engine)]
    for old, new in zip(before, after, strict=True):
        assert new["fds"] <= old["fds"] + 1, (old, new)
        assert new["threads"] <= old["threads"] + 1, (old, new)
        assert new["rss_bytes"] <= old["rss_bytes"] + (8 << 20), (old, new)
    assert_serves(engine, str(19 + num_publishes), num_publishes - 1)
