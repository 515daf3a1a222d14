"""What every same-host transport must do, over all of them."""

from __future__ import annotations

import pytest
import torch
from transports.conftest import Ends
from transports.transport_kit import (
    BUCKET_BYTES,
    OTHER_RUN,
    RUN,
    Background,
    check,
    make_manifest,
    read_all,
    send,
    send_all,
    version,
)

from weightcast.errors import (
    ClosedError,
    InsufficientMemoryError,
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    StaleVersionError,
    UpdateAbortedError,
)
from weightcast.format.bucket import slot_size_bytes
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import memory as host_memory

SHORT_SECONDS = 0.3
MODES = pytest.mark.parametrize("staged", [False, True], ids=["streaming", "staged"])


@MODES
@pytest.mark.parametrize("num_receivers", [0, 1, 3])
def test_every_receiver_gets_every_bucket_of_every_version(ends: Ends, staged: bool, num_receivers: int) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receivers = {f"engine-{n}": ends.receiver(sender, f"engine-{n}") for n in range(num_receivers)}
    for number in (3, 4, 9):
        for receiver in receivers.values():
            receiver.open(manifest, version(number), staged=staged)
        sender.open(manifest, version(number), peers=list(receivers), staged=staged)
        readers = [Background(read_all, receiver, manifest, number) for receiver in receivers.values()]
        send_all(sender, manifest, number)
        for reader in readers:
            buckets = reader.result()
            assert [bucket.index for bucket in buckets] == list(range(5))
            if staged:
                for bucket in buckets:
                    check(bucket, manifest, number)
        for receiver in receivers.values():
            receiver.end()
        assert not sender.failures


@MODES
def test_the_same_index_gives_the_same_tensor_in_every_update(ends: Ends, staged: bool) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receiver = ends.receiver(sender)
    packed, received = [], []
    for number in range(3):
        receiver.open(manifest, version(number), staged=staged)
        sender.open(manifest, version(number), peers=["engine"], staged=staged)
        reader = Background(read_all, receiver, manifest, number)
        packed.append([send(sender, manifest, number, index) for index in range(5)])
        received.append([bucket.buffer for bucket in reader.result()])
        receiver.end()
    for lists in (packed, received):
        assert all(again is first for later in lists[1:] for again, first in zip(later, lists[0], strict=True))


def test_streaming_reuses_its_slots(ends: Ends) -> None:
    sender, manifest = ends.sender(num_slots=2), make_manifest(6)
    receiver = ends.receiver(sender)
    receiver.open(manifest, version(1), staged=False)
    sender.open(manifest, version(1), peers=["engine"], staged=False)
    reader = Background(read_all, receiver, manifest, 1)
    places = {send(sender, manifest, 1, index).data_ptr() for index in range(6)}
    reader.result()
    assert len(places) == 2


def test_a_slot_is_rewritten_only_after_its_release(ends: Ends) -> None:
    sender, manifest = ends.sender(num_slots=2), make_manifest(3)
    receiver = ends.receiver(sender)
    receiver.open(manifest, version(1), staged=False)
    sender.open(manifest, version(1), peers=["engine"], staged=False)
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


def test_staged_buckets_stay_until_the_end_of_the_update(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receiver = ends.receiver(sender)
    receiver.open(manifest, version(1), staged=True)
    sender.open(manifest, version(1), peers=["engine"], staged=True)
    send_all(sender, manifest, 1)
    buckets = read_all(receiver, manifest, 1)
    following = Background(lambda: sender.open(manifest, version(2), peers=["engine"], staged=True))
    assert not following.is_done_within(SHORT_SECONDS)
    for bucket in buckets:
        check(bucket, manifest, 1)
    receiver.open(manifest, version(2), staged=True)
    following.result()
    send_all(sender, manifest, 2)
    read_all(receiver, manifest, 2)
    assert not sender.failures


def test_buffers_are_large_enough_and_flat(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest(2)
    for number, staged in enumerate([False, True]):
        sender.open(manifest, version(number), peers=[], staged=staged)
        buffer = sender.buffer(0)
        assert buffer.dtype == torch.uint8
        assert buffer.is_contiguous()
        assert buffer.data_ptr() % 64 == 0
        assert buffer.shape == (slot_size_bytes(manifest),)


# --- peers that fail ---


def test_a_stalled_receiver_is_dropped_and_keeps_its_bytes(ends: Ends) -> None:
    sender, manifest = ends.sender(deadline_seconds=SHORT_SECONDS), make_manifest(6)
    stalled, lively = ends.receiver(sender, "stalled"), ends.receiver(sender, "lively")
    for receiver in (stalled, lively):
        receiver.open(manifest, version(1), staged=False)
    sender.open(manifest, version(1), peers=["stalled", "lively"], staged=False)
    reader = Background(read_all, lively, manifest, 1)
    send(sender, manifest, 1, 0)
    buckets = iter(stalled)
    held = next(buckets)
    send_all(sender, manifest, 1, start=1)
    reader.result()
    assert list(sender.failures) == ["stalled"]
    assert isinstance(sender.failures["stalled"], PeerTimeoutError)
    assert sender.failures["stalled"].peer == "stalled"
    check(held, manifest, 1)
    with pytest.raises(PeerDiedError):
        next(buckets)
    with pytest.raises(PeerDiedError):
        stalled.open(manifest, version(2), staged=False)


def test_a_stalled_reader_of_a_staged_version_is_dropped_by_the_next_open(ends: Ends) -> None:
    sender, manifest = ends.sender(deadline_seconds=SHORT_SECONDS), make_manifest()
    stalled, lively = ends.receiver(sender, "stalled"), ends.receiver(sender, "lively")
    for number in (1, 2):
        if number == 1:
            stalled.open(manifest, version(1), staged=True)
        lively.open(manifest, version(number), staged=True)
        sender.open(manifest, version(number), peers=["stalled", "lively"], staged=True)
        send_all(sender, manifest, number)
        if number == 1:
            held = read_all(stalled, manifest, 1)
            assert not sender.failures
        read_all(lively, manifest, number)
        lively.end()
    assert list(sender.failures) == ["stalled"]
    assert isinstance(sender.failures["stalled"], PeerTimeoutError)
    for bucket in held:
        check(bucket, manifest, 1)


def test_a_receiver_that_disconnects_frees_its_slots_at_once(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest(6)
    leaving, lively = ends.receiver(sender, "leaving"), ends.receiver(sender, "lively")
    for receiver in (leaving, lively):
        receiver.open(manifest, version(1), staged=False)
    sender.open(manifest, version(1), peers=["leaving", "lively"], staged=False)
    reader = Background(read_all, lively, manifest, 1)
    send(sender, manifest, 1, 0)
    send(sender, manifest, 1, 1)
    leaving.close()
    send_all(sender, manifest, 1, start=2)
    reader.result()
    assert {name: type(error) for name, error in sender.failures.items()} == {"leaving": PeerDiedError}


def test_a_receiver_that_ends_early_leaves_the_update_but_not_the_fleet(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest(6)
    early, lively = ends.receiver(sender, "early"), ends.receiver(sender, "lively")
    for number in (1, 2):
        for receiver in (early, lively):
            receiver.open(manifest, version(number), staged=False)
        sender.open(manifest, version(number), peers=["early", "lively"], staged=False)
        readers = [Background(read_all, lively, manifest, number)]
        send(sender, manifest, number, 0)
        if number == 1:
            next(iter(early))
            early.end()
        else:
            readers.append(Background(read_all, early, manifest, number))
        send_all(sender, manifest, number, start=1)
        for reader in readers:
            reader.result()
        lively.end()
        expected = {"early": UpdateAbortedError} if number == 1 else {}
        assert {name: type(error) for name, error in sender.failures.items()} == expected


def test_a_receiver_that_gave_the_version_up_before_it_began_is_not_waited_for(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receiver = ends.receiver(sender)
    receiver.open(manifest, version(1), staged=False)
    receiver.end()
    sender.open(manifest, version(1), peers=["engine"], staged=False)
    send_all(sender, manifest, 1)
    assert isinstance(sender.failures["engine"], UpdateAbortedError)
    # The same number once more: neither end takes the first attempt for the second.
    receiver.open(manifest, version(1), staged=False)
    sender.open(manifest, version(1), peers=["engine"], staged=False)
    reader = Background(read_all, receiver, manifest, 1)
    send_all(sender, manifest, 1)
    assert len(reader.result()) == 5
    assert not sender.failures


def test_an_update_that_the_receiver_never_opened_does_not_disturb_the_next(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receiver = ends.receiver(sender)
    sender.open(manifest, version(1), peers=["engine"], staged=True)
    send_all(sender, manifest, 1)
    receiver.open(manifest, version(2), staged=True)
    sender.open(manifest, version(2), peers=["engine"], staged=True)
    send_all(sender, manifest, 2)
    read_all(receiver, manifest, 2)
    assert not sender.failures


def test_an_absent_peer_fails_at_the_deadline_and_a_late_one_is_waited_for(ends: Ends) -> None:
    sender, manifest = ends.sender(deadline_seconds=SHORT_SECONDS), make_manifest()
    sender.open(manifest, version(1), peers=["absent"], staged=True)
    assert isinstance(sender.failures["absent"], PeerTimeoutError)
    patient = ends.sender()
    opening = Background(lambda: patient.open(manifest, version(1), peers=["engine"], staged=True))
    receiver = ends.receiver(patient)
    opening.result()
    receiver.open(manifest, version(1), staged=True)
    send_all(patient, manifest, 1)
    read_all(receiver, manifest, 1)
    assert not patient.failures


def test_a_peer_that_left_fails_at_once_and_comes_back_by_connecting(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest()
    first = ends.receiver(sender)
    sender.open(manifest, version(1), peers=["engine"], staged=True)
    first.close()
    sender.open(manifest, version(2), peers=["engine"], staged=True)
    assert isinstance(sender.failures["engine"], PeerDiedError)
    second = ends.receiver(sender)
    second.open(manifest, version(3), staged=True)
    sender.open(manifest, version(3), peers=["engine"], staged=True)
    send_all(sender, manifest, 3)
    read_all(second, manifest, 3)
    assert not sender.failures


def test_a_reconnected_peer_replaces_the_old_connection_and_spares_its_bytes(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest()
    old = ends.receiver(sender)
    old.open(manifest, version(1), staged=True)
    sender.open(manifest, version(1), peers=["engine"], staged=True)
    send_all(sender, manifest, 1)
    held = read_all(old, manifest, 1)
    new = ends.receiver(sender)
    new.open(manifest, version(2), staged=True)
    sender.open(manifest, version(2), peers=["engine"], staged=True)
    send_all(sender, manifest, 2)
    read_all(new, manifest, 2)
    assert not sender.failures
    for bucket in held:
        check(bucket, manifest, 1)
    with pytest.raises(PeerDiedError):
        old.open(manifest, version(2), staged=True)


# --- updates that end early ---


@MODES
def test_an_abort_reaches_every_receiver_and_the_next_update_works(ends: Ends, staged: bool) -> None:
    sender, manifest = ends.sender(), make_manifest(6)
    receivers = {name: ends.receiver(sender, name) for name in ("a", "b")}
    for number, num_sent in ((1, 2), (1, 0), (1, 6)):
        for receiver in receivers.values():
            receiver.open(manifest, version(number), staged=staged)
        sender.open(manifest, version(number), peers=list(receivers), staged=staged)
        readers = [Background(read_all, receiver, manifest, number) for receiver in receivers.values()]
        for index in range(num_sent):
            send(sender, manifest, number, index)
        if num_sent < 6:
            sender.abort("the gather failed")
            sender.abort("again")
            for reader in readers:
                with pytest.raises(UpdateAbortedError, match="the gather failed"):
                    reader.result()
            with pytest.raises(UpdateAbortedError):
                sender.buffer(num_sent)
        for reader in readers[: 0 if num_sent < 6 else None]:
            reader.result()
        for receiver in receivers.values():
            receiver.end()
        assert not sender.failures


def test_opening_the_next_update_aborts_an_unfinished_one(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receiver = ends.receiver(sender)
    receiver.open(manifest, version(1), staged=True)
    sender.open(manifest, version(1), peers=["engine"], staged=True)
    reader = Background(read_all, receiver, manifest, 1)
    send(sender, manifest, 1, 0)
    opening = Background(lambda: sender.open(manifest, version(2), peers=["engine"], staged=True))
    with pytest.raises(UpdateAbortedError):
        reader.result()
    receiver.open(manifest, version(2), staged=True)
    opening.result()
    send_all(sender, manifest, 2)
    read_all(receiver, manifest, 2)


@pytest.mark.parametrize("how", ["end", "close"])
def test_the_receiver_is_woken_by_another_thread(ends: Ends, how: str) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receiver = ends.receiver(sender)
    receiver.open(manifest, version(1), staged=False)
    reader = Background(read_all, receiver, manifest, 1)
    assert not reader.is_done_within(0.05)
    getattr(receiver, how)()
    with pytest.raises(UpdateAbortedError if how == "end" else ClosedError):
        reader.result()


@pytest.mark.parametrize("num_sent", [1, 5])
def test_the_receiver_is_woken_by_the_senders_end(ends: Ends, num_sent: int) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receiver = ends.receiver(sender)
    receiver.open(manifest, version(1), staged=True)
    sender.open(manifest, version(1), peers=["engine"], staged=True)
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


def test_a_silent_sender_is_given_up_at_the_deadline(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receiver = ends.receiver(sender, deadline_seconds=SHORT_SECONDS)
    for begins in (False, True):
        receiver.open(manifest, version(1), staged=True)
        if begins:
            sender.open(manifest, version(1), peers=["engine"], staged=True)
        with pytest.raises(PeerTimeoutError):
            read_all(receiver, manifest, 1)


def test_a_receiver_does_not_give_up_while_the_sender_waits_for_another(ends: Ends) -> None:
    sender, manifest = ends.sender(deadline_seconds=4 * SHORT_SECONDS), make_manifest(6)
    stalled = ends.receiver(sender, "stalled")
    lively = ends.receiver(sender, "lively", deadline_seconds=2 * SHORT_SECONDS)
    for receiver in (stalled, lively):
        receiver.open(manifest, version(1), staged=False)
    sender.open(manifest, version(1), peers=["stalled", "lively"], staged=False)
    reader = Background(read_all, lively, manifest, 1)
    send_all(sender, manifest, 1)
    assert len(reader.result()) == 6
    assert list(sender.failures) == ["stalled"]


# --- sizes and wrong use ---


def test_a_larger_manifest_gets_larger_buffers_and_a_smaller_one_still_fits(ends: Ends) -> None:
    sender = ends.sender()
    receiver = ends.receiver(sender)
    shapes = [(2, BUCKET_BYTES), (7, 4 * BUCKET_BYTES), (3, 256), (0, 256), (2, BUCKET_BYTES)]
    for number, (num_buckets, bucket_bytes) in enumerate(shapes):
        for staged in (False, True):
            manifest = make_manifest(num_buckets, bucket_bytes)
            receiver.open(manifest, version(number), staged=staged)
            sender.open(manifest, version(number), peers=["engine"], staged=staged)
            reader = Background(read_all, receiver, manifest, number)
            send_all(sender, manifest, number)
            assert len(reader.result()) == num_buckets
            receiver.end()
            assert not sender.failures


def test_too_little_memory_is_refused_before_any_byte_moves(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender, manifest = ends.sender(), make_manifest()
    receiver = ends.receiver(sender)
    receiver.open(manifest, version(1), staged=True)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with pytest.raises(InsufficientMemoryError, match="host or container has 1000 left"):
        sender.open(manifest, version(1), peers=["engine"], staged=True)
    with pytest.raises(UpdateAbortedError):
        sender.buffer(0)
    monkeypatch.undo()
    sender.open(manifest, version(1), peers=["engine"], staged=True)
    send_all(sender, manifest, 1)
    read_all(receiver, manifest, 1)


@pytest.mark.parametrize(("num_buckets", "staged"), [(5, False), (4, True)])
def test_an_update_unlike_its_offer_is_refused(ends: Ends, num_buckets: int, staged: bool) -> None:
    sender, manifest = ends.sender(), make_manifest(5)
    receiver = ends.receiver(sender)
    receiver.open(make_manifest(num_buckets), version(1), staged=staged)
    sender.open(manifest, version(1), peers=["engine"], staged=True)
    with pytest.raises(ManifestError, match="the offer said"):
        read_all(receiver, manifest, 1)


def test_wrong_use_of_a_sender(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest(2)
    with pytest.raises(UpdateAbortedError, match="open"):
        sender.buffer(0)
    with pytest.raises(ValueError, match="run"):
        sender.open(manifest, WeightVersion(OTHER_RUN, 1), peers=[], staged=True)
    sender.open(manifest, version(1), peers=[], staged=True)
    with pytest.raises(ValueError, match="bucket 0 is the next"):
        sender.buffer(1)
    send_all(sender, manifest, 1)
    with pytest.raises(ValueError, match="bucket 2"):
        sender.buffer(2)
    sender.close()
    sender.close()
    with pytest.raises(ClosedError):
        sender.open(manifest, version(2), peers=[], staged=True)
    with pytest.raises(ValueError, match="num_slots"):
        ends.sender(num_slots=0)


def test_wrong_use_of_a_receiver(ends: Ends) -> None:
    sender, manifest = ends.sender(), make_manifest()
    with pytest.raises(StaleVersionError, match=OTHER_RUN):
        ends.receiver(sender, run=OTHER_RUN)
    receiver = ends.receiver(sender)
    with pytest.raises(UpdateAbortedError, match="open"):
        next(iter(receiver))
    with pytest.raises(ValueError, match="run"):
        receiver.open(manifest, WeightVersion(OTHER_RUN, 1), staged=True)
    receiver.end()
    receiver.close()
    receiver.close()
    with pytest.raises(ClosedError):
        receiver.open(manifest, version(1), staged=True)
    with pytest.raises(ClosedError):
        next(iter(receiver))


def test_addresses(ends: Ends) -> None:
    sender = ends.sender()
    make = type(ends.receiver(sender))
    assert sender.address.startswith(f"{ends.scheme}://")
    with pytest.raises(PeerDiedError):
        make(sender.address + "0", peer="engine", run=RUN)
    with pytest.raises(ValueError, match="address"):
        make("file:///tmp", peer="engine", run=RUN)
    with pytest.raises(ValueError, match="by itself"):
        type(sender)(f"{ends.scheme}://name", run=RUN)


def test_manifests_may_change_between_updates_of_the_same_size(ends: Ends) -> None:
    sender = ends.sender()
    receiver = ends.receiver(sender)
    manifests: list[Manifest] = [make_manifest(4, 512), make_manifest(2, 1024), make_manifest(4, 512)]
    for number, manifest in enumerate(manifests):
        receiver.open(manifest, version(number), staged=True)
        sender.open(manifest, version(number), peers=["engine"], staged=True)
        send_all(sender, manifest, number)
        read_all(receiver, manifest, number)
