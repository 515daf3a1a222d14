"""Trainer ranks and engines on the devices of one host: every worker reads the arena on its own device.

Devices are labels here. Which arena a process reads or writes is seen from outside: shared memory has an inode.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from faults.actors import arenas
from faults.conftest import Footprints, Stage, assert_serves, eventually, is_free, served, weight_info
from faults.engine_actor import EngineProcess
from faults.publisher_actor import PublisherProcess, publish_together

pytestmark = pytest.mark.cluster

DEADLINE_SECONDS = 4.0
STREAMING = {"install": "streaming"}


def in_full(*values: object) -> Any:
    """A test's parameters that only `--full` runs."""
    return pytest.param(*values, marks=pytest.mark.full)


def arena_of(rank: PublisherProcess) -> str:
    """The one arena of a trainer rank, which may have mapped another's to pack into."""
    (arena,) = own_arenas(rank)
    return arena


def own_arenas(rank: PublisherProcess) -> set[str]:
    return arenas(rank.pid, f"{rank.pid}-")


def reads(engine: EngineProcess, rank: PublisherProcess) -> bool:
    return arenas(engine.pid) == {arena_of(rank)}


def two_devices(stage: Stage, **options: object) -> tuple[list[PublisherProcess], list[EngineProcess]]:
    """Two trainer ranks on two devices with an engine on each, which serve content 1 as version 1."""
    engines = [stage.engine(device_label=label) for label in "ab"]
    options = {**STREAMING, "deadline_seconds": DEADLINE_SECONDS, **options}
    ranks = stage.trainer_ranks(2, *engines, labels="ab", **options)
    assert publish_together(ranks, 1, 1)["failures"] == {}
    return ranks, engines


def assert_all_serve(ranks: list[PublisherProcess], engines: list[EngineProcess], content: int) -> None:
    """The next publish works, for all, and each engine reads its own arena."""
    outcome = publish_together(ranks, content)
    assert outcome["failures"] == {}
    for engine in engines:
        assert_serves(engine, str(outcome["version"]), content)
    for rank, engine in zip(ranks, engines, strict=True):
        assert reads(engine, rank)


def assert_torn_or_old(engine: EngineProcess) -> None:
    """An engine whose update has failed refuses to serve, or had loaded nothing yet and serves content 1."""
    info = weight_info(engine)
    assert not info["paused"], info
    if not info["torn"]:
        assert_serves(engine, "1", 1)


# --- who reads where ---


@pytest.mark.parametrize("labels", [in_full("ab"), "abab", "aabb"])
def test_every_engine_reads_the_arena_of_its_own_device(stage: Stage, labels: str) -> None:
    """One on a device that no rank has, and one on none, read the publishing rank's."""
    engines = {label: stage.engine(device_label=label) for label in "abc"} | {"": stage.engine()}
    ranks = stage.trainer_ranks(len(labels), *engines.values(), labels=labels, **STREAMING)
    for content in (1, 2, 3):
        assert publish_together(ranks, content, content)["failures"] == {}
        for engine in engines.values():
            assert_serves(engine, str(content), content)
    first_of_b = ranks[labels.index("b")]
    assert arena_of(ranks[0]) != arena_of(first_of_b)
    assert reads(engines["b"], first_of_b)
    assert all(reads(engines[label], ranks[0]) for label in ("a", "c", ""))
    assert [len(own_arenas(rank)) for rank in ranks] == [int(rank in (ranks[0], first_of_b)) for rank in ranks]


@pytest.mark.parametrize("num_ranks", [2, in_full(4)])
def test_engines_hold_the_full_tensors_of_an_fsdp2_model(stage: Stage, num_ranks: int) -> None:
    engines = [stage.engine(device_label=label) for label in "ab"]
    ranks = stage.trainer_ranks(num_ranks, *engines, labels="abab"[:num_ranks], fsdp=True, **STREAMING)
    for content in (1, 2):
        assert publish_together(ranks, content, content)["failures"] == {}
        for rank in ranks:
            rank.tell("full digests")
        full, *others = [rank.hear("full digests") for rank in ranks]
        assert all(other == full for other in others)
        assert [served(engine) for engine in engines] == [(str(content), full)] * 2
    assert reads(engines[0], ranks[0])
    assert reads(engines[1], ranks[1])


@pytest.mark.parametrize(("labels", "options"), [("ab", {"install": "staged"}), ("aa", STREAMING), ("", STREAMING)])
def test_one_arena_serves_all(stage: Stage, labels: str, options: dict[str, object]) -> None:
    """Staged buckets are in host memory, once; and where there is one device, there is one arena."""
    engines = [stage.engine(device_label=label) for label in "ab"]
    ranks = stage.trainer_ranks(2, *engines, labels=labels, **options)
    for content in (1, 2):
        assert publish_together(ranks, content, content)["failures"] == {}
        for engine in engines:
            assert_serves(engine, str(content), content)
    assert all(reads(engine, ranks[0]) for engine in engines)
    assert own_arenas(ranks[1]) == set()


def test_many_publishes_leave_nothing(stage: Stage) -> None:
    ranks, engines = two_devices(stage, collects=True)
    for content in range(2, 42):
        publish_together(ranks, content)
    seen = Footprints(*ranks, *engines)
    before = [rank.footprint()["rss_bytes"] for rank in ranks]
    for content in range(42, 82):
        assert publish_together(ranks, content)["failures"] == {}
    after = [rank.footprint()["rss_bytes"] for rank in ranks]
    assert all(now - former < 2 << 20 for former, now in zip(before, after, strict=True))
    seen.assert_settled()
    assert_all_serve(ranks, engines, 82)


# --- engines that fail ---


@pytest.mark.parametrize(
    ("victim", "number"),
    [(0, signal.SIGKILL), (1, signal.SIGSTOP), in_full(1, signal.SIGKILL), in_full(0, signal.SIGSTOP)],
)
def test_a_lost_engine_costs_the_other_nothing(stage: Stage, victim: int, number: int) -> None:
    ranks, engines = two_devices(stage)
    lost, other = engines[victim], engines[1 - victim]
    ranks[0].ask("stop at", "mid-bucket")
    for rank in ranks:
        rank.tell("publish", 2, 2)
    ranks[0].hear("at")
    lost.signal(number)
    ranks[0].tell("go")
    outcomes = [rank.hear("published") for rank in ranks]
    assert outcomes[0] == outcomes[1]
    kind = {signal.SIGKILL: "PeerDiedError", signal.SIGSTOP: "PeerTimeoutError"}[signal.Signals(number)]
    assert {name: failure[0] for name, failure in outcomes[0]["failures"].items()} == {lost.url: kind}
    assert_serves(other, "2", 2)
    if number == signal.SIGSTOP:
        lost.signal(signal.SIGCONT)
        eventually(lambda: is_free(lost), "the engine that stood still gives the update up")
        assert_torn_or_old(lost)
        assert_all_serve(ranks, engines, 3)


@pytest.mark.parametrize("victim", [in_full(0), 1])
def test_an_engine_that_cannot_load_costs_the_other_nothing(stage: Stage, victim: int) -> None:
    ranks, engines = two_devices(stage)
    engines[victim].ask("fail load", True)
    outcome = publish_together(ranks, 2, 2)
    assert {name: failure[0] for name, failure in outcome["failures"].items()} == {engines[victim].url: "InstallError"}
    assert_serves(engines[1 - victim], "2", 2)
    engines[victim].ask("fail load", False)
    assert_all_serve(ranks, engines, 3)


def test_an_engine_that_comes_back_reads_its_own_arena_again(stage: Stage) -> None:
    ranks, engines = two_devices(stage)
    engines[1].kill()
    assert set(publish_together(ranks, 2)["failures"]) == {engines[1].url}
    engines[1] = stage.engine(engines[1].port, device_label="b")
    assert_all_serve(ranks, engines, 3)


# --- trainer ranks that fail ---


@pytest.mark.parametrize("stops", [0, in_full(1)])
def test_a_killed_arena_rank_is_an_error_and_a_restarted_trainer_heals(stage: Stage, stops: int) -> None:
    """Killed while the publishing rank has a bucket in hand, or while its own thread is handing one out."""
    ranks, engines = two_devices(stage)
    publishing, other = ranks
    footprints = Footprints(*engines)
    ranks[stops].ask("stop at", "mid-bucket")
    for rank in ranks:
        rank.tell("publish", 2, 2)
    ranks[stops].hear("at")
    other.kill()
    if stops == 0:
        publishing.tell("go")
    for attempt in (2, 3):
        kind, text = publishing.hear("published")["error"]
        assert kind in ("PeerDiedError", "PeerTimeoutError")
        assert "trainer rank 1" in text
        for engine in engines:
            assert_torn_or_old(engine)
        if attempt == 2:
            publishing.tell("publish", 3, 3)
    publishing.close()

    restarted = stage.trainer_ranks(2, *engines, labels="ab", deadline_seconds=DEADLINE_SECONDS, **STREAMING)
    assert_all_serve(restarted, engines, 4)
    footprints.assert_settled()


@pytest.mark.parametrize("stops", [in_full(0), 1])
def test_a_stopped_arena_rank_is_an_error_and_when_woken_goes_on(stage: Stage, stops: int) -> None:
    ranks, engines = two_devices(stage)
    publishing, other = ranks
    footprints = Footprints(*ranks, *engines)
    ranks[stops].ask("stop at", "mid-bucket")
    for rank in ranks:
        rank.tell("publish", 2, 2)
    ranks[stops].hear("at")
    other.signal(signal.SIGSTOP)
    ranks[stops].tell("go")
    kind, text = publishing.hear("published")["error"]
    assert kind == "PeerTimeoutError"
    assert "trainer rank 1" in text
    other.signal(signal.SIGCONT)
    assert "error" in other.hear("published")
    assert_all_serve(ranks, engines, 3)
    footprints.assert_settled()


def test_the_publishing_rank_is_killed(stage: Stage) -> None:
    ranks, engines = two_devices(stage)
    publishing, other = ranks
    publishing.ask("stop at", "mid-bucket")
    for rank in ranks:
        rank.tell("publish", 2, 2)
    publishing.hear("at")
    publishing.kill()
    kind, text = other.hear("published")["error"]
    assert kind in ("PeerDiedError", "PeerTimeoutError")
    assert "trainer rank 0" in text
    for engine in engines:
        eventually(lambda engine=engine: is_free(engine), "the dead publisher's hold ends")
    other.close()

    restarted = stage.trainer_ranks(2, *engines, labels="ab", deadline_seconds=DEADLINE_SECONDS, **STREAMING)
    assert_all_serve(restarted, engines, 3)


@pytest.mark.parametrize("victim", [0, 1])
def test_an_arena_that_does_not_fit_is_everybodys_error(stage: Stage, victim: int) -> None:
    engines = [stage.engine(device_label=label) for label in "ab"]
    ranks = stage.trainer_ranks(2, *engines, labels="ab", **STREAMING)
    ranks[victim].ask("refuse memory", True)
    for rank in ranks:
        rank.tell("publish", 1, 1)
    errors = [rank.hear("published")["error"] for rank in ranks]
    assert [kind for kind, _ in errors] == ["InsufficientMemoryError"] * 2
    assert errors[1 - victim][1].startswith(f"trainer rank {victim}: ")
    ranks[victim].ask("refuse memory", False)
    assert_all_serve(ranks, engines, 2)
