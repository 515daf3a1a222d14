"""Tests for every transport, including those that keep versions and don't know their readers.

Subclass a contract in a test module, and set its `url`: `TransportContract`, which adds tests of peers, or for a
transport that keeps versions `VersionedTransportContract`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import pytest
import torch

from weightcast.errors import (
    ClosedError,
    IntegrityError,
    PeerDiedError,
    PeerTimeoutError,
    StaleVersionError,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.format.bucket import HEADER_BYTES, Layout
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Bucket, Receiver, Sender
from weightcast.testing.faults import Corrupt, Drop, Duplicate, Fault, FaultyReceiver, FaultySender, Reorder
from weightcast.testing.leftovers import nothing_left
from weightcast.testing.payloads import PAYLOADS, OverPayloads, Payload
from weightcast.testing.transport_kit import (
    OTHER_RUN,
    SHORT_SECONDS,
    Background,
    Reader,
    TransportEnds,
    check,
    numbered,
    pack_and_send,
    read_all,
    send,
    send_all,
    unpack,
    version,
)
from weightcast.trainer.packer import Packer, tiling

ENDED = (PeerDiedError, PeerTimeoutError, UpdateAbortedError, ClosedError)
"""Errors with which an iteration that can't complete may end."""


class VersionedTransportContract(OverPayloads, TransportEnds):
    """Tests that make all ends in this process, by the registered transport of `url`, and leave nothing behind."""

    reads_in_place = False
    """True if staged buckets are the sender's memory, so that its next update waits for receivers to end theirs."""
    number_after_an_abort = 1
    """Number of the version that is sent after an abort of version 1."""

    @pytest.fixture(autouse=True)
    def _close_what_was_made(self) -> Iterator[None]:
        with nothing_left(), contextlib.ExitStack() as self.stack:
            yield

    @pytest.fixture(params=[True, False], ids=["staged", "streaming"])
    def staged(self, request: pytest.FixtureRequest) -> bool:
        """Both install modes: True for staged, False for streaming."""
        return bool(request.param)

    def begin(
        self, sender: Sender, receivers: Mapping[str, Receiver], manifest: Manifest, number: int, staged: bool
    ) -> list[Reader]:
        """Open an update at both ends; every receiver, by peer, reads it in a thread."""
        readers = [Reader(r, manifest, version(number), staged=staged) for r in receivers.values()]
        sender.open(manifest, version(number), peers=list(receivers), staged=staged)
        return readers

    def update(
        self,
        sender: Sender,
        receivers: Mapping[str, Receiver],
        manifest: Manifest,
        number: int,
        staged: bool,
        payload: Payload | None = None,
    ) -> list[list[bytes]]:
        """Send a version of a payload or of numbered buckets to every receiver; return the buckets' bytes."""
        readers = self.begin(sender, receivers, manifest, number, staged)
        if payload is None:
            send_all(sender, manifest, number)
        else:
            packer = Packer(Layout(manifest), tiling(manifest.tensors, payload.regions()))
            for index in range(len(manifest.buckets)):
                pack_and_send(sender, packer, manifest, version(number), index)
        found = [reader.result() for reader in readers]
        for receiver in receivers.values():
            receiver.end()
        assert not sender.failures
        return found

    # --- bytes ---

    def test_every_byte_reaches_every_receiver(self, payload: Payload, staged: bool) -> None:
        sender, manifest = self.sender(), payload.manifest()
        receivers = {peer: self.receiver(sender, peer) for peer in "ab"}
        for number in (1, 2):
            for found in self.update(sender, receivers, manifest, number, staged, payload):
                assert unpack(manifest, found) == payload.expected()

    def test_manifests_and_installs_may_follow_one_another(self) -> None:
        """Buckets grow and shrink, and their number is 0 among others."""
        sender = self.sender()
        receivers = {"a": self.receiver(sender)}
        for number, payload in enumerate(PAYLOADS):
            manifest = payload.manifest()
            for repetition, staged in enumerate([False, True]):
                [found] = self.update(sender, receivers, manifest, 2 * number + repetition, staged, payload)
                assert unpack(manifest, found) == payload.expected()

    def test_another_manifest_of_the_same_size_may_follow(self, staged: bool) -> None:
        sender = self.sender()
        receivers = {"a": self.receiver(sender)}
        for number, num_buckets in enumerate([4, 2, 4]):
            self.update(sender, receivers, numbered(num_buckets, 8192 // num_buckets), number, staged)

    @pytest.mark.parametrize("num_receivers", [0, 1, 3])
    def test_any_number_of_receivers(self, num_receivers: int, staged: bool) -> None:
        sender = self.sender()
        receivers = {peer: self.receiver(sender, peer) for peer in "abc"[:num_receivers]}
        for number in (3, 4, 9):
            self.update(sender, receivers, numbered(), number, staged)

    def test_a_sender_that_was_prepared_sends_any_update(self, staged: bool) -> None:
        """The update that it was prepared for, larger ones, and updates of the other install mode."""
        sender = self.sender()
        receivers = {"a": self.receiver(sender)}
        sender.prepare(numbered(3), staged=staged)
        for number, (num_buckets, is_staged) in enumerate([(3, staged), (5, staged), (5, not staged)]):
            self.update(sender, receivers, numbered(num_buckets), number, is_staged)
            sender.prepare(numbered(9), staged=staged)
        assert sender.memory_seconds >= 0

    def test_a_receiver_may_come_late(self, staged: bool) -> None:
        """Neither `Receiver.open` nor `Sender.open` needs the other to have been there first."""
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender)
        opening = Background(lambda: sender.open(manifest, version(1), peers=["a"], staged=staged))
        reader = Reader(receiver, manifest, version(1), staged=staged)
        opening.result()
        send_all(sender, manifest, 1)
        reader.result()
        assert not sender.failures

    # --- memory ---

    def test_buffers_are_large_enough_and_flat(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(2)
        sender.open(manifest, version(1), peers=[], staged=staged)
        for index in range(2):
            buffer = send(sender, manifest, 1, index)
            for part in (buffer.header, buffer.payload):
                assert (part.dtype, part.ndim, part.is_contiguous()) == (torch.uint8, 1, True)
                assert part.data_ptr() % 64 == 0
            assert buffer.header.numel() == HEADER_BYTES
            assert manifest.buckets[index] <= buffer.payload.numel() <= manifest.max_bucket_bytes

    def test_streaming_memory_is_a_few_buckets(self) -> None:
        sender, manifest = self.sender(), numbered(12)
        [reader] = self.begin(sender, {"a": self.receiver(sender)}, manifest, 1, staged=False)
        places = {send(sender, manifest, 1, index).header.data_ptr() for index in range(12)}
        reader.result()
        assert len(places) <= 4

    def test_the_same_index_is_the_same_buffer_in_every_update(self, staged: bool) -> None:
        """So that thousands of views are made once, not for every update."""
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender)
        packed, received = [], []
        for number in (1, 2, 3):
            buckets: list[Bucket] = []
            reader = Reader(receiver, manifest, version(number), staged=staged, on_bucket=buckets.append)
            sender.open(manifest, version(number), peers=["a"], staged=staged)
            packed.append([send(sender, manifest, number, index) for index in range(5)])
            reader.result()
            received.append([bucket.buffer for bucket in buckets])
            receiver.end()
        for lists in (packed, received):
            assert all(again is first for later in lists[1:] for again, first in zip(later, lists[0], strict=True))

    def test_a_bucket_that_is_read_is_not_written_to(self) -> None:
        sender, manifest = self.sender(), numbered(12)
        receiver = self.receiver(sender)
        receiver.open(manifest, version(1), staged=False)
        sender.open(manifest, version(1), peers=["a"], staged=False)
        sending, buckets = Background(send_all, sender, manifest, 1), iter(receiver)
        first = next(buckets)
        sending.is_done_within(SHORT_SECONDS)
        check(first, manifest, 1)
        for bucket in buckets:
            check(bucket, manifest, 1)
        sending.result()
        assert not sender.failures

    def test_staged_buckets_stay_as_they_were_until_the_end(self) -> None:
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender)
        receiver.open(manifest, version(1), staged=True)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        send_all(sender, manifest, 1)
        buckets = read_all(receiver, manifest, 1)
        following = Background(lambda: sender.open(manifest, version(2), peers=["a"], staged=True))
        has_begun = following.is_done_within(SHORT_SECONDS)
        assert not (self.reads_in_place and has_begun)
        for bucket in buckets:
            check(bucket, manifest, 1)
        receiver.open(manifest, version(2), staged=True)
        following.result()
        send_all(sender, manifest, 2)
        read_all(receiver, manifest, 2)
        assert not sender.failures

    # --- updates that end early ---

    @pytest.mark.parametrize("num_sent", [0, 2])
    def test_an_abort_reaches_everybody_and_the_next_update_is_complete(self, num_sent: int, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(6)
        receivers = {peer: self.receiver(sender, peer) for peer in "ab"}
        readers = self.begin(sender, receivers, manifest, 1, staged)
        for index in range(num_sent):
            send(sender, manifest, 1, index)
        sender.abort("the trainer changed its mind")
        sender.abort("again")
        for reader in readers:
            with pytest.raises(UpdateAbortedError, match="changed its mind"):
                reader.result()
        with pytest.raises(UpdateAbortedError):
            sender.buffer(num_sent)
        assert not sender.failures
        self.update(sender, receivers, manifest, self.number_after_an_abort, staged)

    @pytest.mark.parametrize("has_begun", [False, True])
    @pytest.mark.parametrize(("how", "error"), [("end", UpdateAbortedError), ("close", ClosedError)])
    def test_another_thread_wakes_an_iteration(self, how: str, error: type[Exception], has_begun: bool) -> None:
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender)
        reader = Reader(receiver, manifest, version(1), staged=True)
        if has_begun:
            sender.open(manifest, version(1), peers=["a"], staged=True)
        assert not reader.is_done_within(0.05)
        getattr(receiver, how)()
        with pytest.raises(error):
            reader.result()

    @pytest.mark.parametrize("num_sent", [0, 1])
    def test_the_senders_end_is_the_receivers_error(self, num_sent: int, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(3)
        [reader] = self.begin(sender, {"a": self.receiver(sender)}, manifest, 1, staged)
        for index in range(num_sent):
            send(sender, manifest, 1, index)
        sender.close()
        with pytest.raises((PeerDiedError, UpdateAbortedError)):
            reader.result()

    @pytest.mark.parametrize("has_begun", [False, True])
    def test_a_silent_sender_is_given_up(self, has_begun: bool) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered()
        reader = Reader(self.receiver(sender, deadline_seconds=SHORT_SECONDS), manifest, version(1), staged=True)
        if has_begun:
            sender.open(manifest, version(1), peers=["a"], staged=True)
        with pytest.raises(PeerTimeoutError):
            reader.result()

    def test_another_version_is_not_mistaken_for_the_one_that_was_offered(self, staged: bool) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered(3)
        receiver = self.receiver(sender, deadline_seconds=SHORT_SECONDS)
        reader = Reader(receiver, manifest, version(1), staged=staged)
        sender.open(manifest, version(2), peers=["a"], staged=staged)
        send(sender, manifest, 2, 0)
        with pytest.raises(WeightcastError):
            reader.result()

    @pytest.mark.parametrize("fault", [Corrupt(2, byte=256 + 77), Corrupt(2, byte=80), Drop(2), Duplicate(1)], ids=repr)
    def test_what_a_sender_damages_is_noticed(self, fault: Corrupt | Drop | Duplicate, staged: bool) -> None:
        sender = FaultySender(self.sender())
        self.fail_at_a_bucket(sender, self.receiver(sender.inner), staged, sender, fault)

    @pytest.mark.parametrize("fault", [Corrupt(2, byte=256 + 77), Drop(2), Drop(4), Duplicate(2), Reorder(2)], ids=repr)
    def test_what_happens_to_a_bucket_on_its_way_is_noticed(self, fault: Fault, staged: bool) -> None:
        sender = self.sender()
        receiver = FaultyReceiver(self.receiver(sender))
        self.fail_at_a_bucket(sender, receiver, staged, receiver, fault)

    def fail_at_a_bucket(
        self, sender: Sender, receiver: Receiver, staged: bool, faulty: FaultySender | FaultyReceiver, fault: Fault
    ) -> None:
        """A whole update, one with the fault, and a whole one."""
        manifest = numbered()
        self.update(sender, {"a": receiver}, manifest, 1, staged)
        faulty.fault = fault
        [reader] = self.begin(sender, {"a": receiver}, manifest, 2, staged)
        with contextlib.suppress(WeightcastError):
            send_all(sender, manifest, 2)
        with pytest.raises(IntegrityError):
            reader.result()
        receiver.end()
        self.update(sender, {"a": receiver}, manifest, 3, staged)

    # --- wrong use, and the end ---

    def test_wrong_use_of_a_sender(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(2)
        with pytest.raises(UpdateAbortedError):
            sender.buffer(0)
        with pytest.raises(ValueError, match="run"):
            sender.open(manifest, WeightVersion(OTHER_RUN, 1), peers=[], staged=staged)
        sender.open(manifest, version(1), peers=[], staged=staged)
        with pytest.raises(ValueError, match="bucket 0"):
            sender.buffer(1)
        send_all(sender, manifest, 1)
        with pytest.raises((ValueError, UpdateAbortedError)):
            sender.buffer(2)

    def test_wrong_use_of_a_receiver(self) -> None:
        sender, manifest = self.sender(), numbered()
        with pytest.raises((StaleVersionError, PeerDiedError)):
            self.receiver(sender, run=OTHER_RUN)
        receiver = self.receiver(sender)
        with pytest.raises(UpdateAbortedError):
            next(iter(receiver))
        with pytest.raises(ValueError, match="run"):
            receiver.open(manifest, WeightVersion(OTHER_RUN, 1), staged=True)

    def test_closing_is_idempotent_and_final(self) -> None:
        sender, manifest = self.sender(), numbered(1)
        receiver = self.receiver(sender)
        for end in (receiver.end, receiver.end, receiver.close, receiver.close, sender.close, sender.close):
            end()
        sender.abort("nothing")
        with pytest.raises(ClosedError):
            sender.open(manifest, version(1), peers=[], staged=True)
        with pytest.raises(ClosedError):
            receiver.open(manifest, version(1), staged=True)
        with pytest.raises(ClosedError):
            next(iter(receiver))
