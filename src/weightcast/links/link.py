"""A worker's connection to its publisher, from both ends: hello, verdicts, heartbeats, a transport's records.

The end of the connection means that the peer is gone. A thread that waits for a message reads the socket itself; while
no thread waits, a background thread of the link reads it.

A frame is a 4-byte big-endian length and one JSON record: a record of `format.messages`, or one of the transport that
uses the link (`carry`). Invariants: a link opens only with a Hello that has the run's secret; a link that ends (EOF,
garbage, or silence past the lease) stays closed and wakes every thread that waits on it; every wait has a deadline.
Addresses: `unix:@NAME` (abstract socket: same host and same user) or `tcp:HOST:PORT`.
"""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import hmac
import logging
import operator
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from weightcast.errors import (
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    WeightcastError,
    from_record,
    malformed,
)
from weightcast.format.manifest import PROTOCOL, decode, encode
from weightcast.format.messages import (
    MAX_LINK_MESSAGE_BYTES,
    Accepted,
    Dropped,
    Failed,
    Heartbeat,
    Hello,
    Installed,
    LinkMessage,
    Received,
    ReleaseMemory,
)
from weightcast.host.closing import awaited_at_exit, close_in_child, on_failure
from weightcast.host.deadline import GRACE_SECONDS, POLL_SECONDS, Deadline
from weightcast.host.descriptors import AcceptLog, shortage

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")
_READ_BYTES = 1 << 16
_MAX_STRANGERS = 128
_BEATS_PER_LEASE = 4

_ONE_HOST = (
    ". Both processes must run as the same user, on the same host and in the same network namespace (one container or "
    "pod, or --network=host)"
)

M = TypeVar("M", Accepted, Received, Installed, Failed)
_VERDICTS = (Accepted, Received, Installed, Failed)


def _ignore(*_: object) -> None:
    """Ignore a message that has no handler, and events of a link that was closed."""


def _shut_down(sock: socket.socket) -> None:
    """Shut the connection down in both directions; the descriptor stays open."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def frame(message: msgspec.Struct) -> bytes:
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Splits a byte stream into messages of the union `messages`."""

    def __init__(self, messages: Any = LinkMessage) -> None:
        self._messages = messages
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield every complete message, up to the first bytes that are not a valid frame: these raise ManifestError."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_LINK_MESSAGE_BYTES:
                what = f"a link message of {length} bytes was announced, expected at most {MAX_LINK_MESSAGE_BYTES}"
                raise malformed("too_large", what)
            if len(self._data) < _LENGTH.size + length:
                return
            body = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
            del self._data[: _LENGTH.size + length]
            yield decode(body, self._messages, max_bytes=MAX_LINK_MESSAGE_BYTES)


def connect(address: str, timeout_seconds: float) -> socket.socket:
    """Connect to a link's address. Raises ValueError for a malformed address, OSError if no process accepts."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest.startswith("@"):
        sock = close_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        with on_failure(sock.close):
            sock.settimeout(timeout_seconds)
            sock.connect("\0" + rest[1:])
            check_same_user(sock)
        return sock
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit():
        raise ValueError(f"{address!r} is not a link address; expected unix:@NAME or tcp:HOST:PORT")
    sock = close_in_child(socket.create_connection((host, int(port)), timeout=timeout_seconds))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def check_same_user(sock: socket.socket) -> None:
    """Raise PermissionError unless the process at the other end of a Unix socket runs as this user."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"the peer runs as user {uid}, this process as user {os.geteuid()}: run both as one user")


class ReadingCondition(threading.Condition):
    """A condition whose waiting threads read sockets. It guards the sockets and all state that their messages change.

    A separate reader thread would cost a thread switch for every record of a transport, and would compete for the
    interpreter's lock with the thread that packs or installs.

    Register sockets in `poller`. `on_ready(events)` reads the sockets that are ready and ignores descriptors that it
    does not know. Any waiting thread may call it, with the condition held; it must neither wait nor raise. One thread
    polls at a time; the others wait to be notified, and one of them polls when the first has returned. While no other
    thread waits, a background thread polls in `wait_unattended`. After a Ctrl-C, which may come between any two calls
    of Python code, the condition is neither held nor polled.
    """

    def __init__(self) -> None:
        self._held = threading.RLock()
        super().__init__(self._held)
        self.on_ready: Callable[[list[tuple[int, int]]], None] = _ignore
        self.poller = select.epoll()
        with on_failure(self.poller.close):
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poller.register(self._wake, select.EPOLLIN)
        self._is_polled = False
        self._is_unattended = False
        """True if the background thread polls, while one does."""
        self._is_closed = False
        self._waited_at = 0.0
        """Time at which a thread other than the background thread last waited or read."""
        self._num_waiting = 0
        self._alert = threading.Event()

    # `with` calls the lock's own methods: before the first line of methods in Python a Ctrl-C would leave it locked.
    __enter__ = property(operator.attrgetter("_held.__enter__"))
    __exit__ = property(operator.attrgetter("_held.__exit__"))

    @property
    def attended_at(self) -> float:
        """Time at which a thread other than the background thread last waited or read; now, if one waits."""
        return time.monotonic() if self._num_waiting else self._waited_at

    def read(self) -> None:
        """Read the messages that have arrived, without waiting. The caller holds the condition.

        Do not call this from `on_ready`.
        """
        self._waited_at = time.monotonic()
        if not self._is_closed and (events := self.poller.poll(0)):
            # Do not reset the eventfd here: it is there to wake the thread that polls.
            self.on_ready(events)
            self.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a socket was read or the condition is notified; may return earlier.

        The caller holds the condition, not recursively.
        """
        self._num_waiting += 1
        try:
            if self._is_closed or self._is_polled:
                if self._is_polled and self._is_unattended:
                    os.eventfd_write(self._wake, 1)
                return super().wait(timeout)
            self._poll(timeout, is_unattended=False)
            return True
        finally:
            self._num_waiting -= 1
            self._waited_at = time.monotonic()

    def wait_unattended(self, seconds: float) -> None:
        """Wait in the background thread, for at most `seconds`. The caller holds the condition, not recursively."""
        # Soon after a wait the sockets are left alone: the thread that waited will wait again for the next bucket.
        linger_seconds = 2 * POLL_SECONDS
        if self._is_polled or time.monotonic() < self.attended_at + linger_seconds:
            # Wait on another event: every record notifies the condition.
            self.release()
            try:
                self._alert.wait(min(seconds, linger_seconds))
            finally:
                self.acquire()
            return
        self._poll(seconds, is_unattended=True)

    def notify_all(self) -> None:
        """Wake all waiting threads, including the one that polls."""
        super().notify_all()
        if self._is_polled:
            os.eventfd_write(self._wake, 1)

    def alert(self) -> None:
        """Wake all waiting threads, and keep the background thread awake so that it can end.

        The caller holds the condition.
        """
        self._alert.set()
        self.notify_all()

    def close(self) -> None:
        """Stop reading and free everything; later waits are those of a plain condition. Idempotent."""
        with self:
            if self._is_closed:
                return
            self._is_closed = True
            self.notify_all()
            # The polling thread was woken and now only has to acquire the condition again.
            while self._is_polled:
                super().wait()
            self.on_ready = _ignore
            self.poller.close()
            os.close(self._wake)

    def _poll(self, seconds: float | None, *, is_unattended: bool) -> None:
        """Release the condition until a socket is ready or this thread is woken, then read the ready sockets."""
        events: list[tuple[int, int]] = []
        self._is_polled, self._is_unattended = True, is_unattended
        try:
            self.release()
            events = self.poller.poll(seconds)
        finally:
            self._is_polled = False
            try:
                self.acquire()
            except BaseException:  # a Ctrl-C, before or after it was acquired
                with contextlib.suppress(RuntimeError):
                    self.release()
                self.acquire()
                raise
            finally:
                # Let another waiting thread poll, even if this one was interrupted.
                super().notify_all()
        if self._is_closed:
            return
        if (self._wake, select.EPOLLIN) in events:
            with contextlib.suppress(BlockingIOError):  # another thread has polled meanwhile, and read it
                os.eventfd_read(self._wake)
            events.remove((self._wake, select.EPOLLIN))
        if events:
            self.on_ready(events)


class WorkerLink:
    """The worker's end of a link.

    The link's own thread calls `on_end(reason)` once when the publisher is gone: its process ended, it closed the link,
    or nothing arrived for `lease_seconds`. `on_end` is not called after `close`.

    `on_release()` is called for each ReleaseMemory, and `on_record` (see `carry`) for each record of the transport. The
    link's thread or any thread that waits on the condition calls them, with the condition held: they must not wait.
    """

    def __init__(
        self,
        address: str,
        *,
        lease_seconds: float,
        deadline_seconds: float,
        on_end: Callable[[str], None] | None = None,
        on_release: Callable[[], None] = _ignore,
    ) -> None:
        """Prepare a link without connecting.

        `deadline_seconds` limits connecting, and the wait for room in the socket's buffer when a message is sent.
        """
        self.address = address
        self.condition = ReadingCondition()
        """Held while callbacks run; closed with the link."""
        self.worked_at = 0.0
        """Time at which the publisher last sent a record, or a heartbeat that says that it waits for another peer."""
        self.over = ""
        """Reason why the link is not read any longer; empty while it is. `on_end` is called with it."""
        self._lease_seconds = lease_seconds
        self._deadline_seconds = deadline_seconds
        self._on_end: Callable[[str], None] = on_end or _ignore
        self._on_release = on_release
        self._on_record: Callable[[Any], None] = _ignore
        self._frames = Frames()
        self._sending = threading.Lock()
        self._closed = False
        self._is_welcome = False
        self._is_dropped = False
        self._heard_at = 0.0
        self._descriptor: int | None = None
        self._sock: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def carry(self, messages: Any, on_record: Callable[[Any], None]) -> None:
        """Accept the transport's records, of the union `messages`, from the publisher. Call this before `open`."""
        self._frames, self._on_record = Frames(LinkMessage | messages), on_record

    def open(self, hello: Hello) -> None:
        """Connect and send `hello`. Raises PeerDiedError if no process accepts there, or the link was closed."""
        try:
            if self._closed:
                raise OSError(errno.ENOTCONN, "the link was closed in this process")
            sock = connect(self.address, self._deadline_seconds)
            with on_failure(sock.close):
                self._sock = sock
                sock.sendall(frame(hello))
                sock.setblocking(False)
        except OSError as exc:
            if short := shortage(exc):
                raise WeightcastError(f"can't open the link to the publisher at {self.address}: {short}") from exc
            where = _ONE_HOST if self.address.startswith("unix:") else ""
            raise PeerDiedError(f"no publisher answers at {self.address}: {exc}{where}", peer="trainer") from exc
        self._heard_at = self.worked_at = time.monotonic()
        self.condition.on_ready = self._read
        self.condition.poller.register(sock, select.EPOLLIN)
        self._thread = awaited_at_exit(self._serve, "weightcast-link")

    @property
    def is_open(self) -> bool:
        """True once the link was opened, even if it has ended since."""
        return self._thread is not None

    @property
    def local_host(self) -> str:
        """Address of this host on the connection to the publisher; empty for a Unix socket."""
        name = () if self._sock is None else self._sock.getsockname()
        return str(name[0]) if name and isinstance(name, tuple) else ""

    def send(self, message: msgspec.Struct) -> None:
        """Send one message, unless the link is not open or the publisher does not read for the deadline.

        Errors are ignored: the link itself notices that the publisher is gone.
        """
        data, sock = memoryview(frame(message)), self._sock
        if sock is None:
            return
        with self._sending, contextlib.suppress(OSError):
            while data:
                try:
                    data = data[sock.send(data) :]
                except BlockingIOError:
                    poll = select.poll()
                    poll.register(sock, select.POLLOUT)
                    if not poll.poll(self._deadline_seconds * 1000):
                        return

    def await_welcome(self) -> None:
        """Wait until the publisher has answered the hello. Raises PeerDiedError, PeerTimeoutError."""
        with self.condition:
            self.condition.wait_for(lambda: self._is_welcome or self.over, self._deadline_seconds)
        if self.over and not self._is_welcome:
            raise PeerDiedError(
                f"the publisher at {self.address} closed the link instead of answering this worker's hello: it may be "
                "of another run",
                peer="trainer",
            )
        if not self._is_welcome:
            what = f"the publisher at {self.address} did not answer a hello within {self._deadline_seconds:g} s"
            raise PeerTimeoutError(what, peer="trainer")

    @property
    def silent_seconds(self) -> float:
        """Time since the last message of the publisher."""
        return time.monotonic() - self._heard_at

    @property
    def has_ended(self) -> bool:
        """True once the link has ended; `on_end` may not have been called yet."""
        with self.condition:
            self.condition.read()
            return bool(self.over)

    @property
    def is_dropped(self) -> bool:
        """True once the publisher has said that its run goes on without this engine.

        Waits shortly at most: the link's own thread reads this, too, but a process that was stopped goes on with any
        thread first.
        """
        if self.condition.acquire(timeout=POLL_SECONDS):
            try:
                self.condition.read()
            finally:
                self.condition.release()
        return self._is_dropped

    def pop_descriptor(self) -> int | None:
        """Return the file descriptor that arrived last over a Unix socket, once; None if there is none.

        The caller owns it. Call this in `on_record`: a descriptor arrives together with the record that it belongs to.
        """
        descriptor, self._descriptor = self._descriptor, None
        return descriptor

    def leave(self) -> None:
        """Shut the link down, which the publisher sees as the end of this worker. Does not wait; thread-safe."""
        self._closed = True
        if self._sock is not None:
            _shut_down(self._sock)

    def close(self) -> None:
        """Shut the link down and free everything. Idempotent and thread-safe; not to be called in `on_record`."""
        self.leave()
        with self.condition:
            self._end("it was closed in this process")
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(GRACE_SECONDS)
        self.condition.close()
        if self._sock is not None:
            self._sock.close()
        self._keep_descriptor(None)
        # The callbacks refer to the link's owner, which refers to the link: the cycle would wait for a collection.
        self._on_end = self._on_release = self._on_record = _ignore

    def _serve(self) -> None:
        with self.condition:
            while not self.over:
                remaining = self._lease_seconds - self.silent_seconds
                if remaining > 0:
                    self.condition.wait_unattended(remaining)
                    continue
                # Read first: if this process was stopped, heartbeats may be waiting in the socket.
                self.condition.read()
                if self.silent_seconds >= self._lease_seconds:
                    self._end(f"no heartbeat of the publisher for {self._lease_seconds:g} s")
        if not self._closed and self._sock is not None:
            # If the publisher was only stopped, it sees when it goes on that this worker has disconnected.
            _shut_down(self._sock)
            self._on_end(self.over)

    def _end(self, reason: str) -> None:
        """Stop reading; the link's thread then calls `on_end`. Only the first reason is kept."""
        if self.over:
            return
        self.over = reason
        if self._sock is not None and self._thread is not None:
            with contextlib.suppress(OSError, ValueError):  # In a forked child the socket is closed already.
                self.condition.poller.unregister(self._sock)
        self.condition.alert()

    def _read(self, events: list[tuple[int, int]]) -> None:
        sock = self._sock
        assert sock is not None
        try:
            # Read up to an end of the stream: messages before the end may have lost their meaning by it.
            while not self.over:
                if sock.family == socket.AF_UNIX:
                    # The kernel closes further descriptors of one message.
                    data, descriptors, _, _ = socket.recv_fds(sock, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                    for descriptor in descriptors:
                        self._keep_descriptor(descriptor)
                else:
                    data = sock.recv(_READ_BYTES)
                if not data:
                    self._end("the publisher's process ended, or it closed the link")
                    return
                self._heard_at = time.monotonic()
                self._is_welcome = True
                for message in self._frames.feed(data):
                    if not isinstance(message, Heartbeat) or message.waits:
                        self.worked_at = self._heard_at
                    if isinstance(message, ReleaseMemory):
                        self._on_release()
                    elif isinstance(message, Dropped):
                        self._is_dropped = True
                    elif not isinstance(message, Heartbeat):
                        self._on_record(message)
        except BlockingIOError:
            return
        except Exception as exc:
            # After any error the link is not read any longer, and the owner must be told.
            self._end(f"reading the link failed: {shortage(exc) or exc}")

    def _keep_descriptor(self, descriptor: int | None) -> None:
        """Keep this descriptor; close a former one that `pop_descriptor` has not returned."""
        former, self._descriptor = self._descriptor, descriptor
        if former is not None:
            os.close(former)


class Link:
    """The publisher's end of one worker's connection. A LinkListener creates it and reads it."""

    def __init__(self, sock: socket.socket, condition: ReadingCondition, messages: Any) -> None:
        self.engine = ""
        self.engine_rank = 0
        self.peer = ""
        """Name of the worker: the engine's name, followed by `#` and the engine rank unless that is 0."""
        self.host = ""
        """Equal for workers that share a host's memory; empty if the worker did not send it."""
        self.memory = ""
        """Location of this worker's memory that the engine's other workers on its host read into; empty for none."""
        self.opened_at = time.monotonic()
        self._sock = sock
        self._condition = condition
        self._frames = Frames(messages)
        self._verdicts: list[Any] = []
        self.records = collections.deque[Any]()
        """Records of the worker's receiver that the sender has not handled yet."""
        self.ended = ""
        """Reason why the link ended; empty while it is open."""
        self.has_left = False
        """True if the worker ended the link: its process ended, or it closed the link."""

    def wait(self, kind: type[M], version: int, deadline: Deadline) -> M:
        """Wait for the worker's message of this kind about this version, and return it.

        Raises the worker's own error if it reports Failed, PeerDiedError if the link ends, PeerTimeoutError at the
        deadline. The link is then closed, so that a worker that was only stopped aborts the update when it goes on.
        """
        with self._condition:
            self._condition.read()
            while True:
                for message in self._verdicts:
                    if message.version == version and isinstance(message, Failed):
                        raise from_record(message.error)
                    if message.version == version and isinstance(message, kind):
                        return message
                if self.ended:
                    raise PeerDiedError(f"the link of {self.peer} ended: {self.ended}", peer=self.peer)
                if not (seconds := deadline.remaining_seconds):
                    break
                self._condition.wait(seconds)
        self.end(f"no {kind.__name__} for version {version} within {deadline.seconds:g} s", goes_on=True)
        what = f"{self.peer} sent no {kind.__name__} for version {version} within {deadline.seconds:g} s"
        raise PeerTimeoutError(what, peer=self.peer)

    def verdicts(self, version: int) -> list[Any]:
        """Return what the worker has reported of this version by now (Accepted to Installed, Failed). Does not wait."""
        with self._condition:
            self._condition.read()
            return [message for message in self._verdicts if message.version == version]

    def forget_verdicts(self) -> None:
        """Drop the verdicts that have arrived so far."""
        with self._condition:
            self._verdicts.clear()

    def send(self, message: msgspec.Struct) -> None:
        """Send one small message, without waiting. If the socket's buffer is full, the worker has stopped reading, and
        the link ends.
        """
        if not self.put(frame(message)):
            self.end("the worker does not read its messages")

    def put(self, data: bytes, descriptor: int | None = None) -> bool:
        """Write a whole frame without waiting; return False if the socket's buffer has no room.

        A frame that was written in part ends the link. Over a Unix socket `descriptor` is sent with the frame.
        """
        with self._condition:
            try:
                ancillary = (
                    []
                    if descriptor is None
                    else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
                )
                num_sent = self._sock.sendmsg([data], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return False
            if num_sent < len(data):
                self.end("the worker does not read its messages")
            return True

    def wake_for_room(self, is_wanted: bool) -> None:
        """Set if a wait on the condition also ends when the socket has room for more."""
        events = select.EPOLLIN | select.EPOLLOUT if is_wanted else select.EPOLLIN
        with contextlib.suppress(OSError, ValueError):  # The socket was closed meanwhile.
            self._condition.poller.modify(self._sock, events)

    def end(self, reason: str, *, goes_on: bool = False) -> None:
        """Shut the link down, which the worker sees as the end of its publisher. Idempotent.

        `goes_on`: first tell the worker that the run goes on without its engine.
        """
        with self._condition:
            if goes_on and not self.ended and not self.put(frame(Dropped())):
                # The worker has stopped reading: this last message gets room beside those that fill the buffer.
                size = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
                self.put(frame(Dropped()))
            if self.ended:
                return
            self.ended = reason
            # Not closed here: the listener reads the end of the stream and then closes the socket.
            _shut_down(self._sock)
            self._condition.notify_all()


class LinkListener:
    """The publisher's end of all links: accepts workers, reads their messages, sends heartbeats.

    A thread that waits on `condition` reads all links. A background thread reads them while no thread waits, and sends
    the heartbeats.
    """

    def __init__(
        self,
        run: str,
        *,
        host: str | None = None,
        port: int = 0,
        lease_seconds: float = 20.0,
        secret: str = "",
    ) -> None:
        """Listen on an abstract Unix socket, or with `host` on a TCP port of that address (0: any free port).

        Every hello must have `secret`; by default a new one is made. Raises OSError if the address can't be bound.
        """
        self.run = run
        self.secret = secret or secrets.token_hex(32)
        self.lease_seconds = lease_seconds
        self._messages: Any = LinkMessage
        self.joined: dict[tuple[str, int], Link] = {}
        """Links that have sent a hello, by engine and engine rank; `condition` guards it."""
        self._open_links: dict[int, Link] = {}
        """Links by file descriptor, including those that have not sent a hello."""
        self._is_closing = False
        self._accept_at = 0.0
        """Time to accept again after the process ran out of file descriptors; 0 otherwise."""
        self._accept_log = AcceptLog(logger, "a worker's link")
        self._listener, self.address = _listen(run, host, port)
        self.port = 0 if host is None else int(self._listener.getsockname()[1])
        """The TCP port; 0 for a Unix socket."""
        with on_failure(self._listener.close):
            self.condition = ReadingCondition()
            """Notified whenever a link opens, ends or receives a message."""
        self.condition.on_ready = self._read
        self.condition.poller.register(self._listener, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="weightcast-links", daemon=True)
        self._thread.start()

    def carry(self, messages: Any) -> None:
        """Accept the transport's records, of the union `messages`. Call this before any worker has the address."""
        self._messages = LinkMessage | messages

    def release_memory(self) -> None:
        """Ask every worker to free its kept memory. A worker that has stopped reading keeps its memory."""
        message = frame(ReleaseMemory())
        for link in self.links():
            link.put(message)

    def links(self, engine: str | None = None) -> list[Link]:
        """Return the open links of an engine's workers by engine rank; for None those of all engines."""
        with self.condition:
            self.condition.read()
            return [
                link for (name, _), link in sorted(self.joined.items()) if engine in (None, name) and not link.ended
            ]

    def wait(self, engine: str, num_workers: int, seconds: float) -> list[Link]:
        """Wait until `num_workers` workers of an engine have sent their hello, for at most `seconds`; return the links
        that are open then.
        """
        with self.condition:
            self.condition.wait_for(lambda: len(self.links(engine)) >= num_workers, seconds)
            return self.links(engine)

    def end_links(self, reason: str, engine: str | None = None, *, goes_on: bool = False) -> None:
        """End every link of an engine at once, or for None of all engines. The listener goes on until `close`.

        `goes_on`: see `Link.end`.
        """
        for link in self.links(engine):
            link.end(reason, goes_on=goes_on)

    def close(self) -> None:
        """End every link and free everything. Idempotent."""
        if self._thread.is_alive():
            with self.condition:
                self._is_closing = True
                self.condition.alert()
            self._thread.join(timeout=10)

    def _serve(self) -> None:
        next_beat = time.monotonic()
        try:
            with self.condition:
                while not self._is_closing:
                    now = time.monotonic()
                    if now >= next_beat:
                        beat_seconds = self.lease_seconds / _BEATS_PER_LEASE
                        next_beat = now + beat_seconds
                        heartbeat = frame(Heartbeat(waits=self.condition.attended_at > now - beat_seconds))
                        for link in list(self._open_links.values()):
                            if link.engine:
                                # A full buffer means a stopped worker: the deadlines of updates handle that.
                                link.put(heartbeat)
                            elif now - link.opened_at > GRACE_SECONDS:
                                self._drop(link, f"it sent no hello within {GRACE_SECONDS:g} s")
                    if self._accept_at and now >= self._accept_at:
                        self._accept_at = 0.0
                        self.condition.poller.modify(self._listener, select.EPOLLIN)
                    self.condition.wait_unattended(min(next_beat, self._accept_at or next_beat) - now)
        finally:
            with self.condition:
                for link in list(self._open_links.values()):
                    self._drop(link, "the publisher was closed")
            self.condition.close()
            self._listener.close()

    def _read(self, events: list[tuple[int, int]]) -> None:
        for descriptor, _ in events:
            link = self._open_links.get(descriptor)
            if link is None:
                if descriptor == self._listener.fileno():
                    self._accept()
                continue
            try:
                # Read up to an end of the stream.
                while True:
                    if not (data := link._sock.recv(_READ_BYTES)):
                        raise ConnectionResetError("the worker's process ended, or it closed the link")
                    for message in link._frames.feed(data):
                        if isinstance(message, Hello):
                            self._welcome(link, message)
                        elif not link.engine:
                            raise ManifestError("the worker's first message is not a hello")
                        elif isinstance(message, _VERDICTS):
                            link._verdicts.append(message)
                        else:
                            link.records.append(message)
            except BlockingIOError:
                continue
            except (OSError, ManifestError) as exc:
                link.has_left = not link.ended and isinstance(exc, OSError)
                self._drop(link, str(exc))

    def _accept(self) -> None:
        try:
            sock = close_in_child(self._listener.accept()[0])
        except (BlockingIOError, ConnectionError, PermissionError):
            return
        except OSError as exc:
            # Most likely no file descriptor is free. The connection stays in the queue: accept it later, don't spin.
            self._accept_log.failed(exc)
            self._accept_at = time.monotonic() + POLL_SECONDS
            self.condition.poller.modify(self._listener, 0)
            self.condition.notify_all()
            return
        with contextlib.suppress(OSError), on_failure(sock.close):
            if sock.family == socket.AF_UNIX:
                check_same_user(sock)
            else:
                # A host that vanished sends no FIN: end the connection if nothing is acknowledged for a lease.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.lease_seconds * 1000))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            strangers = [link for link in self._open_links.values() if not link.engine]
            if len(strangers) >= _MAX_STRANGERS:
                self._drop(min(strangers, key=lambda link: link.opened_at), "too many connections without a hello")
            sock.setblocking(False)
            self.condition.poller.register(sock, select.EPOLLIN)
            self._open_links[sock.fileno()] = Link(sock, self.condition, self._messages)

    def _welcome(self, link: Link, hello: Hello) -> None:
        if hello.protocol != PROTOCOL or hello.run != self.run or link.engine:
            raise ManifestError(
                f"the worker sent a hello of protocol {hello.protocol} for run {hello.run[:8]}, expected one hello of "
                f"protocol {PROTOCOL} for run {self.run[:8]}"
            )
        if not hmac.compare_digest(hello.secret, self.secret):
            raise ManifestError("the worker's hello has a wrong secret")
        link.engine, link.engine_rank = hello.engine, hello.engine_rank
        link.peer = f"{link.engine}#{link.engine_rank}" if link.engine_rank else link.engine
        link.host = "" if hello.host is UNSET else hello.host
        link.memory = "" if hello.memory is UNSET else hello.memory
        former = self.joined.get((link.engine, link.engine_rank))
        self.joined[link.engine, link.engine_rank] = link
        if former is not None:
            former.end("the worker connected again")
        link.put(frame(Heartbeat()))

    def _drop(self, link: Link, reason: str) -> None:
        link.end(reason)
        if self.joined.get((link.engine, link.engine_rank)) is link:
            del self.joined[link.engine, link.engine_rank]
        if self._open_links.pop(link._sock.fileno(), None) is None:
            return  # a garbage collection while it was read has dropped the publisher, and with it this link
        self.condition.poller.unregister(link._sock)
        link._sock.close()


def _listen(run: str, host: str | None, port: int) -> tuple[socket.socket, str]:
    is_ipv6 = host is not None and ":" in host
    family = socket.AF_UNIX if host is None else socket.AF_INET6 if is_ipv6 else socket.AF_INET
    sock = close_in_child(socket.socket(family, socket.SOCK_STREAM))
    with on_failure(sock.close):
        if host is None:
            name = f"weightcast-link-{run[:12]}-{secrets.token_hex(4)}"
            sock.bind(f"\0{name}")
            address = f"unix:@{name}"
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError as exc:
                remedy = "give the transport's URL an address of this host and a free port, or port 0"
                raise OSError(exc.errno, f"can't listen on {host}:{port}: {exc.strerror}; {remedy}") from exc
            address = f"tcp:{host}:{sock.getsockname()[1]}"
        sock.listen(1024)
        sock.setblocking(False)
    return sock, address
