"""A worker's end of the ipc transport: maps the sender's arena once, and is told what in it is whole.

Invariants: a bucket is handed out only in its turn, and only while the connection lives; one that the sender has closed
(a receiver that stood still for too long, say) hands out nothing more; records of a former update are never taken for
the present one. `end` and `close` may be called from any thread and wake an iteration that waits.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec

from weightcast.errors import (
    ClosedError,
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.format.bucket import buffer_size_bytes
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Bucket
from weightcast.transports.ipc.arena import MappedSharedArena
from weightcast.transports.ipc.channel import PUBLISHER, connect
from weightcast.transports.ipc.cuda import MappedCudaArena
from weightcast.transports.ipc.devices import choose
from weightcast.transports.ipc.records import (
    Awaiting,
    BucketReady,
    CudaArena,
    IpcAborted,
    IpcBegin,
    IpcEnded,
    IpcHello,
    Released,
    SharedArena,
    ToReceiver,
)

_Arena: TypeAlias = MappedSharedArena | MappedCudaArena


_CONNECT_SECONDS = 15.0


@dataclasses.dataclass(slots=True, eq=False)
class _Incoming:
    """An update that the sender has begun, as far as it has told of it. `is_over`: this end has done with it."""

    begin: IpcBegin
    ready: collections.deque[tuple[BucketReady, _Arena]] = dataclasses.field(default_factory=collections.deque)
    aborted: str | None = None
    is_over: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class _IpcUpdate:
    """An update that the worker waits for."""

    manifest: Manifest
    version: WeightVersion
    staged: bool
    num_taken: int = 0
    is_whole: bool = False
    incoming: _Incoming | None = None


class IpcReceiver:
    """Implements `Receiver`. Memory: none of its own, but for a bucket's pages that the engine writes to."""

    def __init__(self, url: str, *, peer: str, run: str, deadline_seconds: float = 60.0) -> None:
        """Connect as `peer` to a sender's address; of several, to that of this process's device.

        Raises PeerDiedError, PeerTimeoutError, StaleVersionError.
        """
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._lock = threading.RLock()
        self._nobody_waits = threading.Condition(self._lock)
        self._num_waiting = 0
        self._arena: _Arena | None = None
        self._incoming: _Incoming | None = None
        self._wanted: _IpcUpdate | None = None
        self._ended = ""
        self._closed = False
        self._heard_at = 0.0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            self._channel = connect(choose(url), IpcHello(run, peer), min(deadline_seconds, _CONNECT_SECONDS))
        except BaseException:
            os.close(self._wake)
            raise

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Wait for `version` from now on. Raises PeerDiedError if the sender has gone."""
        if version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this receiver of run {self._run}")
        self.end()
        with self._lock:
            # An iteration of the former update was woken by `end`; it must not take what is meant for this one.
            if not self._nobody_waits.wait_for(lambda: self._num_waiting == 0, self._deadline_seconds):
                raise PeerTimeoutError("the iteration of the former update did not end", peer=PUBLISHER)
            self._require_open()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._heard_at = time.monotonic()
            self._listen()
            self._require_connection()
            self._wanted = _IpcUpdate(manifest, version, staged)
            self._tell(Awaiting(version.number))
            self._match()

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket in order, once."""
        with self._lock:
            self._require_open()
            wanted = self._wanted
        if wanted is None:
            raise UpdateAbortedError("no update is open: it was ended, or open() was not called")
        num_buckets = len(wanted.manifest.buckets)
        while wanted.num_taken < num_buckets:
            ready, arena = self._next(wanted)
            yield self._take(wanted, ready, arena)
            if wanted.num_taken == num_buckets:
                self._check_live(wanted)
            if not wanted.staged:
                arena.finish()
                self._release(wanted, ready)
        wanted.is_whole = True

    def reread(self, bucket: Bucket) -> bool:
        """Drop what this process wrote over a bucket, if it could: the mapping is private. The views stay valid."""
        with self._lock:
            return self._arena is not None and self._arena.reread(bucket.buffer)

    def end(self) -> None:
        """Release every bucket and wake an iteration, which raises UpdateAbortedError. Idempotent, from any thread."""
        with self._lock:
            if self._wanted is None or self._closed:
                return
            with contextlib.suppress(WeightcastError):
                self._listen()
            wanted, self._wanted = self._wanted, None
            os.eventfd_write(self._wake, 1)
            if self._arena is not None and not wanted.is_whole:
                self._reset(self._arena)
            if wanted.incoming is None:
                self._tell(IpcEnded(wanted.version.number, 0))
            else:
                self._be_done(wanted.incoming)

    def close(self) -> None:
        """Disconnect; wakes an iteration, which raises ClosedError. Idempotent, from any thread."""
        with self._lock:
            if self._closed:
                return
            self._closed, self._wanted = True, None
            os.eventfd_write(self._wake, 1)
            if self._num_waiting == 0:
                self._free()

    def _free(self) -> None:
        self._channel.close()
        os.close(self._wake)
        if self._arena is not None:
            self._arena.close()
        self._arena = self._incoming = None

    # --- waiting ---

    def _next(self, wanted: _IpcUpdate) -> tuple[BucketReady, _Arena]:
        with self._lock:
            start = time.monotonic()
            while (found := self._poll(wanted)) is None:
                self._wait(self._end_of_patience(wanted, start))
        return found

    def _poll(self, wanted: _IpcUpdate) -> tuple[BucketReady, _Arena] | None:
        self._check_live(wanted)
        incoming = wanted.incoming
        return incoming.ready.popleft() if incoming is not None and incoming.ready else None

    def _check_live(self, wanted: _IpcUpdate) -> None:
        """Hear what there is to hear. Raises if the update is over for any reason."""
        with self._lock:
            self._require_open()
            if self._wanted is not wanted:
                raise UpdateAbortedError(f"version {wanted.version.number} was ended on this side")
            self._listen()
            if wanted.incoming is not None and wanted.incoming.aborted is not None:
                raise UpdateAbortedError(wanted.incoming.aborted)
            self._require_connection()

    def _end_of_patience(self, wanted: _IpcUpdate, start: float) -> float:
        # Before an update begins the sender may itself wait for somebody else, up to its deadline.
        patience = self._deadline_seconds * (2 if wanted.incoming is None else 1)
        end = max(start, self._heard_at) + patience
        if time.monotonic() >= end:
            raise PeerTimeoutError(f"nothing was heard of the publisher for {patience:g} s", peer=PUBLISHER)
        return end

    def _wait(self, end: float) -> None:
        """Give up the lock until there is something to hear, somebody wakes us, or `end`."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        self._num_waiting += 1
        self._lock.release()
        try:
            poller.poll(max(0.0, end - time.monotonic()) * 1000)
        finally:
            self._lock.acquire()
            self._num_waiting -= 1
            self._nobody_waits.notify_all()
            if self._closed and self._num_waiting == 0:
                self._free()

    # --- records ---

    def _listen(self) -> None:
        """Take every record that is there. Raises ManifestError for one that can't be."""
        while not self._ended:
            try:
                packet = self._channel.receive(ToReceiver, max_descriptors=1)
                if packet is None:
                    return
                self._heard_at = time.monotonic()
                self._on_record(*packet)
            except EOFError as exc:
                self._give_up(str(exc))
            except BaseException as exc:
                self._give_up(f"it was disconnected: {exc}")
                raise

    def _on_record(self, record: Any, descriptor: int | None) -> None:
        if descriptor is not None and not isinstance(record, SharedArena):
            os.close(descriptor)
        match record:
            case SharedArena():
                if descriptor is None:
                    raise ManifestError("an arena was announced without its descriptor", fault="type")
                self._set_arena(MappedSharedArena(record, descriptor))
            case CudaArena():
                self._set_arena(MappedCudaArena(record))
            case IpcBegin():
                self._on_begin(record)
            case BucketReady() | IpcAborted():
                self._on_progress(record)

    def _on_progress(self, record: BucketReady | IpcAborted) -> None:
        incoming, arena = self._incoming, self._arena
        if incoming is None or incoming.is_over or incoming.begin.update != record.update:
            return
        if isinstance(record, IpcAborted):
            incoming.aborted = record.reason
            return
        if arena is None or record.generation != arena.generation:
            raise ManifestError(f"bucket {record.index} lies in arena {record.generation}, which is not known here")
        # With its arena: the sender may announce a new one before this bucket's turn.
        incoming.ready.append((record, arena))

    def _on_begin(self, begin: IpcBegin) -> None:
        former, self._incoming = self._incoming, _Incoming(begin)
        wanted = self._wanted
        if wanted is not None and wanted.incoming is former and not wanted.num_taken:
            # A second attempt; the first was begun before the sender had heard that it was given up here.
            wanted.incoming = None
        elif former is not None and former.aborted is None:
            former.aborted = f"the publisher went on to version {begin.version}"
        self._match()

    def _match(self) -> None:
        """Join what the sender has begun with what is wanted; what isn't wanted is released at once."""
        wanted, incoming = self._wanted, self._incoming
        if wanted is None or wanted.incoming is not None or incoming is None or incoming.is_over:
            return
        begin = incoming.begin
        if begin.version != wanted.version.number or incoming.aborted is not None:
            self._be_done(incoming)
            return
        found, expected = (begin.num_buckets, begin.staged), (len(wanted.manifest.buckets), wanted.staged)
        if found != expected:
            raise ManifestError(f"the publisher sends (buckets, staged) = {found}, the offer said {expected}")
        wanted.incoming = incoming

    def _set_arena(self, arena: _Arena) -> None:
        former, self._arena = self._arena, arena
        if former is not None:
            former.close()

    def _reset(self, arena: _Arena) -> None:
        try:
            arena.reset()
        except WeightcastError as exc:
            self._give_up(f"it was disconnected: {exc}")

    def _take(self, wanted: _IpcUpdate, ready: BucketReady, arena: _Arena) -> Bucket:
        """Find the bytes that a record speaks of. Raises ManifestError if they aren't the next bucket's."""
        index = wanted.num_taken
        size_bytes = buffer_size_bytes(wanted.manifest, index)
        if ready.index != index:
            raise ManifestError(f"bucket {ready.index} was announced, bucket {index} is the next")
        if ready.offset_bytes + size_bytes > arena.size_bytes:
            raise ManifestError(f"bucket {index} of {size_bytes} bytes would end behind the arena", fault="offset")
        arena.wait_ready(ready.event)
        if index == 0:
            arena.buffers.forget_above(len(wanted.manifest.buckets))
        wanted.num_taken += 1
        return Bucket(index, arena.buffers.get(index, ready.offset_bytes, size_bytes))

    def _release(self, wanted: _IpcUpdate, ready: BucketReady) -> None:
        with self._lock:
            if self._wanted is wanted:
                self._tell(Released(ready.version, ready.update, ready.generation, ready.index))

    def _be_done(self, incoming: _Incoming) -> None:
        if not incoming.is_over:
            incoming.is_over = True
            incoming.ready.clear()
            self._tell(IpcEnded(incoming.begin.version, incoming.begin.update))

    def _tell(self, record: msgspec.Struct) -> None:
        if self._ended:
            return
        try:
            if not self._channel.send(record):
                self._give_up("it takes no records")
        except EOFError as exc:
            self._give_up(str(exc))

    def _give_up(self, reason: str) -> None:
        """The connection is of no more use; the sender is told by its end."""
        self._ended = reason
        self._channel.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this receiver was closed")

    def _require_connection(self) -> None:
        if self._ended:
            raise PeerDiedError(f"the publisher has gone or dropped this receiver: {self._ended}", peer=PUBLISHER)
