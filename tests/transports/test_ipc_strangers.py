"""Whoever connects to an ipc sender without being a receiver of its run, and receivers that send what they must not."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from transports.conftest import Ends

from weightcast.errors import PeerDiedError
from weightcast.format.messages import MAX_LINK_MESSAGE_BYTES, Heartbeat, Hello, LinkMessage
from weightcast.host.deadline import Deadline
from weightcast.host.memory import host_identity
from weightcast.links import link as links
from weightcast.links.link import Frames, frame
from weightcast.seams.transport import Sender
from weightcast.testing.transport_kit import (
    OTHER_RUN,
    PATIENCE_SECONDS,
    RUN,
    Background,
    listener_of,
    numbered,
    read_all,
    send,
    send_all,
    version,
)
from weightcast.transports.ipc import IpcSender
from weightcast.transports.ipc.records import CudaArena, SharedArena
from weightcast.transports.records import BucketReady, FromSender, Opened, Released, UpdateEnded

LENGTH = (100).to_bytes(4, "big")


def _hello(sender: Sender, peer: str, **changes: object) -> bytes:
    fields = {"run": RUN, "engine": peer, "engine_rank": 0, "secret": listener_of(sender).secret}
    return frame(Hello(**{**fields, "host": host_identity(), **changes}))  # type: ignore[arg-type]


HOSTILE: dict[str, Callable[[Sender], bytes]] = {
    "garbage": lambda sender: LENGTH + b"\x00\xff" * 50,
    "not a record": lambda sender: frame([1, 2, 3]),  # type: ignore[arg-type]
    "unknown kind": lambda sender: LENGTH + b'{"kind":"exec","code":"1"}'.ljust(100),
    "not a hello": lambda sender: frame(Opened(1)),
    "the other direction": lambda sender: frame(Heartbeat()),
    "other run": lambda sender: _hello(sender, "engine", run=OTHER_RUN),
    "bad run": lambda sender: _hello(sender, "engine", run="xyz"),
    "wrong secret": lambda sender: _hello(sender, "engine", secret="0" * 64),
    "other protocol": lambda sender: _hello(sender, "engine", protocol=1),
    "long name": lambda sender: _hello(sender, "x" * 5000),
    "oversized": lambda sender: (MAX_LINK_MESSAGE_BYTES + 1).to_bytes(4, "big"),
    "deeply nested": lambda sender: (30_000).to_bytes(4, "big") + b"[" * 30_000,
}


@pytest.fixture
def sockets() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _connect(sender: Sender, sockets: contextlib.ExitStack) -> socket.socket:
    sock = sockets.enter_context(links.connect(listener_of(sender).address, PATIENCE_SECONDS))
    sock.settimeout(PATIENCE_SECONDS)
    return sock


def _join(sender: Sender, sock: socket.socket, peer: str, opened: Opened) -> None:
    """Say hello as a worker that has opened a version, and wait until the sender knows of it."""
    sock.sendall(_hello(sender, peer) + frame(opened))
    polls = Deadline(PATIENCE_SECONDS).polls(0.001, 0.01)
    assert any(sender.connected([peer]) for _ in polls)


def _hear_the_end(sock: socket.socket) -> list[object]:
    """Every record up to the end of the connection."""
    frames, records = Frames(LinkMessage | SharedArena | CudaArena | BucketReady | FromSender), list[object]()
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(1 << 16):
            records += frames.feed(data)
    return records


def _publish(ends: Ends, sender: Sender, number: int) -> None:
    manifest, receiver = numbered(), ends.receiver(sender, f"real-{number}")
    receiver.open(manifest, version(number), staged=False)
    sender.open(manifest, version(number), peers=[f"real-{number}"], staged=False)
    reader = Background(read_all, receiver, manifest, number)
    send_all(sender, manifest, number)
    assert len(reader.result()) == 5
    assert not sender.failures


@pytest.mark.parametrize("kind", HOSTILE)
def test_who_does_not_say_a_proper_hello_is_disconnected(
    ipc_ends: Ends, sockets: contextlib.ExitStack, kind: str
) -> None:
    sender = ipc_ends.sender()
    stranger = _connect(sender, sockets)
    stranger.sendall(HOSTILE[kind](sender))
    assert _hear_the_end(stranger) == []
    _publish(ipc_ends, sender, 1)


def test_silent_strangers_are_turned_out_and_keep_nobody_out(
    ipc_ends: Ends, sockets: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "GRACE_SECONDS", 2.0)
    monkeypatch.setattr(links, "_MAX_STRANGERS", 4)
    sender = ipc_ends.sender()
    strangers = [_connect(sender, sockets) for _ in range(9)]
    for stranger in strangers:
        assert _hear_the_end(stranger) == []
    _publish(ipc_ends, sender, 1)


def test_another_user_is_refused_on_both_ends(ipc_ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = ipc_ends.sender()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PeerDiedError, match="user"):
        ipc_ends.receiver(sender)

    def trusting(address: str, timeout_seconds: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + address.removeprefix("unix:@"))
        return sock

    monkeypatch.setattr(links, "connect", trusting)
    with pytest.raises(PeerDiedError, match=r"closed the link instead of answering|no publisher answers"):
        ipc_ends.receiver(sender)
    monkeypatch.undo()
    _publish(ipc_ends, sender, 1)


def test_descriptors_that_come_unasked_are_closed(ipc_ends: Ends, sockets: contextlib.ExitStack) -> None:
    sender = ipc_ends.sender()
    stranger = _connect(sender, sockets)
    reader, writer = os.pipe()
    socket.send_fds(stranger, [_hello(sender, "engine")], [writer] * 3)
    os.close(writer)
    stranger.recv(1 << 16)
    # The end of the pipe shows that no copy of its other end is open any more.
    assert os.read(reader, 1) == b""
    os.close(reader)
    _publish(ipc_ends, sender, 1)


@pytest.mark.parametrize(
    "words",
    [
        LENGTH + b"garbage".ljust(100),
        LENGTH + b"{" * 100,
        (MAX_LINK_MESSAGE_BYTES + 1).to_bytes(4, "big"),
        LENGTH + b'{"kind":"released","version":-1,"update":1}'.ljust(100),
    ],
    ids=["garbage", "nested", "oversized", "negative"],
)
def test_a_receiver_that_turns_to_garbage_is_dropped_and_named(
    ipc_ends: Ends, sockets: contextlib.ExitStack, words: bytes
) -> None:
    sender, manifest = ipc_ends.sender(), numbered(6)
    rogue, lively = _connect(sender, sockets), ipc_ends.receiver(sender, "lively")
    _join(sender, rogue, "rogue", Opened(1))
    lively.open(manifest, version(1), staged=False)
    sender.open(manifest, version(1), peers=["rogue", "lively"], staged=False)
    reader = Background(read_all, lively, manifest, 1)
    rogue.sendall(words)
    assert _hear_the_end(rogue)
    send_all(sender, manifest, 1)
    assert len(reader.result()) == 6
    assert {name: type(error) for name, error in sender.failures.items()} == {"rogue": PeerDiedError}


def test_releases_of_other_updates_and_buckets_free_nothing(ipc_ends: Ends, sockets: contextlib.ExitStack) -> None:
    sender, manifest = ipc_ends.sender(deadline_seconds=0.4), numbered(3)
    rogue = _connect(sender, sockets)
    _join(sender, rogue, "rogue", Opened(7))
    sender.open(manifest, version(7), peers=["rogue"], staged=False)
    send(sender, manifest, 7, 0)
    send(sender, manifest, 7, 1)
    for record in (
        Released(version=6, generation=1, index=0),
        Released(version=7, generation=999, index=0),
        Released(version=7, generation=1, index=1),
        Released(version=7, generation=1, index=4_000_000_000),
        UpdateEnded(version=6),
    ):
        rogue.sendall(frame(record))
    send(sender, manifest, 7, 2)
    assert "released nothing" in str(sender.failures["rogue"])


def test_a_peer_that_reads_nothing_is_waited_for_and_one_without_room_for_the_end_is_disconnected(
    ipc_ends: Ends, sockets: contextlib.ExitStack
) -> None:
    sender, manifest = ipc_ends.sender(), numbered(6)
    assert isinstance(sender, IpcSender)
    slow = _connect(sender, sockets)
    _join(sender, slow, "slow", Opened(1))
    sender.open(manifest, version(1), peers=["slow"], staged=True)
    link = sender._peers["slow"].link
    while link.put(frame(Heartbeat())):
        pass
    sending = Background(send, sender, manifest, 1, 0)
    assert not sending.is_done_within(0.2)
    # The kernel says that there is room only once much has been read.
    while not sending.is_done_within(0.01):
        slow.recv(1 << 16)
    sending.result()
    assert not sender.failures
    while link.put(frame(Heartbeat())):
        pass
    sender.abort("the test ends it")
    assert sender.connected(["slow"]) == []
    assert "does not read its messages" in link.ended
    _hear_the_end(slow)


_OUT_OF_DESCRIPTORS = """
import os, resource, socket, sys
import contextlib
from weightcast.testing.transport_kit import address_of, make_receiver, make_sender
import weightcast.links.link as module

class FailedOnce(module.AcceptLog):
    def failed(self, error):
        super().failed(error)
        os.write(writer, b"f")

reader, writer = os.pipe()
module.AcceptLog = FailedOnce
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
stack = contextlib.ExitStack()
address = address_of(make_sender(stack, "ipc://"), "ipc://")
client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
client.connect("\\0" + address.link.removeprefix("unix:@"))
os.read(reader, 1), os.read(reader, 1)
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
make_receiver(stack, address, "engine")
stack.close()
print("connected")
"""


def test_a_listener_that_was_out_of_descriptors_accepts_again_and_logs_one_line() -> None:
    """In a process whose descriptors have numbers over 1,024, which select(2) does not take."""
    program = [sys.executable, "-c", _OUT_OF_DESCRIPTORS]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_SECONDS * 2, check=False)
    assert ended.stdout == "connected\n", ended.stderr
    assert ended.stderr.count("could not be accepted") == 1
    assert "no file descriptor left" in ended.stderr


_FEW_DESCRIPTORS = """
import os, resource, sys
import torch
import weightcast
from weightcast.control.local import LocalEngine

model = torch.nn.Linear(8, 8)
engine = LocalEngine(weightcast.ModuleEngine(torch.nn.Linear(8, 8)))
publisher = weightcast.Publisher(weightcast.ModuleSource(model), transport="ipc://", engines=[engine])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
for _ in range(int(sys.argv[1])):
    os.close(held.pop())
try:
    publisher.publish()
except (OSError, weightcast.errors.WeightcastError) as exc:
    found = f"{type(exc).__name__}: {exc}"
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
for descriptor in held:
    os.close(descriptor)
assert publisher.publish().ok
publisher.close()
print(found)
"""


@pytest.mark.parametrize("num_left", [0, 3, 5])
def test_a_publish_without_descriptors_says_so_and_the_next_one_goes(num_left: int) -> None:
    program = [sys.executable, "-c", _FEW_DESCRIPTORS, str(num_left)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE_SECONDS * 2, check=False)
    assert ended.returncode == 0, ended.stderr
    # If the engine has none left, its log says so.
    assert "no file descriptor left (limit 256): raise the limit" in ended.stdout + ended.stderr
