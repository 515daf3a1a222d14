"""A worker's end of a store: waits until its version is whole, pins the slot, reads bucket by bucket.

Invariants: bytes are read into memory of this process, from a slot that is pinned meanwhile; the pin ends with the last
bucket, or with `end`. `end` and `close` may be called from any thread and wake an iteration that waits.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from weightcast.errors import (
    ClosedError,
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    StaleVersionError,
    UpdateAbortedError,
)
from weightcast.format.bucket import ArenaLayout, Buffers, place
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import memory as host_memory
from weightcast.seams.transport import Bucket, Receiver, StoredVersion
from weightcast.store.address import MAX_BUFFERS, StoreAddress
from weightcast.store.reading import PinnedVersion, StoreReader, WriterState

_PUBLISHER = "trainer"
_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.05


@dataclasses.dataclass(slots=True, eq=False)
class _StoreUpdate:
    """An update that the worker waits for. `attempt`: the writer's last one when it was opened.

    `num_ahead`: how many buckets are read while one is taken.
    """

    manifest: Manifest
    version: WeightVersion
    arena_layout: ArenaLayout
    attempt: int
    num_ahead: int
    num_taken: int = 0
    pinned: PinnedVersion | None = None
    reads: collections.deque[Future[None]] = dataclasses.field(default_factory=collections.deque)


class StoreReceiver(Receiver):
    """A `Receiver` that is a `VersionedReceiver`.

    Memory, kept between updates: staged, the whole version, in every process that reads; streaming, one bucket, with
    several threads one more for each, but no more than there are, and at most `MAX_BUFFERS`.
    """

    def __init__(self, url: str, *, peer: str, run: str | None = None, deadline_seconds: float = 60.0) -> None:
        """`run`: the only one to be read, or None for all, also of a directory that is not there yet.

        Raises PeerDiedError if there is no store, StaleVersionError if another run writes it.
        """
        self._address = address = StoreAddress.parse(url)
        self._reader = StoreReader(address.directory, label=peer)
        if run is not None:
            self._require_writer(run)
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._num_ahead = 0 if address.num_threads == 1 else address.num_threads
        self._pool = ThreadPoolExecutor(address.num_threads, "weightcast-store") if self._num_ahead else None
        self._arena = _Arena()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._wanted: _StoreUpdate | None = None
        self._newest: PinnedVersion | None = None
        self._closed = False

    def newest(self, known: WeightVersion | None) -> StoredVersion | None:
        """The newest version, unless it is `known` or there is none, pinned until `end`. Raises IntegrityError."""
        with self._lock:
            self._require_open()
            commit = self._reader.commit()
            if commit is None or commit.newest.version == known:
                return None
            pinned = self._reader.pin()
            if pinned is None or pinned.stored.version == known:
                if pinned is not None:
                    pinned.close()
                return None
            self._let_go()
            self._newest, stored = pinned, pinned.stored
            return StoredVersion(
                stored.version, pinned.manifest, stored.manifest_digest, stored.root, stored.committed_at
            )

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Read `version` from now on, or wait for it. Raises InsufficientMemoryError if its memory does not fit."""
        if self._run is not None and version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this receiver of run {self._run}")
        with self._lock:
            self._require_open()
            self._end_wanted()
            self._wake.clear()
            # Reads ahead of what was checked would overwrite its trailer.
            num_ahead = self._num_ahead if staged else min(self._num_ahead, MAX_BUFFERS - 1)
            num_ahead = num_ahead if len(manifest.buckets) > 1 else 0
            arena_layout = place(manifest, num_slots=num_ahead + 1, staged=staged, adjoining=num_ahead == 0)
            self._arena.prepare(arena_layout)
            record = self._reader.writer().record
            wanted = _StoreUpdate(manifest, version, arena_layout, 0 if record is None else record.attempt, num_ahead)
            newest = self._newest
            if newest is not None and newest.stored.version == version:
                self._newest, wanted.pinned = None, newest
            self._let_go()
            self._wanted = wanted

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket in order, once."""
        with self._lock:
            self._require_open()
            wanted = self._wanted
        if wanted is None:
            raise UpdateAbortedError("no update is open: it was ended, or open() was not called")
        self._await(wanted)
        while wanted.num_taken < len(wanted.manifest.buckets):
            yield self._next(wanted)
            with self._lock:
                self._check_live(wanted)

    def end(self) -> None:
        """Release every bucket and wake an iteration, which raises UpdateAbortedError. Idempotent, from any thread."""
        # First, so that a wait is over when the lock is wanted.
        self._wake.set()
        with self._lock:
            self._end_wanted()
            self._let_go()

    def renew(self) -> None:
        """Leave the memory of earlier updates to whoever has tensors in it; the next `open` takes other memory."""
        with self._lock:
            self._arena = _Arena()

    def close(self) -> None:
        """Free everything; wakes an iteration, which raises ClosedError. Idempotent, from any thread."""
        self._wake.set()
        with self._lock:
            self._closed = True
            self._end_wanted()
            self._let_go()
            self._arena = _Arena()
        if self._pool is not None:
            self._pool.shutdown()

    # --- waiting ---

    def _await(self, wanted: _StoreUpdate) -> None:
        """Wait until the version is in the store, and pin it."""
        start, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
        while True:
            with self._lock:
                self._check_live(wanted)
                if wanted.pinned is None:
                    wanted.pinned = self._pin(wanted)
                if wanted.pinned is not None:
                    self._check_fits(wanted, wanted.pinned)
                    return
            # Before an update begins the writer may itself wait for readers, up to its deadline.
            if time.monotonic() >= start + 2 * self._deadline_seconds:
                raise PeerTimeoutError(
                    f"version {wanted.version.number} did not come into the store {self._address.directory} within "
                    f"{2 * self._deadline_seconds:g} s",
                    peer=_PUBLISHER,
                )
            self._wake.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def _pin(self, wanted: _StoreUpdate) -> PinnedVersion | None:
        """The version, if it is there. Raises if it will not come."""
        # In this order: a writer commits before it lets go.
        writer, pinned = self._reader.writer(), self._reader.pin(wanted.version)
        if pinned is not None:
            return pinned
        commit = self._reader.commit()
        newest = None if commit is None else commit.newest.version
        if newest is not None and newest.run == wanted.version.run and newest.number > wanted.version.number:
            raise UpdateAbortedError(
                f"the store went on to version {newest.number} before version {wanted.version.number} was read"
            )
        self._check_writer(wanted, writer)
        return None

    def _check_writer(self, wanted: _StoreUpdate, writer: WriterState) -> None:
        record, version = writer.record, wanted.version
        if record is None or record.run != version.run or not writer.is_alive:
            what = f"the publisher of run {version.run} has let go of the store {self._address.directory}"
            raise PeerDiedError(what, peer=_PUBLISHER)
        if record.aborted and record.number == version.number and record.attempt > wanted.attempt:
            raise UpdateAbortedError(record.aborted)

    def _check_fits(self, wanted: _StoreUpdate, pinned: PinnedVersion) -> None:
        if pinned.manifest is not wanted.manifest and pinned.manifest.buckets != wanted.manifest.buckets:
            found, expected = len(pinned.manifest.buckets), len(wanted.manifest.buckets)
            raise ManifestError(f"the store has another plan ({found} buckets) than was offered ({expected} buckets)")

    def _check_live(self, wanted: _StoreUpdate) -> None:
        self._require_open()
        if self._wanted is not wanted:
            raise UpdateAbortedError(f"version {wanted.version.number} was ended on this side")

    # --- reading; the caller holds the lock ---

    def _next(self, wanted: _StoreUpdate) -> Bucket:
        with self._lock:
            self._check_live(wanted)
            assert wanted.pinned is not None
            index, num_buckets = wanted.num_taken, len(wanted.manifest.buckets)
            if self._pool is None or wanted.num_ahead == 0:
                wanted.pinned.read(index, self._arena.buffer(wanted.arena_layout, index))
            else:
                # A streaming bucket's memory is free when the next one is asked for: look no further than that.
                for ahead in range(index + len(wanted.reads), min(index + wanted.num_ahead, num_buckets)):
                    buffer = self._arena.buffer(wanted.arena_layout, ahead)
                    wanted.reads.append(self._pool.submit(wanted.pinned.read, ahead, buffer))
                wanted.reads.popleft().result()
            wanted.num_taken += 1
            if wanted.num_taken == num_buckets:
                wanted.pinned.close()
            return Bucket(index, self._arena.buffer(wanted.arena_layout, index))

    def _end_wanted(self) -> None:
        """Nothing reads into the arena any more when this returns."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            for read in wanted.reads:
                if not read.cancel():
                    with contextlib.suppress(Exception):
                        read.result()
            if wanted.pinned is not None:
                wanted.pinned.close()

    def _let_go(self) -> None:
        if self._newest is not None:
            self._newest.close()
            self._newest = None

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this receiver was closed")

    def _require_writer(self, run: str) -> None:
        directory = self._address.directory
        record = self._reader.writer().record
        if record is None:
            raise PeerDiedError(f"there is no store in {directory} on this host: is it mounted here?", peer=_PUBLISHER)
        if record.run != run:
            raise StaleVersionError(f"the receiver is of run {run}, the store {directory} of {record.run}: init again")


class _Arena:
    """Anonymous memory of this process, kept and never shrunk."""

    def __init__(self) -> None:
        self._size_bytes = 0
        self._buffers = Buffers(torch.empty(0, dtype=torch.uint8))

    def prepare(self, arena_layout: ArenaLayout) -> None:
        """Make room. Raises InsufficientMemoryError."""
        needed = arena_layout.size_bytes
        if needed > self._size_bytes:
            remedy = 'publish with install="streaming", or free memory'
            host_memory.require(needed - self._size_bytes, "reading this version", remedy)
            self._buffers, self._size_bytes = Buffers(torch.empty(0, dtype=torch.uint8)), 0
            mapping = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with contextlib.suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
            self._buffers, self._size_bytes = Buffers(torch.frombuffer(mapping, dtype=torch.uint8)), needed
        self._buffers.forget_above(len(arena_layout.slots))

    def buffer(self, arena_layout: ArenaLayout, index: int) -> torch.Tensor:
        return self._buffers.get(index, arena_layout.offsets[index], arena_layout.sizes_bytes[index])
