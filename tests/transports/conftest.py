"""Every transport test runs under a check that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from weightcast import registry
from weightcast.seams.transport import Receiver, Sender
from weightcast.testing.transport_kit import PATIENCE_SECONDS, RUN


@dataclasses.dataclass
class Ends:
    """Makes senders and receivers of one transport, and closes them."""

    scheme: str
    stack: contextlib.ExitStack

    def sender(self, *, deadline_seconds: float = PATIENCE_SECONDS, **options: Any) -> Sender:
        url = f"{self.scheme}://"
        sender: Sender = registry.transport(url).sender(url, run=RUN, deadline_seconds=deadline_seconds, **options)
        self.stack.callback(sender.close)
        return sender

    def receiver(
        self, sender: Sender, peer: str = "engine", *, run: str = RUN, deadline_seconds: float = PATIENCE_SECONDS
    ) -> Receiver:
        make = registry.transport(sender.address).receiver
        receiver: Receiver = make(sender.address, peer=peer, run=run, deadline_seconds=deadline_seconds)
        self.stack.callback(receiver.close)
        return receiver


@pytest.fixture(params=["memory", "ipc"])
def ends(request: pytest.FixtureRequest, leaves_nothing: None) -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        yield Ends(request.param, stack)


@pytest.fixture
def ipc_ends(leaves_nothing: None) -> Iterator[Ends]:
    with contextlib.ExitStack() as stack:
        yield Ends("ipc", stack)
