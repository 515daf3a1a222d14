"""ipc between processes that are stopped and killed: who is dropped, what survives, what is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transports.conftest import Ends
from transports.ipc_children import Child, publish_one_bucket, receive

from weightcast.errors import ClosedError, PeerDiedError, PeerTimeoutError, UpdateAbortedError
from weightcast.testing.transport_kit import (
    PATIENCE_SECONDS,
    Background,
    address_of,
    check,
    make_receiver,
    numbered,
    read_all,
    send,
    send_all,
    version,
)

MODES = pytest.mark.parametrize("staged", [False, True], ids=["streaming", "staged"])
NUM_BUCKETS = 6


@pytest.fixture
def children() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@MODES
def test_a_killed_receiver_is_named_and_the_others_go_on(
    ipc_ends: Ends, children: contextlib.ExitStack, staged: bool
) -> None:
    sender, manifest = ipc_ends.sender(), numbered(NUM_BUCKETS)
    victim = children.enter_context(Child(receive, address_of(sender, "ipc://"), "victim", staged, NUM_BUCKETS))
    lively = ipc_ends.receiver(sender, "lively")
    assert victim.hear() == "connected"
    for number in (1, 2):
        lively.open(manifest, version(number), staged=staged)
        if number == 1:
            victim.pipe.send(number)
            assert victim.hear() == "open"
        sender.open(manifest, version(number), peers=["victim", "lively"], staged=staged)
        reader = Background(read_all, lively, manifest, number)
        send(sender, manifest, number, 0)
        if number == 1:
            assert victim.hear() == 0
            victim.kill()
        send_all(sender, manifest, number, start=1)
        assert len(reader.result()) == NUM_BUCKETS
        lively.end()
        assert {name: type(error) for name, error in sender.failures.items()} == {"victim": PeerDiedError}


@MODES
def test_a_stopped_receiver_is_dropped_and_never_sees_other_bytes(
    ipc_ends: Ends, children: contextlib.ExitStack, staged: bool
) -> None:
    sender, manifest = ipc_ends.sender(deadline_seconds=1.0), numbered(NUM_BUCKETS)
    victim = children.enter_context(Child(receive, address_of(sender, "ipc://"), "victim", staged, NUM_BUCKETS))
    lively = ipc_ends.receiver(sender, "lively")
    assert victim.hear() == "connected"
    victim.pipe.send(1)
    assert victim.hear() == "open"
    failures = []
    for number in (1, 2):
        lively.open(manifest, version(number), staged=staged)
        sender.open(manifest, version(number), peers=["victim", "lively"], staged=staged)
        reader = Background(read_all, lively, manifest, number)
        send(sender, manifest, number, 0)
        if number == 1:
            assert victim.hear() == 0
            victim.stop()
        send_all(sender, manifest, number, start=1)
        assert len(reader.result()) == NUM_BUCKETS
        lively.end()
        failures += [(name, type(error)) for name, error in sender.failures.items()]
    # Staged, nobody waits for it before its bytes would be overwritten: by the second version.
    expected = [("victim", PeerTimeoutError)] if staged else [("victim", PeerTimeoutError), ("victim", PeerDiedError)]
    assert failures == expected
    victim.wake()
    victim.pipe.send("go on")
    assert victim.hear() == "PeerDiedError"


def test_a_receiver_that_was_dropped_comes_back_by_connecting(ipc_ends: Ends, children: contextlib.ExitStack) -> None:
    sender, manifest = ipc_ends.sender(deadline_seconds=0.5), numbered(NUM_BUCKETS)
    victim = children.enter_context(Child(receive, address_of(sender, "ipc://"), "engine", False, NUM_BUCKETS))
    assert victim.hear() == "connected"
    victim.pipe.send(1)
    assert victim.hear() == "open"
    sender.open(manifest, version(1), peers=["engine"], staged=False)
    send(sender, manifest, 1, 0)
    assert victim.hear() == 0
    victim.stop()
    send_all(sender, manifest, 1, start=1)
    assert isinstance(sender.failures["engine"], PeerTimeoutError)
    successor = ipc_ends.receiver(sender, "engine")
    successor.open(manifest, version(2), staged=False)
    sender.open(manifest, version(2), peers=["engine"], staged=False)
    reader = Background(read_all, successor, manifest, 2)
    send_all(sender, manifest, 2)
    assert len(reader.result()) == NUM_BUCKETS
    assert not sender.failures
    victim.wake()
    victim.pipe.send("go on")
    assert victim.hear() == "PeerDiedError"


@MODES
def test_a_killed_sender_wakes_its_receivers_and_leaves_nothing(
    leaves_nothing: None, children: contextlib.ExitStack, staged: bool
) -> None:
    manifest, before = numbered(), set(os.listdir("/dev/shm"))
    publisher = children.enter_context(Child(publish_one_bucket, staged))
    pids = {str(os.getpid()), str(publisher.process.pid)}
    address = publisher.hear()
    with contextlib.ExitStack() as stack:
        receiver = make_receiver(stack, address, "engine")
        receiver.open(manifest, version(1), staged=staged)
        publisher.pipe.send("connected")
        buckets = iter(receiver)
        held = next(buckets)
        assert publisher.hear() == "sent"
        following = Background(next, buckets)
        publisher.kill()
        with pytest.raises(PeerDiedError):
            following.result()
        check(held, manifest, 1)
        with pytest.raises(PeerDiedError):
            make_receiver(stack, address, "engine")
    # Named shared memory says which process made it: other programs of this host come and go, and so do earlier tests.
    made = set(os.listdir("/dev/shm")) - before
    assert not [name for name in made if pids & set(re.split(r"\D+", name))]
    assert address.link.removeprefix("unix:@") not in Path("/proc/net/unix").read_text()


def test_a_forked_child_does_not_keep_connections_up(ipc_ends: Ends) -> None:
    sender, manifest = ipc_ends.sender(), numbered()
    receiver = ipc_ends.receiver(sender, "engine")
    receiver.open(manifest, version(1), staged=True)
    sender.open(manifest, version(1), peers=["engine"], staged=True)
    parent_end, child_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.write(child_end, b"!")
        signal.pause()
        os._exit(0)
    try:
        os.read(parent_end, 1)
        reader = Background(read_all, receiver, manifest, 1)
        sender.close()
        with pytest.raises((PeerDiedError, UpdateAbortedError)):
            reader.result()
        with pytest.raises(PeerDiedError):
            receiver.open(manifest, version(2), staged=True)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(parent_end)
        os.close(child_end)


def _usage() -> tuple[Counter[str], int, int]:
    """What descriptors of this process are of, its mappings and its resident bytes."""
    gc.collect()
    opened: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            opened[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    num_mappings = Path("/proc/self/maps").read_text().count("/memfd:weightcast")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return opened, num_mappings, resident


def test_closing_ends_the_wait_of_another_thread(ipc_ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender: Any = ipc_ends.sender(6 * PATIENCE_SECONDS)
    manifest, is_waiting, wait = numbered(NUM_BUCKETS), threading.Event(), sender.condition.wait
    ipc_ends.receiver(sender, "silent")

    def waiting(seconds: float) -> None:
        is_waiting.set()
        wait(seconds)

    monkeypatch.setattr(sender.condition, "wait", waiting)
    waits = Background(lambda: sender.open(manifest, version(1), peers=["silent"], staged=True))
    assert is_waiting.wait(PATIENCE_SECONDS)
    Background(sender.close).result()
    with pytest.raises(ClosedError):
        waits.result()


@pytest.mark.cluster
def test_two_hundred_updates_leave_no_trace(ipc_ends: Ends) -> None:
    sender = ipc_ends.sender()
    receivers = {name: ipc_ends.receiver(sender, name) for name in ("a", "b")}
    manifests = [numbered(4, 64 << 10), numbered(3, 96 << 10)]

    def update(number: int) -> None:
        manifest, staged = manifests[number % 2], number % 3 == 0
        for receiver in receivers.values():
            receiver.open(manifest, version(number), staged=staged)
        sender.open(manifest, version(number), peers=list(receivers), staged=staged)
        readers = [Background(read_all, receiver, manifest, number) for receiver in receivers.values()]
        if number % 5 == 4:
            send(sender, manifest, number, 0)
            sender.abort("every fifth")
            for reader in readers:
                with pytest.raises(UpdateAbortedError):
                    reader.result()
        else:
            send_all(sender, manifest, number)
            for reader in readers:
                reader.result()
        for receiver in receivers.values():
            receiver.end()
        assert not sender.failures

    for number in range(30):
        update(number)
    before = _usage()
    for number in range(30, 230):
        update(number)
    after = _usage()
    # What an earlier test's groups still had open may have been closed since.
    assert not after[0] - before[0]
    assert after[1] == before[1]
    assert after[2] - before[2] < 8 << 20
