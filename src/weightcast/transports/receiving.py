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
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

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
from weightcast.links.link import WorkerLink
from weightcast.seams.transport import Bucket, Receiver
from weightcast.transports import records

logger = logging.getLogger(__name__)

PUBLISHER = "trainer"


@dataclasses.dataclass(slots=True, eq=False)
class WantedUpdate:
    """An update that the worker waits for. `is_done`: all was iterated."""

    manifest: Manifest
    version: WeightVersion
    staged: bool
    num_read: int = 0
    is_done: bool = False

    @property
    def num_buckets(self) -> int:
        return len(self.manifest.buckets)


W = TypeVar("W", bound=WantedUpdate)
T = TypeVar("T")


class ReceivingEnd(Receiver, abc.ABC, Generic[W]):
    """Iterates, ends and closes. A transport says how it hears of buckets and how it releases them."""

    def __init__(self, run: str | None, deadline_seconds: float, condition: threading.Condition | None = None) -> None:
        """`run`: the only one to be received, or None for all. The condition guards all state and is notified.

        `deadline_seconds`: how long nothing of an update may come.
        """
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._condition = condition or threading.Condition()
        self._wanted: W | None = None
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
                self._closed = True
                self._disconnect()
                self._wanted = None
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

    def _heard_at(self) -> float:
        """When the sender has shown last that it goes on, where that can be known."""
        return 0.0

    def _check_sender(self, wanted: W) -> None:
        """Raises if the sender has ended the update, or has gone."""
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
            remaining = max(start, self._heard_at()) + self._deadline_seconds - time.monotonic()
            if remaining <= 0:
                raise PeerTimeoutError(self._silence(wanted, self._deadline_seconds), peer=PUBLISHER)
            self._wait(wanted, min(remaining, self._longest_wait_seconds(wanted)))

    def _longest_wait_seconds(self, wanted: W) -> float:
        """After that long something is looked for that wakes nobody; at most as long as poll(2) can wait."""
        return MAX_SECONDS

    def _silence(self, wanted: W, seconds: float) -> str:
        return f"nothing of version {wanted.version.number} came from the publisher for {seconds:g} s"

    def _check_live(self, wanted: W) -> None:
        """Raises if the update is over for any reason."""
        self._require_open()
        if self._wanted is not wanted:
            what = f"version {wanted.version.number} was given up by its worker, in this process"
            raise UpdateAbortedError(f"{what}, before all of it had come: end() was called")
        self._listen()
        self._check_sender(wanted)

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


@dataclasses.dataclass(slots=True, eq=False)
class PeerUpdate(WantedUpdate):
    """`begin`: once the sender has begun it; `is_unlike` what was offered. `aborted`: why the sender has given it up.

    In an arena: `announced` are buckets that were not handed out yet, and arenas before the first bucket in them, each
    with the descriptor that came with it. `given`: the bucket that was handed out last. `unreleased`: the one before
    that, on a GPU, with what was queued when the next was asked for.
    """

    begin: records.BeginUpdate | None = None
    is_unlike: bool = False
    aborted: str | None = None
    announced: collections.deque[tuple[Any, int | None]] = dataclasses.field(default_factory=collections.deque)
    given: records.BucketReady | None = None
    unreleased: tuple[records.BucketReady, host_device.Event | None] | None = None


V = TypeVar("V", bound=PeerUpdate)


class PeerReceiver(ReceivingEnd[V]):
    """Hears its sender over the session's link, in the thread that waits, or in the link's own.

    A transport says how bytes move. Whatever is about another version than the one that is wanted is dropped.
    """

    def __init__(self, run: str, link: WorkerLink | None, deadline_seconds: float, messages: Any) -> None:
        """`link`: the session's, not open yet; it is closed by its owner. `messages`: the union of what may come."""
        if link is None:
            raise ValueError("this transport has peers: its receiver needs the link of a publisher's session")
        super().__init__(run, deadline_seconds, link.condition)
        self._link = link
        link.carry(messages, self._on_record)

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Wait for `version` from now on. Raises PeerDiedError if the sender has gone, InsufficientMemoryError."""
        self._require_open(version)
        self.end()
        with self._condition:
            self._require_open()
            wanted = self._want(manifest, version, staged)
            self._listen()
            self._check_sender(wanted)
            self._wanted = wanted
            self._tell(records.Opened(version.number, self._mapped_generation()))
            self._condition.notify_all()

    # --- what a transport adds; the caller holds the condition ---

    @abc.abstractmethod
    def _want(self, manifest: Manifest, version: WeightVersion, staged: bool) -> V:
        """Prepare for an update. May wait for what is left of the one before."""

    @abc.abstractmethod
    def _on_other(self, record: Any) -> None:
        """A record of the transport's own. Must not wait."""

    def _mapped_generation(self) -> int:
        """That of the sender's arena that is mapped here; 0 for none."""
        return 0

    def _on_begun(self, wanted: V) -> None:
        """The sender has begun what is wanted, or after a loss has begun it again."""

    def _on_aborted(self, wanted: V) -> None:
        """The sender has given up what is wanted."""

    # --- records ---

    def _listen(self) -> None:
        self._link.condition.read()

    def _heard_at(self) -> float:
        return self._link.worked_at

    def _tell(self, record: msgspec.Struct) -> None:
        # A sender that has gone is noticed by the link.
        with contextlib.suppress(OSError):
            self._link.send(record)

    def _on_record(self, record: Any) -> None:
        wanted = self._wanted
        if not isinstance(record, records.BeginUpdate | records.UpdateAborted):
            self._on_other(record)
        elif wanted is not None and record.version == wanted.version.number:
            if isinstance(record, records.UpdateAborted):
                wanted.aborted = record.reason
                self._on_aborted(wanted)
            else:
                wanted.begin = record
                wanted.is_unlike = (record.num_buckets, record.staged) != (wanted.num_buckets, wanted.staged)
                if not wanted.is_unlike:
                    self._on_begun(wanted)
            self._condition.notify_all()

    def _leave(self, wanted: V) -> None:
        self._tell(records.UpdateEnded(wanted.version.number))

    def _check_sender(self, wanted: V) -> None:
        if wanted.aborted is not None:
            raise UpdateAbortedError(wanted.aborted)
        if wanted.is_unlike and (begin := wanted.begin):
            found, expected = (begin.num_buckets, begin.staged), (wanted.num_buckets, wanted.staged)
            raise ManifestError(f"the publisher sends (buckets, staged) = {found}, the offer said {expected}")
        if self._link.over:
            what = f"the publisher at {self._link.address} has gone or dropped this receiver: {self._link.over}"
            raise PeerDiedError(what, peer=PUBLISHER)

    def _disconnect(self) -> None:
        """Leave: the sender knows by the end of the link."""
        self._link.leave()


class ArenaReceiver(PeerReceiver[PeerUpdate]):
    """Implements `Receiver`: reads the sender's arena in place. Memory: none of its own.

    Arenas are mapped by the thread that iterates: that of the link only keeps what it hears.
    """

    _arena: MappedArena | None = None

    def reread(self, bucket: Bucket) -> bool:
        """Drop what this process wrote over a bucket, if the arena's mapping is its own. The views stay valid."""
        with self._condition:
            return self._arena is not None and self._arena.reread(bucket.buffer)

    def release(self) -> None:
        """Let go of the arena, which is the sender's memory; it is announced again. See `Receiver.release`."""
        with self._condition:
            if self._wanted is None:
                self._use_arena(None)

    # --- what a transport adds ---

    @abc.abstractmethod
    def _map(self, record: Any, descriptor: int | None) -> MappedArena:
        """Map the arena of the transport's record, whose descriptor it owns from now on. Raises WeightcastError."""

    # --- the arena ---

    def _mapped_generation(self) -> int:
        return 0 if self._arena is None else self._arena.generation

    def _want(self, manifest: Manifest, version: WeightVersion, staged: bool) -> PeerUpdate:
        return PeerUpdate(manifest, version, staged)

    def _use_arena(self, arena: MappedArena | None) -> None:
        former, self._arena = self._arena, arena
        if former is not None:
            former.close()

    def _on_other(self, record: Any) -> None:
        wanted, is_bucket = self._wanted, isinstance(record, records.BucketReady)
        descriptor = None if is_bucket else self._link.pop_descriptor()
        # What is left of a former update comes before this one has begun: its arena is announced again.
        if (
            wanted is not None
            and wanted.begin is not None
            and (not is_bucket or record.version == wanted.begin.version)
        ):
            wanted.announced.append((record, descriptor))
        elif descriptor is not None:
            os.close(descriptor)

    def _next_bucket(self, wanted: PeerUpdate) -> Bucket | None:
        """Raises ManifestError if the bytes that the sender speaks of aren't the next bucket's."""
        index, ready = wanted.num_read, None
        while wanted.announced and ready is None:
            record, descriptor = wanted.announced.popleft()
            if isinstance(record, records.BucketReady):
                ready = record
            else:
                self._use_arena(self._map(record, descriptor))
        if ready is None:
            self._release_read(wanted)
            return None
        wanted.given, arena = ready, self._arena
        size_bytes = wanted.manifest.buckets[index]
        largest, payload = HEADER_BYTES + size_bytes, ready.offset_bytes + HEADER_BYTES
        if arena is None or ready.generation != arena.generation:
            raise ManifestError(f"bucket {ready.index} lies in arena {ready.generation}, which is not known here")
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
        ready, arena = wanted.given, self._arena
        if wanted.staged or ready is None or arena is None:
            return
        read = host_device.recorded(arena.device) if arena.device.type == "cuda" else None
        former = None if wanted.unreleased is None else wanted.unreleased[1]
        # Not under the condition, which the link's thread needs.
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
                self._tell(records.Released(ready.version, ready.generation, ready.index))

    def _longest_wait_seconds(self, wanted: PeerUpdate) -> float:
        """The sender may wait for a bucket that is still being read here."""
        return super()._longest_wait_seconds(wanted) if wanted.unreleased is None else host_device.POLL_SECONDS

    def _leave(self, wanted: PeerUpdate) -> None:
        _forget(wanted)
        if self._arena is not None and not wanted.is_done:
            try:
                self._arena.reset()
            except WeightcastError as exc:
                logger.warning("the publisher's arena was let go: %s", exc)
                self._use_arena(None)
        super()._leave(wanted)

    def _disconnect(self) -> None:
        super()._disconnect()
        if self._wanted is not None:
            _forget(self._wanted)
        self._use_arena(None)


def _forget(wanted: PeerUpdate) -> None:
    """Close what came with arenas that were not mapped."""
    while wanted.announced:
        _, descriptor = wanted.announced.popleft()
        if descriptor is not None:
            os.close(descriptor)
