"""HTTP server of a store: readers elsewhere follow and pull its versions, and may push theirs, if that is allowed.

Invariants: all routes but /health require the token, if there is one; a slot stays pinned for a reader, and the store
locked for a version that is pushed, until they are released or nothing was asked of them for `IDLE_SECONDS`; only the
last push is under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightcast.control.routes import Answer, guarded, natural_number, read_body, refusal, reply
from weightcast.errors import IntegrityError, ManifestError, StaleVersionError, UnsupportedError
from weightcast.format.bucket import HEADER_BYTES, slot_size_bytes
from weightcast.format.manifest import MAX_MESSAGE_BYTES, decode
from weightcast.host.closing import Closeable, on_failure
from weightcast.host.deadline import GRACE_SECONDS
from weightcast.store import files
from weightcast.store.address import RemoteAddress, StoreAddress
from weightcast.store.copying import LocalCopy
from weightcast.store.reading import StoreReader, manifest_of
from weightcast.store.records import MAX_RECORD_BYTES, Commit, ReaderRecord
from weightcast.store.remote import CopyAnswer, CopyRequest, RemoteSlots
from weightcast.store.storage import BucketReader, read_record

IDLE_SECONDS = 60.0
"""Time without a request after which a reader's pin, or a push, ends."""
_MAX_BODY_BYTES = MAX_MESSAGE_BYTES + MAX_RECORD_BYTES
_RECORDS = {files.POINTER, files.NEXT, files.WRITER}
_SLOT_RECORDS = {files.SEAL, files.MANIFEST}
_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{1,19})")
_ID = re.compile(r"[0-9a-f]{32}")


@dataclasses.dataclass(slots=True, eq=False)
class _PinnedSlot:
    """A slot that is pinned for a reader. `data`: the buckets of its version, if it has one; `max_bytes`: of one."""

    pin: Closeable
    data: BucketReader | None = None
    max_bytes: int = 0
    num_buckets: int = 0

    def close(self) -> None:
        if self.data is not None:
            self.data.close()
        self.pin.close()


P = TypeVar("P", _PinnedSlot, LocalCopy)


@dataclasses.dataclass(slots=True, eq=False)
class _Lease:
    """A client's claim on the store. It is closed when it has ended and no request uses it."""

    thing: _PinnedSlot | LocalCopy
    used_at: float
    num_uses: int = 0
    has_ended: bool = False


class StoreServer:
    """The routes of a store, as the ASGI application `app`."""

    def __init__(
        self,
        address: StoreAddress,
        *,
        token: str | None = None,
        allow_push: bool = False,
        deadline_seconds: float = 60.0,
    ) -> None:
        """`allow_push`: also write versions into the store. `deadline_seconds`: of a push's wait for other readers."""
        if isinstance(address, RemoteAddress):
            raise ValueError(f"{address.url} is a store that another server serves: name a directory, or s3://")
        self._address = address
        self._reader = StoreReader(address, label="serve-store", deadline_seconds=deadline_seconds)
        self._allow_push = allow_push
        self._deadline_seconds = deadline_seconds
        self._condition = threading.Condition()
        self._beginning = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._is_closed = False
        routes: list[tuple[str, str, Answer]] = [
            ("GET", "/store/records/{name}", _in_thread(self._record)),
            ("GET", "/store/slots", _in_thread(self._slots)),
            ("PUT", "/store/pins/{client}/{slot}", _in_thread(self._pin, MAX_RECORD_BYTES)),
            ("GET", "/store/pins/{client}/{slot}/buckets/{index}", _in_thread(self._read_bucket)),
            ("DELETE", "/store/pins/{client}/{slot}", _in_thread(lambda request, _: self._end(_pin_name(request)[0]))),
            ("PUT", "/store/copies/{copy}", _in_thread(self._begin_copy, _MAX_BODY_BYTES)),
            ("GET", "/store/copies/{copy}/buckets/{index}", _in_thread(self._has_bucket)),
            ("PUT", "/store/copies/{copy}/buckets/{index}", StoreServer._write_bucket),
            ("POST", "/store/copies/{copy}", _in_thread(self._commit_copy)),
            ("DELETE", "/store/copies/{copy}", _in_thread(lambda request, _: self._end(_copy_name(request)))),
        ]
        guard = functools.partial(guarded, None, find=lambda: self, token=token, on_error=lambda error: None)
        self.app = Starlette(
            routes=[
                Route("/health", lambda request: reply({"status": "ok"})),
                *(Route(path, guard(answer), methods=[method]) for method, path, answer in routes),
            ]
        )
        self._sweeper = threading.Thread(target=self._sweep, name="weightcast-store-server", daemon=True)
        self._sweeper.start()

    def close(self) -> None:
        """Release every pin, and the store. A push that is under way can be continued later. Idempotent."""
        with self._condition:
            self._is_closed = True
            names = list(self._leases)
            self._condition.notify_all()
        for name in names:
            self._end(name)
        self._sweeper.join(GRACE_SECONDS)
        self._reader.close()

    # --- leases ---

    def _add(self, name: str, thing: _PinnedSlot | LocalCopy) -> None:
        with self._condition:
            is_new = name not in self._leases and not self._is_closed
            if is_new:
                self._leases[name] = _Lease(thing, time.monotonic())
        if not is_new:
            thing.close()

    @contextlib.contextmanager
    def _used(self, name: str, kind: type[P]) -> Iterator[P]:
        with self._condition:
            lease = self._leases.get(name)
            thing = None if lease is None else lease.thing
            if lease is None or not isinstance(thing, kind):
                if kind is LocalCopy:
                    raise StaleVersionError(
                        "this push has ended: another one has begun, the server was started again, or it was idle for "
                        f"{IDLE_SECONDS:g} s; push again, what has come is kept"
                    )
                raise IntegrityError(
                    f"this reader's pin has ended: the server was started again, or asked for nothing for "
                    f"{IDLE_SECONDS:g} s, so that a newer version may have replaced this one; read the newest one"
                )
            lease.num_uses += 1
        try:
            yield thing
        finally:
            with self._condition:
                lease.num_uses -= 1
                lease.used_at = time.monotonic()
                is_last = lease.has_ended and not lease.num_uses
                self._condition.notify_all()
            if is_last:
                thing.close()

    def _end(self, name: str) -> None:
        """End what a client has. It is closed now, or by the last request that uses it."""
        with self._condition:
            lease = self._leases.pop(name, None)
            if lease is None:
                return
            lease.has_ended = True
            is_used = lease.num_uses > 0
        if not is_used:
            lease.thing.close()

    def _sweep(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._is_closed, GRACE_SECONDS)
                if self._is_closed:
                    return
                oldest = time.monotonic() - IDLE_SECONDS
                idle = [name for name, each in self._leases.items() if not each.num_uses and each.used_at < oldest]
            for name in idle:
                self._end(name)

    # --- routes of readers ---

    def _record(self, request: Request, body: bytes) -> Response | None:
        name, given = request.path_params["name"], request.query_params.get("slot")
        slot = None if given is None else natural_number("slot", given)
        if name not in (_RECORDS if slot is None else _SLOT_RECORDS):
            return refusal(f"a store has no record {name[:40]!r}", "not_found", 404)
        limit = MAX_MESSAGE_BYTES if name == files.MANIFEST else MAX_RECORD_BYTES
        data = self._reader.storage.read(name, limit, slot)
        return None if data is None else Response(data, media_type="application/json")

    def _slots(self, request: Request, body: bytes) -> RemoteSlots:
        storage = self._reader.storage
        return RemoteSlots(storage.slots(), storage.has_writer(self._reader.writer()))

    def _pin(self, request: Request, body: bytes) -> dict[str, str] | None:
        (name, slot), storage = _pin_name(request), self._reader.storage
        found = storage.pin(slot, decode(body, ReaderRecord))
        if found is None:
            return None
        pinned = _PinnedSlot(found)
        # Without a version here the reader finds no seal, and says what is wrong.
        with on_failure(found.close), contextlib.suppress(IntegrityError):
            sealed = read_record(storage, files.SEAL, Commit, slot)
            if sealed is not None:
                manifest = self._reader.manifest(sealed.newest)
                pinned.data = storage.open_slot(sealed.newest, manifest)
                pinned.max_bytes, pinned.num_buckets = slot_size_bytes(manifest), len(manifest.buckets)
        self._add(name, pinned)
        return {}

    def _read_bucket(self, request: Request, body: bytes) -> Response:
        (name, _), index = _pin_name(request), _index(request)
        wanted = _RANGE.fullmatch(request.headers.get("range", ""))
        if wanted is None:
            raise ManifestError("a bucket is read by a header such as `Range: bytes=0-255`", fault="type")
        first, last = int(wanted[1]), int(wanted[2])
        with self._used(name, _PinnedSlot) as pinned:
            if pinned.data is None or not (first <= last < pinned.max_bytes and index < pinned.num_buckets):
                raise ManifestError(f"bytes {first}-{last} of bucket {index} are not there", fault="bounds")
            memory = memoryview(bytearray(last + 1 - first))
            pinned.data.read(index, [memory], first)
        headers = {"content-range": f"bytes {first}-{last}/*"}
        return Response(memory, 206, headers, media_type="application/octet-stream")

    # --- routes of a push ---

    def _begin_copy(self, request: Request, body: bytes) -> CopyAnswer:
        if not self._allow_push:
            raise UnsupportedError("this server only lets versions be read: start it with --allow-push")
        name = _copy_name(request)
        wanted: CopyRequest = decode(body, CopyRequest)
        manifest = manifest_of(wanted.stored, bytes(wanted.manifest), "the manifest that was sent")
        with self._beginning:
            self._end_other_copies()
            copy = LocalCopy(self._address, wanted.stored, manifest, deadline_seconds=self._deadline_seconds)
            with on_failure(copy.close):
                answer = CopyAnswer(copy.accepts_deltas, sorted(copy.left))
            self._add(name, copy)
        return answer

    def _end_other_copies(self) -> None:
        """End the push that is under way, if there is one, and wait for its requests."""
        with self._condition:
            others = [(name, each) for name, each in self._leases.items() if isinstance(each.thing, LocalCopy)]
        for name, lease in others:
            self._end(name)
            with self._condition:
                self._condition.wait_for(lambda lease=lease: not lease.num_uses, self._deadline_seconds)  # type: ignore[misc]

    def _has_bucket(self, request: Request, body: bytes) -> dict[str, str] | None:
        index = _index(request)
        with self._used(_copy_name(request), LocalCopy) as copy:
            return {} if copy.has(index) else None

    async def _write_bucket(self, request: Request) -> Response:
        name, index = _copy_name(request), _index(request)

        def max_bytes() -> int:
            with self._used(name, LocalCopy) as copy:
                return HEADER_BYTES + copy.raw_bytes(index)

        def write(body: bytes) -> None:
            with self._used(name, LocalCopy) as copy:
                copy.write(index, memoryview(body))

        # The copy is not used while bytes are awaited, so that a later push need not wait for them; each part of the
        # body is a sign of life, or finds that another push has begun.
        body = await read_body(request, max_bytes(), on_part=max_bytes)
        await run_in_threadpool(write, body)
        return Response(status_code=204)

    def _commit_copy(self, request: Request, body: bytes) -> None:
        with self._used(_copy_name(request), LocalCopy) as copy:
            copy.commit()


def _in_thread(answer: Callable[[Request, bytes], object], max_body_bytes: int = 0) -> Answer:
    """Return the answer of a route that `answer` gives in a thread: None is one without a body."""

    async def in_thread(server: StoreServer, request: Request) -> Response:
        body = await read_body(request, max_body_bytes) if max_body_bytes else b""
        found = await run_in_threadpool(answer, request, body)
        if isinstance(found, Response):
            return found
        return Response(status_code=204) if found is None else reply(found)

    return in_thread


def _index(request: Request) -> int:
    return natural_number("a bucket's number", request.path_params["index"])


def _pin_name(request: Request) -> tuple[str, int]:
    slot = natural_number("a slot's number", request.path_params["slot"])
    return f"pin {_id(request.path_params['client'])} {slot}", slot


def _copy_name(request: Request) -> str:
    return f"copy {_id(request.path_params['copy'])}"


def _id(text: str) -> str:
    if _ID.fullmatch(text) is None:
        raise ManifestError(f"{text[:40]!r} must be 32 hex digits", fault="type")
    return text
