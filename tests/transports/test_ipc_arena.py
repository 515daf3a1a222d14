"""The shared memory itself: what a receiver accepts, who sees whose writes, when its pages are given back."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transports.conftest import Ends

from weightcast.errors import ManifestError, PeerDiedError
from weightcast.format.bucket import HEADER_BYTES
from weightcast.format.messages import MAX_LINK_MESSAGE_BYTES, Heartbeat
from weightcast.links.link import Frames, frame
from weightcast.testing.transport_kit import (
    PATIENCE_SECONDS,
    Background,
    LinkAddress,
    check,
    make_receiver,
    numbered,
    read_all,
    send_all,
    version,
)
from weightcast.transports.ipc import IpcReceiver, IpcSender
from weightcast.transports.ipc.arena import MappedSharedArena, OwnedSharedArena
from weightcast.transports.ipc.records import SharedArena
from weightcast.transports.records import BeginUpdate, BucketReady, Opened, UpdateAborted, UpdateEnded

SIZE_BYTES = 1 << 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _memory(size_bytes: int = SIZE_BYTES, seals: int = SEALS) -> int:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("size_bytes", "seals"),
    [(SIZE_BYTES // 2, SEALS), (2 * SIZE_BYTES, SEALS), (SIZE_BYTES, 0), (SIZE_BYTES, fcntl.F_SEAL_GROW)],
    ids=["smaller", "larger", "unsealed", "shrinkable"],
)
def test_memory_that_could_vanish_is_not_mapped(size_bytes: int, seals: int) -> None:
    descriptor = _memory(size_bytes, seals)
    with pytest.raises(ManifestError):
        MappedSharedArena(SharedArena(1, SIZE_BYTES), descriptor)
    assert not _is_open(descriptor)


def test_what_is_no_anonymous_memory_is_not_mapped(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(SIZE_BYTES))
    for path in (file, Path("/dev/null"), tmp_path):
        with pytest.raises(ManifestError):
            MappedSharedArena(SharedArena(1, SIZE_BYTES), os.open(path, os.O_RDONLY))


def test_the_arena_cannot_be_resized() -> None:
    arena = OwnedSharedArena(1, 1000)
    _, descriptor = arena.announcement()
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    arena.close(free=True)


def test_what_a_receiver_writes_stays_its_own_and_is_gone_with_the_failed_update(ipc_ends: Ends) -> None:
    sender, manifest = ipc_ends.sender(), numbered()
    writer, other = ipc_ends.receiver(sender, "writer"), ipc_ends.receiver(sender, "other")
    for number in (1, 2):
        for receiver in (writer, other):
            receiver.open(manifest, version(number), staged=True)
        sender.open(manifest, version(number), peers=["writer", "other"], staged=True)
        send_all(sender, manifest, number)
        if number == 1:
            bucket = next(iter(writer))
            bucket.buffer.payload.zero_()
            writer.end()
        else:
            assert len(read_all(writer, manifest, number)) == 5
        assert len(read_all(other, manifest, number)) == 5
        other.end()


def test_pages_are_given_back_when_an_arena_is_outgrown() -> None:
    arena = OwnedSharedArena(1, SIZE_BYTES)
    _, descriptor = arena.announcement()
    buffer = arena.buffers.get(0, 0, HEADER_BYTES, SIZE_BYTES - HEADER_BYTES)
    view = buffer.flat(SIZE_BYTES)
    view.fill_(7)
    kept = os.dup(descriptor)
    assert os.fstat(kept).st_blocks * 512 == SIZE_BYTES
    arena.close(free=True)
    assert os.fstat(kept).st_blocks == 0
    assert not view.any()
    os.close(kept)


# --- a sender that breaks the rules ---


class FakeSender:
    """Welcomes one receiver and then sends whatever a test wants."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.settimeout(PATIENCE_SECONDS)
        name = f"weightcast-fake-{os.getpid()}-{id(self)}"
        self.address = LinkAddress("ipc://", f"unix:@{name}", "0" * 64)
        self._listener.bind("\0" + name)
        self._listener.listen()
        self._accepting = Background(self._welcome)

    def _welcome(self) -> socket.socket:
        sock, _ = self._listener.accept()
        sock.settimeout(PATIENCE_SECONDS)
        sock.recv(1 << 16)
        sock.send(frame(Heartbeat()))
        return sock

    def connect(self, stack: contextlib.ExitStack) -> tuple[IpcReceiver, socket.socket]:
        return make_receiver(stack, self.address, "engine"), self._accepting.result()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def fake(leaves_nothing: None) -> Iterator[tuple[IpcReceiver, socket.socket]]:
    with contextlib.closing(FakeSender()) as sender, contextlib.ExitStack() as stack:
        receiver, sock = sender.connect(stack)
        with sock:
            yield receiver, sock


BEGIN = BeginUpdate(version=1, staged=True, num_buckets=5)


def _ready(**changes: int) -> BucketReady:
    fields = {"version": 1, "generation": 1, "index": 0, "offset_bytes": 0, "num_bytes": HEADER_BYTES + 8192}
    return BucketReady(**{**fields, **changes})


def framed(words: bytes) -> bytes:
    return len(words).to_bytes(4, "big") + words


@pytest.mark.parametrize(
    "record",
    [
        _ready(generation=2),
        _ready(index=1),
        _ready(offset_bytes=SIZE_BYTES),
        _ready(offset_bytes=1 << 55),
        _ready(num_bytes=HEADER_BYTES - 1),
        _ready(num_bytes=HEADER_BYTES + 8193),
        SharedArena(2, SIZE_BYTES),
        framed(b"garbage"),
        (MAX_LINK_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        framed(b'{"kind":"ready","version":1,"generation":1,"index":0,"offset_bytes":-8,"num_bytes":8448}'),
        framed(b'{"kind":"released","version":1,"generation":1,"index":0}'),
    ],
    ids=[
        "generation",
        "index",
        "behind",
        "overflow",
        "no header",
        "too long",
        "no descriptor",
        "garbage",
        "oversized",
        "negative",
        "direction",
    ],
)
def test_a_receiver_trusts_no_record(fake: tuple[IpcReceiver, socket.socket], record: object) -> None:
    receiver, sock = fake
    receiver.open(numbered(), version(1), staged=True)
    descriptor = _memory()
    sock.send(frame(BEGIN))
    socket.send_fds(sock, [frame(SharedArena(1, SIZE_BYTES))], [descriptor])
    os.close(descriptor)
    sock.send(record if isinstance(record, bytes) else frame(record))  # type: ignore[arg-type]
    # What is no record ends the link; what can't be true is the iteration's to find.
    with pytest.raises(PeerDiedError if isinstance(record, bytes) else ManifestError):
        next(iter(receiver))


def test_an_arena_that_could_vanish_costs_its_update_and_is_not_known_in_the_next(
    fake: tuple[IpcReceiver, socket.socket],
) -> None:
    receiver, sock = fake
    receiver.open(numbered(), version(1), staged=True)
    descriptor = _memory(seals=0)
    sock.send(frame(BEGIN))
    socket.send_fds(sock, [frame(SharedArena(1, SIZE_BYTES))], [descriptor])
    os.close(descriptor)
    with pytest.raises(ManifestError, match="seals"):
        next(iter(receiver))
    receiver.open(numbered(), version(2), staged=True)
    assert _said(sock, 3) == [Opened(1), UpdateEnded(1), Opened(2, generation=0)]


def _said(sock: socket.socket, number: int) -> list[object]:
    """The receiver's next records."""
    frames, said = Frames(IpcSender.messages), list[object]()
    while len(said) < number:
        said += frames.feed(sock.recv(1 << 16))
    return said


def test_superfluous_descriptors_are_closed(fake: tuple[IpcReceiver, socket.socket]) -> None:
    receiver, sock = fake
    receiver.open(numbered(), version(1), staged=True)
    reader, writer = os.pipe()
    descriptor = _memory()
    socket.send_fds(sock, [frame(Heartbeat())], [writer])
    # Of an update that has not begun.
    socket.send_fds(sock, [frame(SharedArena(1, SIZE_BYTES))], [writer])
    sock.send(frame(BEGIN))
    socket.send_fds(sock, [frame(SharedArena(1, SIZE_BYTES))], [descriptor, writer])
    socket.send_fds(sock, [frame(SharedArena(2, SIZE_BYTES))], [writer, descriptor])
    for open_here in (descriptor, writer):
        os.close(open_here)
    with pytest.raises(ManifestError):
        next(iter(receiver))
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_buckets_of_an_arena_that_was_replaced_are_still_read(fake: tuple[IpcReceiver, socket.socket]) -> None:
    receiver, sock = fake
    manifest = numbered()
    receiver.open(manifest, version(1), staged=True)
    sock.send(frame(BEGIN))
    arenas = []
    for index in range(2):
        arena = OwnedSharedArena(index + 1, SIZE_BYTES)
        record, descriptor = arena.announcement()
        socket.send_fds(sock, [frame(record)], [descriptor])
        arena.buffers.get(0, 0, HEADER_BYTES, SIZE_BYTES - HEADER_BYTES).payload.fill_(index + 1)
        sock.send(frame(_ready(generation=index + 1, index=index)))
        arenas.append(arena)
    buckets = iter(receiver)
    for index in range(2):
        bucket = next(buckets)
        assert torch.equal(bucket.buffer.payload, torch.full_like(bucket.buffer.payload, index + 1))
    for arena in arenas:
        arena.close(free=False)


def test_a_version_that_was_given_up_before_the_sender_had_heard_so_is_not_the_next_one(
    fake: tuple[IpcReceiver, socket.socket],
) -> None:
    """What is left of it costs the next one nothing; the arena, which was announced too early, is announced again."""
    receiver, sock = fake
    receiver.open(numbered(), version(1), staged=True)
    receiver.end()
    arena = OwnedSharedArena(1, SIZE_BYTES)
    record, descriptor = arena.announcement()
    for index in range(2):
        start = index * SIZE_BYTES // 2
        arena.buffers.get(index, start, start + HEADER_BYTES, 8192).payload.fill_(index + 1)
    receiver.open(numbered(), version(2), staged=True)
    buckets = Background(lambda: next(iter(receiver)))
    sock.send(frame(BEGIN))
    socket.send_fds(sock, [frame(record)], [descriptor])
    sock.send(frame(_ready()))
    sock.send(frame(UpdateAborted(1, "the publisher began another update")))
    sock.send(frame(BeginUpdate(version=2, staged=True, num_buckets=5)))
    sock.send(frame(_ready()))
    socket.send_fds(sock, [frame(record)], [descriptor])
    sock.send(frame(_ready(version=2, offset_bytes=SIZE_BYTES // 2)))
    payload = buckets.result().buffer.payload
    assert torch.equal(payload, torch.full_like(payload, 2))
    arena.close(free=False)


def test_an_abandoned_arena_is_not_reused_for_another_layout(ipc_ends: Ends) -> None:
    sender, manifest, larger = ipc_ends.sender(deadline_seconds=0.3), numbered(2), numbered(1, 14336)
    stalled, lively = ipc_ends.receiver(sender, "stalled"), ipc_ends.receiver(sender, "lively")
    stalled.open(manifest, version(1), staged=False)
    sender.open(manifest, version(1), peers=["stalled"], staged=False)
    send_all(sender, manifest, 1)
    buckets = iter(stalled)
    next(buckets)
    held = next(buckets)
    lively.open(larger, version(2), staged=True)
    sender.open(larger, version(2), peers=["lively"], staged=True)
    send_all(sender, larger, 2)
    assert len(read_all(lively, larger, 2)) == 1
    check(held, manifest, 1)
    assert list(sender.failures) == ["stalled"]
