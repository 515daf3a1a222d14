"""The contract of transports that keep versions over a store, and what a reader there is in place of a peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightcast.testing import VersionedTransportContract
from weightcast.testing.transport_kit import SHORT_SECONDS, Reader, numbered, send_all, version
from weightcast.testing.versioned_transport_contract import ENDED


class TestStore(VersionedTransportContract):
    options = ""

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.url = f"file://{tmp_path}/store{self.options}"

    def test_a_reader_that_goes_is_not_named_and_stops_no_other(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(6)
        stays, goes = (self.receiver(sender, peer) for peer in ("stays", "goes"))
        left = Reader(goes, manifest, version(1), staged=staged, on_bucket=lambda bucket: goes.close())
        reader = Reader(stays, manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["stays", "goes"], staged=staged)
        send_all(sender, manifest, 1)
        with pytest.raises(ENDED):
            left.result()
        assert len(reader.result()) == 6
        assert not sender.failures

    def test_a_reader_that_stalls_reads_its_version_to_the_end_while_others_go_on(self) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered(8)
        stalls, goes_on = (self.receiver(sender, peer) for peer in ("stalls", "goes on"))
        stalled = Reader(stalls, manifest, version(1), staged=False, pause_at=1)
        for number in (1, 2, 3):
            reader = Reader(goes_on, manifest, version(number), staged=False)
            sender.open(manifest, version(number), peers=["stalls", "goes on"], staged=False)
            send_all(sender, manifest, number)
            assert len(reader.result()) == 8
            assert stalled.has_paused.wait(SHORT_SECONDS * 10)
        stalled.go_on.set()
        assert len(stalled.result()) == 8

    def test_nobody_waits_for_a_peer_that_never_comes(self, staged: bool) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered(3)
        reader = Reader(self.receiver(sender), manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["a", "nobody"], staged=staged)
        send_all(sender, manifest, 1)
        assert len(reader.result()) == 3
        assert not sender.failures


class TestStoreWithThreads(TestStore):
    options = "?num_threads=3"
