"""The worker's own connection to the publisher: hello, verdicts, heartbeats; its end means death.

Frames are a 4-byte big-endian length and one JSON record: of `control.messages`, or of a transport that keeps a link of
its own. This is the workers' side; `listener` has the publisher's. A link that ends (EOF, garbage, or silence past the
lease) is closed for good.
Addresses: `unix:@NAME` (abstract, one host, same user only) or `tcp:HOST:PORT`.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from weightcast.errors import ManifestError, PeerDiedError, PeerTimeoutError
from weightcast.format.manifest import decode, encode
from weightcast.format.messages import MAX_LINK_MESSAGE_BYTES, Heartbeat, Hello, LinkMessage
from weightcast.host.closing import close_in_child

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")


def frame(message: msgspec.Struct) -> bytes:
    data = encode(message)
    return _LENGTH.pack(len(data)) + data


class Frames:
    """Cuts a byte stream into messages of the union `messages`."""

    def __init__(self, messages: Any = LinkMessage) -> None:
        self._messages = messages
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield every whole message. Raises ManifestError for garbage."""
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_LINK_MESSAGE_BYTES:
                what = f"a link message of {length} bytes; the limit is {MAX_LINK_MESSAGE_BYTES}"
                raise ManifestError(f"{what} [too_large]", fault="too_large")
            if len(self._data) < _LENGTH.size + length:
                return
            body = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
            del self._data[: _LENGTH.size + length]
            yield decode(body, self._messages, max_bytes=MAX_LINK_MESSAGE_BYTES)


def connect(address: str, timeout_seconds: float) -> socket.socket:
    """Open a socket to a link's address. Raises ValueError for a malformed one, OSError if nobody answers."""
    kind, _, rest = address.partition(":")
    if kind == "unix" and rest.startswith("@"):
        sock = close_in_child(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.settimeout(timeout_seconds)
        try:
            sock.connect("\0" + rest[1:])
            check_same_user(sock)
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit():
        raise ValueError(f"{address!r} is not a link address; expected unix:@NAME or tcp:HOST:PORT")
    sock = close_in_child(socket.create_connection((host, int(port)), timeout=timeout_seconds))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def check_same_user(sock: socket.socket) -> None:
    """Raises PermissionError unless the process at the other end of a Unix socket runs as this user."""
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid():
        raise PermissionError(f"the peer runs as user {uid}, this process as {os.geteuid()}")


class WorkerLink:
    """The worker's end. `on_end(reason)` is called once, from the link's own thread, when the publisher has gone:
    its process ended, it closed the link, or nothing came for `lease_seconds`. Not called after `close`.

    `on_message(message)` is called for everything but heartbeats, from the same thread: it must not wait.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        lease_seconds: float,
        on_end: Callable[[str], None],
        on_message: Callable[[Any], None] = lambda message: None,
        messages: Any = LinkMessage,
        connect_seconds: float = 30.0,
    ) -> None:
        """Connect and say hello. Raises PeerDiedError if nobody answers at `address`."""
        self._lease_seconds = lease_seconds
        self._on_end = on_end
        self._on_message = on_message
        self._frames = Frames(messages)
        self._lock = threading.Lock()
        self._closed = False
        self._heard = threading.Event()
        self._heard_at = time.monotonic()
        self._is_over = False
        try:
            self._sock = connect(address, connect_seconds)
            self._sock.settimeout(lease_seconds)
            self.send(hello)
        except OSError as exc:
            raise PeerDiedError(f"no publisher answers at {address}: {exc}", peer="trainer") from exc
        self._thread = threading.Thread(target=self._watch, name="weightcast-link", daemon=True)
        self._thread.start()

    @property
    def local_host(self) -> str:
        """The address of this host that reaches the publisher; empty for a Unix socket."""
        name = self._sock.getsockname()
        return str(name[0]) if isinstance(name, tuple) else ""

    def send(self, message: msgspec.Struct) -> None:
        """Send one message. Raises OSError if the publisher has gone."""
        with self._lock:
            self._sock.sendall(frame(message))

    def await_welcome(self, timeout_seconds: float) -> None:
        """Wait until the publisher knows of this link. Raises PeerDiedError, PeerTimeoutError."""
        if not self._heard.wait(timeout_seconds):
            raise PeerTimeoutError(f"no sign of the publisher {timeout_seconds:g} s after a hello", peer="trainer")
        if self._is_over:
            raise PeerDiedError("the publisher ended the link at once: it may be of another run", peer="trainer")

    @property
    def silent_seconds(self) -> float:
        """How long nothing has come from the publisher."""
        return time.monotonic() - self._heard_at

    @property
    def has_ended(self) -> bool:
        """Whether the publisher has closed it, as of now: `on_end` may be about to say so."""
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLRDHUP)
        except (OSError, ValueError):
            return True
        return bool(poll.poll(0))

    def close(self) -> None:
        """Leave. Idempotent; from any thread."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=10)
        self._sock.close()

    def _watch(self) -> None:
        reason = "the publisher's process ended or closed the link"
        try:
            while data := self._sock.recv(1 << 16):
                self._heard.set()
                self._heard_at = time.monotonic()
                for message in self._frames.feed(data):
                    if not isinstance(message, Heartbeat):
                        self._on_message(message)
        except TimeoutError:
            reason = f"no heartbeat of the publisher for {self._lease_seconds:g} s"
        except (OSError, ManifestError) as exc:
            reason = f"the link broke: {exc}"
        if not self._heard.is_set():
            self._is_over = True
            self._heard.set()
        if not self._closed:
            # A publisher that wakes up learns from it that this end has gone.
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
            self._on_end(reason)
