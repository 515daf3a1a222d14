"""An engine that starts late, or comes and leaves: one trainer rank waits for it or finds it, the others follow."""

from __future__ import annotations

import json

import pytest

from gather.squad import squad

pytestmark = pytest.mark.cluster

DEADLINE = 6.0


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


def test_engines_that_come_and_leave_are_in_the_report_of_all_ranks() -> None:
    with squad(2) as ranks:
        ranks.all("make", "table", "rows", has_directory=True)
        ranks.all("fill", 1)
        steps = (
            ("publish", {}, {"engine-0"}),
            ("sync_all", {"joins": "engine-1"}, {"engine-0", "engine-1"}),
            ("publish", {"leaves": "engine-0"}, {"engine-1"}),
        )
        for call, change, expected in steps:
            ranks.all("change_directory", **change)
            outcomes = ranks.all(call)
            assert [outcome["error"] for outcome in outcomes] == [None, None]
            reports = [json.loads(outcome["report"]) for outcome in outcomes]
            assert reports[0] == reports[1]
            assert reports[0]["engines"].keys() == expected
            assert ranks[0].ask("check", 1) == []
