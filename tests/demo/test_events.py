"""Events cross a pipe; signals are noted, not thrown."""

from __future__ import annotations

import os
import selectors
import signal

import msgspec
import pytest
from demo import runs

from weightcast.demo.events import EventReader, EventWriter
from weightcast.demo.interrupts import NUMBERS, Interrupts


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_events_come_out_as_they_went_in(size: int) -> None:
    reader, writer = os.pipe()
    try:
        for event in runs.events():
            EventWriter(writer)(event)
        os.close(writer)
        found, events = [], EventReader()
        while data := os.read(reader, size):
            found += events.feed(data)
    finally:
        os.close(reader)
    assert found == runs.events()


def test_what_is_no_event_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        EventReader().feed(b"Loading weights: 100%\n")


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_is_noted_and_the_former_handlers_come_back(number: signal.Signals) -> None:
    former = {each: signal.getsignal(each) for each in NUMBERS}
    with Interrupts() as interrupts, selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ)
        assert interrupts.received is None
        assert not selector.select(0)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert selector.select(10)
        assert interrupts.received is number
    assert {each: signal.getsignal(each) for each in NUMBERS} == former
