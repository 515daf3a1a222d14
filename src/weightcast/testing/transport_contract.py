"""What every transport must do. Subclass `TransportContract` in a test module and fill in two methods."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from weightcast.errors import (
    ClosedError,
    IntegrityError,
    PeerDiedError,
    PeerTimeoutError,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.format.bucket import slot_size_bytes, write_trailer
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.plan import plan
from weightcast.seams.transport import Receiver, Sender
from weightcast.testing.faults import Corrupt, Drop, Duplicate, Fault, FaultyReceiver, FaultySender, Reorder
from weightcast.testing.leftovers import nothing_left
from weightcast.testing.payloads import PAYLOADS, Payload
from weightcast.testing.reading import PATIENCE_SECONDS, Reader, send_all, unpack

RUN = "5a" * 16
SHORT_SECONDS = 0.5
ENDED = (PeerDiedError, PeerTimeoutError, UpdateAbortedError, ClosedError)
"""How an iteration may end that must not end well."""


def version(number: int) -> WeightVersion:
    return WeightVersion(RUN, number)


def numbered(num_buckets: int) -> Manifest:
    """Buckets of 4 KiB that hold one tensor each."""
    return plan([TensorSpec(f"t{i}", "uint8", (4096,)) for i in range(num_buckets)], 4096)


class TransportContract:
    """Runs over the payload table. All ends are made in this process, each receiver is read in a thread of its own."""

    def make_sender(self, *, deadline_seconds: float) -> Sender:
        """A sender of run RUN."""
        raise NotImplementedError(f"{type(self).__name__} must define `make_sender`")

    def make_receiver(self, sender: Sender, peer: str, *, deadline_seconds: float) -> Receiver:
        raise NotImplementedError(f"{type(self).__name__} must define `make_receiver`")

    @pytest.fixture(autouse=True)
    def _close_what_was_made(self) -> Iterator[None]:
        with nothing_left(), contextlib.ExitStack() as stack:
            self._stack = stack
            yield
            del self._stack

    @pytest.fixture(params=[True, False], ids=["staged", "streaming"])
    def staged(self, request: pytest.FixtureRequest) -> bool:
        return bool(request.param)

    @pytest.fixture(params=PAYLOADS, ids=str)
    def payload(self, request: pytest.FixtureRequest) -> Payload:
        payload: Payload = request.param
        return payload

    def sender(self, deadline_seconds: float = PATIENCE_SECONDS) -> Sender:
        sender = self.make_sender(deadline_seconds=deadline_seconds)
        self._stack.callback(sender.close)
        return sender

    def receiver(self, sender: Sender, peer: str = "a", deadline_seconds: float = PATIENCE_SECONDS) -> Receiver:
        receiver = self.make_receiver(sender, peer, deadline_seconds=deadline_seconds)
        self._stack.callback(receiver.close)
        return receiver

    # --- bytes ---

    def test_every_byte_reaches_every_receiver(self, payload: Payload, staged: bool) -> None:
        sender, manifest = self.sender(), payload.manifest()
        receivers = [self.receiver(sender, peer) for peer in "ab"]
        for number in (1, 2):
            readers = [Reader(r, manifest, version(number), staged=staged) for r in receivers]
            sender.open(manifest, version(number), peers=["a", "b"], staged=staged)
            send_all(sender, payload, manifest, version(number))
            for reader in readers:
                assert unpack(manifest, reader.result()) == payload.expected()
            for receiver in receivers:
                receiver.end()
            assert not sender.failures

    def test_manifests_may_follow_one_another(self, staged: bool) -> None:
        sender = self.sender()
        receiver = self.receiver(sender)
        for number, payload in enumerate(PAYLOADS):
            manifest = payload.manifest()
            reader = Reader(receiver, manifest, version(number), staged=staged)
            sender.open(manifest, version(number), peers=["a"], staged=staged)
            send_all(sender, payload, manifest, version(number))
            assert unpack(manifest, reader.result()) == payload.expected()
            receiver.end()

    def test_a_receiver_may_come_late(self, staged: bool) -> None:
        """Neither `Receiver.open` nor `Sender.open` needs the other to have been there first."""
        payload, sender = PAYLOADS[0], self.sender()
        manifest = payload.manifest()
        opening = threading.Thread(
            target=sender.open, args=(manifest, version(1)), kwargs={"peers": ["a"], "staged": staged}
        )
        opening.start()
        reader = Reader(self.receiver(sender), manifest, version(1), staged=staged)
        opening.join(PATIENCE_SECONDS)
        assert not opening.is_alive()
        send_all(sender, payload, manifest, version(1))
        assert unpack(manifest, reader.result()) == payload.expected()

    def test_staged_buckets_stay_as_they_were_until_the_end(self) -> None:
        payload = next(p for p in PAYLOADS if p.name == "larger_than_bucket")
        sender, manifest = self.sender(), payload.manifest()
        receiver = self.receiver(sender)
        buffers: list[torch.Tensor] = []
        reader = Reader(receiver, manifest, version(1), staged=True, on_bucket=lambda b: buffers.append(b.buffer))
        sender.open(manifest, version(1), peers=["a"], staged=True)
        send_all(sender, payload, manifest, version(1))
        reader.result()
        later = [bytes(b[:size].numpy()) for b, size in zip(buffers, manifest.buckets, strict=True)]
        assert unpack(manifest, later) == payload.expected()
        buffers.clear()
        receiver.end()

    # --- memory ---

    def test_streaming_memory_is_a_few_buckets(self) -> None:
        sender, manifest = self.sender(), numbered(12)
        reader = Reader(self.receiver(sender), manifest, version(1), staged=False)
        sender.open(manifest, version(1), peers=["a"], staged=False)
        places = {self._send(sender, manifest, 1, index).data_ptr() for index in range(12)}
        reader.result()
        assert len(places) <= 4

    def test_the_same_index_is_the_same_tensor_in_every_update(self, staged: bool) -> None:
        """So that thousands of views are made once, not for every update."""
        sender, manifest = self.sender(), numbered(5)
        receiver = self.receiver(sender)
        found: list[list[int]] = []
        buffers: list[torch.Tensor] = []
        for number in (1, 2, 3):
            reader = Reader(receiver, manifest, version(number), staged=staged)
            sender.open(manifest, version(number), peers=["a"], staged=staged)
            buffers += [self._send(sender, manifest, number, index) for index in range(5)]
            found.append([id(b) for b in buffers[-5:]])
            reader.result()
            receiver.end()
        assert found[1] == found[2] == found[0]
        assert all(b.is_contiguous() and b.dtype == torch.uint8 and b.ndim == 1 for b in buffers)
        assert all(b.numel() <= slot_size_bytes(manifest) for b in buffers)

    # --- failures ---

    def test_an_abort_reaches_everybody_and_the_next_update_is_whole(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(6)
        receivers = [self.receiver(sender, peer) for peer in "ab"]
        readers = [Reader(r, manifest, version(1), staged=staged) for r in receivers]
        sender.open(manifest, version(1), peers=["a", "b"], staged=staged)
        self._send(sender, manifest, 1, 0)
        sender.abort("the trainer changed its mind")
        sender.abort("again")
        for reader in readers:
            with pytest.raises(UpdateAbortedError, match="changed its mind"):
                reader.result()
        for receiver in receivers:
            receiver.end()
        self._expect_whole(sender, receivers, manifest, 2, staged)

    def test_a_receiver_that_goes_is_named_and_stops_nobody(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(6)
        stays, goes = (self.receiver(sender, peer) for peer in ("stays", "goes"))
        left = Reader(goes, manifest, version(1), staged=staged, on_bucket=lambda bucket: goes.close())
        reader = Reader(stays, manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["stays", "goes"], staged=staged)
        for index in range(6):
            self._send(sender, manifest, 1, index)
            if index == 0:
                with pytest.raises(ENDED):
                    left.result()
        assert len(reader.result()) == 6
        assert set(sender.failures) == {"goes"}

    def test_a_receiver_that_stalls_is_dropped_and_never_sees_a_reused_slot(self) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered(8)
        stalls, goes_on = (self.receiver(sender, peer) for peer in ("stalls", "goes on"))
        stalled = Reader(stalls, manifest, version(1), staged=False, pause_at=1)
        reader = Reader(goes_on, manifest, version(1), staged=False)
        sender.open(manifest, version(1), peers=["stalls", "goes on"], staged=False)
        for index in range(8):
            self._send(sender, manifest, 1, index)
        assert len(reader.result()) == 8
        assert isinstance(sender.failures["stalls"], PeerTimeoutError)
        stalled.go_on.set()
        # Raising `checked`'s IntegrityError here would mean that the slot under its hands was written to.
        with pytest.raises(ENDED):
            stalled.result()

    def test_a_peer_that_never_comes_is_named_at_the_deadline(self, staged: bool) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered(3)
        reader = Reader(self.receiver(sender), manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["a", "nobody"], staged=staged)
        for index in range(3):
            self._send(sender, manifest, 1, index)
        assert len(reader.result()) == 3
        assert set(sender.failures) == {"nobody"}

    @pytest.mark.parametrize("num_sent", [0, 1])
    def test_the_senders_end_is_the_receivers_error(self, num_sent: int, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(3)
        reader = Reader(self.receiver(sender), manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["a"], staged=staged)
        for index in range(num_sent):
            self._send(sender, manifest, 1, index)
        sender.close()
        with pytest.raises((PeerDiedError, UpdateAbortedError)):
            reader.result()

    def test_a_silent_sender_is_given_up(self) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered(3)
        reader = Reader(self.receiver(sender, deadline_seconds=SHORT_SECONDS), manifest, version(1), staged=True)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        with pytest.raises(PeerTimeoutError):
            reader.result()

    @pytest.mark.parametrize("how", ["end", "close"])
    def test_another_thread_wakes_an_iteration(self, how: str) -> None:
        sender, manifest = self.sender(), numbered(3)
        receiver = self.receiver(sender)
        reader = Reader(receiver, manifest, version(1), staged=True)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        assert reader.is_waiting(0.05)
        getattr(receiver, how)()
        with pytest.raises((ClosedError, UpdateAbortedError)):
            reader.result()

    def test_another_version_is_not_taken_for_the_one_that_was_offered(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(3)
        receiver = self.receiver(sender, deadline_seconds=SHORT_SECONDS)
        reader = Reader(receiver, manifest, version(1), staged=staged)
        sender.open(manifest, version(2), peers=["a"], staged=staged)
        self._send(sender, manifest, 2, 0)
        with pytest.raises(WeightcastError):
            reader.result()

    @pytest.mark.parametrize("fault", [Corrupt(2, byte=77), Corrupt(2, byte=4100), Drop(2), Duplicate(1)], ids=repr)
    def test_what_a_sender_damages_is_noticed(self, fault: Corrupt | Drop | Duplicate, staged: bool) -> None:
        manifest = numbered(5)
        sender = FaultySender(self.sender())
        receiver = self.receiver(sender.inner)
        self._expect_whole(sender, [receiver], manifest, 1, staged)
        sender.fault = fault
        reader = Reader(receiver, manifest, version(2), staged=staged)
        sender.open(manifest, version(2), peers=["a"], staged=staged)
        with contextlib.suppress(WeightcastError):
            for index in range(5):
                self._send(sender, manifest, 2, index)
        with pytest.raises(IntegrityError):
            reader.result()
        receiver.end()
        self._expect_whole(sender, [receiver], manifest, 3, staged)

    @pytest.mark.parametrize("fault", [Corrupt(2, byte=77), Drop(2), Drop(4), Duplicate(2), Reorder(2)], ids=repr)
    def test_what_happens_to_a_bucket_on_its_way_is_noticed(self, fault: Fault, staged: bool) -> None:
        manifest, sender = numbered(5), self.sender()
        receiver = FaultyReceiver(self.receiver(sender), fault)
        reader = Reader(receiver, manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["a"], staged=staged)
        with contextlib.suppress(WeightcastError):
            for index in range(5):
                self._send(sender, manifest, 1, index)
        with pytest.raises(IntegrityError):
            reader.result()
        receiver.end()
        self._expect_whole(sender, [receiver], manifest, 2, staged)

    # --- the end ---

    def test_closing_is_idempotent_and_final(self) -> None:
        sender, manifest = self.sender(), numbered(1)
        receiver = self.receiver(sender)
        for end in (receiver.end, receiver.end, receiver.close, receiver.close, sender.close, sender.close):
            end()
        with pytest.raises(ClosedError):
            sender.open(manifest, version(1), peers=[], staged=True)
        with pytest.raises(ClosedError):
            next(iter(receiver))
        sender.abort("nothing")

    def test_a_sender_without_peers_sends_to_nobody(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(3)
        sender.open(manifest, version(1), peers=[], staged=staged)
        for index in range(3):
            self._send(sender, manifest, 1, index)
        assert not sender.failures

    def _send(self, sender: Sender, manifest: Manifest, number: int, index: int) -> torch.Tensor:
        """Send up to and with bucket `index`, again if the sender asks for earlier ones."""
        position = index
        while position <= index:
            buffer, size = sender.buffer(position), manifest.buckets[position]
            buffer[:size].fill_((number * 37 + position * 11 + 1) % 251)
            write_trailer(buffer, size, version(number), position, manifest.digest_kind)
            position = sender.send(position)
        return buffer

    def _expect_whole(
        self, sender: Sender, receivers: list[Receiver], manifest: Manifest, number: int, staged: bool
    ) -> None:
        readers = [Reader(r, manifest, version(number), staged=staged) for r in receivers]
        sender.open(manifest, version(number), peers=["a", "b"][: len(receivers)], staged=staged)
        for index in range(len(manifest.buckets)):
            self._send(sender, manifest, number, index)
        for reader in readers:
            reader.result()
        for receiver in receivers:
            receiver.end()
        assert not sender.failures
