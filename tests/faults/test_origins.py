"""Trainer ranks on several hosts, each with an origin of its own, and engines that receive from all of them.

The hosts are names here. Over `ipc://`, which has one origin for each host that it reaches, all are on this one.
"""

from __future__ import annotations

import signal

import pytest

from faults.actors import STEPS, arenas
from faults.conftest import (
    GLOO,
    IPC,
    LARGE_GLOO,
    Footprints,
    Stage,
    assert_one_whole_version,
    assert_serves,
    eventually,
    is_free,
    on,
    served,
    weight_info,
)
from faults.engine_actor import EngineProcess
from faults.publisher_actor import PublisherProcess, publish_together

DEADLINE_SECONDS = 6.0
STREAMING, STAGED = "streaming", "staged"


def two_hosts(stage: Stage, install: str, hosts: str = "ab") -> tuple[list[PublisherProcess], list[EngineProcess]]:
    """Trainer ranks on these hosts, and two engines, which serve content 1 as version 1."""
    engines = stage.engines(2)
    ranks = stage.trainer_ranks(len(hosts), *engines, hosts=hosts, install=install, deadline_seconds=DEADLINE_SECONDS)
    assert publish_together(ranks, 1, 1)["failures"] == {}
    return ranks, engines


def assert_all_serve(ranks: list[PublisherProcess], engines: list[EngineProcess], content: int) -> None:
    """The next publish works, for all."""
    outcome = publish_together(ranks, content)
    assert outcome["failures"] == {}
    for engine in engines:
        assert_serves(engine, str(outcome["version"]), content)


def assert_not_mixed(engine: EngineProcess, install: str) -> None:
    """An engine whose update has failed serves content 1; streaming, it may have to refuse to serve."""
    info = weight_info(engine)
    assert not info["paused"], info
    if install == STAGED or not info["torn"]:
        assert_serves(engine, "1", 1)


# --- who sends what ---


@pytest.mark.parametrize(("wire", "install"), [on(IPC, STREAMING), on(IPC, STAGED), on(GLOO, STAGED)])
@pytest.mark.parametrize("hosts", ["ab", "aabb", pytest.param("abcd", marks=pytest.mark.full)])
def test_engines_hold_what_all_hosts_send(stage: Stage, hosts: str, install: str) -> None:
    ranks, engines = two_hosts(stage, install, hosts)
    for content in (2, 3):
        assert_all_serve(ranks, engines, content)
    leaders = [hosts.index(host) for host in sorted(set(hosts))]
    own = [len(arenas(rank.pid, f"{rank.pid}-")) for rank in ranks]
    assert own == [int(number in leaders) for number in range(len(ranks))]


@pytest.mark.parametrize("wire", [on(GLOO)])
@pytest.mark.parametrize("hosts", ["ab", pytest.param("aabb", marks=pytest.mark.full)])
def test_engines_hold_the_full_tensors_of_an_fsdp2_model(stage: Stage, hosts: str) -> None:
    engines = stage.engines(2)
    ranks = stage.trainer_ranks(len(hosts), *engines, hosts=hosts, fsdp=True)
    for content in (1, 2):
        assert publish_together(ranks, content, content)["failures"] == {}
        for rank in ranks:
            rank.tell("full digests")
        full, *others = [rank.hear("full digests") for rank in ranks]
        assert all(other == full for other in others)
        assert [served(engine) for engine in engines] == [(str(content), full)] * 2


@pytest.mark.parametrize(("wire", "install"), [on(IPC, STREAMING), on(GLOO, STAGED)])
def test_many_publishes_leave_nothing(stage: Stage, install: str) -> None:
    engines = [stage.engine(collects=True) for _ in range(2)]
    ranks = stage.trainer_ranks(2, *engines, hosts="ab", install=install, collects=True)
    for content in range(1, 61):  # allocators of all threads have what they keep then
        assert publish_together(ranks, content)["failures"] == {}
    seen = Footprints(*ranks, *engines)
    before = [rank.footprint()["rss_bytes"] for rank in ranks]
    for content in range(61, 101):
        assert publish_together(ranks, content)["failures"] == {}
    after = [rank.footprint()["rss_bytes"] for rank in ranks]
    assert all(now - former < 2 << 20 for former, now in zip(before, after, strict=True))
    seen.assert_settled()
    assert_all_serve(ranks, engines, 61)


@pytest.mark.full
@pytest.mark.parametrize(("wire", "install"), [on(GLOO, STAGED), on(GLOO, STREAMING), on(IPC, STREAMING)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["engine", "trainer"])
def test_four_origins(stage: Stage, install: str, victim: str, number: int) -> None:
    """An engine or the last trainer rank is lost while the third origin has a bucket in hand."""
    ranks, (lost, other) = two_hosts(stage, install, "abcd")
    ranks[2].ask("stop at", "first bucket")
    for rank in ranks:
        rank.tell("publish", 2, 2)
    ranks[2].hear("at")
    actor = lost if victim == "engine" else ranks[3]
    actor.signal(number)
    ranks[2].tell("go")
    outcomes = [rank.hear("published") for rank in ranks if rank is not actor]
    if victim == "engine":
        assert all(outcome == outcomes[0] for outcome in outcomes)
        assert list(outcomes[0]["failures"]) == [lost.url], outcomes[0]["failures"]
        assert_serves(other, "2", 2)
    else:
        assert all("trainer rank 3" in outcome["error"][1] for outcome in outcomes)
        for engine in (lost, other):
            assert_not_mixed(engine, install)
    if number == signal.SIGSTOP:
        actor.signal(signal.SIGCONT)
        if victim == "engine":
            eventually(lambda: is_free(lost), "the engine that stood still gives the update up")
        else:
            assert "error" in actor.hear("published")
        assert_all_serve(ranks, [lost, other], 3)


# --- engines that fail, while one origin or the other has a bucket in hand ---


@pytest.mark.parametrize(
    ("wire", "install", "stops", "number"),
    [
        on(GLOO, STAGED, 0, signal.SIGKILL),
        on(GLOO, STAGED, 1, signal.SIGKILL),
        on(GLOO, STAGED, 1, signal.SIGSTOP),
        on(GLOO, STREAMING, 1, signal.SIGKILL),
        on(IPC, STREAMING, 1, signal.SIGKILL),
        on(GLOO, STAGED, 0, signal.SIGSTOP, full=True),
        on(GLOO, STREAMING, 0, signal.SIGSTOP, full=True),
        on(IPC, STREAMING, 0, signal.SIGSTOP, full=True),
        on(IPC, STAGED, 1, signal.SIGSTOP, full=True),
    ],
)
def test_a_lost_engine_costs_the_other_nothing(stage: Stage, install: str, stops: int, number: int) -> None:
    ranks, (lost, other) = two_hosts(stage, install)
    ranks[stops].ask("stop at", "mid-bucket")
    for rank in ranks:
        rank.tell("publish", 2, 2)
    ranks[stops].hear("at")
    lost.signal(number)
    ranks[stops].tell("go")
    outcomes = [rank.hear("published") for rank in ranks]
    assert outcomes[0] == outcomes[1]
    assert list(outcomes[0]["failures"]) == [lost.url], outcomes[0]["failures"]
    assert_serves(other, "2", 2)
    if number == signal.SIGSTOP:
        lost.signal(signal.SIGCONT)
        eventually(lambda: is_free(lost), "the engine that stood still gives the update up")
        assert_not_mixed(lost, install)
        assert_all_serve(ranks, [lost, other], 3)
    else:
        again = stage.engine(lost.port)
        assert_all_serve(ranks, [again, other], 3)


@pytest.mark.parametrize(("wire", "install"), [on(IPC, STREAMING), on(GLOO, STAGED)])
@pytest.mark.parametrize("stops", [0, 1])
def test_a_corrupt_byte_of_either_origin_is_refused(stage: Stage, install: str, stops: int) -> None:
    ranks, engines = two_hosts(stage, install)
    ranks[stops].ask("corrupt")
    outcome = publish_together(ranks, 2, 2)
    assert {failure[0] for failure in outcome["failures"].values()} == {"IntegrityError"}
    for engine in engines:
        assert_not_mixed(engine, install)
    assert_all_serve(ranks, engines, 3)


@pytest.mark.parametrize("wire", [on(GLOO)])
def test_an_engine_that_cannot_load_costs_the_other_nothing(stage: Stage) -> None:
    ranks, engines = two_hosts(stage, STAGED)
    engines[1].ask("fail load", True)
    outcome = publish_together(ranks, 2, 2)
    assert {name: failure[0] for name, failure in outcome["failures"].items()} == {engines[1].url: "InstallError"}
    assert_serves(engines[0], "2", 2)
    engines[1].ask("fail load", False)
    assert_all_serve(ranks, engines, 3)


# --- trainer ranks that fail ---


@pytest.mark.parametrize(
    ("wire", "install", "stops"),
    [
        on(GLOO, STAGED, 0),
        on(GLOO, STAGED, 1),
        on(IPC, STREAMING, 1),
        on(GLOO, STREAMING, 1, full=True),
        on(IPC, STREAMING, 0, full=True),
    ],
)
def test_a_killed_host_is_an_error_and_a_restarted_trainer_heals(stage: Stage, install: str, stops: int) -> None:
    """Killed while the publishing rank has a bucket in hand, or while it sends one itself."""
    ranks, engines = two_hosts(stage, install)
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
            assert_not_mixed(engine, install)
        if attempt == 2:
            publishing.tell("publish", 3, 3)
    publishing.close()

    restarted = stage.trainer_ranks(2, *engines, hosts="ab", install=install, deadline_seconds=DEADLINE_SECONDS)
    assert_all_serve(restarted, engines, 4)
    footprints.assert_settled()


@pytest.mark.parametrize(
    ("wire", "install", "stops"),
    [on(GLOO, STAGED, 1), on(GLOO, STAGED, 0, full=True), on(IPC, STREAMING, 1, full=True)],
)
def test_a_stopped_host_is_an_error_and_when_woken_goes_on(stage: Stage, install: str, stops: int) -> None:
    ranks, engines = two_hosts(stage, install)
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


@pytest.mark.parametrize(("wire", "install"), [on(GLOO, STAGED), on(IPC, STREAMING, full=True)])
@pytest.mark.parametrize("phase", ["mid-bucket", "before seal"])
def test_the_publishing_rank_is_killed(stage: Stage, install: str, phase: str) -> None:
    ranks, engines = two_hosts(stage, install)
    publishing, other = ranks
    publishing.ask("stop at", phase)
    for rank in ranks:
        rank.tell("publish", 2, 2)
    publishing.hear("at")
    publishing.kill()
    kind, text = other.hear("published")["error"]
    assert kind in ("PeerDiedError", "PeerTimeoutError")
    assert "trainer rank 0" in text
    for engine in engines:
        eventually(lambda engine=engine: is_free(engine), "the dead publisher's hold ends")
        if install == STAGED:
            assert_one_whole_version(engine, {"1": 1})
    other.close()

    restarted = stage.trainer_ranks(2, *engines, hosts="ab", install=install, deadline_seconds=DEADLINE_SECONDS)
    assert_all_serve(restarted, engines, 3)


@pytest.mark.parametrize(("wire", "victim"), [on(IPC, 0), on(IPC, 1), on(GLOO, 1)])
def test_memory_that_an_origin_lacks_is_everybodys_error(stage: Stage, victim: int) -> None:
    engines = stage.engines(2)
    ranks = stage.trainer_ranks(2, *engines, hosts="ab")
    ranks[victim].ask("refuse memory", True)
    for rank in ranks:
        rank.tell("publish", 1, 1)
    errors = [rank.hear("published")["error"] for rank in ranks]
    assert [kind for kind, _ in errors] == ["InsufficientMemoryError"] * 2
    assert errors[1 - victim][1].startswith(f"trainer rank {victim}: ")
    ranks[victim].ask("refuse memory", False)
    assert_all_serve(ranks, engines, 2)


# --- deltas ---


def with_bases(
    stage: Stage, hosts: str = "ab", num_engines: int = 2
) -> tuple[list[PublisherProcess], list[EngineProcess]]:
    """Trainer ranks on these hosts, and engines, of which all have the base of content `STEPS`."""
    engines = stage.engines(num_engines)
    options = {"delta": "always", "deadline_seconds": DEADLINE_SECONDS}
    ranks = stage.trainer_ranks(len(hosts), *engines, hosts=hosts, **options)
    assert publish_together(ranks, STEPS, 1)["num_deltas"] == 0
    return ranks, engines


def assert_deltas(ranks: list[PublisherProcess], engines: list[EngineProcess], content: int, num_deltas: int) -> None:
    """The next publish works for all engines, of which so many get deltas."""
    outcome = publish_together(ranks, content)
    assert (outcome["failures"], outcome["num_deltas"]) == ({}, num_deltas)
    for engine in engines:
        assert_serves(engine, str(outcome["version"]), content)


@pytest.mark.parametrize("wire", [on(GLOO), on(LARGE_GLOO), on(IPC, full=True)])
@pytest.mark.parametrize("hosts", ["ab", "aabb", pytest.param("abc", marks=pytest.mark.full)])
def test_deltas_of_all_hosts(stage: Stage, hosts: str) -> None:
    ranks, engines = with_bases(stage, hosts)
    for content in (STEPS + 1, STEPS + 2):
        assert_deltas(ranks, engines, content, 2)
    late = stage.engine()
    for rank in ranks:
        rank.ask("add", late.url)
    assert_deltas(ranks, [*engines, late], STEPS + 3, 2)
    assert_deltas(ranks, [*engines, late], STEPS + 4, 3)


@pytest.mark.parametrize(
    ("wire", "phase", "stops", "number"),
    [
        on(GLOO, "encoded", 0, signal.SIGKILL),
        on(GLOO, "mid-bucket", 0, signal.SIGKILL),
        on(GLOO, "mid-bucket", 1, signal.SIGKILL),
        on(GLOO, "mid-bucket", 1, signal.SIGSTOP),
        on(GLOO, "encoded", 1, signal.SIGSTOP, full=True),
        on(GLOO, "before seal", 0, signal.SIGKILL, full=True),
    ],
)
def test_an_engine_lost_among_deltas(stage: Stage, phase: str, stops: int, number: int) -> None:
    """The other one gets them; the lost one all weights when it is back."""
    ranks, (lost, other) = with_bases(stage)
    assert_deltas(ranks, [lost, other], STEPS + 1, 2)
    ranks[stops].ask("stop at", phase)
    for rank in ranks:
        rank.tell("publish", STEPS + 2, 7)
    ranks[stops].hear("at")
    lost.signal(number)
    ranks[stops].tell("go")
    outcomes = [rank.hear("published") for rank in ranks]
    assert outcomes[0] == outcomes[1]
    assert list(outcomes[0]["failures"]) == [lost.url], outcomes[0]
    assert_serves(other, "7", STEPS + 2)
    if number == signal.SIGSTOP:
        lost.signal(signal.SIGCONT)
        eventually(lambda: is_free(lost), "the engine that stood still gives the update up")
        assert_serves(lost, "2", STEPS + 1)
    else:
        lost = stage.engine(lost.port)
    assert_deltas(ranks, [lost, other], STEPS + 3, 1)
    assert_deltas(ranks, [lost, other], STEPS + 4, 2)


@pytest.mark.parametrize(
    ("wire", "phase", "stops"),
    [
        on(GLOO, "encoded", 0),
        on(GLOO, "encoded", 1),
        on(GLOO, "mid-bucket", 1),
        on(GLOO, "mid-bucket", 0, full=True),
        on(IPC, "encoded", 1, full=True),
    ],
)
def test_a_host_killed_among_deltas(stage: Stage, phase: str, stops: int) -> None:
    """Killed while the publishing rank has a bucket in hand, or one itself."""
    ranks, engines = with_bases(stage)
    publishing, other = ranks
    assert_deltas(ranks, engines, STEPS + 1, 2)
    ranks[stops].ask("stop at", phase)
    for rank in ranks:
        rank.tell("publish", STEPS + 2, 3)
    ranks[stops].hear("at")
    other.kill()
    if stops == 0:
        publishing.tell("go")
    kind, text = publishing.hear("published")["error"]
    assert kind in ("PeerDiedError", "PeerTimeoutError")
    assert "trainer rank 1" in text
    for engine in engines:
        assert_serves(engine, "2", STEPS + 1)
    publishing.close()

    options = {"delta": "always", "deadline_seconds": DEADLINE_SECONDS}
    restarted = stage.trainer_ranks(2, *engines, hosts="ab", **options)
    assert_deltas(restarted, engines, STEPS + 3, 0)
    assert_deltas(restarted, engines, STEPS + 4, 2)


@pytest.mark.parametrize(("wire", "phase"), [on(GLOO, "encoded"), on(GLOO, "mid-bucket")])
def test_a_host_stopped_among_deltas_and_woken(stage: Stage, phase: str) -> None:
    """The ranks keep their bases, which are of no common version any more."""
    ranks, engines = with_bases(stage)
    publishing, other = ranks
    assert_deltas(ranks, engines, STEPS + 1, 2)
    other.ask("stop at", phase)
    for rank in ranks:
        rank.tell("publish", STEPS + 2, 3)
    other.hear("at")
    other.signal(signal.SIGSTOP)
    kind, text = publishing.hear("published")["error"]
    assert kind == "PeerTimeoutError"
    assert "trainer rank 1" in text
    other.signal(signal.SIGCONT)
    other.tell("go")
    assert "error" in other.hear("published")
    for engine in engines:
        assert_serves(engine, "2", STEPS + 1)
    assert_deltas(ranks, engines, STEPS + 3, 0)
    assert_deltas(ranks, engines, STEPS + 4, 2)


@pytest.mark.parametrize("wire", [on(GLOO)])
@pytest.mark.parametrize("stops", [0, 1])
def test_a_corrupt_byte_of_a_delta_is_refused(stage: Stage, stops: int) -> None:
    ranks, engines = with_bases(stage)
    assert_deltas(ranks, engines, STEPS + 1, 2)
    ranks[stops].ask("corrupt")
    outcome = publish_together(ranks, STEPS + 2, 3)
    assert {failure[0] for failure in outcome["failures"].values()} == {"IntegrityError"}
    for engine in engines:
        assert_serves(engine, "2", STEPS + 1)
    assert_deltas(ranks, engines, STEPS + 3, 0)
    assert_deltas(ranks, engines, STEPS + 4, 2)
