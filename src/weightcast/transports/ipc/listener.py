"""Lets receivers in: a small thread that accepts connections and reads their hello, whatever the publisher does.

Invariants: only a process of the same user that names this run and protocol in its first record gets in; a stranger
holds a place for a short time, and can't keep others out.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import secrets
import select
import threading
import time

from weightcast.errors import ManifestError, RefusedError, StaleVersionError, UnsupportedError, to_record
from weightcast.format.manifest import PROTOCOL
from weightcast.links.link import check_same_user
from weightcast.transports.ipc.channel import SCHEME, Channel, adopt, packet_socket
from weightcast.transports.ipc.records import IpcHello, Refused, ToSender, Welcome

logger = logging.getLogger(__name__)

_HELLO_SECONDS = 5.0
_EXHAUSTED_SECONDS = 0.1
_BACKLOG = 128
_MAX_STRANGERS = 128


class Listener:
    """Listens at `address` until `close`. `arrived` is an eventfd, readable while `take` has something."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._arrivals: list[tuple[str, Channel]] = []
        self._strangers: collections.OrderedDict[int, tuple[Channel, float]] = collections.OrderedDict()
        self._poller = select.poll()
        name = f"weightcast-{secrets.token_hex(16)}"
        self.address = f"{SCHEME}@{name}"
        self._sock = packet_socket()
        self._sock.bind("\0" + name)
        self._sock.listen(_BACKLOG)
        self.arrived = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name="weightcast-ipc", daemon=True)
        self._thread.start()

    def take(self) -> list[tuple[str, Channel]]:
        """The peers that have come since, in order; the caller owns their channels."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self.arrived)
            arrivals, self._arrivals = self._arrivals, []
            return arrivals

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
            ready = {descriptor for descriptor, _ in self._poller.poll(self._patience_ms())}
            if self._stop in ready:
                break
            for descriptor in ready & self._strangers.keys():
                self._greet(descriptor)
            if self._sock.fileno() in ready:
                self._accept()
            self._turn_out(time.monotonic())
        self._turn_out(float("inf"))

    def _patience_ms(self) -> float | None:
        if not self._strangers:
            return None
        oldest = next(iter(self._strangers.values()))[1]
        return max(0.0, oldest + _HELLO_SECONDS - time.monotonic()) * 1000

    def _accept(self) -> None:
        try:
            sock, _ = self._sock.accept()
        except BlockingIOError:
            return
        except OSError as exc:
            # Out of descriptors, most likely: the connection waits in the queue, so don't spin on it.
            logger.warning("a receiver could not be accepted: %s", exc)
            select.select([self._stop], [], [], _EXHAUSTED_SECONDS)
            return
        channel = Channel(adopt(sock))
        try:
            check_same_user(sock)
        except OSError as exc:
            logger.warning("a connection was refused: %s", exc)
            channel.close()
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._forget(next(iter(self._strangers))).close()
        self._strangers[channel.fileno()] = (channel, time.monotonic())
        self._poller.register(channel, select.POLLIN)

    def _turn_out(self, now: float) -> None:
        while self._strangers and next(iter(self._strangers.values()))[1] + _HELLO_SECONDS <= now:
            self._forget(next(iter(self._strangers))).close()

    def _forget(self, descriptor: int) -> Channel:
        self._poller.unregister(descriptor)
        return self._strangers.pop(descriptor)[0]

    def _greet(self, descriptor: int) -> None:
        channel = self._strangers[descriptor][0]
        try:
            packet = channel.receive(ToSender)
            if packet is None:
                return
            self._admit(packet[0], self._forget(descriptor))
        except (EOFError, ManifestError) as exc:
            logger.warning("a connection was closed before its hello: %s", exc)
            if descriptor in self._strangers:
                self._forget(descriptor)
            channel.close()

    def _admit(self, record: object, channel: Channel) -> None:
        refusal = self._refusal(record)
        if refusal is not None:
            channel.send(Refused(to_record(refusal)))
            channel.close()
            return
        assert isinstance(record, IpcHello)
        with self._lock:
            # Under the lock, so that whoever has been welcomed is among the arrivals.
            channel.send(Welcome())
            self._arrivals.append((record.peer, channel))
            os.eventfd_write(self.arrived, 1)

    def _refusal(self, record: object) -> RefusedError | None:
        if not isinstance(record, IpcHello):
            return UnsupportedError(f"the first record must be a hello, not {type(record).__name__}")
        if record.protocol != PROTOCOL:
            return UnsupportedError(f"protocol {record.protocol} was offered, {PROTOCOL} is spoken: update one end")
        if record.run != self._run:
            return StaleVersionError(f"the receiver is of run {record.run}, the publisher of {self._run}: init again")
        return None
