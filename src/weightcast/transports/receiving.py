"""Base classes of the receivers of all transports: they open an update, wait for its buckets, and end it.

Invariants: buckets are yielded in order, and only while the sender is connected; a late record of a former update is
never taken for one of the present update. `end` and `close` may be called from any thread and wake an iteration.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar

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
    """The update that the worker waits for. `is_done` is true once every bucket was iterated.

    `poll_seconds`: time after which the next bucket is looked for without a notification; at most poll(2)'s limit.
    `heard_at`: time of the sender's last sign of progress, or 0.0 if the transport has none.
    """

    manifest: Manifest
    version: WeightVersion
    staged: bool
    num_buckets: int
    num_read: int = 0
    is_done: bool = False
    poll_seconds: float = MAX_SECONDS
    heard_at: float = 0.0


W = TypeVar("W", bound=WantedUpdate)


class ReceivingEnd(Receiver, abc.ABC, Generic[W]):
    """Base of all receivers. A transport adds how it learns of buckets and how it releases them."""

    def __init__(self, run: str | None, deadline_seconds: float, condition: threading.Condition | None = None) -> None:
        """Make a receiver for versions of `run`, or of every run for None.

        An iteration fails if nothing of the update arrives for `deadline_seconds`. The condition guards all state and
        is notified of every change.
        """
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._condition = condition or threading.Condition()
        self._wanted: W | None = None
        self._closed = False

    def __iter__(self) -> Iterator[Bucket]:
        """Yield every bucket in order, once.

        Raises the error that ends the update, or PeerTimeoutError if nothing arrives for the deadline.
        """
        with self._condition:
            wanted = self._wanted
            if wanted is None:
                self._require_open()
                raise UpdateAbortedError("no update is open: call open() first (end() closes an update)")
        while True:
            start = time.monotonic()
            with self._condition:
                while True:
                    if self._wanted is not wanted:
                        raise self._ended(wanted)
                    self._check_sender(wanted)
                    if wanted.num_read == wanted.num_buckets:
                        wanted.is_done = True
                        return
                    bucket = self._next_bucket(wanted)
                    if bucket is not None:
                        break
                    remaining = max(start, wanted.heard_at) + self._deadline_seconds - time.monotonic()
                    if remaining <= 0:
                        raise PeerTimeoutError(self._silence(wanted, self._deadline_seconds), peer=PUBLISHER)
                    self._condition.wait(min(remaining, wanted.poll_seconds))
                wanted.num_read += 1
            index = bucket.index
            yield bucket
            del bucket
            self._release(wanted, index)

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
                self.end()

    # --- methods that a transport implements; the caller holds the condition, except for `_release` ---

    @abc.abstractmethod
    def _next_bucket(self, wanted: W) -> Bucket | None:
        """Return bucket `wanted.num_read`, or None if it has not arrived."""

    def _release(self, wanted: W, index: int) -> None:
        """Release bucket `index`: the caller has asked for the next one."""
        return

    @abc.abstractmethod
    def _leave(self, wanted: W) -> None:
        """Release everything of the update, which has ended: completely read, failed or aborted."""

    @abc.abstractmethod
    def _disconnect(self) -> None:
        """Disconnect from the sender and free all memory."""

    def _check_sender(self, wanted: W) -> None:
        """Read the records that have arrived; raise if the sender has aborted the update, or is gone. Does not wait."""
        return

    # --- for transports ---

    def _silence(self, wanted: W, seconds: float) -> str:
        return f"nothing of version {wanted.version.number} arrived from the publisher for {seconds:g} s"

    def _ended(self, wanted: W) -> UpdateAbortedError:
        """Return the error for an update that this worker has ended. Raises ClosedError if the receiver was closed."""
        self._require_open()
        what = f"this worker ended version {wanted.version.number} before all of it had arrived"
        return UpdateAbortedError(f"{what}: end() was called in this process")

    def _require_open(self, version: WeightVersion | None = None) -> None:
        """Raise ClosedError if this is closed, ValueError for a version of another run."""
        if self._closed:
            raise ClosedError("this worker has closed its receiver, in this process: make another receiver")
        if version is not None and self._run is not None and version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this receiver of run {self._run}")


# --- receivers that are connected to their sender by a link ---


class MappedArena:
    """A receiver's end of a sender's arena. The methods here suit host memory that no process overwrites."""

    generation: int
    size_bytes: int
    buffers: Buffers
    device = torch.device("cpu")

    def reset(self) -> None:
        """Drop this process's reads and writes of an aborted update, so that none can affect the next update."""

    def reread(self, buffer: BucketBuffer) -> bool:
        """Make `buffer` show the sender's bytes again; return False if it can't. See `Receiver.reread`."""
        return False

    def close(self) -> None:
        """Release the arena; its memory stays mapped as long as a tensor refers to it."""


@dataclasses.dataclass(slots=True, eq=False)
class PeerUpdate(WantedUpdate):
    """The update that the worker waits for, with what the sender has sent about it.

    `begin`: the sender's record that begins the update, None before. `unlike`: how that record differs from the offer.
    `aborted`: the sender's reason for aborting the update.

    For arenas: `announced` are records of buckets that were not yielded yet, each preceded by the record of a new arena
    if it lies in one, with the file descriptor that arrived with the record. `given` is the bucket that was yielded
    last. `unreleased`, on a GPU, is the bucket before that, with an event of the reads that were queued by then.
    """

    begin: records.BeginUpdate | None = None
    unlike: str = ""
    aborted: str | None = None
    announced: collections.deque[tuple[Any, int | None]] = dataclasses.field(default_factory=collections.deque)
    given: records.BucketReady | None = None
    unreleased: tuple[records.BucketReady, host_device.Event | None] | None = None


V = TypeVar("V", bound=PeerUpdate)


class PeerReceiver(ReceivingEnd[V]):
    """Base of receivers that get records from their sender over the session's link. A transport adds how bytes move.

    Records arrive in the thread that waits, or in the link's own. Records about another version are dropped.
    """

    mapped_generation = 0
    """Generation of the sender's arena that is mapped here; 0 for none."""

    def __init__(self, run: str, link: WorkerLink | None, deadline_seconds: float, messages: Any) -> None:
        """Make a receiver on the session's `link`, which is not open yet and which its owner closes.

        `messages` is the union of the records that the sender may send.
        """
        if link is None:
            raise ValueError("link is None: the receiver of this transport needs the link of a publisher's session")
        super().__init__(run, deadline_seconds, link.condition)
        self._link = link
        link.carry(messages, self._on_record)

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Prepare for `version` and tell the sender so. Raises PeerDiedError if it is gone, InsufficientMemoryError."""
        with self._condition:
            self._require_open(version)
            self.end()
            wanted = self._want(manifest, version, staged)
            self._check_sender(wanted)
            self._wanted = wanted
            self._link.send(records.Opened(version.number, self.mapped_generation))

    # --- methods that a transport implements; the caller holds the condition ---

    @abc.abstractmethod
    def _want(self, manifest: Manifest, version: WeightVersion, staged: bool) -> V:
        """Prepare memory for an update. May wait for operations of the former one."""

    @abc.abstractmethod
    def _on_other(self, record: Any) -> None:
        """Handle a record that only this transport has. Must not wait."""

    def _on_begun(self, wanted: V) -> None:
        """Handle the sender's BeginUpdate, which comes again after a loss."""

    def _on_aborted(self, wanted: V) -> None:
        """Handle the sender's UpdateAborted."""

    # --- records ---

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
                found, expected = (record.num_buckets, record.staged), (wanted.num_buckets, wanted.staged)
                if found == expected:
                    self._on_begun(wanted)
                else:
                    wanted.unlike = f"the publisher begins (buckets, staged) = {found}, but has offered {expected}"

    def _leave(self, wanted: V) -> None:
        self._link.send(records.UpdateEnded(wanted.version.number))

    def _check_sender(self, wanted: V) -> None:
        self._link.condition.read()
        wanted.heard_at = self._link.worked_at
        if wanted.aborted is not None:
            raise UpdateAbortedError(wanted.aborted)
        if wanted.unlike:
            raise ManifestError(wanted.unlike)
        if self._link.over:
            what = f"the publisher at {self._link.address} is gone or has dropped this receiver: {self._link.over}"
            raise PeerDiedError(what, peer=PUBLISHER)

    def _disconnect(self) -> None:
        """Shut the link down, which the sender sees as the end of this receiver."""
        self._link.leave()


class ArenaReceiver(PeerReceiver[PeerUpdate]):
    """Implements `Receiver`: reads the sender's arena in place. Memory: none of its own.

    The thread that iterates maps arenas; the link's thread only stores the records. A transport adds `announcements`,
    the union of the records of its arenas, and how one is mapped.
    """

    announcements: ClassVar[Any]
    _arena: MappedArena | None = None

    def __init__(
        self,
        url: str,
        *,
        peer: str,
        run: str,
        link: WorkerLink | None,
        deadline_seconds: float,
        device: torch.device | None = None,
    ) -> None:
        """Make a receiver. `device`: the GPU for which an arena on a GPU is mapped."""
        super().__init__(run, link, deadline_seconds, self.announcements | records.FromArena)
        self._device = device

    def reread(self, bucket: Bucket) -> bool:
        """Drop this process's writes into a bucket, if the arena is mapped privately. The views stay valid."""
        with self._condition:
            return self._arena is not None and self._arena.reread(bucket.buffer)

    def release(self) -> None:
        """Unmap the arena, which is the sender's memory; the sender will announce it again. See `Receiver.release`."""
        with self._condition:
            if self._wanted is None:
                self._use_arena(None)

    # --- the method that a transport implements ---

    @abc.abstractmethod
    def _map(self, record: Any, descriptor: int | None) -> MappedArena:
        """Map the arena that `record` announces, and take ownership of the descriptor. Raises WeightcastError."""

    # --- the arena ---

    def _want(self, manifest: Manifest, version: WeightVersion, staged: bool) -> PeerUpdate:
        return PeerUpdate(manifest, version, staged, len(manifest.buckets))

    def _use_arena(self, arena: MappedArena | None) -> None:
        former, self._arena = self._arena, arena
        self.mapped_generation = 0 if arena is None else arena.generation
        if former is not None:
            former.close()

    def _on_other(self, record: Any) -> None:
        wanted, is_bucket = self._wanted, isinstance(record, records.BucketReady)
        descriptor = None if is_bucket else self._link.pop_descriptor()
        # Records that arrive before this update has begun are of a former one. Its arena will be announced again.
        if (
            wanted is not None
            and wanted.begin is not None
            and (not is_bucket or record.version == wanted.begin.version)
        ):
            wanted.announced.append((record, descriptor))
        elif descriptor is not None:
            os.close(descriptor)

    def _next_bucket(self, wanted: PeerUpdate) -> Bucket | None:
        """Return the next bucket, or None. Raises ManifestError if the sender announces another bucket or place."""
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
            what = f"the publisher announced bucket {ready.index} in arena {ready.generation}"
            raise ManifestError(f"{what}, but this receiver has arena {self.mapped_generation} (0: none)")
        if ready.index != index:
            raise ManifestError(f"the publisher announced bucket {ready.index}, expected bucket {index}")
        if not HEADER_BYTES <= ready.num_bytes <= largest:
            what = f"the publisher announced {ready.num_bytes} bytes of bucket {index}"
            raise ManifestError(f"{what}, expected {HEADER_BYTES} to {largest}", fault="size")
        if ready.offset_bytes + largest > arena.size_bytes:
            what = f"bucket {index} needs {largest} bytes from byte {ready.offset_bytes} of the publisher's arena on"
            raise ManifestError(f"{what}, which ends at byte {arena.size_bytes}", fault="offset")
        if index == 0:
            arena.buffers.forget_above(wanted.num_buckets)
        return Bucket(index, arena.buffers.get(index, ready.offset_bytes, payload, size_bytes))

    def _release(self, wanted: PeerUpdate, index: int) -> None:
        """Release a bucket once nothing reads it.

        On a GPU its reads may still be queued when the next bucket is asked for. It is then released when they are
        over, at the latest with the next bucket, whose check waits for them anyway.
        """
        ready, arena = wanted.given, self._arena
        if wanted.staged or ready is None or arena is None:
            return
        read = host_device.recorded(arena.device) if arena.device.type == "cuda" else None
        former = None if wanted.unreleased is None else wanted.unreleased[1]
        # Wait without the condition, which the link's thread needs.
        for event in (former, read if index + 1 == wanted.num_buckets else None):
            if event is not None and not event.query():
                event.synchronize()
        with self._condition:
            self._release_read(wanted)
            wanted.unreleased = ready, read
            # The sender may wait for a bucket whose reads are queued on this GPU.
            wanted.poll_seconds = host_device.POLL_SECONDS
            self._release_read(wanted)

    def _release_read(self, wanted: PeerUpdate) -> None:
        """Tell the sender that a bucket may be overwritten, if its reads are over."""
        if wanted.unreleased is None:
            return
        ready, read = wanted.unreleased
        if read is None or read.query():
            wanted.unreleased, wanted.poll_seconds = None, MAX_SECONDS
            if self._wanted is wanted:
                self._link.send(records.Released(ready.version, ready.generation, ready.index))

    def _leave(self, wanted: PeerUpdate) -> None:
        # Close the descriptors of arenas that were announced but not mapped.
        while wanted.announced:
            _, descriptor = wanted.announced.popleft()
            if descriptor is not None:
                os.close(descriptor)
        if self._arena is not None and not wanted.is_done:
            try:
                self._arena.reset()
            except WeightcastError as exc:
                logger.warning("the publisher's arena was unmapped, since it could not be reset: %s", exc)
                self._use_arena(None)
        super()._leave(wanted)

    def _disconnect(self) -> None:
        super()._disconnect()
        self._use_arena(None)
