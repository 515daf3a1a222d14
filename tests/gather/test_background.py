"""Several trainer ranks publish in the background: weights change on all of them once all is packed, and all agree."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from gather.squad import Squad, squad

pytestmark = pytest.mark.cluster


def make(ranks: Squad, cut: str, **options: Any) -> None:
    ranks.all("make", "linears" if cut == "fsdp2" else "table", cut, **options)


@pytest.fixture
def pair() -> Iterator[Squad]:
    with squad(2) as ranks:
        make(ranks, "rows", deadline_seconds=60.0)
        assert [outcome["error"] for outcome in ranks.publish(1)] == [None] * 2
        yield ranks


@pytest.mark.parametrize(
    ("size", "cut", "options"),
    [
        (2, "fsdp2", {}),
        (4, "fsdp2", {"hosts": 2, "transport": "gloo://127.0.0.1:0"}),
        (3, "rows", {"is_apart": True}),
        (2, "replicated", {"num_engines": 2, "verify": "installed", "is_provable": True}),
    ],
)
def test_weights_change_on_every_rank_once_all_is_packed(size: int, cut: str, options: dict[str, Any]) -> None:
    with squad(size) as ranks:
        make(ranks, cut, **options)
        for content in (1, 2, 3):
            ranks.all("fill", content)
            ranks[0].ask("hold_install")
            assert ranks.all("start") == ["packed"] * size
            ranks.all("spoil_weights")
            ranks[0].ask("let_install")
            outcomes = ranks.all("result")
            assert [outcome["error"] for outcome in outcomes] == [None] * size
            assert len({outcome["report"] for outcome in outcomes}) == 1
            assert ranks[0].ask("check", content) == []


@pytest.mark.parametrize(("overlap", "how"), [("skip", "skipped"), ("raise", "PublishInFlightError")])
def test_all_ranks_skip_or_raise_alike(pair: Squad, overlap: str, how: str) -> None:
    """The publishing rank says what; the others hear of it while its publish is in flight, whatever they would do."""
    pair.all("fill", 2)
    pair[0].ask("hold_install")
    assert pair.all("start") == ["packed"] * 2
    pair.all("fill", 3)
    for _ in range(3):
        pair[1].tell("start")
        assert pair[0].ask("start", overlap=overlap) == how
        assert pair[1].hear() == how
    # Also one that calls late.
    assert pair[0].ask("start", overlap=overlap) == how
    pair[0].ask("let_install")
    assert [outcome["error"] for outcome in pair.all("result")] == [None] * 2
    assert pair[1].ask("start") == how
    assert pair[0].ask("check", 2) == []
    assert pair.all("start", overlap=overlap) == ["packed"] * 2
    assert [outcome["error"] for outcome in pair.all("result")] == [None] * 2
    assert pair[0].ask("check", 3) == []


def test_the_next_start_waits_on_every_rank(pair: Squad) -> None:
    pair[0].ask("hold_install")
    assert pair.all("start") == ["packed"] * 2
    pair[0].ask("let_install")
    for content in (2, 3):
        pair.all("fill", content)
        assert pair.all("start") == ["packed"] * 2
    assert [outcome["error"] for outcome in pair.all("result")] == [None] * 2
    assert pair[0].ask("check", 3) == []


def test_the_publishing_rank_cancels_for_all(pair: Squad) -> None:
    pair.all("fill", 2)
    pair[0].ask("hold_install", "Seal")
    assert pair.all("start") == ["packed"] * 2
    assert pair[1].ask("cancel") is False
    assert pair[0].ask("cancel") is True
    pair[0].ask("let_install")
    errors = [outcome["error"] for outcome in pair.all("result")]
    assert [kind for kind, _ in errors] == ["UpdateAbortedError"] * 2
    assert "was cancelled" in errors[1][1]
    assert pair[0].ask("check", 1) == []
    pair.all("fill", 3)
    assert pair.all("start") == ["packed"] * 2
    assert [outcome["error"] for outcome in pair.all("result")] == [None] * 2
    assert pair[0].ask("check", 3) == []


def test_what_fails_on_one_rank_before_all_is_packed_is_raised_by_every_start(pair: Squad) -> None:
    pair[1].ask("fail_source", RuntimeError("no weights here"))
    kinds = pair.all("start")
    assert kinds == ["WeightcastError", "RuntimeError"]
    pair[1].ask("fail_source", None)
    pair.all("fill", 2)
    assert pair.all("start") == ["packed"] * 2
    assert [outcome["error"] for outcome in pair.all("result")] == [None] * 2
    assert pair[0].ask("check", 2) == []


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies_while_the_engine_installs(victim: int) -> None:
    """The engine has the whole version, or the one before; the survivor's result is an error, in time."""
    with squad(2) as ranks:
        make(ranks, "rows", deadline_seconds=6.0)
        ranks.publish(1)
        ranks.all("fill", 2)
        ranks[0].ask("hold_install")
        assert ranks.all("start") == ["packed"] * 2
        ranks[victim].kill()
        if victim:
            ranks[0].ask("let_install")
        kind, _ = ranks[1 - victim].ask("result")["error"]
        assert kind in ("PeerDiedError", "PeerTimeoutError")
        if victim:
            assert ranks[0].ask("serves") in ([0], [1])
            assert ranks[0].ask("check", 1 + ranks[0].ask("serves")[0]) == []


@pytest.mark.parametrize("seed", range(3))
def test_starts_skips_and_cancels_in_any_order(pair: Squad, seed: int) -> None:
    """The publishing rank chooses; both ranks' calls end alike, and the engine serves the last that went well."""
    chance, served, in_flight, held = random.Random(seed), 1, 0, False
    for content in range(2, 26):
        pair.all("fill", content)
        is_held = chance.random() < 0.5 and not in_flight
        if is_held:
            pair[0].ask("hold_install", chance.choice(["", "Seal"]))
        overlap = "wait" if not in_flight else chance.choice(["skip", "raise"])
        for rank, choice in enumerate([overlap, "wait"]):
            pair[rank].tell("start", overlap=choice)
        ways = [pair[rank].hear() for rank in range(2)]
        assert ways[0] == ways[1]
        assert ways[0] == "packed" if not in_flight else ways[0] != "packed" or not held
        if ways[0] == "packed":
            served, in_flight, held = in_flight or served, content, is_held
        if chance.random() < 0.6:
            cancelled = chance.random() < 0.5 and pair[0].ask("cancel")
            if held:
                pair[0].ask("let_install")
            errors = [outcome["error"] for outcome in pair.all("result")]
            assert [error and error[0] for error in errors] == ["UpdateAbortedError" if cancelled else None] * 2
            served, in_flight = served if cancelled else in_flight, 0
            assert pair[0].ask("check", served) == []
    if in_flight and held:
        pair[0].ask("let_install")
