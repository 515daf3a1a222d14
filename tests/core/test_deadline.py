"""`Deadline` and `on_failure`: what a wait may take, and what is closed if something fails."""

from __future__ import annotations

import pytest

from weightcast.host.closing import on_failure
from weightcast.host.deadline import Deadline, in_background


def test_a_deadline_that_has_passed_has_nothing_left() -> None:
    deadline = Deadline(0.0)
    assert deadline.has_passed
    assert deadline.remaining_seconds == 0.0
    assert not Deadline(1000.0).has_passed
    assert 0.0 < Deadline(1000.0).remaining_seconds <= 1000.0


def test_pauses_between_polls_double_up_to_the_longest_and_never_outlast_the_deadline() -> None:
    pauses: list[float] = []
    deadline = Deadline(1000.0)
    for _ in deadline.polls(0.1, 0.4, pauses.append):
        if len(pauses) == 4:
            break
    assert pauses == [0.1, 0.2, 0.4, 0.4]
    assert len(list(Deadline(0.0).polls(0.1, 0.4))) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_is_cleaned_up_and_raises_its_own_error(error: type[BaseException]) -> None:
    closed: list[str] = []
    with pytest.raises(error, match="the cause"), on_failure(lambda: closed.append("it")):
        raise error("the cause")
    assert closed == ["it"]


def test_what_succeeds_is_not_cleaned_up() -> None:
    closed: list[str] = []
    with on_failure(lambda: closed.append("it")):
        pass
    assert not closed


def test_a_call_in_the_background_gives_its_result_or_its_error() -> None:
    assert in_background(lambda: 7, name="test").result(10.0) == 7
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 // 0, name="test").result(10.0)
