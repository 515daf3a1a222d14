"""The storage of a store behind `weightcast serve-store`, for readers; and the calls of such a server.

Invariants: a request that was cut off is made again until `deadline_seconds` have passed without a byte, and a bucket
goes on from the byte that came last; a slot is pinned by the server while it is read here, and also while its reader is
busy elsewhere; nothing but these bytes and records is believed: readers check seals and digests as they do for files.
"""

from __future__ import annotations

import collections
import contextlib
import http.client
import ssl
import threading
import urllib.parse
import uuid
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from weightcast.errors import (
    ControlError,
    IntegrityError,
    PeerDiedError,
    WeightcastError,
)
from weightcast.format.manifest import MAX_MESSAGE_BYTES, Manifest, decode, encode
from weightcast.host.closing import close_in_child
from weightcast.host.deadline import GRACE_SECONDS, LOAD_SECONDS, Deadline
from weightcast.links.answers import error_in, tls_error
from weightcast.store import files
from weightcast.store.address import RemoteAddress, read_token
from weightcast.store.records import ReaderRecord, SlotInfo, Stored, WriterRecord

T = TypeVar("T")

_STALL_SECONDS = 2 * GRACE_SECONDS
"""Time without a byte after which a bucket is asked for over another connection."""
_PIN_SECONDS = 3 * GRACE_SECONDS
"""Time between two requests that keep a pin, which ends at the server after 60 s without one."""
_PART_BYTES = 256 << 10
_NO_CONTENT = 204
_PARTIAL = 206
_RETRIED = (502, 503, 504)
"""Statuses of a proxy before a server that is starting or away."""


class RemoteSlots(msgspec.Struct, frozen=True):
    """Answer of `GET /store/slots`."""

    slots: list[SlotInfo]
    has_writer: bool | None


class CopyRequest(msgspec.Struct, frozen=True):
    """Body of `PUT /store/copies/ID`: a version that is sent, and its manifest, byte for byte."""

    stored: Stored
    manifest: msgspec.Raw


class CopyAnswer(msgspec.Struct, frozen=True):
    """Answer to it. `accepts_deltas`: the store has the base. `left`: buckets that may be there from an earlier try."""

    accepts_deltas: bool
    left: list[Annotated[int, msgspec.Meta(ge=0)]]


class RemoteCalls:
    """Requests to a server of a store. Thread-safe; each thread that calls has a connection."""

    def __init__(self, address: RemoteAddress, deadline_seconds: float) -> None:
        """Raises ValueError if the token or the authorities' certificates can't be read."""
        self.where = address.url
        self._url = urllib.parse.urlsplit(address.url)
        self._headers = {}
        if address.token_file:
            token = read_token(Path(address.token_file), "token_file")
            self._headers["Authorization"] = f"Bearer {token}"
        self._tls: ssl.SSLContext | None = None
        if self._url.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=address.ca_file or None)
            except OSError as exc:  # also ssl.SSLError
                raise ValueError(f"ca_file {address.ca_file} can't be used: {exc}") from exc
        self._deadline_seconds = deadline_seconds
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._is_closed = False
        self._has_answered = False

    def close(self) -> None:
        """Close idle connections; later calls don't keep theirs. Idempotent."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def call(
        self,
        method: str,
        path: str,
        body: bytes | memoryview = b"",
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
        timeout_seconds: float = LOAD_SECONDS,
        once: bool = False,
    ) -> bytes | None:
        """Return the answer's body; None if it has none. A request may reach the server twice, unless `once` is set.

        `timeout_seconds`: of the server's silence. Raises the server's error, PeerError, IntegrityError if the answer
        is longer than `max_bytes`.
        """
        deadline = Deadline(0.0 if once else self._deadline_seconds)
        failure: Exception | None = None
        for _ in deadline.polls(max_pause_seconds=1.0):
            try:
                with self._asked(method, path, body, timeout_seconds=timeout_seconds) as answer:
                    content = answer.read(max_bytes + 1)
                    if len(content) > max_bytes:
                        raise IntegrityError(f"{self.where}{path} has more than {max_bytes} bytes: check the URL")
                    if answer.length:  # `read` returns what came before the connection was cut off
                        raise http.client.IncompleteRead(content, answer.length)
                    return None if answer.status == _NO_CONTENT else content
            except (OSError, http.client.HTTPException) as exc:
                failure = self._retried(exc)
        raise self._lost(path) from failure

    def ask(self, method: str, path: str, kind: type[T], body: bytes = b"") -> T:
        """Return the decoded answer. Raises what `call` raises, ControlError if it is invalid."""
        content = self.call(method, path, body)
        try:
            return decode(content or b"", kind)
        except WeightcastError as exc:
            raise self._foreign(path, str(exc)) from exc

    def read_range(self, path: str, parts: Sequence[memoryview], start: int) -> None:
        """Fill `parts` from byte `start` of a file. After a broken connection it goes on from the byte that came last.

        Raises the server's error; PeerDiedError if no byte comes for `deadline_seconds`.
        """
        left = collections.deque(part for part in parts if len(part))
        while left:
            num_left, failure = sum(map(len, left)), None
            for _ in Deadline(self._deadline_seconds).polls(max_pause_seconds=1.0):
                try:
                    self._read_some(path, left, start)
                except (OSError, http.client.HTTPException) as exc:
                    failure = self._retried(exc)
                num_bytes = num_left - sum(map(len, left))
                if num_bytes:
                    start += num_bytes
                    break
            else:
                raise self._lost(path) from failure

    def _read_some(self, path: str, left: collections.deque[memoryview], start: int) -> None:
        """Fill these parts as far as one answer goes, and remove from them what was filled."""
        end = start + sum(map(len, left))
        header = {"Range": f"bytes={start}-{end - 1}"}
        with self._asked("GET", path, headers=header, timeout_seconds=_STALL_SECONDS) as answer:
            said = answer.headers.get("Content-Range", "").partition("-")[0]
            if answer.status != _PARTIAL or said != f"bytes {start}":
                raise self._foreign(path, f"it answered {answer.status} to a request for a part of a file")
            while left and (num_bytes := answer.readinto(left[0])):
                left[0] = left[0][num_bytes:]
                if not left[0]:
                    left.popleft()

    @contextlib.contextmanager
    def _asked(
        self,
        method: str,
        path: str,
        body: bytes | memoryview = b"",
        *,
        headers: dict[str, str] | None = None,
        timeout_seconds: float,
    ) -> Iterator[http.client.HTTPResponse]:
        """Make one request, and yield a good answer. Raises the server's error, OSError, HTTPException."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None or connection.sock is None or connection.sock.fileno() < 0:
            host, port = self._url.hostname or "", self._url.port
            if self._tls is None:
                connection = http.client.HTTPConnection(host, port, timeout=_STALL_SECONDS)
            else:
                connection = http.client.HTTPSConnection(host, port, timeout=_STALL_SECONDS, context=self._tls)
            connection.connect()
            close_in_child(connection.sock)
        is_reusable = False
        try:
            connection.sock.settimeout(timeout_seconds)
            # In parts, since the timeout of a socket is that of one send. A server may refuse before it has read all.
            fields = {**self._headers, "Content-Length": str(len(body)), **(headers or {})}
            parts = (memoryview(body)[start : start + _PART_BYTES] for start in range(0, len(body), _PART_BYTES))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.request(method, self._url.path + path, parts, fields)
            answer = connection.getresponse()
            self._has_answered = True
            if answer.status not in (200, _NO_CONTENT, _PARTIAL):
                found = error_in(answer.read(MAX_MESSAGE_BYTES), self.where)
                if isinstance(found, WeightcastError):
                    raise found
                if answer.status in _RETRIED:
                    raise OSError(f"it answered {answer.status}: {found}")
                if answer.status == 401:
                    problem = "does not match the server's" if self._headers else "is missing"
                    raise ControlError(
                        f"{self.where} answered 401: the token {problem}; name a file that has it, ?token_file=FILE in "
                        "the URL",
                        peer=self.where,
                    )
                raise self._foreign(path, f"it answered {answer.status}: {found}")
            yield answer
            is_reusable = answer.isclosed() and not answer.will_close
        finally:
            with self._lock:
                is_kept = is_reusable and not self._is_closed
                if is_kept:
                    self._idle.append(connection)
            if not is_kept:
                connection.close()

    def _foreign(self, path: str, problem: str) -> ControlError:
        return ControlError(
            f"{self.where}{path} is not of a server that `weightcast serve-store` runs: {problem}; check the URL",
            peer=self.where,
        )

    def _retried(self, error: Exception) -> Exception:
        """Return an error after which a request is made again. Raises PeerError if that is of no use."""
        if isinstance(error, ssl.SSLError):
            trusted = "this system trusts or that ?ca_file=FILE in the URL has"
            raise tls_error(error, self.where, trusted=trusted, scheme="store+http://") from error
        if not self._has_answered:
            raise PeerDiedError(
                f"{self.where} can't be reached: {error}; start `weightcast serve-store` there, or check the URL",
                peer=self.where,
            ) from error
        return error

    def _lost(self, path: str) -> PeerDiedError:
        return PeerDiedError(
            f"{self.where}{path} gave no answer for {self._deadline_seconds:g} s: check that `weightcast serve-store` "
            "runs there, and do the same again; a copy goes on where it was",
            peer=self.where,
        )


class RemoteBuckets:
    """The buckets of a version; see `BucketReader`."""

    def __init__(self, calls: RemoteCalls, pin: str) -> None:
        self._calls = calls
        self._pin = pin

    def read(self, index: int, parts: Sequence[memoryview], start: int) -> None:
        self._calls.read_range(f"{self._pin}/buckets/{index}", parts, start)

    def close(self) -> None: ...


class RemoteStorage:
    """See `ReadStorage`."""

    def __init__(self, address: RemoteAddress, deadline_seconds: float) -> None:
        """Raises ValueError if the token can't be read."""
        self.calls = RemoteCalls(address, deadline_seconds)
        self._client = uuid.uuid4().hex
        self._num_pins = collections.Counter[int]()
        self._unpinned = threading.Event()
        """Set while nothing is pinned."""
        self._unpinned.set()

    def path(self, name: str, slot: int | None = None) -> str:
        folder = self.calls.where if slot is None else f"{self.calls.where}/{files.SLOTS}/{slot}"
        return f"{folder}/{name}" if name else folder

    def read(self, name: str, max_bytes: int, slot: int | None = None) -> bytes | None:
        query = "" if slot is None else f"?slot={slot}"
        return self.calls.call("GET", f"/store/records/{name}{query}", max_bytes=max_bytes)

    def slot_numbers(self) -> set[int]:
        return {slot.number for slot in self.slots()}

    def slots(self) -> list[SlotInfo]:
        return self.calls.ask("GET", "/store/slots", RemoteSlots).slots

    def has_writer(self, record: WriterRecord | None) -> bool | None:
        return self.calls.ask("GET", "/store/slots", RemoteSlots).has_writer

    def pin(self, slot: int, reader: ReaderRecord) -> contextlib.ExitStack | None:
        if not self._num_pins[slot] and self.calls.call("PUT", self._pin(slot), encode(reader)) is None:
            return None
        self._num_pins[slot] += 1
        if self._unpinned.is_set():
            self._unpinned = threading.Event()
            of = weakref.ref(self), self._unpinned
            threading.Thread(target=_keep_pins, args=of, name="weightcast-pins", daemon=True).start()
        pin = contextlib.ExitStack()
        pin.callback(self._unpin, slot)
        return pin

    def _unpin(self, slot: int) -> None:
        """Release one pin of a slot. If the server can't be reached, it releases the last one after a while."""
        self._num_pins[slot] -= 1
        if not self._num_pins.total():
            self._unpinned.set()
        if not self._num_pins[slot]:
            with contextlib.suppress(WeightcastError):
                self.calls.call("DELETE", self._pin(slot), timeout_seconds=GRACE_SECONDS, once=True)

    def _pin(self, slot: int) -> str:
        return f"/store/pins/{self._client}/{slot}"

    def open_slot(self, stored: Stored, manifest: Manifest) -> RemoteBuckets:
        return RemoteBuckets(self.calls, self._pin(stored.slot))

    def close(self) -> None:
        self.calls.close()


def _keep_pins(of: weakref.ref[RemoteStorage], unpinned: threading.Event) -> None:
    """Show the server that the pinned slots are still used, until there are none, or it is garbage-collected.

    Errors are ignored: the next read finds them.
    """
    while not unpinned.wait(_PIN_SECONDS) and (storage := of()) is not None:
        for slot in [slot for slot, count in list(storage._num_pins.items()) if count > 0]:
            with contextlib.suppress(WeightcastError):
                storage.calls.read_range(f"{storage._pin(slot)}/buckets/0", [memoryview(bytearray(1))], 0)
        del storage
