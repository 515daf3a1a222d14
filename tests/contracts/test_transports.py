"""The transport contract over every transport there is."""

from __future__ import annotations

from weightcast import registry
from weightcast.seams.transport import Receiver, Sender
from weightcast.testing import TransportContract
from weightcast.testing.transport_contract import RUN


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
