"""An engine that starts late: one trainer rank waits for it, and the others wait on past their own deadline."""

from __future__ import annotations

import pytest

from gather.squad import squad

pytestmark = pytest.mark.cluster

DEADLINE = 2.0


def test_ranks_wait_with_the_one_that_waits_for_an_engine() -> None:
    with squad(2) as ranks:
        ranks.all("make", "table", "rows", deadline_seconds=DEADLINE)
        ranks.all("fill", 1)
        ranks[0].ask("be_absent", 1.5 * DEADLINE)
        for rank in range(2):
            ranks[rank].tell("publish", wait_ready_seconds=60.0)
        assert [ranks[rank].hear()["error"] for rank in range(2)] == [None, None]
        assert ranks[0].ask("check", 1) == []


def test_an_engine_that_does_not_come_is_the_same_error_on_all_ranks() -> None:
    with squad(2) as ranks:
        ranks.all("make", "table", "rows", deadline_seconds=DEADLINE)
        ranks[0].ask("be_absent", 3600.0)
        for rank in range(2):
            ranks[rank].tell("publish", wait_ready_seconds=0.1)
        for rank in range(2):
            kind, text = ranks[rank].hear()["error"]
            assert (kind, "nothing listens there yet" in text) == ("PublishError", True)
