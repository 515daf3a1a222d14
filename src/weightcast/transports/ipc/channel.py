"""One connection of the ipc transport: whole records in both directions, never blocking.

An abstract Unix socket of packets: a record is one packet, so that there is no half of one, and a kill leaves no file.
Invariants: both ends run as the same user (SO_PEERCRED); a descriptor that comes unasked is closed; a process that was
forked off holds no connection, so that the end of the owner's process is the end of its connections.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import time
from typing import Any, TypeVar

import msgspec

from weightcast.errors import ManifestError, PeerDiedError, PeerTimeoutError, from_record
from weightcast.format.manifest import decode, encode
from weightcast.host.closing import close_in_child
from weightcast.links.link import check_same_user
from weightcast.transports.ipc.records import MAX_RECORD_BYTES, IpcHello, Refused, ToReceiver, Welcome

SCHEME = "ipc://"
PUBLISHER = "trainer"
_RETRY_SECONDS = 0.01

T = TypeVar("T")


def packet_socket() -> socket.socket:
    """A new packet socket that a forked child closes."""
    return adopt(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))


def adopt(sock: socket.socket) -> socket.socket:
    """Have a forked child close this socket, and make it non-blocking."""
    sock.setblocking(False)
    return close_in_child(sock)


class Channel:
    """A connected packet socket. `send` may be called from several threads, `receive` from one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(MAX_RECORD_BYTES)

    def fileno(self) -> int:
        return self._sock.fileno()

    def send(self, record: msgspec.Struct, descriptor: int | None = None) -> bool:
        """Send one record, with a descriptor if given; False if there is no room now. Raises EOFError at the end."""
        ancillary: list[Any] = []
        if descriptor is not None:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            self._sock.sendmsg([encode(record)], ancillary, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise EOFError(f"the connection ended: {exc}") from exc
        return True

    def receive(self, kind: Any, *, max_descriptors: int = 0) -> tuple[Any, int | None] | None:
        """The next record of the union `kind`, with its descriptor, which the caller then owns; None if none is there.

        Raises EOFError at the end of the connection, ManifestError for anything that is not such a record.
        """
        room = socket.CMSG_SPACE(4 * max_descriptors) if max_descriptors else 0
        try:
            size, ancillary, flags, _ = self._receive_packet(room)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise EOFError(f"the connection ended: {exc}") from exc
        descriptors = _descriptors(ancillary)
        try:
            if not size:
                raise EOFError("the connection ended")
            if flags & socket.MSG_TRUNC:
                raise ManifestError(f"a record of over {MAX_RECORD_BYTES} bytes [too_large]", fault="too_large")
            record = decode(memoryview(self._buffer)[:size], kind, max_bytes=MAX_RECORD_BYTES)
        except BaseException:
            _close_all(descriptors)
            raise
        _close_all(descriptors[1:])
        return record, descriptors[0] if descriptors else None

    def _receive_packet(self, room: int) -> tuple[int, list[tuple[int, int, bytes]], int, Any]:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            return self._sock.recvmsg_into([self._buffer], room, flags)
        except ConnectionResetError:
            # The peer closed with records of ours unread; what it sent before is still there, then comes the end.
            return self._sock.recvmsg_into([self._buffer], room, flags)

    def close(self) -> None:
        self._sock.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def connect(url: str, hello: IpcHello, deadline_seconds: float) -> Channel:
    """Connect to a sender's address and be welcomed. Raises PeerDiedError, PeerTimeoutError or what it refuses with."""
    name = url.removeprefix(SCHEME)
    if not url.startswith(SCHEME) or not name.startswith("@"):
        raise ValueError(f"{url!r} is not the address of an ipc sender; expected {SCHEME}@NAME, as in Sender.address")
    end = time.monotonic() + deadline_seconds
    sock = packet_socket()
    try:
        _connect(sock, "\0" + name[1:], end)
        check_same_user(sock)
        channel = Channel(sock)
        channel.send(hello)
        _await_welcome(channel, url, end)
        return channel
    except EOFError as exc:
        sock.close()
        raise PeerDiedError(f"the publisher at {url} closed the connection: {exc}", peer=PUBLISHER) from exc
    except OSError as exc:
        sock.close()
        raise PeerDiedError(
            f"no publisher of this user answers at {url}: {exc}. ipc:// needs both ends on one host and in one network "
            "namespace (one container or pod, or --network=host)",
            peer=PUBLISHER,
        ) from exc
    except BaseException:
        sock.close()
        raise


def _connect(sock: socket.socket, address: str, end: float) -> None:
    while True:
        try:
            return sock.connect(address)
        except BlockingIOError:
            # Its queue of new connections is full; a Unix socket gives no event for that.
            if time.monotonic() >= end:
                raise
            time.sleep(_RETRY_SECONDS)


def _await_welcome(channel: Channel, url: str, end: float) -> None:
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    while (packet := channel.receive(ToReceiver)) is None:
        remaining = end - time.monotonic()
        if remaining <= 0:
            raise PeerTimeoutError(f"the publisher at {url} did not welcome this peer by the deadline", peer=PUBLISHER)
        poller.poll(remaining * 1000)
    record = packet[0]
    if isinstance(record, Refused):
        raise from_record(record.error)
    if not isinstance(record, Welcome):
        raise ManifestError(f"the publisher at {url} answered a hello with {type(record).__name__}", fault="type")
