"""Hypothesis: whatever happens in a series of updates, ipc ends each as memory, the reference, does."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weightcast.errors import WeightcastError
from weightcast.host.deadline import Deadline
from weightcast.testing.transport_kit import (
    PATIENCE_SECONDS,
    Background,
    address_of,
    make_receiver,
    make_sender,
    numbered,
    read_all,
    send,
    version,
)

PEERS = ("a", "b")


@dataclasses.dataclass(frozen=True)
class Step:
    """One update: after `num_sent` buckets it is whole, aborted, or one peer ends or disconnects, and it goes on."""

    num_buckets: int
    num_sent: int
    staged: bool
    event: str


STEPS = st.lists(
    st.builds(
        Step,
        num_buckets=st.integers(0, 5),
        num_sent=st.integers(0, 5),
        staged=st.booleans(),
        event=st.sampled_from(["none", "none", "abort", "end", "disconnect", "reconnect"]),
    ),
    min_size=1,
    max_size=6,
)


class Run:
    """Plays steps over one transport and notes how each ended for the sender and for each peer."""

    def __init__(self, scheme: str, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._url = f"{scheme}://"
        self._sender = make_sender(stack, self._url)
        self._receivers = {peer: self._connect(peer) for peer in PEERS}
        self._number = 0

    def _connect(self, peer: str) -> Any:
        return make_receiver(self._stack, address_of(self._sender, self._url), peer)

    def play(self, step: Step) -> Any:
        self._number += 1
        manifest, number = numbered(step.num_buckets, 512), self._number
        readers = {}
        for peer, receiver in self._receivers.items():
            with contextlib.suppress(WeightcastError):
                receiver.open(manifest, version(number), staged=step.staged)
                readers[peer] = receiver
        self._sender.open(manifest, version(number), peers=PEERS, staged=step.staged)
        reading = {
            # What is ended from outside may be rewritten under its reader's eyes.
            peer: Background(list, r) if peer == "a" else Background(read_all, r, manifest, number)
            for peer, r in readers.items()
        }
        early = _send_with_event(self._sender, step, manifest, number, lambda: self._happen(step.event, readers))
        outcomes = {peer: _outcome(reader) for peer, reader in reading.items()}
        for peer, receiver in readers.items():
            if self._receivers[peer] is receiver:
                receiver.end()
        failures = {peer: type(error).__name__ for peer, error in self._sender.failures.items()}
        return outcomes, failures, early

    def _happen(self, event: str, readers: dict[str, Any]) -> None:
        if event == "abort":
            self._sender.abort("by chance")
        elif event == "end" and "a" in readers:
            readers["a"].end()
        elif event == "disconnect":
            self._receivers["a"].close()
        elif event == "reconnect":
            self._receivers["a"].close()
            self._receivers["a"] = self._connect("a")
        if event != "none" and "a" in readers:
            polls = Deadline(PATIENCE_SECONDS).polls(0.0001, 0.01)
            assert event == "abort" or any("a" in self._sender.failures for _ in polls)


def _send_with_event(sender: Any, step: Step, manifest: Any, number: int, happen: Any) -> bool:
    """Send all buckets, the event after `num_sent` of them; whether the update ended before it was whole."""
    for index in range(step.num_buckets):
        if index == step.num_sent:
            happen()
            if step.event == "abort":
                return True
        send(sender, manifest, number, index)
    return False


def _outcome(reader: Background) -> str:
    try:
        return f"whole {len(reader.result())}"
    except WeightcastError as exc:
        return type(exc).__name__


@given(steps=STEPS)
def test_every_series_of_updates_ends_alike(steps: list[Step]) -> None:
    ends = []
    for scheme in ("memory", "ipc"):
        with contextlib.ExitStack() as stack:
            run = Run(scheme, stack)
            ends.append([run.play(step) for step in steps])
    assert ends[0] == ends[1]
