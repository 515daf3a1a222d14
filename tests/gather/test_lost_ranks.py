"""Trainer ranks that die, stand still or do not come: the others raise in time, engines keep what they have."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gather.squad import Squad, squad

pytestmark = pytest.mark.cluster

DEADLINE = 5.0
SLACK = 30.0
"""For starting threads and closing sockets on two busy cores, and the roll call."""


@pytest.fixture(params=["mapped", "apart"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Squad]:
    with squad(3) as members:
        members.all("make", "table", "rows", deadline_seconds=DEADLINE, is_apart=request.param == "apart")
        assert [outcome["error"] for outcome in members.publish(1)] == [None] * 3
        yield members


def errors_of(ranks: Squad, survivors: list[int], since: float) -> list[tuple[str, str]]:
    """How their publishes ended: a PeerError each, in time."""
    errors = [ranks[rank].hear()["error"] for rank in survivors]
    assert time.monotonic() - since < DEADLINE + SLACK
    assert all(kind in ("PeerDiedError", "PeerTimeoutError") for kind, _ in errors), errors
    return errors


def keeps(ranks: Squad, content: int) -> None:
    assert ranks[0].ask("check", content) == []


def bucket_of(ranks: Squad, rank: int) -> int:
    """The third bucket that this rank packs a part of."""
    spans = ranks[0].ask("spans")
    return int(spans[min(rank, len(spans) - 1)][2])


def test_a_rank_that_died_before(ranks: Squad) -> None:
    ranks[2].kill()
    since = time.monotonic()
    ranks[0].tell("publish")
    ranks[1].tell("publish")
    for _, text in errors_of(ranks, [0, 1], since):
        assert text.startswith(
            f"trainer rank 2 did not publish within {DEADLINE:g} s: it has published before, and has"
        )
        assert "call publish" not in text
    keeps(ranks, 1)
    assert ranks[0].ask("serves") == [0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_lost_at_a_bucket(ranks: Squad, number: int) -> None:
    bucket = bucket_of(ranks, 1)
    ranks[1].ask("stop_at", bucket)
    ranks.all("fill", 2)
    since = time.monotonic()
    for rank in range(3):
        ranks[rank].tell("publish")
    assert ranks[1].hear("at") == bucket
    ranks[1].signal(number)
    for _, text in errors_of(ranks, [0, 2], since):
        # On a busy machine a living rank's sign may come too late as well.
        assert re.search("trainer ranks? 1", text), text
    keeps(ranks, 1)
    if number == signal.SIGSTOP:
        ranks[1].signal(signal.SIGCONT)
        ranks[1].pipe.send(("go", None))
        assert ranks[1].hear()["error"] is not None
        assert [outcome["error"] for outcome in ranks.publish(3)] == [None] * 3
        keeps(ranks, 3)


def test_the_publishing_rank_dies(ranks: Squad) -> None:
    bucket = bucket_of(ranks, 1)
    ranks[1].ask("stop_at", bucket)
    since = time.monotonic()
    for rank in range(3):
        ranks[rank].tell("publish")
    assert ranks[1].hear("at") == bucket
    ranks[0].kill()
    ranks[1].pipe.send(("go", None))
    for _, text in errors_of(ranks, [1, 2], since):
        assert "trainer rank 0" in text


def test_the_publishing_rank_stands_still_and_wakes(ranks: Squad) -> None:
    ranks[0].signal(signal.SIGSTOP)
    since = time.monotonic()
    ranks[1].tell("publish")
    ranks[2].tell("publish")
    errors_of(ranks, [1, 2], since)
    ranks[0].signal(signal.SIGCONT)
    assert [outcome["error"] for outcome in ranks.publish(2)] == [None] * 3
    keeps(ranks, 2)


def test_ranks_that_do_not_publish() -> None:
    """Nor are they in the way afterwards, whoever called how often."""
    with squad(2) as members:
        members.all("make", "many", "rows", deadline_seconds=DEADLINE)
        for rank in (0, 1):
            kind, text = members[rank].ask("publish")["error"]
            assert kind == "PeerTimeoutError"
            assert text == (
                f"trainer rank {1 - rank} did not publish within {DEADLINE:g} s: call publish on every trainer rank, "
                "or pass trainer_group=None to publish from one rank alone"
            )
        assert [outcome["error"] for outcome in members.publish(1)] == [None] * 2
        kind, text = members[0].ask("publish")["error"]
        assert (kind, f"trainer rank 1 did not publish within {DEADLINE:g} s" in text) == ("PeerTimeoutError", True)
        outcomes: list[dict[str, Any]] = members.publish(2)
        assert [outcome["error"] for outcome in outcomes] == [None] * 2
        keeps(members, 2)
