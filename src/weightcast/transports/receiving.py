"""Common base of the workers' ends of all transports: the update that is wanted, the wait for it, and its end.

Invariants: a bucket is handed out only in its turn, and only while the sender lives; what comes of a former update is
never taken for the present one. `end` and `close` may be called from any thread and wake an iteration that waits.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
import torch

from weightcast.errors import (
    ClosedError,
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, Buffers
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import device as host_device
from weightcast.host.deadline import MAX_SECONDS
from weightcast.seams.transport import Bucket, Receiver
from weightcast.transports import records

PUBLISHER = "trainer"
CONNECT_SECONDS = 15.0
_POLL_SECONDS = 0.0005
"""How often a GPU is asked whether a bucket was read."""


B = TypeVar("B")


@dataclasses.dataclass(slots=True, eq=False)
class WantedUpdate(Generic[B]):
    """An update that the worker waits for. `begun`: what the sender has begun of it. `is_done`: all was iterated."""

    manifest: Manifest
    version: WeightVersion
    staged: bool
    begun: B | None = None
    num_read: int = 0
    is_done: bool = False

    @property
    def num_buckets(self) -> int:
        return len(self.manifest.buckets)


W = TypeVar("W", bound=WantedUpdate[Any])
T = TypeVar("T")


class ReceivingEnd(Receiver, abc.ABC, Generic[W]):
    """Iterates, ends and closes. A transport says how it hears of buckets and how it releases them."""

    def __init__(self, run: str | None, deadline_seconds: float, condition: threading.Condition | None = None) -> None:
        """`run`: the only one to be received, or None for all. The condition guards all state and is notified."""
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._condition = condition or threading.Condition()
        self._publisher = "the publisher"
        self._wanted: W | None = None
        self._ended = ""
        """Why the connection is of no more use."""
        self._heard_at = 0.0
        self._closed = False

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket in order, once."""
        with self._condition:
            self._require_open()
            wanted = self._wanted
        if wanted is None:
            raise UpdateAbortedError("no update is open: it was ended, or open() was not called")
        yield from self._buckets(wanted)
        wanted.is_done = True

    def end(self) -> None:
        """Release every bucket and wake an iteration, which raises UpdateAbortedError. Idempotent, from any thread."""
        with self._condition:
            wanted, self._wanted = self._wanted, None
            if wanted is not None:
                self._leave(wanted)
                self._condition.notify_all()

    def close(self) -> None:
        """Disconnect; wakes an iteration, which raises ClosedError. Idempotent, from any thread."""
        with self._condition:
            if not self._closed:
                self._closed, self._wanted = True, None
                self._disconnect()
                self._condition.notify_all()

    # --- what a transport adds; but for `_release`, the caller holds the condition ---

    @abc.abstractmethod
    def _next_bucket(self, wanted: W) -> Bucket | None:
        """Bucket `wanted.num_read`, if it is here."""

    def _release(self, wanted: W, index: int) -> None:
        """The bucket after `index` was asked for."""
        return

    @abc.abstractmethod
    def _leave(self, wanted: W) -> None:
        """The update has ended here, in whichever way."""

    @abc.abstractmethod
    def _disconnect(self) -> None: ...

    def _listen(self) -> None:
        """Take in what the sender has done by now, where no thread does. Does not wait."""
        return

    def _wait(self, wanted: W, seconds: float) -> None:
        """Let go of the condition until something happens, at most that long."""
        self._condition.wait(seconds)

    # --- for transports ---

    def _buckets(self, wanted: W) -> Iterator[Bucket]:
        find = functools.partial(self._next_bucket, wanted)
        while wanted.num_read < wanted.num_buckets:
            with self._condition:
                bucket = self._await(wanted, find)
                wanted.num_read += 1
            index = bucket.index
            yield bucket
            del bucket
            if wanted.num_read == wanted.num_buckets:
                with self._condition:
                    self._check_live(wanted)
            self._release(wanted, index)

    def _await(self, wanted: W, find: Callable[[], T | None]) -> T:
        """Wait until something is found. Raises whatever ends the update, PeerTimeoutError if nothing is heard."""
        start = time.monotonic()
        while True:
            self._check_live(wanted)
            found = find()
            if found is not None:
                return found
            patience = self._patience_seconds(wanted)
            remaining = max(start, self._heard_at) + patience - time.monotonic()
            if remaining <= 0:
                raise PeerTimeoutError(self._silence(wanted, patience), peer=PUBLISHER)
            self._wait(wanted, min(remaining, self._longest_wait_seconds(wanted)))

    def _patience_seconds(self, wanted: W) -> float:
        """Before an update begins the sender may itself wait for somebody else, up to its deadline."""
        return self._deadline_seconds * (2 if wanted.begun is None else 1)

    def _longest_wait_seconds(self, wanted: W) -> float:
        """After that long something is looked for that wakes nobody; at most as long as poll(2) can wait."""
        return MAX_SECONDS

    def _silence(self, wanted: W, seconds: float) -> str:
        return f"nothing was heard of the publisher for {seconds:g} s"

    def _check_live(self, wanted: W) -> None:
        """Raises if the update is over for any reason."""
        self._require_open()
        if self._wanted is not wanted:
            what = f"version {wanted.version.number} was given up by its worker, in this process"
            raise UpdateAbortedError(f"{what}, before all of it had come: end() was called")
        self._listen()
        self._check_sender(wanted)

    def _check_sender(self, wanted: W) -> None:
        """Raises if the sender has ended the update, or has gone."""
        if self._ended:
            what = f"{self._publisher} has gone or dropped this receiver: {self._ended}"
            raise PeerDiedError(what, peer=PUBLISHER)

    def _require_open(self, version: WeightVersion | None = None) -> None:
        """Raises ClosedError, ValueError for a version of another run."""
        if self._closed:
            raise ClosedError("this receiver was closed by its worker, in this process")
        if version is not None and self._run is not None and version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this receiver of run {self._run}")


# --- receivers that hear records of their sender ---


class MappedArena:
    """A receiver's end of a sender's arena. This will do for host memory that nobody writes."""

    generation: int
    size_bytes: int
    buffers: Buffers
    device = torch.device("cpu")

    def reset(self) -> None:
        """An update was given up: let nothing that was read or written here reach the next one."""

    def reread(self, buffer: BucketBuffer) -> bool:
        """Make `buffer` show the sender's bytes again; False if that can't be. See `Receiver.reread`."""
        return False

    def close(self) -> None:
        """Let go of it; the memory stays as long as a tensor needs it."""


ReadyBucket: TypeAlias = tuple[records.BucketReady, MappedArena]


@dataclasses.dataclass(slots=True, eq=False)
class IncomingUpdate:
    """An update that the sender has begun. `is_over`: this end has done with it. `aborted`: why the sender has.

    `ready`: buckets in an arena that were not handed out yet, each with its arena: the sender may announce another one.
    """

    begin: records.BeginUpdate
    ready: collections.deque[ReadyBucket] = dataclasses.field(default_factory=collections.deque)
    aborted: str | None = None
    is_over: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class PeerUpdate(WantedUpdate[IncomingUpdate]):
    """`given`: the bucket in an arena that was handed out last. `unreleased`: the one before that, on a GPU, with what
    was queued when the next was asked for.
    """

    given: ReadyBucket | None = None
    unreleased: tuple[records.BucketReady, host_device.Event | None] | None = None

    @property
    def number(self) -> int:
        """The sender's own number of the update; 0 before it has begun."""
        return 0 if self.begun is None else self.begun.begin.update


V = TypeVar("V", bound=PeerUpdate)


class PeerReceiver(ReceivingEnd[V]):
    """Matches what the sender begins with what is wanted here. A transport says how records travel, and bytes."""

    _incoming: IncomingUpdate | None = None
    _opening = 0

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Wait for `version` from now on. Raises PeerDiedError if the sender has gone, InsufficientMemoryError."""
        self._require_open(version)
        self.end()
        with self._condition:
            self._require_open()
            wanted = self._want(manifest, version, staged)
            self._heard_at = time.monotonic()
            self._listen()
            self._check_sender(wanted)
            self._wanted = wanted
            self._opening += 1
            self._tell(records.Opened(version.number, self._opening))
            self._match()
            self._condition.notify_all()

    def end(self) -> None:
        with self._condition:
            if self._wanted is not None:
                with contextlib.suppress(WeightcastError):
                    self._listen()
            super().end()

    # --- what a transport adds; the caller holds the condition ---

    @abc.abstractmethod
    def _tell(self, record: msgspec.Struct) -> None:
        """Send the sender a record, if it is there. Does not wait, and raises nothing."""

    @abc.abstractmethod
    def _want(self, manifest: Manifest, version: WeightVersion, staged: bool) -> V:
        """Prepare for an update. May wait for what is left of the one before."""

    @abc.abstractmethod
    def _on_other(self, record: Any) -> None:
        """A record of the transport's own. Raises ManifestError for one that can't be."""

    def _on_begun(self, wanted: V) -> None:
        """The sender has begun what is wanted, or after a loss has begun it again."""

    def _on_over(self) -> None:
        """The sender's update has ended here without an `end`: it was given up, or is not what is wanted."""

    # --- records ---

    def _on_record(self, record: Any) -> None:
        """Handle a record; one about another update, or about an update that is over here, is ignored."""
        self._heard_at = time.monotonic()
        incoming = None if self._incoming is None or self._incoming.is_over else self._incoming
        match record:
            case records.BeginUpdate():
                self._on_begin(record, incoming)
            case records.UpdateAborted():
                if incoming is not None and incoming.begin.update == record.update:
                    incoming.aborted = record.reason
                    self._on_over()
            case records.KeepAlive():
                pass
            case _:
                self._on_other(record)

    def _on_begin(self, begin: records.BeginUpdate, incoming: IncomingUpdate | None) -> None:
        wanted = self._wanted
        if incoming is not None and incoming.begin.update == begin.update:
            incoming.begin = begin
            if wanted is not None and wanted.begun is incoming:
                self._on_begun(wanted)
            return
        former, self._incoming = self._incoming, IncomingUpdate(begin)
        if former is not None and former.aborted is None:
            former.aborted = f"the publisher went on to version {begin.version}"
        self._match()

    def _match(self) -> None:
        """Join what the sender has begun with what is wanted; what isn't wanted is declined at once."""
        wanted, incoming = self._wanted, self._incoming
        if wanted is None or wanted.begun is not None or incoming is None or incoming.is_over:
            return
        if incoming.begin.opening != self._opening or incoming.aborted is not None:
            self._be_done(incoming)
            # One of no buckets was whole at once, wherever it was wanted: the sender has gone on.
            if incoming.aborted is None and incoming.begin.num_buckets:
                self._on_over()
            return
        wanted.begun = incoming
        if _is_unlike(wanted, incoming.begin):
            self._on_over()
        else:
            self._on_begun(wanted)

    def _be_done(self, incoming: IncomingUpdate) -> None:
        if not incoming.is_over:
            incoming.is_over = True
            incoming.ready.clear()
            self._tell(records.UpdateEnded(incoming.begin.version, incoming.begin.update))

    def _leave(self, wanted: V) -> None:
        if wanted.begun is None:
            self._tell(records.UpdateEnded(wanted.version.number, 0))
        else:
            self._be_done(wanted.begun)

    def _check_sender(self, wanted: V) -> None:
        if wanted.begun is not None and wanted.begun.aborted is not None:
            raise UpdateAbortedError(wanted.begun.aborted)
        if wanted.begun is not None and _is_unlike(wanted, begin := wanted.begun.begin):
            found, expected = (begin.num_buckets, begin.staged), (wanted.num_buckets, wanted.staged)
            raise ManifestError(f"the publisher sends (buckets, staged) = {found}, the offer said {expected}")
        super()._check_sender(wanted)


def _is_unlike(wanted: PeerUpdate, begin: records.BeginUpdate) -> bool:
    """Return whether the update that the sender has begun differs from the one that was offered."""
    return (begin.num_buckets, begin.staged) != (wanted.num_buckets, wanted.staged)


class ArenaReceiver(PeerReceiver[PeerUpdate]):
    """Implements `Receiver`: reads the sender's arena in place. Memory: none of its own."""

    _arena: MappedArena | None = None

    def reread(self, bucket: Bucket) -> bool:
        """Drop what this process wrote over a bucket, if the arena's mapping is its own. The views stay valid."""
        with self._condition:
            return self._arena is not None and self._arena.reread(bucket.buffer)

    def release(self) -> None:
        """Let go of memory that the sender has closed since: all of it is the sender's. See `Receiver.release`."""
        with self._condition:
            if not self._closed and self._wanted is None:
                self._listen()

    def _want(self, manifest: Manifest, version: WeightVersion, staged: bool) -> PeerUpdate:
        return PeerUpdate(manifest, version, staged)

    def _use_arena(self, arena: MappedArena) -> None:
        """The next buckets lie in this one."""
        former, self._arena = self._arena, arena
        if former is not None:
            former.close()

    def _on_other(self, record: Any) -> None:
        incoming = self._incoming
        if isinstance(record, records.ArenaClosed):
            if self._arena is not None and self._arena.generation == record.generation:
                self._arena.close()
                self._arena = None
            return
        if not isinstance(record, records.BucketReady):
            raise ManifestError(f"the publisher sent {type(record).__name__}, which has no place here", fault="type")
        if incoming is None or incoming.is_over or incoming.begin.update != record.update:
            return
        if self._arena is None or record.generation != self._arena.generation:
            where = f"arena {record.generation}, which is not known here"
            raise ManifestError(f"bucket {record.index} lies in {where}")
        incoming.ready.append((record, self._arena))

    def _next_bucket(self, wanted: PeerUpdate) -> Bucket | None:
        """Raises ManifestError if the bytes that the sender speaks of aren't the next bucket's."""
        incoming, index = wanted.begun, wanted.num_read
        if incoming is None or not incoming.ready:
            self._release_read(wanted)
            return None
        ready, arena = wanted.given = incoming.ready.popleft()
        size_bytes = wanted.manifest.buckets[index]
        largest, payload = HEADER_BYTES + size_bytes, ready.offset_bytes + HEADER_BYTES
        if ready.index != index:
            raise ManifestError(f"bucket {ready.index} was announced, bucket {index} is the next")
        if not HEADER_BYTES <= ready.num_bytes <= largest:
            what = f"bucket {index} of {ready.num_bytes} bytes was announced, expected {HEADER_BYTES} to {largest}"
            raise ManifestError(what, fault="size")
        if ready.offset_bytes + largest > arena.size_bytes:
            raise ManifestError(f"bucket {index} of {largest} bytes would end behind the arena", fault="offset")
        if index == 0:
            arena.buffers.forget_above(wanted.num_buckets)
        return Bucket(index, arena.buffers.get(index, ready.offset_bytes, payload, size_bytes))

    def _release(self, wanted: PeerUpdate, index: int) -> None:
        """On a GPU what reads the bucket is only queued: it is released when that is over, at the latest with the next
        one, whose check has waited for as much.
        """
        if wanted.staged or wanted.given is None:
            return
        ready, arena = wanted.given
        read = host_device.recorded(arena.device) if arena.device.type == "cuda" else None
        former = None if wanted.unreleased is None else wanted.unreleased[1]
        # Not under the condition, which a sender in this process may need.
        for event in (former, read if index + 1 == wanted.num_buckets else None):
            if event is not None and not event.query():
                event.synchronize()
        with self._condition:
            self._release_read(wanted)
            wanted.unreleased = ready, read
            self._release_read(wanted)

    def _release_read(self, wanted: PeerUpdate) -> None:
        """Tell the sender that a bucket may be overwritten, if what reads it is over."""
        if wanted.unreleased is None:
            return
        ready, read = wanted.unreleased
        if read is None or read.query():
            wanted.unreleased = None
            if self._wanted is wanted:
                self._tell(records.Released(ready.update, ready.generation, ready.index))

    def _longest_wait_seconds(self, wanted: PeerUpdate) -> float:
        """The sender may wait for a bucket that is still being read here."""
        return super()._longest_wait_seconds(wanted) if wanted.unreleased is None else _POLL_SECONDS

    def _leave(self, wanted: PeerUpdate) -> None:
        if self._arena is not None and not wanted.is_done:
            try:
                self._arena.reset()
            except WeightcastError as exc:
                self._give_up(f"it was disconnected: {exc}")
        super()._leave(wanted)

    def _give_up(self, reason: str) -> None:
        """Mark the connection as of no more use. A transport also ends it, by which the sender knows."""
        self._ended = reason

    def _disconnect(self) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena = self._incoming = None
