"""Whoever connects to an ipc sender without being a receiver of its run, and receivers that send what they must not."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from transports.conftest import Ends

from weightcast.errors import PeerDiedError
from weightcast.format.manifest import decode, encode
from weightcast.seams.transport import Sender
from weightcast.testing.transport_kit import (
    OTHER_RUN,
    PATIENCE_SECONDS,
    RUN,
    Background,
    numbered,
    read_all,
    send,
    send_all,
    version,
)
from weightcast.transports.ipc import channel as ipc_channel
from weightcast.transports.ipc import receiver as ipc_receiver
from weightcast.transports.ipc.records import (
    MAX_RECORD_BYTES,
    IpcHello,
    Refused,
    ToReceiver,
)
from weightcast.transports.ipc.sender import IpcSender
from weightcast.transports.records import KeepAlive, Opened, Released, UpdateAborted, UpdateEnded

HOSTILE_PACKETS = {
    "garbage": b"\x00\xff" * 50,
    "truncated": encode(IpcHello(RUN, "engine"))[:-3],
    "not a record": b"[1, 2, 3]",
    "unknown kind": b'{"kind":"exec","code":"1"}',
    "not a hello": encode(Opened(1, 1)),
    "the other direction": b'{"kind":"welcome"}',
    "other run": encode(IpcHello(OTHER_RUN, "engine")),
    "bad run": b'{"kind":"hello","run":"xyz","peer":"engine","protocol":3}',
    "other protocol": encode(IpcHello(RUN, "engine", protocol=1)),
    "long name": encode(IpcHello(RUN, "x" * 5000)),
    "oversized": b"{" + b" " * (MAX_RECORD_BYTES + 100),
    "deeply nested": b"[" * 30_000,
}


@pytest.fixture
def sockets() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def _connect(sender: Sender, sockets: contextlib.ExitStack) -> socket.socket:
    sock = sockets.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    sock.settimeout(PATIENCE_SECONDS)
    sock.connect("\0" + sender.address.removeprefix("ipc://@"))
    return sock


def _hear_the_end(sock: socket.socket) -> list[object]:
    """Every record up to the end of the connection."""
    records: list[object] = []
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(MAX_RECORD_BYTES):
            records.append(decode(data, ToReceiver))
    return records


def _publish(ends: Ends, sender: Sender, number: int) -> None:
    manifest, receiver = numbered(), ends.receiver(sender, f"real-{number}")
    receiver.open(manifest, version(number), staged=False)
    sender.open(manifest, version(number), peers=[f"real-{number}"], staged=False)
    reader = Background(read_all, receiver, manifest, number)
    send_all(sender, manifest, number)
    assert len(reader.result()) == 5
    assert not sender.failures


@pytest.mark.parametrize("kind", HOSTILE_PACKETS)
def test_who_does_not_say_a_proper_hello_is_disconnected(
    ipc_ends: Ends, sockets: contextlib.ExitStack, kind: str
) -> None:
    sender = ipc_ends.sender()
    stranger = _connect(sender, sockets)
    stranger.send(HOSTILE_PACKETS[kind])
    answer = _hear_the_end(stranger)
    assert all(isinstance(record, Refused) for record in answer)
    assert bool(answer) == (kind in ("other run", "other protocol", "not a hello"))
    _publish(ipc_ends, sender, 1)


def test_silent_strangers_are_turned_out_and_keep_nobody_out(
    ipc_ends: Ends, sockets: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc_channel, "_HELLO_SECONDS", 0.3)
    monkeypatch.setattr(ipc_channel, "_MAX_STRANGERS", 4)
    sender = ipc_ends.sender()
    strangers = [_connect(sender, sockets) for _ in range(9)]
    _publish(ipc_ends, sender, 1)
    for stranger in strangers:
        assert _hear_the_end(stranger) == []


def test_another_user_is_refused_on_both_ends(ipc_ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = ipc_ends.sender()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PeerDiedError, match="user"):
        ipc_ends.receiver(sender)

    def trusting(sock: socket.socket) -> None:
        pass

    monkeypatch.setattr(ipc_receiver, "check_same_user", trusting)
    with pytest.raises(PeerDiedError, match="closed the connection"):
        ipc_ends.receiver(sender)
    monkeypatch.undo()
    _publish(ipc_ends, sender, 1)


def test_descriptors_that_come_unasked_are_closed(ipc_ends: Ends, sockets: contextlib.ExitStack) -> None:
    sender = ipc_ends.sender()
    stranger = _connect(sender, sockets)
    reader, writer = os.pipe()
    socket.send_fds(stranger, [encode(IpcHello(RUN, "engine"))], [writer] * 3)
    os.close(writer)
    stranger.recv(MAX_RECORD_BYTES)
    # The end of the pipe shows that no copy of its other end is open any more.
    assert os.read(reader, 1) == b""
    os.close(reader)
    _publish(ipc_ends, sender, 1)


@pytest.mark.parametrize(
    "packet",
    [b"garbage", b"{" * 1000, b" " * (MAX_RECORD_BYTES + 1), b'{"kind":"released","version":-1,"update":1}'],
    ids=["garbage", "nested", "oversized", "negative"],
)
def test_a_receiver_that_turns_to_garbage_is_dropped_and_named(
    ipc_ends: Ends, sockets: contextlib.ExitStack, packet: bytes
) -> None:
    sender, manifest = ipc_ends.sender(), numbered(6)
    rogue, lively = _connect(sender, sockets), ipc_ends.receiver(sender, "lively")
    rogue.send(encode(IpcHello(RUN, "rogue")))
    rogue.send(encode(Opened(1, 1)))
    lively.open(manifest, version(1), staged=False)
    sender.open(manifest, version(1), peers=["rogue", "lively"], staged=False)
    reader = Background(read_all, lively, manifest, 1)
    rogue.send(packet)
    send_all(sender, manifest, 1)
    assert len(reader.result()) == 6
    assert {name: type(error) for name, error in sender.failures.items()} == {"rogue": PeerDiedError}
    assert "no valid record" in str(sender.failures["rogue"])


def test_releases_of_other_updates_and_buckets_free_nothing(ipc_ends: Ends, sockets: contextlib.ExitStack) -> None:
    sender, manifest = ipc_ends.sender(deadline_seconds=0.4), numbered(3)
    rogue = _connect(sender, sockets)
    rogue.send(encode(IpcHello(RUN, "rogue")))
    rogue.send(encode(Opened(7, 1)))
    sender.open(manifest, version(7), peers=["rogue"], staged=False)
    send(sender, manifest, 7, 0)
    send(sender, manifest, 7, 1)
    for record in (
        Released(update=999, generation=1, index=0),
        Released(update=1, generation=999, index=0),
        Released(update=1, generation=1, index=1),
        Released(update=1, generation=1, index=4_000_000_000),
        UpdateEnded(version=6, update=999),
        IpcHello(RUN, "rogue"),
    ):
        rogue.send(encode(record))
    send(sender, manifest, 7, 2)
    assert "released nothing" in str(sender.failures["rogue"])


def test_a_peer_without_room_for_the_end_of_an_update_is_told_later(
    ipc_ends: Ends, sockets: contextlib.ExitStack
) -> None:
    """It is alive, and only behind: it need not connect again."""
    sender, manifest = ipc_ends.sender(), numbered(6)
    assert isinstance(sender, IpcSender)
    slow = _connect(sender, sockets)
    slow.send(encode(IpcHello(RUN, "slow")))
    slow.send(encode(Opened(1, 1)))
    sender.open(manifest, version(1), peers=["slow"], staged=False)
    while sender._peers["slow"].channel.send(KeepAlive()):
        pass
    sender.abort("the test ends it")
    assert sender.connected(["slow"]) == ["slow"]
    heard = list[object]()
    while not any(isinstance(record, UpdateAborted) for record in heard):
        heard.append(decode(slow.recv(MAX_RECORD_BYTES), ToReceiver))
        assert sender.failures == {}


_OUT_OF_DESCRIPTORS = """
import os, resource, socket, sys
from weightcast.testing.transport_kit import RUN, PATIENCE_SECONDS
from weightcast.transports.ipc.channel import Listener
from weightcast.transports.ipc.receiver import IpcReceiver
import weightcast.transports.ipc.channel as module

class FailedOnce(module.AcceptLog):
    def failed(self, error):
        super().failed(error)
        os.write(writer, b"f")

reader, writer = os.pipe()
module.AcceptLog = FailedOnce
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
listener = Listener(RUN)
client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
client.connect("\\0" + listener.address.removeprefix("ipc://@"))
os.read(reader, 1), os.read(reader, 1)
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
IpcReceiver(listener.address, peer="engine", run=RUN, deadline_seconds=PATIENCE_SECONDS).close()
listener.close()
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
    assert "no file descriptor left, its limit is 256: raise that" in ended.stdout
