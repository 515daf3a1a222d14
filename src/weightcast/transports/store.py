"""`file:///dir`, `s3://bucket/prefix`: versions that one publisher writes and any number of readers follow.

The package `weightcast.store` defines where they lie. Invariants: a bucket's buffer is reused only when the filesystem
or the server has its bytes; an error of any writing thread is raised, and the version is not sealed then; a sealed
version is dropped unless `commit` is called next. Readers copy bytes into memory of their own from a slot that is
pinned meanwhile; the pin ends with the last bucket, or with `end`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, NoReturn, TypeVar

import torch

from weightcast.errors import (
    ManifestError,
    PeerDiedError,
    StaleVersionError,
    Translated,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.format.bucket import (
    HEADER_BYTES,
    BucketBuffer,
    arena_layout_of,
    header_digest,
    queued_digest,
    write_header,
)
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.format.packed_base import PackedBase
from weightcast.host import memory as host_memory
from weightcast.host.closing import awaited_at_exit
from weightcast.host.deadline import GRACE_SECONDS, POLL_SECONDS, run_into
from weightcast.host.memory import SharedMemory
from weightcast.links.link import LinkListener, WorkerLink
from weightcast.seams.transport import Bucket, Portion, Transport
from weightcast.seams.versions import StoredVersion
from weightcast.store.address import MAX_BUFFERS, StoreAddress
from weightcast.store.reading import PinnedVersion, StoreReader
from weightcast.store.records import StoredBase
from weightcast.store.writing import OriginWriter, StoreWriter
from weightcast.transports.kept_memory import KeptMemory, MemoryToSend
from weightcast.transports.receiving import PUBLISHER, ReceivingEnd, WantedUpdate
from weightcast.transports.sending import RunSender, check_length, check_next, unlocked

_HOST_MEMORY = torch.device("cpu")
_READ_INTO = _HOST_MEMORY, "reading this version", 'publish with install="streaming", or free memory'


W = TypeVar("W", StoreWriter, OriginWriter)


class _PinnedMemory(KeptMemory):
    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)


class _BufferedSender(RunSender, Generic[W]):
    """Base of the senders of all origins: a ring of buffers, which one thread or several write to the filesystem.

    Memory: one bucket, and with several threads one more for each, at most `MAX_BUFFERS` or the number of buckets.
    """

    writer_type: type[W]

    def __init__(
        self,
        url: str,
        *,
        run: str,
        listener: LinkListener | None = None,
        deadline_seconds: float = 60.0,
        device: torch.device | str | None = None,
    ) -> None:
        """Make a sender that owns the store. `listener` is ignored: readers need no link. Raises as the writer."""
        address = StoreAddress.parse(url)
        num_threads = address.num_threads
        self._address = address
        super().__init__(run)
        self._max_buffers = 1 if num_threads == 1 else min(num_threads + 1, MAX_BUFFERS)
        self._num_buffers = 1
        # The pool starts a thread only if no other thread is free.
        self._pool = ThreadPoolExecutor(self._max_buffers, "weightcast-store")
        # Zeros, since the bytes between the end of a bucket and the end of its buffer are written, too.
        kind = _PinnedMemory if torch.device(device or "cpu").type == "cuda" else MemoryToSend
        self._ring = kind(_HOST_MEMORY, "writing this version")
        self._plan: Manifest | None = None
        self._digests: list[bytes] = []
        self._writes = collections.deque[Future[None]]()
        self._writer: W = self.writer_type(address, run, deadline_seconds=deadline_seconds)

    def _writing(self) -> Translated:
        """Translate an OSError of the store's files into a WeightcastError."""

        def raise_as_stores(error: OSError) -> NoReturn:
            raise WeightcastError(
                f"can't write to the store {self._writer.where}: {error}; its newest version stays. Check that the "
                "filesystem is mounted, writable and not full, and publish again"
            ) from error

        return Translated(OSError, raise_as_stores)

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Always empty: a store does not know who reads it."""
        return {}

    def connected(self, peers: Sequence[str]) -> list[str]:
        """Return all of them: readers of a store don't connect to the publisher."""
        return list(peers)

    def buffer(self, index: int) -> BucketBuffer:
        """Return memory to pack bucket `index`, the next one, into. Waits until its former content was written."""
        self._require_update(index)
        with self._writing():
            self._await_writes(self._num_buffers - 1)
        return self._ring.buffer(index)

    def send(self, index: int, num_bytes: int) -> None:
        """Write bucket `index`, in the background if there are several threads.

        With the last bucket, wait until the filesystem has all of them, and seal the version if no other origin sends a
        part of it. Raises InsufficientMemoryError, StaleVersionError, or another WeightcastError if the filesystem
        fails.
        """
        plan, buffer = self._require_update(index), self._ring.buffer(index)
        check_length(plan, index, num_bytes)
        self._digests.append(header_digest(buffer.header))
        data = self._stored(index, buffer, num_bytes)
        with self._writing():
            if self._num_buffers == 1:
                self._writer.write(index, data)
            else:
                self._writes.append(self._pool.submit(self._writer.write, index, data))
            if index + 1 == len(plan.buckets):
                self._finish_all()

    def abort(self, reason: str) -> None:
        """Drop the version; the one before stays."""
        if self._writer.is_locked:  # In a forked child the threads are the parent's.
            wait(self._writes)
        self._writes.clear()
        self._plan = None
        if not self._closed:
            self._writer.abort(reason)

    def close(self) -> None:
        """Release the store, so that another publisher can use it. Idempotent."""
        if self._closed:
            return
        self.abort("the publisher was closed")
        self._closed = True
        self._writer.close()
        self._pool.shutdown()
        self._ring.close()

    def _begin(self, plan: Manifest) -> None:
        """Prepare buffers for the buckets of a plan. The writer has begun already."""
        self._plan, self._digests = plan, []
        self._num_buffers = max(1, min(self._max_buffers, len(plan.buckets)))
        self._ring.prepare(arena_layout_of(plan, num_slots=self._num_buffers, staged=False))
        if not plan.buckets:
            with self._writing():
                self._finish_all()

    def _finish_all(self) -> None:
        self._await_writes(0)
        self._writer.finish()
        self._plan = None

    def _stored(self, index: int, buffer: BucketBuffer, num_bytes: int) -> memoryview:
        """Return what is written of a bucket whose header and raw payload have so many bytes."""
        return buffer.flat(num_bytes).numpy().data

    def _await_writes(self, most: int) -> None:
        """Wait until at most `most` writes are under way."""
        while len(self._writes) > most:
            # Not in a variable: the future has the error, whose traceback would keep this frame and the ring alive.
            self._writes.popleft().result()

    def _require_update(self, index: int) -> Manifest:
        self._require_open()
        plan = self._plan
        if plan is None:
            raise UpdateAbortedError("no update is open: call open() first (commit() and abort() end an update)")
        check_next(index, len(self._digests), len(plan.buckets))
        return plan


class StoreSender(_BufferedSender[StoreWriter]):
    """Implements `Sender` of a transport that keeps versions. One thread calls it.

    The constructor locks the store; `StoreWriter` describes its files.
    """

    writer_type = StoreWriter
    _begun_together: WeightVersion | None = None
    _base: PackedBase | None = None
    """The packed buckets of the version that was written last, with `full_every`. Memory: that version."""
    _delta_of: StoredBase | None = None
    _version: WeightVersion | None = None

    def newest_version(self) -> int | None:
        """Return the larger one of the numbers of the store's newest version and of the last version that was dropped.

        The versions may be of any run. Return None if there is none. Raises as `StoreWriter.ensure_lock`.
        """
        self._require_open()
        with self._writing():
            self._writer.ensure_lock()
        number = self._writer.last_number
        return None if number < 0 else number

    def begin_together(self, manifest: Manifest, version: WeightVersion) -> str:
        """Reserve a slot for a version that several origins write; return its location for `JoinedStoreSender.join`.

        Raises as `StoreWriter.begin`.
        """
        where = self._begin_writing(manifest, version, manifest.spans[0])
        self._begun_together = version
        return where

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Reserve a slot unless `begin_together` has done so. `peers` and `staged` are ignored.

        Raises as `StoreWriter.begin`.
        """
        self._require_open(version)
        if self._begun_together != version:
            self._begin_writing(manifest, version, range(len(manifest.buckets)))
        self._begin(manifest)
        return 0

    def seal(self, others: Sequence[bytes]) -> None:
        """Seal a version of several origins, once all have sent. `others`: digests of their buckets, in order."""
        self._require_open()
        if self._begun_together is None or self._plan is not None:
            raise UpdateAbortedError(
                "no version of several origins is complete: call begin_together() and send every bucket first (abort() "
                "drops the version)"
            )
        self._begun_together = None
        with self._writing():
            self._writer.seal([*self._digests, *others])

    def commit(self) -> None:
        """Make the sealed version the newest one. Raises as `StoreWriter.commit`."""
        self._require_open()
        with self._writing():
            self._writer.commit()

    def abort(self, reason: str) -> None:
        self._begun_together = None
        super().abort(reason)

    def _begin_writing(self, manifest: Manifest, version: WeightVersion, span: range) -> str:
        self._require_open(version)
        self.abort("the publisher began another update")
        with self._writing():
            self._version, self._delta_of = version, None
            base = self._base = self._base_of(manifest, is_alone=len(span) == len(manifest.buckets))
            if base is not None:
                self._delta_of = self._writer.base_for(base.number, base.root, base.manifest_digest)
                base.begin()
            return self._writer.begin(manifest, version, span, base=self._delta_of)

    def _base_of(self, manifest: Manifest, *, is_alone: bool) -> PackedBase | None:
        """Return where to keep the packed buckets of a version, if a later one is to be a delta on it."""
        if self._address.full_every == 1 or not is_alone:
            return None
        if self._base is not None and self._base.manifest is manifest:
            return self._base
        self._base = None
        host_memory.require(
            sum(manifest.buckets), "the base of a store's deltas", "free memory, or publish without full_every"
        )
        return PackedBase(manifest, manifest.digest())

    def _stored(self, index: int, buffer: BucketBuffer, num_bytes: int) -> memoryview:
        base, version, raw_bytes = self._base, self._version, num_bytes - HEADER_BYTES
        if base is None or version is None:
            return super()._stored(index, buffer, num_bytes)
        digest, payload = header_digest(buffer.header), buffer.payload[:raw_bytes]
        if self._delta_of is None:
            base.keep(index, payload, digest)
            return super()._stored(index, buffer, num_bytes)
        delta, _ = base.advance(index, payload, digest, by_classes=self._address.by_classes)
        if delta.nbytes + HEADER_BYTES > raw_bytes:
            return super()._stored(index, buffer, num_bytes)
        stored = torch.empty(2 * HEADER_BYTES + delta.nbytes, dtype=torch.uint8)
        write_header(
            stored[:HEADER_BYTES],
            version,
            index,
            queued_digest(delta),
            raw_bytes=raw_bytes,
            encoded_bytes=delta.nbytes,
        )
        stored[HEADER_BYTES : 2 * HEADER_BYTES] = buffer.header
        stored[2 * HEADER_BYTES :] = delta
        return stored.numpy().data

    def release(self) -> None:
        """Free the packed buckets of the last version, so that the next one is full."""
        self._base = None
        super().release()

    def _finish_all(self) -> None:
        super()._finish_all()
        if self._begun_together is None:
            self._writer.seal(self._digests)
            if self._base is not None and self._version is not None:
                self._base.complete(self._version.number)


class JoinedStoreSender(_BufferedSender[OriginWriter]):
    """Implements `Sender` for one origin of a version that another rank's `StoreSender` has begun.

    It writes the origin's own files. Call `join` before `open`.
    """

    writer_type = OriginWriter

    def join(self, manifest: Manifest, origin: int, place: str) -> None:
        """Open the origin's files in the slot `place` of the publishing rank. Raises as `OriginWriter.begin`."""
        self._require_open()
        self.abort("the publisher began another update")
        with self._writing():
            self._writer.begin(manifest, origin, place)

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Prepare for the origin's buckets, which `send` writes to the files that `join` has opened."""
        self._require_open(version)
        if not self._writer.is_locked:
            raise UpdateAbortedError("this sender has not joined the publishing rank's version: call join() first")
        self._begin(manifest)
        return 0


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class StoreUpdate(WantedUpdate):
    """The version that is read.

    `pinned`: None until the version is in the store and pinned. `attempt`: the number of the writer's last attempt when
    the update was opened. `num_ahead`: number of buckets that are read in advance. `arena`: the memory that they are
    read into. `portion`: the buckets whose payload this rank reads; None for all.
    """

    arena: KeptMemory
    portion: Portion | None
    attempt: int
    num_ahead: int
    pinned: PinnedVersion | None = None
    reads: collections.deque[Future[None]] = dataclasses.field(default_factory=collections.deque)


class StoreReceiver(ReceivingEnd[StoreUpdate]):
    """Implements `Receiver` of a transport that keeps versions.

    Memory, kept between updates: staged, the whole version, in every reading process, but only once for the ranks of an
    engine on one host; streaming, one bucket, and with several threads one more for each, at most `MAX_BUFFERS` or the
    number of buckets.
    """

    def __init__(
        self,
        url: str,
        *,
        peer: str,
        run: str = "",
        link: WorkerLink | None = None,
        deadline_seconds: float = 60.0,
        device: torch.device | None = None,
    ) -> None:
        """Make a reader of versions of `run`; with an empty `run` of every run, and the directory need not exist yet.

        `link` and `device` are ignored: versions are read into host memory.

        Raises PeerDiedError if there is no store, StaleVersionError if another run writes it.
        """
        # Twice, since the publisher packs and writes a whole version before any of it can be read.
        super().__init__(run or None, 2 * deadline_seconds)
        address = StoreAddress.parse(url)
        self._reader = StoreReader(address, label=peer, deadline_seconds=deadline_seconds)
        self._where = where = self._reader.storage.path("")
        record = self._reader.writer() if run else None
        if run and record is None:
            what = f"there is no store in {where} on this host: check that the directory is mounted here"
            raise PeerDiedError(what, peer=PUBLISHER)
        if record is not None and record.run != run:
            what = f"run {record.run} writes the store {where}, this receiver is of run {run}"
            raise StaleVersionError(f"{what}: initialise the engine again")
        self._num_ahead = 0 if address.num_threads == 1 else address.num_threads
        self._new_pool = functools.partial(ThreadPoolExecutor, address.num_threads, "weightcast-store")
        self._pool = self._new_pool()
        self._arena = KeptMemory(*_READ_INTO)
        self._common_memory: SharedMemory | None = None
        self._together: KeptMemory | None = None
        self._portion: Portion | None = None
        """Portion of the version that is opened next."""
        self._late_reads: list[Future[None]] = []
        """Reads of an ended version into memory that several ranks read; they may still write to it."""
        self._newest: PinnedVersion | None = None

    def newest(self, known: WeightVersion | None) -> StoredVersion | None:
        """Return the newest version, pinned until `end`, or None if it is `known` or the store is empty.

        Raises IntegrityError.
        """
        with self._condition:
            self._require_open()
            with unlocked(self._condition):
                pinned = self._reader.pin_newest(known)
            if pinned is None:
                return None
            if self._closed:
                pinned.close()
            self._require_open()
            self._let_go()
            self._newest, stored = pinned, pinned.stored
            return StoredVersion(
                stored.version, pinned.manifest, stored.manifest_digest, stored.root, stored.committed_at
            )

    def common_memory(self) -> str:
        with self._condition:
            self._require_open()
            if self._common_memory is None:
                self._common_memory = SharedMemory.make()
            return self._common_memory.location

    def read_together(self, manifest: Manifest, portion: Portion) -> bool:
        """Read the same memory as the engine's other ranks; return False if this version has several origins.

        Each rank then reads such a version by itself, since it joins tensors from several origins before the last
        bucket is there.
        """
        if len(manifest.spans) > 1 or not portion.memory:
            return False
        with self._condition:
            self._require_open()
            if not all(read.done() for read in self._late_reads):
                raise WeightcastError(
                    f"a read of an ended version in the store {self._where} has not finished, and would overwrite "
                    "the next one: check that the filesystem answers, and publish again"
                )
            shared = None if self._together is None else self._together.shared
            if shared is None or shared.location != portion.memory:
                self._together = KeptMemory(*_READ_INTO, shared=SharedMemory.open(portion.memory))
            self._portion = portion
        return True

    def reread(self, bucket: Bucket) -> bool:
        with self._condition:
            return self._wanted is not None and self._wanted.arena.reread(bucket.buffer)

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Prepare to read `version`, which may not be in the store yet. Raises InsufficientMemoryError."""
        with self._condition:
            self._require_open(version)
            super().end()
            num_ahead = self._num_ahead if staged else min(self._num_ahead, MAX_BUFFERS - 1)
            num_ahead = num_ahead if len(manifest.buckets) > 1 else 0
            portion, self._portion = self._portion, None
            arena = self._arena if portion is None or self._together is None else self._together
            arena.prepare(arena_layout_of(manifest, num_slots=num_ahead + 1, staged=staged, adjoining=True))
            record = self._reader.writer()
            attempt = 0 if record is None else record.attempt
            self._wanted = wanted = StoreUpdate(
                manifest,
                version,
                staged,
                len(manifest.buckets),
                poll_seconds=0.001,
                arena=arena,
                portion=portion,
                attempt=attempt,
                num_ahead=num_ahead,
            )
            if self._newest is not None and self._newest.stored.version == version:
                self._newest, wanted.pinned = None, self._newest
            self._let_go()

    def end(self) -> None:
        with self._condition:
            super().end()
            self._let_go()

    def close(self) -> None:
        with self._condition:
            self.end()
            super().close()
        # Don't wait for a read that a network filesystem does not answer.
        self._pool.shutdown(wait=False)

    def _leave(self, wanted: StoreUpdate) -> None:
        """End the update. Reads that are under way keep the arena, and the version's pin until they are over."""
        reads = [read for read in wanted.reads if not read.cancel() and not read.done()]
        if reads and self._num_ahead:
            # The threads are busy with reads of the ended update.
            self._pool.shutdown(wait=False)
            self._pool = self._new_pool()
        if reads and wanted.arena is self._arena:
            self._arena = KeptMemory(*_READ_INTO)
        elif reads:
            # Other ranks read this memory, too: the next version must not be overwritten.
            self._late_reads = [*wait(reads, GRACE_SECONDS).not_done]
        pinned = wanted.pinned
        if pinned is not None and reads:
            awaited_at_exit(functools.partial(_close_after, reads, pinned), "weightcast-store-end")
        elif pinned is not None:
            pinned.close()

    def _disconnect(self) -> None:
        self._reader.close()
        self._arena.free()
        self._together = self._common_memory = None

    def _let_go(self) -> None:
        if self._newest is not None:
            self._newest.close()
            self._newest = None

    # --- buckets ---

    def _silence(self, wanted: StoreUpdate, seconds: float) -> str:
        number = wanted.version.number
        return f"version {number} was not committed to the store {self._where} within {seconds:g} s"

    def _pin(self, wanted: StoreUpdate) -> PinnedVersion | None:
        """Pin the version, or return None if it is not there yet. Raises if it can't come any more."""
        version, record = wanted.version, self._reader.writer()
        # In this order, since a writer commits before it releases the store.
        has_writer, pinned = self._reader.storage.has_writer(record), self._reader.pin(version)
        if pinned is not None:
            return pinned
        commit = self._reader.commit()
        newest = None if commit is None else commit.newest.version
        if newest is not None and newest.run == version.run and newest.number > version.number:
            raise UpdateAbortedError(
                f"the store has version {newest.number} already: version {version.number} was not read in time"
            )
        if record is None or record.run != version.run or has_writer is False:
            what = f"the publisher of run {version.run} has closed the store {self._where}, or its process ended"
            raise PeerDiedError(what, peer=PUBLISHER)
        if record.aborted and record.number == version.number and record.attempt > wanted.attempt:
            raise UpdateAbortedError(record.aborted)
        return None

    def _next_bucket(self, wanted: StoreUpdate) -> Bucket | None:
        if wanted.pinned is None:  # `newest` may have pinned it.
            with unlocked(self._condition):
                found = self._pin(wanted)
            if found is not None and self._wanted is not wanted:
                found.close()
            if self._wanted is not wanted:
                raise self._ended(wanted)
            wanted.pinned = found
        pinned = wanted.pinned
        if pinned is None:
            wanted.poll_seconds = min(2 * wanted.poll_seconds, POLL_SECONDS)
            return None
        number, order = wanted.num_read, wanted.manifest.rounds
        stored, expected = pinned.manifest.buckets, wanted.manifest.buckets
        if number == 0 and stored != expected:
            raise ManifestError(
                f"version {wanted.version.number} in the store {self._where} has another plan ({len(stored)} "
                f"buckets) than the publisher offered ({len(expected)} buckets)"
            )
        index = order[number]
        here: Future[None] | None = None
        if wanted.num_ahead == 0:
            here = Future()
            here.set_running_or_notify_cancel()
            wanted.reads.append(here)
        # Read no further ahead: a streaming bucket's memory is free only when the next bucket is asked for.
        for ahead in order[number + len(wanted.reads) : number + wanted.num_ahead]:
            wanted.reads.append(self._pool.submit(_read, pinned, wanted, ahead))
        following = wanted.reads[0]
        with unlocked(self._condition):
            if here is None:
                wait([following])
            else:
                run_into(here, functools.partial(_read, pinned, wanted, index))
        if self._wanted is not wanted:
            raise self._ended(wanted)
        wanted.reads.popleft().result()
        if number + 1 == wanted.num_buckets:
            pinned.close()
        return Bucket(index, wanted.arena.buffer(index))


def _close_after(reads: list[Future[None]], pinned: PinnedVersion) -> None:
    wait(reads)
    pinned.close()


def _read(pinned: PinnedVersion, wanted: StoreUpdate, index: int) -> None:
    is_others = wanted.portion is not None and index not in wanted.portion.buckets
    pinned.read(index, wanted.arena.target(index), only_header=is_others)


TRANSPORT = Transport(
    sender=StoreSender,
    receiver=StoreReceiver,
    keeps_versions=True,
    joined_sender=JoinedStoreSender,
    origins="any",
    # A bucket that fits in a core's cache is packed, digested and written without reading memory twice.
    default_bucket_size_bytes={"cpu": 2 << 20, "cuda": 64 << 20},
    same_host=False,
)
S3 = dataclasses.replace(TRANSPORT, default_bucket_size_bytes={"cpu": 64 << 20, "cuda": 64 << 20})
