"""The publisher's side of all links: accepts workers, reads their verdicts, sends heartbeats. One thread for all.

Invariants: nothing but a Hello with the run's secret opens a link; a link that ends (EOF, garbage) is closed for good
and wakes everybody who waits on it; no wait is without a deadline. `link` has the workers' side and the frames.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from weightcast.errors import ErrorRecord, ManifestError, PeerDiedError, PeerTimeoutError, from_record
from weightcast.format.manifest import PROTOCOL
from weightcast.format.messages import Failed, Heartbeat, Hello, LinkMessage
from weightcast.host.closing import close_in_child
from weightcast.links.worker_end import Frames, check_same_user, frame

_HELLO_SECONDS = 10.0
_ACCEPT_RETRY_SECONDS = 0.05
_MAX_STRANGERS = 128
_LOST_HOST_SECONDS = 30.0
_ASK_SECONDS = 0.5

M = TypeVar("M", bound=msgspec.Struct)


class Link:
    """The publisher's end of one worker's connection. Made by a LinkListener, which reads it."""

    def __init__(self, sock: socket.socket, condition: threading.Condition, messages: Any) -> None:
        self.engine = ""
        self.engine_rank = 0
        self.opened_at = time.monotonic()
        self._sock = sock
        self._condition = condition
        self._frames = Frames(messages)
        self._messages: list[Any] = []
        self._ended = ""

    @property
    def is_alive(self) -> bool:
        return not self._ended

    @property
    def ended(self) -> str:
        """Why the link ended, or empty."""
        return self._ended

    @property
    def peer(self) -> str:
        return f"{self.engine}#{self.engine_rank}" if self.engine_rank else self.engine

    def wait(self, kind: type[M], version: int, deadline_seconds: float) -> M:
        """Wait for the worker's message of this kind about this version.

        Raises what the worker reports as Failed, PeerDiedError if the link ends, PeerTimeoutError at the deadline
        (the link is then closed, so that a worker that wakes later gives the update up).
        """
        with self._condition:
            found = self._condition.wait_for(lambda: self._find(kind, version) or self._ended, deadline_seconds)
            message = self._find(kind, version)
        if isinstance(message, Failed):
            raise from_record(message.error)
        if message is not None:
            return message
        if found:
            raise PeerDiedError(f"the link of {self.peer} ended: {self._ended}", peer=self.peer)
        self.end(f"no {kind.__name__} for version {version} within {deadline_seconds:g} s")
        raise PeerTimeoutError(f"{self.peer} sent no {kind.__name__} within {deadline_seconds:g} s", peer=self.peer)

    def failures(self, version: int) -> list[ErrorRecord]:
        """What the worker has reported as failed of this version, without waiting."""
        with self._condition:
            found = [message for message in self._messages if isinstance(message, Failed)]
        return [message.error for message in found if message.version == version]

    def hear_out(self, version: int, seconds: float) -> None:
        """Give the worker that long to say why this version failed: its word may come later than the loss itself."""
        with self._condition:
            self._condition.wait_for(lambda: self._find(Failed, version) or self._ended, seconds)

    def forget(self) -> None:
        """Drop what was received for former versions."""
        with self._condition:
            self._messages.clear()

    def take(self) -> list[Any]:
        """Every message since the last `take`, in order, without waiting."""
        with self._condition:
            messages, self._messages = self._messages, []
        return messages

    def send(self, message: msgspec.Struct) -> None:
        """Send one small message, without waiting. A worker that has no room for it has stood still: the link ends."""
        if not self._put(frame(message)):
            self.end("it takes no messages")

    def _find(self, kind: type[M], version: int) -> M | Failed | None:
        for message in self._messages:
            if isinstance(message, (kind, Failed)) and getattr(message, "version", None) == version:
                return message
        return None

    def end(self, reason: str) -> None:
        """Close the link, which tells the worker that the publisher has gone. Idempotent."""
        with self._condition:
            if self._ended:
                return
            self._ended = reason
            # shutdown, not close: the listener's selector still holds the descriptor and closes it.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._condition.notify_all()

    def beat(self, data: bytes) -> None:
        # A full buffer means a stopped worker: its deadlines deal with that, not the heartbeat.
        self._put(data)

    def _put(self, data: bytes) -> bool:
        """Write a whole frame at once, or nothing; a frame that was cut ends the link. False if there was no room."""
        with self._condition:
            try:
                num_sent = self._sock.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                return False
            if num_sent < len(data):
                self.end("it takes no messages")
            return True


class LinkListener:
    """The publisher's side: accepts workers, reads their verdicts, sends heartbeats. One thread."""

    def __init__(
        self,
        run: str,
        *,
        host: str | None = None,
        port: int = 0,
        heartbeat_seconds: float = 5.0,
        messages: Any = LinkMessage,
    ) -> None:
        """Listen on an abstract Unix socket, or with `host` on a TCP port of that address (0: a free one).

        `messages` is the union of what workers may send. Raises OSError if the address can't be had.
        """
        self.run = run
        self.secret = secrets.token_hex(32)
        self._heartbeat_seconds = heartbeat_seconds
        self.condition = threading.Condition()
        """Notified whenever a link opens, ends or brings a message."""
        self._messages = messages
        self._links: dict[tuple[str, int], Link] = {}
        self._selector = selectors.DefaultSelector()
        self._listener, self.address = _listen(run, host, port)
        self._wake_reader, self._wake_writer = map(close_in_child, socket.socketpair())
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="weightcast-links", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The TCP port; 0 for a Unix socket."""
        _, _, port = self.address.rpartition(":")
        return int(port) if self.address.startswith("tcp:") else 0

    def links(self, engine: str) -> list[Link]:
        """The living links of an engine's workers, by engine rank."""
        with self.condition:
            return [link for (name, _), link in sorted(self._links.items()) if name == engine and link.is_alive]

    def wait(
        self, engine: str, num_workers: int, deadline_seconds: float, *, ask: Callable[[], None] = lambda: None
    ) -> list[Link]:
        """Wait until that many workers of an engine have said hello. Raises PeerTimeoutError.

        `ask` is called now and then meanwhile: it raises if they can't come any more.
        """
        end = time.monotonic() + deadline_seconds
        while True:
            patience = min(end - time.monotonic(), _ASK_SECONDS)
            with self.condition:
                if self.condition.wait_for(lambda: len(self.links(engine)) >= num_workers, patience):
                    return self.links(engine)
                num_links = len(self.links(engine))
            if time.monotonic() >= end:
                raise PeerTimeoutError(
                    f"{num_links} of {num_workers} workers of {engine} connected to the link "
                    f"{self.address} within {deadline_seconds:g} s: can they reach it?",
                    peer=engine,
                )
            ask()

    def end_links(self, reason: str) -> None:
        """End every link at once. The thread goes on until `close`."""
        with self.condition:
            links = list(self._links.values())
        for link in links:
            link.end(reason)

    def drop(self, engine: str, reason: str) -> None:
        """End every link of an engine."""
        for link in self.links(engine):
            link.end(reason)

    def close(self) -> None:
        """End every link and free everything. Idempotent."""
        if self._thread.is_alive():
            self._wake_writer.close()
            self._thread.join(timeout=10)

    def _serve(self) -> None:
        beat, next_beat = frame(Heartbeat()), time.monotonic()
        try:
            while True:
                for key, _ in self._selector.select(max(0.0, next_beat - time.monotonic())):
                    if key.fileobj is self._wake_reader:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._read(key.data)
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + self._heartbeat_seconds
                    self._tend(beat)
        finally:
            self._close_all()

    def _accept(self) -> None:
        try:
            self._let_in()
        except OSError:
            # Out of descriptors, most likely: the connection stays in the queue, so don't spin on it.
            time.sleep(_ACCEPT_RETRY_SECONDS)

    def _let_in(self) -> None:
        with contextlib.suppress(ConnectionError, PermissionError):
            sock = close_in_child(self._listener.accept()[0])
            try:
                if sock.family == socket.AF_UNIX:
                    check_same_user(sock)
                else:
                    # A host that vanished without a word is dead once nothing was acknowledged for as long.
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_LOST_HOST_SECONDS * 1000))
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if len(self._open_links()) - len(self._links) >= _MAX_STRANGERS:
                    raise PermissionError("too many connections without a hello")
                sock.setblocking(False)
                self._selector.register(sock, selectors.EVENT_READ, Link(sock, self.condition, self._messages))
            except BaseException as exc:
                sock.close()
                if not isinstance(exc, OSError):
                    raise

    def _open_links(self) -> list[Link]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _read(self, link: Link) -> None:
        try:
            data = link._sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError("its process ended or closed it")
            for message in link._frames.feed(data):
                self._take(link, message)
        except BlockingIOError:
            return
        except (OSError, ManifestError) as exc:
            self._drop(link, str(exc))

    def _take(self, link: Link, message: LinkMessage) -> None:
        if isinstance(message, Hello):
            self._greet(link, message)
        elif not link.engine:
            raise ManifestError("the first message was no hello")
        else:
            with self.condition:
                link._messages.append(message)
                self.condition.notify_all()

    def _greet(self, link: Link, hello: Hello) -> None:
        if hello.protocol != PROTOCOL or hello.run != self.run or link.engine:
            raise ManifestError(f"a hello of protocol {hello.protocol} for run {hello.run[:8]}")
        if not hmac.compare_digest(hello.secret, self.secret):
            raise ManifestError("a hello with a wrong secret")
        with self.condition:
            link.engine, link.engine_rank = hello.engine, hello.engine_rank
            former = self._links.get((hello.engine, hello.engine_rank))
            self._links[hello.engine, hello.engine_rank] = link
            self.condition.notify_all()
        if former is not None:
            former.end("the worker connected again")
        link.beat(frame(Heartbeat()))

    def _drop(self, link: Link, reason: str) -> None:
        link.end(reason)
        with self.condition:
            if self._links.get((link.engine, link.engine_rank)) is link:
                del self._links[link.engine, link.engine_rank]
            self.condition.notify_all()
        self._selector.unregister(link._sock)
        link._sock.close()

    def _tend(self, beat: bytes) -> None:
        for link in self._open_links():
            if link.engine:
                link.beat(beat)
            elif time.monotonic() - link.opened_at > _HELLO_SECONDS:
                self._drop(link, "no hello")

    def _close_all(self) -> None:
        for link in self._open_links():
            self._drop(link, "the publisher was closed")
        self._selector.close()
        for sock in (self._listener, self._wake_reader, self._wake_writer):
            sock.close()


def _listen(run: str, host: str | None, port: int) -> tuple[socket.socket, str]:
    if host is None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = f"weightcast-link-{run[:12]}-{secrets.token_hex(4)}"
        address = f"unix:@{name}"
        target: str | tuple[str, int] = f"\0{name}"
    else:
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        target = (host, port)
    try:
        if host is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(target)
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    close_in_child(sock)
    return sock, address if host is None else f"tcp:{host}:{sock.getsockname()[1]}"
