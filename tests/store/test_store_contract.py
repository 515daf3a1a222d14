"""The transport contract over a store, which knows no peers: what is said of them there is said of their reads here."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcast.seams.transport import Receiver, Sender
from weightcast.testing.reading import Reader
from weightcast.testing.transport_contract import ENDED, RUN, SHORT_SECONDS, TransportContract, numbered, version
from weightcast.transports.store import StoreReceiver, StoreSender


class TestStore(TransportContract):
    options = ""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}/store{self.options}"

    def make_sender(self, *, deadline_seconds: float) -> Sender:
        return StoreSender(self.url, run=RUN, deadline_seconds=deadline_seconds)

    def make_receiver(self, sender: Sender, peer: str, *, deadline_seconds: float) -> Receiver:
        return StoreReceiver(sender.address, peer=peer, run=RUN, deadline_seconds=deadline_seconds)

    def test_a_receiver_that_goes_is_named_and_stops_nobody(self, staged: bool) -> None:
        """It can't be named."""
        sender, manifest = self.sender(), numbered(6)
        stays, goes = (self.receiver(sender, peer) for peer in ("stays", "goes"))
        left = Reader(goes, manifest, version(1), staged=staged, on_bucket=lambda bucket: goes.close())
        reader = Reader(stays, manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["stays", "goes"], staged=staged)
        for index in range(6):
            self._send(sender, manifest, 1, index)
        with pytest.raises(ENDED):
            left.result()
        assert len(reader.result()) == 6
        assert not sender.failures

    def test_a_receiver_that_stalls_is_dropped_and_never_sees_a_reused_slot(self) -> None:
        """It is not dropped: it reads its version to the end, while others go on."""
        sender, manifest = self.sender(SHORT_SECONDS), numbered(8)
        stalls, goes_on = (self.receiver(sender, peer) for peer in ("stalls", "goes on"))
        stalled = Reader(stalls, manifest, version(1), staged=False, pause_at=1)
        for number in (1, 2, 3):
            reader = Reader(goes_on, manifest, version(number), staged=False)
            sender.open(manifest, version(number), peers=["stalls", "goes on"], staged=False)
            for index in range(8):
                self._send(sender, manifest, number, index)
            assert len(reader.result()) == 8
            assert stalled.holds.wait(SHORT_SECONDS * 10)
        stalled.go_on.set()
        assert len(stalled.result()) == 8

    def test_a_peer_that_never_comes_is_named_at_the_deadline(self, staged: bool) -> None:
        """Nobody waits for it."""
        sender, manifest = self.sender(SHORT_SECONDS), numbered(3)
        reader = Reader(self.receiver(sender), manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["a", "nobody"], staged=staged)
        for index in range(3):
            self._send(sender, manifest, 1, index)
        assert len(reader.result()) == 3
        assert not sender.failures


class TestStoreWithThreads(TestStore):
    options = "?num_threads=3"
