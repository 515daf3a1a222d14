"""Deltas from several origins: each leader keeps the base of its own buckets, and all of them send one version's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from gather.squad import Squad, squad
from gather.test_gather import failed, published

pytestmark = pytest.mark.cluster

NUM_RANKS = 4
GLOO: dict[str, Any] = {"transport": "gloo://127.0.0.1:0"}
DELTAS: dict[str, Any] = {**GLOO, "delta": "always"}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Squad]:
    with squad(NUM_RANKS) as members:
        yield members


def publish(ranks: Squad, content: int, num_engines: int) -> dict[str, Any]:
    """Publish a content, which so many engines get as deltas; all engines hold it then."""
    report = published(ranks.publish(content))
    assert report["delta"]["num_engines"] == num_engines, report["delta"]
    assert bool(report["delta"]["reason"]) == (num_engines == 0)
    assert ranks[0].ask("check", content) == []
    return report


@pytest.mark.parametrize("cut", ["rows", "columns", "last_alone", "hybrid", "replicated", "transposed"])
@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_engines_get_what_changed(ranks: Squad, hosts: int, cut: str) -> None:
    """Ranks of one host share their origin's memory; an engine has two ranks."""
    ranks.all("make", "stepped", cut, hosts=hosts, num_engines=2, num_engine_ranks=2, **DELTAS)
    publish(ranks, 1, 0)
    for content in (2, 3):
        report = publish(ranks, content, 2)
        assert report["delta"]["base"] == report["version"] - 1
        assert 0 < report["delta"]["num_changed"] < report["delta"]["num_words"] / 10
        assert report["delta"]["num_bytes"] < report["num_bytes"]


@pytest.mark.parametrize("transport", ["ipc://", "memory://"])
def test_ranks_of_one_host_that_share_no_memory(ranks: Squad, transport: str) -> None:
    """Over `memory://` there is one origin, whose ranks do share memory."""
    options: dict[str, Any] = {"transport": transport, "delta": "always", "num_engine_ranks": 2}
    ranks.all("make", "stepped", "rows", is_apart=transport == "ipc://", **options)
    for content in range(1, 5):
        publish(ranks, content, int(content > 1))


def test_nothing_changed_and_everything_changed(ranks: Squad) -> None:
    ranks.all("make", "table", "rows", hosts=2, **DELTAS)
    publish(ranks, 1, 0)
    assert publish(ranks, 1, 1)["delta"]["num_changed"] == 0
    report = publish(ranks, 2, 1)
    assert report["delta"]["num_changed"] > report["delta"]["num_words"] / 2
    publish(ranks, 2, 1)


@pytest.mark.parametrize("hosts", [2, 4])
def test_an_engine_without_the_base_gets_all_of_every_origin(ranks: Squad, hosts: int) -> None:
    ranks.all("make", "stepped", "rows", hosts=hosts, num_engine_ranks=2, **DELTAS)
    publish(ranks, 1, 0)
    ranks.all("add", "late")
    publish(ranks, 2, 1)
    publish(ranks, 3, 2)
    ranks[0].ask("lose_base")  # which is known only when the engine refuses the deltas
    publish(ranks, 4, 1)
    publish(ranks, 5, 2)


@pytest.mark.parametrize("leader", [1, 3])
def test_a_leader_without_a_base_makes_the_next_publish_full(ranks: Squad, leader: int) -> None:
    ranks.all("make", "stepped", "rows", hosts=4, num_engines=2, **DELTAS)
    publish(ranks, 1, 0)
    publish(ranks, 2, 2)
    ranks[leader].ask("lose_base")
    publish(ranks, 3, 0)
    publish(ranks, 4, 2)


def test_release_and_another_plan_make_the_next_publish_full(ranks: Squad) -> None:
    ranks.all("make", "stepped", "rows", hosts=2, **DELTAS)
    publish(ranks, 1, 0)
    publish(ranks, 2, 1)
    ranks.all("release")
    publish(ranks, 3, 0)
    publish(ranks, 4, 1)
    ranks.all("rename", "tiny.3", "tiny.one")
    assert published(ranks.all("publish"))["delta"]["num_engines"] == 0
    assert published(ranks.all("publish"))["delta"]["num_engines"] == 1


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("at", [0, -1])
def test_a_rank_that_fails_while_deltas_are_encoded(ranks: Squad, rank: int, at: int) -> None:
    ranks.all("make", "stepped", "rows", hosts=2, **DELTAS)
    publish(ranks, 1, 0)
    publish(ranks, 2, 1)
    ranks[rank].ask("fail_at", ranks[0].ask("spans")[rank // 2][at], RuntimeError("out of paper"))
    errors = [outcome["error"] for outcome in ranks.publish(3)]
    assert errors[rank] == ("RuntimeError", "out of paper")
    assert sum(f"trainer rank {rank}" in text for _, text in errors) == NUM_RANKS - 1
    assert ranks[0].ask("check", 2) == []
    publish(ranks, 4, 0)
    publish(ranks, 5, 1)


@pytest.mark.parametrize("group_rank", [0, 2])
@pytest.mark.parametrize("at", [0, 2, -1])
@pytest.mark.parametrize("is_late", [False, True])
def test_an_origin_that_has_lost_peers_sends_its_deltas_again(
    ranks: Squad, group_rank: int, at: int, is_late: bool
) -> None:
    """Or the base's buckets, to an engine that has come late."""
    ranks.all("make", "stepped", "rows", hosts=2, num_engines=2, **DELTAS)
    publish(ranks, 1, 0)
    spans = ranks[0].ask("spans")
    ranks[group_rank].ask("lose_nobody", spans[group_rank // 2][at] - spans[group_rank // 2][0])
    if is_late:
        ranks.all("add", "late")
    publish(ranks, 2, 2)
    publish(ranks, 3, 2 + is_late)


@pytest.mark.parametrize(("loser", "other"), [(0, 2), (2, 0)])
def test_an_origin_that_has_lost_all_engines_with_the_base(ranks: Squad, loser: int, other: int) -> None:
    """The engine that gets all of the version gets it from every origin, also where the others still took deltas."""
    ranks.all("make", "stepped", "rows", hosts=2, num_engines=2, **DELTAS)
    publish(ranks, 1, 0)
    ranks[loser].ask("lose_nobody", 0, loses_all=True)
    ranks[other].ask("lose_nobody", 0)
    ranks.all("add", "late")
    errors = failed(ranks.publish(2))
    assert all("engine-0" in text and "engine-1" in text and "late" not in text for _, text in errors), errors
    assert ranks[0].ask("serves") == [0, 0, 1]
    publish(ranks, 3, 1)
    publish(ranks, 4, 3)


@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_leader_without_room_for_a_base(ranks: Squad, rank: int, mode: str) -> None:
    ranks.all("make", "stepped", "rows", hosts=2, **GLOO, delta=mode)
    ranks[rank].ask("refuse_bases", True)
    outcomes = ranks.publish(1)
    if mode == "always":
        errors = failed(outcomes)
        assert {kind for kind, _ in errors} == {"InsufficientMemoryError"}
        assert all("the base of deltas needs" in text for _, text in errors)
        assert all(f"trainer rank {rank}" in text for number, (_, text) in enumerate(errors) if number != rank)
    else:
        assert "the base of deltas needs" in published(outcomes)["delta"]["reason"]
        assert ranks[0].ask("check", 1) == []
    ranks[rank].ask("refuse_bases", False)
    publish(ranks, 2, 0)
    publish(ranks, 3, 1)


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_every_origin_proves_what_it_has_encoded(ranks: Squad, cut: str) -> None:
    ranks.all("make", "stepped", cut, hosts=4, verify="installed", is_provable=True, **DELTAS)
    for content in (1, 2, 3):
        publish(ranks, content, int(content > 1))
    ranks[0].ask("spoil_engine", "large")
    errors = failed(ranks.publish(4))
    assert all("its live memory is not what was sent" in text and "'large'" in text for _, text in errors)


def test_a_late_engine_that_has_the_last_version_gets_deltas(ranks: Squad) -> None:
    ranks.all("make", "stepped", "rows", hosts=2, **DELTAS)
    publish(ranks, 1, 0)
    publish(ranks, 2, 1)
    assert published(ranks.all("sync", "late", is_new=True))["version"] == 1
    assert ranks[0].ask("check", 2) == []
    publish(ranks, 3, 2)


def test_weights_of_every_rank_may_change_once_deltas_are_encoded(ranks: Squad) -> None:
    ranks.all("make", "stepped", "rows", hosts=2, **DELTAS)
    publish(ranks, 1, 0)
    ranks.all("add", "late")
    ranks.all("fill", 2)
    assert ranks.all("start") == ["packed"] * NUM_RANKS
    ranks.all("spoil_weights")
    assert published(ranks.all("result"))["delta"]["num_engines"] == 1
    assert ranks[0].ask("check", 2) == []


def test_an_engine_that_fails_costs_the_other_nothing(ranks: Squad) -> None:
    ranks.all("make", "stepped", "rows", hosts=2, num_engines=2, **DELTAS)
    publish(ranks, 1, 0)
    ranks[0].ask("fail_engine", 3)
    errors = failed(ranks.publish(2))
    assert all("engine-0" in text and "engine-1" not in text for _, text in errors)
    ranks[0].ask("fail_engine", None)
    publish(ranks, 3, 1)
    publish(ranks, 4, 2)


def test_auto_sends_deltas(ranks: Squad) -> None:
    ranks.all("make", "stepped", "rows", hosts=2, **GLOO, delta="auto")
    publish(ranks, 1, 0)
    publish(ranks, 2, 1)


def test_many_publishes_leave_nothing(ranks: Squad) -> None:
    ranks.all("make", "many", "rows", hosts=2, **DELTAS)
    ranks.require_no_growth()


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 40))])
def test_any_order_of_events(ranks: Squad, seed: int) -> None:
    """An engine has the bits of one version, whoever has lost a base, has failed, or lost peers."""
    chance, content, num_deltas, names, is_losing = random.Random(seed), 1, 0, list[str](), False
    ranks.all("make", "stepped", "rows", hosts=chance.choice([2, 3, 4]), num_engine_ranks=2, **DELTAS)
    published(ranks.publish(content))
    spans = ranks[0].ask("spans")
    for number in range(25):
        match chance.choice(["publish"] * 4 + ["fail", "base", "lose", "engine", "add", "remove", "release", "sync"]):
            case "fail":
                rank = chance.randrange(NUM_RANKS)
                index = chance.choice([index for span in spans for index in span])
                ranks[rank].ask("fail_at", index, RuntimeError("out of paper"))
                ranks.publish(content + 1)  # that rank may have no part of that bucket
                ranks[rank].ask("fail_nowhere")
            case "base":
                ranks[chance.choice([0, *(rank for rank in range(NUM_RANKS) if ranks[rank].ask("leads"))])].ask(
                    "lose_base"
                )
            case "lose" if not is_losing:  # after a second loss in a row all engines are given up
                is_losing = True
                leader = chance.choice([rank for rank in range(NUM_RANKS) if ranks[rank].ask("leads")])
                ranks[leader].ask("lose_nobody", chance.randrange(2))
            case "engine":
                ranks[0].ask("fail_engine", chance.randrange(6))
                content += 1
                ranks.publish(content)
                ranks[0].ask("fail_engine", None)
            case "add" if len(names) < 2:
                names.append(f"late-{number}")
                ranks.all("add", names[-1])
            case "remove" if names:
                ranks.all("drop", names.pop(0))
            case "release":
                ranks.all("release")
            case "sync":
                ranks.all("sync_all")
            case _:
                content += chance.randrange(3)
                report, is_losing = published(ranks.publish(content)), False
                num_deltas += report["delta"]["num_engines"]
                assert ranks[0].ask("check", content) == [], (seed, number)
    assert num_deltas > 0
