"""Tests for every transport with peers. Subclass `TransportContract` in a test module and set its `url`."""

from __future__ import annotations

import pytest

from weightcast.errors import ManifestError, PeerDiedError, PeersLostError, PeerTimeoutError, UpdateAbortedError
from weightcast.format.manifest import Manifest
from weightcast.host.deadline import Deadline
from weightcast.seams.transport import Bucket, Receiver, Sender
from weightcast.testing.transport_kit import (
    PATIENCE_SECONDS,
    SHORT_SECONDS,
    Background,
    Reader,
    RecoveringSender,
    check,
    numbered,
    read_all,
    send,
    send_all,
    version,
)
from weightcast.testing.versioned_transport_contract import ENDED, VersionedTransportContract


def failed(sender: Sender) -> dict[str, type[Exception]]:
    """Wait until the sender has failures, and return them: a receiver's record may still be on its way."""
    for _ in Deadline(PATIENCE_SECONDS).polls(0.001, 0.1):
        if sender.failures:
            break
    return {peer: type(error) for peer, error in sender.failures.items()}


class TransportContract(VersionedTransportContract):
    """Tests for transports with peers: a peer that dies, stalls or disconnects is named, and never stops the others."""

    number_after_an_abort = 2
    """A version is offered once over a link."""

    def sender(self, deadline_seconds: float = PATIENCE_SECONDS, **options: object) -> Sender:
        return RecoveringSender(super().sender(deadline_seconds, **options))

    def test_a_loss_that_disturbs_the_others_is_raised_with_the_survivors(self, staged: bool) -> None:
        """A transport may continue without an error; a raised error has fewer survivors each time, and no lost peer."""
        sender, manifest = super().sender(), numbered(6)
        receivers = {peer: self.receiver(sender, peer) for peer in ("a", "b", "goes")}
        readers = [Reader(receivers[peer], manifest, version(1), staged=staged) for peer in ("a", "b")]
        receivers["goes"].open(manifest, version(1), staged=staged)
        peers, is_lost = list(receivers), False
        while peers:
            survivors: set[str] = set()
            try:
                first = sender.open(manifest, version(1), peers=peers, staged=staged)
                assert first == 0 or len(peers) < len(receivers)
                for index in range(first, 6):
                    if index == 2 and not is_lost:
                        is_lost = True
                        receivers["goes"].close()
                    send(sender, manifest, 1, index)
                break
            except PeersLostError as exc:
                survivors = set(exc.survivors)
            with pytest.raises(UpdateAbortedError):
                sender.buffer(0)
            assert survivors < set(peers)
            assert set(peers) - survivors <= sender.failures.keys()
            peers = sorted(survivors)
        assert all(len(reader.result()) == 6 for reader in readers)
        assert failed(sender) == {"goes": PeerDiedError}

    def fail_to_begin(self, receiver: Receiver, manifest: Manifest, number: int, staged: bool) -> Bucket:
        """Open an update that must not succeed, and wait for its first bucket."""
        receiver.open(manifest, version(number), staged=staged)
        return next(iter(receiver))

    def test_a_receiver_that_stalls_is_dropped_and_keeps_its_bytes(self) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered(8)
        stalls, goes_on = self.receiver(sender, "stalls"), self.receiver(sender, "goes on")
        stalls.open(manifest, version(1), staged=False)
        reader = Reader(goes_on, manifest, version(1), staged=False)
        sender.open(manifest, version(1), peers=["stalls", "goes on"], staged=False)
        send(sender, manifest, 1, 0)
        buckets = iter(stalls)
        held = next(buckets)
        send_all(sender, manifest, 1, start=1)
        reader.result()
        assert failed(sender) == {"stalls": PeerTimeoutError}
        assert sender.failures["stalls"].peer == "stalls"  # type: ignore[attr-defined]
        check(held, manifest, 1)
        with pytest.raises(ENDED):
            list(buckets)
        with pytest.raises(PeerDiedError):
            self.fail_to_begin(stalls, manifest, 2, staged=False)

    def test_a_stalled_reader_of_a_staged_version_is_dropped_by_the_next_open(self) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered()
        stalls, goes_on = self.receiver(sender, "stalls"), self.receiver(sender, "goes on")
        stalls.open(manifest, version(1), staged=True)
        for number in (1, 2):
            goes_on.open(manifest, version(number), staged=True)
            sender.open(manifest, version(number), peers=["stalls", "goes on"], staged=True)
            send_all(sender, manifest, number)
            if number == 1:
                held = read_all(stalls, manifest, 1)
                assert not sender.failures
            read_all(goes_on, manifest, number)
            goes_on.end()
        assert failed(sender) == {"stalls": PeerTimeoutError}
        for bucket in held:
            check(bucket, manifest, 1)

    def test_a_receiver_that_goes_is_named_and_stops_no_other(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(6)
        stays, goes = self.receiver(sender, "stays"), self.receiver(sender, "goes")
        left = Reader(goes, manifest, version(1), staged=staged, on_bucket=lambda bucket: goes.close())
        reader = Reader(stays, manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["stays", "goes"], staged=staged)
        send(sender, manifest, 1, 0)
        with pytest.raises(ENDED):
            left.result()
        send_all(sender, manifest, 1, start=1)
        assert len(reader.result()) == 6
        assert failed(sender) == {"goes": PeerDiedError}

    def test_a_receiver_that_goes_before_it_reads_is_not_waited_for(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(6)
        stays, goes = self.receiver(sender, "stays"), self.receiver(sender, "goes")
        goes.open(manifest, version(1), staged=staged)
        reader = Reader(stays, manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=["stays", "goes"], staged=staged)
        send(sender, manifest, 1, 0)
        send(sender, manifest, 1, 1)
        goes.close()
        send_all(sender, manifest, 1, start=2)
        assert len(reader.result()) == 6
        assert failed(sender) == {"goes": PeerDiedError}

    def test_a_receiver_that_ends_early_misses_that_update_only(self, staged: bool) -> None:
        sender, manifest = self.sender(), numbered(6)
        receivers = {peer: self.receiver(sender, peer) for peer in ("early", "stays")}
        receivers["early"].open(manifest, version(1), staged=staged)
        reader = Reader(receivers["stays"], manifest, version(1), staged=staged)
        sender.open(manifest, version(1), peers=list(receivers), staged=staged)
        send(sender, manifest, 1, 0)
        next(iter(receivers["early"]))
        receivers["early"].end()
        # Before the last bucket is sent: a peer that ends the update after that has missed nothing.
        assert failed(sender) == {"early": UpdateAbortedError}
        send_all(sender, manifest, 1, start=1)
        assert len(reader.result()) == 6
        receivers["stays"].end()
        self.update(sender, receivers, manifest, 2, staged)

    def test_a_receiver_that_gave_the_version_up_before_it_began_is_not_waited_for(self) -> None:
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender)
        receiver.open(manifest, version(1), staged=False)
        receiver.end()
        sender.open(manifest, version(1), peers=["a"], staged=False)
        send_all(sender, manifest, 1)
        assert failed(sender) == {"a": UpdateAbortedError}
        self.update(sender, {"a": receiver}, manifest, 2, False)

    def test_a_peer_that_is_not_connected_or_opens_nothing_is_named(self, staged: bool) -> None:
        """A peer that is not connected fails at once, one that opens nothing at the deadline."""
        sender, manifest = self.sender(SHORT_SECONDS), numbered(3)
        reader = Reader(self.receiver(sender), manifest, version(1), staged=staged)
        self.receiver(sender, "opens nothing")
        sender.open(manifest, version(1), peers=["a", "nobody", "opens nothing"], staged=staged)
        send_all(sender, manifest, 1)
        assert len(reader.result()) == 3
        assert failed(sender) == {"nobody": PeerDiedError, "opens nothing": PeerTimeoutError}

    def test_a_peer_that_left_fails_at_once_and_comes_back_by_connecting(self) -> None:
        sender, manifest = self.sender(), numbered()
        first = self.receiver(sender)
        first.open(manifest, version(1), staged=True)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        first.close()
        sender.open(manifest, version(2), peers=["a"], staged=True)
        assert isinstance(sender.failures["a"], PeerDiedError)
        self.update(sender, {"a": self.receiver(sender)}, manifest, 3, True)

    def test_a_reconnected_peer_replaces_the_old_connection_and_spares_its_bytes(self) -> None:
        sender, manifest = self.sender(), numbered()
        old = self.receiver(sender)
        old.open(manifest, version(1), staged=True)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        send_all(sender, manifest, 1)
        held = read_all(old, manifest, 1)
        self.update(sender, {"a": self.receiver(sender)}, manifest, 2, True)
        for bucket in held:
            check(bucket, manifest, 1)
        with pytest.raises(PeerDiedError):
            self.fail_to_begin(old, manifest, 2, staged=True)

    def test_a_receiver_does_not_give_up_while_the_sender_waits_for_another(self) -> None:
        sender, manifest = self.sender(6 * SHORT_SECONDS), numbered(6)
        stalls = self.receiver(sender, "stalls")
        stalls.open(manifest, version(1), staged=False)
        goes_on = self.receiver(sender, "goes on", deadline_seconds=4 * SHORT_SECONDS)
        reader = Reader(goes_on, manifest, version(1), staged=False)
        sender.open(manifest, version(1), peers=["stalls", "goes on"], staged=False)
        send_all(sender, manifest, 1)
        assert len(reader.result()) == 6
        assert set(sender.failures) == {"stalls"}

    def test_opening_the_next_update_aborts_an_unfinished_one(self) -> None:
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender)
        [reader] = self.begin(sender, {"a": receiver}, manifest, 1, staged=True)
        send(sender, manifest, 1, 0)
        opening = Background(lambda: sender.open(manifest, version(2), peers=["a"], staged=True))
        with pytest.raises(UpdateAbortedError):
            reader.result()
        reader = Reader(receiver, manifest, version(2), staged=True)
        opening.result()
        send_all(sender, manifest, 2)
        assert len(reader.result()) == 5

    def test_a_version_is_sent_as_deltas_to_one_peer_and_in_full_to_another(self) -> None:
        """Deltas have other lengths than the manifest's buckets."""
        sender, manifest = self.sender(), numbered()
        deltas = manifest.with_sizes(tuple(256 * (1 + index) for index in range(len(manifest.buckets))))
        receivers = {peer: self.receiver(sender, peer) for peer in ("has the base", "is new")}
        for number in (1, 2, 3):
            for peer, plan in zip(receivers, (deltas, manifest), strict=True):
                reader = Reader(receivers[peer], plan, version(number), staged=True)
                sender.open(plan, version(number), peers=[peer], staged=True)
                send_all(sender, plan, number)
                assert list(map(len, reader.result())) == list(plan.buckets)
                receivers[peer].end()
        assert not sender.failures

    def test_a_version_of_which_deltas_were_given_up_is_sent_in_full_to_another(self) -> None:
        """Another origin's sender may have lost all peers that took deltas."""
        sender, manifest = self.sender(), numbered()
        deltas = manifest.with_sizes((256,) * len(manifest.buckets))
        receivers = {peer: self.receiver(sender, peer) for peer in ("has the base", "is new")}
        given_up = Reader(receivers["has the base"], deltas, version(1), staged=True)
        sender.open(deltas, version(1), peers=["has the base"], staged=True)
        send(sender, deltas, 1, 0)
        reader = Reader(receivers["is new"], manifest, version(1), staged=True)
        sender.open(manifest, version(1), peers=["is new"], staged=True)
        send_all(sender, manifest, 1)
        assert list(map(len, reader.result())) == list(manifest.buckets)
        with pytest.raises(UpdateAbortedError):
            given_up.result()

    @pytest.mark.parametrize(("num_buckets", "opened_staged"), [(5, False), (4, True)])
    def test_an_update_unlike_its_offer_is_refused(self, num_buckets: int, opened_staged: bool) -> None:
        sender, manifest = self.sender(SHORT_SECONDS), numbered(5)
        reader = Reader(self.receiver(sender), numbered(num_buckets), version(1), staged=opened_staged)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        with pytest.raises((ManifestError, UpdateAbortedError)):
            reader.result()

    @pytest.mark.parametrize("num_sent", [1, 5])
    def test_the_senders_end_spares_what_is_read(self, num_sent: int) -> None:
        sender, manifest = self.sender(), numbered()
        receiver = self.receiver(sender)
        receiver.open(manifest, version(1), staged=True)
        sender.open(manifest, version(1), peers=["a"], staged=True)
        for index in range(num_sent):
            send(sender, manifest, 1, index)
        buckets = iter(receiver)
        held = next(buckets)
        sender.close()
        try:
            list(buckets)
        except (PeerDiedError, UpdateAbortedError):
            pass
        else:
            # A receiver may still yield buckets that are complete in its own memory, but no others.
            assert num_sent == len(manifest.buckets)
        check(held, manifest, 1)
        with pytest.raises(PeerDiedError):
            self.fail_to_begin(receiver, manifest, 2, staged=True)
