"""Events cross a pipe; signals are noted, not raised."""

from __future__ import annotations

import os
import queue
import signal

import msgspec
import pytest
from demo import runs

from weightcast.demo import messages
from weightcast.demo.supervisor import SIGNALS, catch_signals


def test_events_come_out_as_they_went_in() -> None:
    for event in runs.events():
        assert messages.decoder.decode(msgspec.json.encode(event)) == event


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decoder.decode(b"Loading weights: 100%\n")


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_the_former_handlers_come_back(number: signal.Signals) -> None:
    former = {each: signal.getsignal(each) for each in SIGNALS}
    inbox = queue.SimpleQueue()
    with catch_signals(inbox) as received:
        assert not received
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert inbox.get(timeout=10) is number
        assert received[0] is number
    assert {each: signal.getsignal(each) for each in SIGNALS} == former
