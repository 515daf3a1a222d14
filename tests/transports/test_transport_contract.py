"""The public contract over every transport but the store, and what only those of one host do (slots, addresses)."""

from __future__ import annotations

import pytest

from weightcast import registry
from weightcast.errors import (
    InsufficientMemoryError,
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    StaleVersionError,
    UpdateAbortedError,
)
from weightcast.format.bucket import HEADER_BYTES
from weightcast.format.manifest import Manifest
from weightcast.host import memory as host_memory
from weightcast.seams.transport import Bucket, Receiver
from weightcast.testing import TransportContract
from weightcast.testing.transport_kit import (
    OTHER_RUN,
    SHORT_SECONDS,
    Background,
    Reader,
    address_of,
    check,
    make_receiver,
    make_sender,
    numbered,
    read_all,
    send,
    send_all,
    version,
)


class TestGloo(TransportContract):
    url = "gloo://127.0.0.1:0"


class SameHostContract(TransportContract):
    reads_in_place = True

    def fail_to_begin(self, receiver: Receiver, manifest: Manifest, number: int, staged: bool) -> Bucket:
        """A lost receiver sees that already when it opens the update."""
        receiver.open(manifest, version(number), staged=staged)
        raise AssertionError("a lost receiver has opened an update")

    def test_streaming_reuses_its_slots(self) -> None:
        sender, manifest = self.sender(), numbered(6)
        reader = Reader(self.receiver(sender), manifest, version(1), staged=False)
        sender.open(manifest, version(1), peers=["a"], staged=False)
        places = {send(sender, manifest, 1, index).header.data_ptr() for index in range(6)}
        reader.result()
        assert len(places) == 2

    def test_a_slot_is_rewritten_only_after_its_release(self) -> None:
        sender, manifest = self.sender(), numbered(3)
        receiver = self.receiver(sender)
        receiver.open(manifest, version(1), staged=False)
        sender.open(manifest, version(1), peers=["a"], staged=False)
        buckets = iter(receiver)
        send(sender, manifest, 1, 0)
        send(sender, manifest, 1, 1)
        first = next(buckets)
        third = Background(send, sender, manifest, 1, 2)
        assert not third.is_done_within(SHORT_SECONDS)
        check(first, manifest, 1)
        next(buckets)
        third.result()
        check(next(buckets), manifest, 1)
        assert not sender.failures

    def test_every_buffer_is_a_whole_slot(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(2)
        sender.open(manifest, version(1), peers=[], staged=staged)
        buffer = sender.buffer(0)
        assert (buffer.header.numel(), buffer.payload.numel()) == (HEADER_BYTES, manifest.max_bucket_bytes)

    def test_a_stalled_receiver_sees_its_end_at_once(self) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered(6)
        receiver = self.receiver(sender)
        receiver.open(manifest, version(1), staged=False)
        sender.open(manifest, version(1), peers=["a"], staged=False)
        send(sender, manifest, 1, 0)
        buckets = iter(receiver)
        held = next(buckets)
        send_all(sender, manifest, 1, start=1)
        check(held, manifest, 1)
        with pytest.raises(PeerDiedError):
            next(buckets)
        with pytest.raises(PeerDiedError):
            receiver.open(manifest, version(2), staged=False)

    @pytest.mark.parametrize("num_sent", [1, 5])
    def test_the_senders_end_comes_before_further_buckets(self, num_sent: int) -> None:
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender)
        receiver.open(manifest, version(1), staged=True)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        buckets = iter(receiver)
        for index in range(num_sent):
            send(sender, manifest, 1, index)
        held = next(buckets)
        sender.close()
        with pytest.raises((PeerDiedError, UpdateAbortedError)):
            next(buckets)
        check(held, manifest, 1)
        with pytest.raises(PeerDiedError):
            receiver.open(manifest, version(2), staged=True)

    @pytest.mark.parametrize("has_begun", [False, True])
    def test_a_silent_sender_is_given_up_however_patient_it_is(self, has_begun: bool) -> None:
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender, deadline_seconds=SHORT_SECONDS)
        receiver.open(manifest, version(1), staged=True)
        if has_begun:
            sender.open(manifest, version(1), peers=["a"], staged=True)
        with pytest.raises(PeerTimeoutError):
            read_all(receiver, manifest, 1)

    def test_an_update_that_the_receiver_never_opened_does_not_disturb_the_next(self) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered()
        receiver = self.receiver(sender)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        assert isinstance(sender.failures["a"], PeerTimeoutError)
        send_all(sender, manifest, 1)
        self.update(sender, {"a": receiver}, manifest, 2, staged=True)

    def test_too_little_memory_is_refused_before_any_byte_moves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender)
        receiver.open(manifest, version(1), staged=True)
        monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
        with pytest.raises(InsufficientMemoryError, match="host or container has 1000 left"):
            sender.open(manifest, version(1), peers=["a"], staged=True)
        with pytest.raises(UpdateAbortedError):
            sender.buffer(0)
        monkeypatch.undo()
        sender.open(manifest, version(1), peers=["a"], staged=True)
        send_all(sender, manifest, 1)
        read_all(receiver, manifest, 1)

    @pytest.mark.parametrize(("num_buckets", "opened_staged"), [(5, False), (4, True)])
    def test_an_update_unlike_its_offer_says_so(self, num_buckets: int, opened_staged: bool) -> None:
        sender, manifest = self.sender(), numbered(5)
        receiver = self.receiver(sender)
        receiver.open(numbered(num_buckets), version(1), staged=opened_staged)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        with pytest.raises(ManifestError, match="but has offered"):
            read_all(receiver, manifest, 1)

    def test_wrong_use_says_what_is_wrong(self) -> None:
        sender, manifest = self.sender(), numbered(2)
        with pytest.raises(UpdateAbortedError, match="open"):
            sender.buffer(0)
        sender.open(manifest, version(1), peers=[], staged=True)
        with pytest.raises(ValueError, match="expected bucket 0"):
            sender.buffer(1)
        send_all(sender, manifest, 1)
        with pytest.raises(ValueError, match="no bucket 2"):
            sender.buffer(2)
        with pytest.raises((StaleVersionError, PeerDiedError), match="run"):
            self.receiver(sender, run=OTHER_RUN)
        with pytest.raises(UpdateAbortedError, match="open"):
            next(iter(self.receiver(sender)))

    def test_addresses(self) -> None:
        sender = self.sender()
        address = address_of(sender, self.url)
        with pytest.raises(PeerDiedError, match="no publisher answers"):
            make_receiver(self.stack, address._replace(link=f"{address.link}0"), "a")
        with pytest.raises(PeerDiedError, match="another run"):
            make_receiver(self.stack, address._replace(secret="0" * 64), "a")
        with pytest.raises(ValueError, match="pass"):
            make_sender(self.stack, f"{self.url}name")

    def test_a_receiver_without_a_link_is_refused(self) -> None:
        """As of a follower, which no publisher has connected."""
        make = registry.transport(self.url).receiver
        with pytest.raises(ValueError, match="needs the link"):
            make(self.url, run="", peer="a", link=None, device=self.device, deadline_seconds=SHORT_SECONDS)


class TestMemory(SameHostContract):
    url = "memory://"


class TestIpc(SameHostContract):
    url = "ipc://"
