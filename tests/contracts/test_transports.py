"""The transport contract over every transport there is."""

from __future__ import annotations

import pytest

from weightcast import registry
from weightcast.interfaces import Receiver, Sender
from weightcast.process_group import serve_store
from weightcast.testing import TransportContract
from weightcast.testing.transport_contract import RUN


@pytest.fixture(autouse=True, scope="module")
def _libuv_is_up() -> None:
    """The first loop of torch's store opens a pipe that stays until the process ends."""
    serve_store("127.0.0.1", 10.0)


class TestMemory(TransportContract):
    scheme = "memory"

    def make_sender(self, *, deadline_seconds: float) -> Sender:
        url = f"{self.scheme}://"
        sender: Sender = registry.transport(url).sender(url, run=RUN, deadline_seconds=deadline_seconds)
        return sender

    def make_receiver(self, sender: Sender, peer: str, *, deadline_seconds: float) -> Receiver:
        make = registry.transport(sender.address).receiver
        receiver: Receiver = make(sender.address, peer=peer, run=RUN, deadline_seconds=deadline_seconds)
        return receiver


class TestIpc(TestMemory):
    scheme = "ipc"


class TestGloo(TestMemory):
    scheme = "gloo"
