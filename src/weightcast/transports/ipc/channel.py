"""Packets between the ends of the ipc transport, never blocking, and who is let in to exchange them.

An abstract Unix socket of packets: a record is one packet, so that there is no half of one, and a kill leaves no file.
Invariants: both ends run as the same user (SO_PEERCRED); only a process that names this run and protocol in its first
record is welcomed; a stranger holds a place for a short time, and can't keep others out; a descriptor that comes
unasked is closed; a process that was forked off holds no connection, so that the end of the owner's process is the end
of its connections.
"""

from __future__ import annotations

import array
import collections
import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from typing import Any

import msgspec

from weightcast.errors import ManifestError, RefusedError, StaleVersionError, UnsupportedError, to_record
from weightcast.format.manifest import PROTOCOL, decode, encode
from weightcast.host.closing import close_in_child, on_failure
from weightcast.host.descriptors import ACCEPT_RETRY_SECONDS, AcceptLog
from weightcast.links.link import check_same_user
from weightcast.transports.ipc.records import MAX_RECORD_BYTES, IpcHello, Refused, ToSender, Welcome

logger = logging.getLogger(__name__)

SCHEME = "ipc://"
_HELLO_SECONDS = 5.0
_BACKLOG = 128
_MAX_STRANGERS = 128
# As numbers: operators of an enumeration take a good part of a packet's time.
_SEND_FLAGS = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_WAS_CUT = int(socket.MSG_TRUNC)


class Channel:
    """A packet socket that a forked child closes. `send`: from several threads; `receive`: from one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = close_in_child(sock)
        self._buffer = bytearray(MAX_RECORD_BYTES)

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, record: msgspec.Struct, descriptor: int | None = None) -> bool:
        """Send one record, with a descriptor if given; False if there is no room now. Raises EOFError at the end."""
        ancillary: list[Any] = []
        if descriptor is not None:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        try:
            self.sock.sendmsg([encode(record)], ancillary, _SEND_FLAGS)
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
            try:
                size, ancillary, seen, _ = self.sock.recvmsg_into([self._buffer], room, _RECEIVE_FLAGS)
            except ConnectionResetError:
                # The peer closed with records of ours unread; what it sent before is still there, then comes the end.
                size, ancillary, seen, _ = self.sock.recvmsg_into([self._buffer], room, _RECEIVE_FLAGS)
        except BlockingIOError:
            return None
        except OSError as exc:
            raise EOFError(f"the connection ended: {exc}") from exc
        descriptors = array.array("i")
        for level, message, data in ancillary:
            if (level, message) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        record: Any = None
        try:
            if not size:
                raise EOFError("the connection ended")
            if seen & _WAS_CUT:
                raise ManifestError(f"a record of over {MAX_RECORD_BYTES} bytes [too_large]", fault="too_large")
            record = decode(memoryview(self._buffer)[:size], kind, max_bytes=MAX_RECORD_BYTES)
        finally:
            for descriptor in descriptors[0 if record is None else 1 :]:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        return record, descriptors[0] if descriptors else None

    def close(self) -> None:
        self.sock.close()


class Listener:
    """Listens at `address` until `close`, in a thread that accepts connections and reads their hello.

    `arrived` is an eventfd, readable while `take` has something.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._arrivals: list[tuple[str, Channel]] = []
        self._strangers: collections.OrderedDict[int, tuple[Channel, float]] = collections.OrderedDict()
        self._poller = select.poll()
        self._accept_log = AcceptLog(logger, "a receiver")
        name = f"weightcast-{secrets.token_hex(16)}"
        self.address = f"{SCHEME}@{name}"
        self._sock = close_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        self._sock.setblocking(False)
        self._sock.bind("\0" + name)
        self._sock.listen(_BACKLOG)
        self.arrived = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name="weightcast-ipc", daemon=True)
        self._thread.start()

    def take(self) -> list[tuple[str, Channel]]:
        """The peers that have come since, in order; the caller owns their channels."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
            if arrivals:
                os.eventfd_read(self.arrived)
            return arrivals

    def wake(self) -> None:
        """End a wait for `arrived`, and every later one."""
        os.eventfd_write(self.arrived, 1)

    def close(self) -> None:
        """Stop listening; peers that were not taken are disconnected. Call once."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._sock.close()
        for _, channel in self._arrivals:
            channel.close()
        os.close(self.arrived)
        os.close(self._stop)

    def _serve(self) -> None:
        self._poller.register(self._sock, select.POLLIN)
        self._poller.register(self._stop, select.POLLIN)
        while True:
            patience_ms = _HELLO_SECONDS * 250 if self._strangers else None
            ready = {descriptor for descriptor, _ in self._poller.poll(patience_ms)}
            if self._stop in ready:
                break
            for descriptor in ready & self._strangers.keys():
                self._greet(descriptor)
            if self._sock.fileno() in ready:
                self._accept()
            self._turn_out(time.monotonic() - _HELLO_SECONDS)
        self._turn_out(float("inf"))

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
            with on_failure(sock.close):
                check_same_user(sock)
        except BlockingIOError:
            return
        except PermissionError as exc:
            logger.warning("a connection was refused: %s", exc)
            return
        except OSError as exc:
            # Out of descriptors, most likely: the connection waits in the queue, so don't spin on it.
            self._accept_log.failed(exc)
            time.sleep(ACCEPT_RETRY_SECONDS)
            return
        channel = Channel(sock)
        if len(self._strangers) >= _MAX_STRANGERS:
            self._forget(next(iter(self._strangers))).close()
        self._strangers[channel.fileno()] = (channel, time.monotonic())
        self._poller.register(channel, select.POLLIN)

    def _turn_out(self, latest: float) -> None:
        """Close the connections of strangers that came until then."""
        while self._strangers and next(iter(self._strangers.values()))[1] <= latest:
            self._forget(next(iter(self._strangers))).close()

    def _forget(self, descriptor: int) -> Channel:
        self._poller.unregister(descriptor)
        return self._strangers.pop(descriptor)[0]

    def _greet(self, descriptor: int) -> None:
        """Hear a stranger's first record, and welcome or refuse it."""
        channel = self._strangers[descriptor][0]
        try:
            packet = channel.receive(ToSender)
            if packet is None:
                return
            self._forget(descriptor)
            record, refusal = packet[0], self._refusal(packet[0])
            if refusal is not None:
                channel.send(Refused(to_record(refusal)))
                channel.close()
                return
            with self._lock:
                # Under the lock, so that whoever has been welcomed is among the arrivals.
                channel.send(Welcome())
                self._arrivals.append((record.peer, channel))
                os.eventfd_write(self.arrived, 1)
        except (EOFError, ManifestError) as exc:
            logger.warning("a connection was closed before its hello: %s", exc)
            if descriptor in self._strangers:
                self._forget(descriptor)
            channel.close()

    def _refusal(self, record: object) -> RefusedError | None:
        if not isinstance(record, IpcHello):
            return UnsupportedError(f"the first record must be a hello, not {type(record).__name__}")
        if record.protocol != PROTOCOL:
            return UnsupportedError(f"protocol {record.protocol} was offered, {PROTOCOL} is spoken: update one end")
        if record.run != self._run:
            return StaleVersionError(f"the receiver is of run {record.run}, the publisher of {self._run}: init again")
        return None
