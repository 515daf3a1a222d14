"""Copies of versions from one store into another, which keep their run and number.

A copy is written by the target's own writer, bucket by bucket, in any order. Invariants: a bucket is counted only after
its digest was checked, of a delta after it was added to the target's own base; the version is sealed only if the root
digest of all buckets is that of the source's seal; buckets that an interrupted copy has written are checked and kept.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import msgspec
import torch

from weightcast.errors import (
    IncompleteUpdateError,
    IntegrityError,
    ManifestError,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.format.bucket import (
    HEADER_BYTES,
    BucketBuffer,
    check_bucket,
    header_digest,
    root_digest,
)
from weightcast.format.manifest import Manifest, encode
from weightcast.host.closing import ClosedOnExit, on_failure
from weightcast.store.address import StoreAddress
from weightcast.store.reading import PinnedVersion, StoreReader, not_found, stored_bytes
from weightcast.store.records import Stored
from weightcast.store.remote import CopyAnswer, CopyRequest, RemoteCalls, RemoteStorage
from weightcast.store.storage import is_base
from weightcast.store.writing import StoreWriter

_NUM_LOOKS = 8
"""Headers of buckets that are read at once, to find out what an interrupted copy has left."""


class Copied(msgspec.Struct, frozen=True):
    """A version that was copied. `num_bytes`: of its tensors. `sent_bytes`: what was transferred of its buckets."""

    version: int
    run: str
    num_bytes: int
    sent_bytes: int
    seconds: float


class _Arrived:
    """One bucket in memory; see `BucketReader`."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read(self, index: int, parts: Sequence[memoryview], start: int) -> None:
        data = self._data[start:]
        for part in parts:
            if len(data) < len(part):
                raise IntegrityError(f"bucket {index} has {len(self._data)} bytes, which is less than its header says")
            part[:], data = data[: len(part)], data[len(part) :]

    def close(self) -> None: ...


class LocalCopy(ClosedOnExit):
    """A version that is written into the target. The store is locked until `close`. `has` and `write` are thread-safe.

    `accepts_deltas`: `write` takes what the source has stored of a delta, else raw buckets only. Memory: one bucket for
    each calling thread.
    """

    def __init__(self, address: StoreAddress, stored: Stored, manifest: Manifest, *, deadline_seconds: float) -> None:
        """Begin the version `stored` of another store. Raises what `StoreWriter` and its `begin` raise."""
        self._stored = stored
        self._manifest = manifest
        self._origins = manifest.bucket_origins
        self._digests: list[bytes | None] = [None] * len(manifest.buckets)
        self._lock = threading.Lock()
        self._num_writing = 0
        self._is_sealed = self._is_committed = False
        self.left: set[int] = set()
        self._reader = StoreReader(address, label="copy", deadline_seconds=deadline_seconds)
        self._base: PinnedVersion | None = None
        if stored.base is not None:
            self._base = self._reader.pin_complete(lambda found: is_base(found, stored))
        self.accepts_deltas = self._base is not None
        self._left: PinnedVersion | None = None
        with on_failure(self._close_readers):
            self._writer = StoreWriter(address, stored.run, deadline_seconds=deadline_seconds)
        with on_failure(self.close):
            base, wanted = None, stored.base
            if self.accepts_deltas and wanted is not None:
                base = self._writer.base_for(wanted.number, wanted.root, stored.manifest_digest)
            self._is_delta = base is not None
            self._writer.begin(manifest, stored.version, range(len(manifest.buckets)), base=base)
            left = self._writer.left(stored, manifest)
            if left is not None:
                # Without the base, deltas that are left count as damaged: a full version must not have any.
                base_of_left = self._base if self._is_delta else None
                self._left = PinnedVersion(stored, manifest, left, base=base_of_left)
                with ThreadPoolExecutor(_NUM_LOOKS, "weightcast-copy") as pool:
                    found = pool.map(lambda index: self._checked(index, only_header=True), range(len(self._digests)))
                    self.left = {index for index, buffer in enumerate(found) if buffer is not None}

    def _checked(self, index: int, *, only_header: bool = False) -> BucketBuffer | None:
        """Return the raw bucket that was left in the slot; None if it is damaged, or of another version."""
        with contextlib.suppress(IntegrityError):
            return None if self._left is None else self._read(self._left, index, only_header=only_header)
        return None

    def _read(self, version: PinnedVersion, index: int, *, only_header: bool = False) -> BucketBuffer:
        num_bytes = self.raw_bytes(index)
        buffer = BucketBuffer.of(torch.empty(HEADER_BYTES + num_bytes, dtype=torch.uint8))
        version.read(index, buffer, only_header=only_header)
        origin = self._origins[index]
        check_bucket(buffer, num_bytes, self._stored.version, index, origin, only_header=only_header)
        return buffer

    def raw_bytes(self, index: int) -> int:
        """Return the size of a bucket's raw payload. Raises ManifestError if there is no such bucket."""
        if not 0 <= index < len(self._digests):
            raise ManifestError(f"there is no bucket {index}: the version has {len(self._digests)}", fault="bounds")
        return self._manifest.buckets[index]

    def has(self, index: int) -> bool:
        """Return whether bucket `index` is there, intact, from an interrupted copy."""
        self.raw_bytes(index)
        if self._digests[index] is None and index in self.left:
            self._writer.keep(index)
            buffer = self._checked(index)
            if buffer is not None:
                self._digests[index] = header_digest(buffer.header)
        return self._digests[index] is not None

    def write(self, index: int, data: memoryview) -> None:
        """Write bucket `index`: its header and what follows. Raises IntegrityError, InsufficientMemoryError."""
        arrived = PinnedVersion(self._stored, self._manifest, _Arrived(data), base=self._base)
        buffer, num_bytes = self._read(arrived, index), self.raw_bytes(index)
        if self._is_delta:
            first = torch.frombuffer(bytearray(data[:HEADER_BYTES]), dtype=torch.uint8)
            data = data[: stored_bytes(first, num_bytes)]
        else:
            data = buffer.flat(HEADER_BYTES + num_bytes).numpy().data
        with self._lock:
            if self._is_sealed:
                raise UpdateAbortedError(f"version {self._stored.number} was sealed: it gets no more buckets")
            self._num_writing += 1
        try:
            self._writer.write(index, data)
            self._digests[index] = header_digest(buffer.header)
        finally:
            with self._lock:
                self._num_writing -= 1

    def commit(self) -> None:
        """Seal the version, and make it the newest. Idempotent. Raises IncompleteUpdateError, IntegrityError."""
        # For all of it: the request of a push may come again while the first one still seals the version.
        with self._lock:
            if self._is_committed:
                return
            if self._is_sealed:
                raise UpdateAbortedError(f"the commit of version {self._stored.number} has failed: copy it again")
            digests = [digest for digest in self._digests if digest is not None]
            if len(digests) < len(self._digests) or self._num_writing:
                raise IncompleteUpdateError(
                    f"{len(digests)} of {len(self._digests)} buckets came, {self._num_writing} are being written: "
                    "send the others first"
                )
            self._is_sealed = True
            found = root_digest(self._stored.manifest_digest, digests)
            if found != self._stored.root:
                # Each one is intact, so that the next copy would keep them.
                for index in range(len(digests)):
                    self._writer.write(index, memoryview(bytes(HEADER_BYTES)))
                raise IntegrityError(
                    f"the buckets that came of version {self._stored.number} have the root digest {found}, the "
                    f"source's seal says {self._stored.root}: they are not of one version, and were dropped; copy it "
                    "again, and if that fails, too, run `weightcast verify` on the source"
                )
            self._writer.finish()
            self._writer.seal(digests)
            self._writer.commit()
            self._is_committed = True

    def _close_readers(self) -> None:
        for part in (self._left, self._base, self._reader):
            if part is not None:
                part.close()

    def close(self) -> None:
        self._close_readers()
        self._writer.close()


class RemoteCopy(ClosedOnExit):
    """The same calls as `LocalCopy`'s, for a store of a server, which writes the version, and checks it."""

    def __init__(self, calls: RemoteCalls, stored: Stored, manifest: Manifest) -> None:
        """Begin the version `stored` of another store. Raises the server's error, PeerError."""
        self._calls = calls
        self._path = f"/store/copies/{uuid.uuid4().hex}"
        request = CopyRequest(stored, msgspec.Raw(manifest.encode()))
        answer = self._calls.ask("PUT", self._path, CopyAnswer, encode(request))
        self.accepts_deltas, self._left = answer.accepts_deltas, set(answer.left)

    def has(self, index: int) -> bool:
        return index in self._left and self._calls.call("GET", f"{self._path}/buckets/{index}") is not None

    def write(self, index: int, data: memoryview) -> None:
        self._calls.call("PUT", f"{self._path}/buckets/{index}", data)

    def commit(self) -> None:
        self._calls.call("POST", self._path)

    def close(self) -> None:
        """End the copy, so that the server releases its store now, and not after a while."""
        if self._path:
            path, self._path = self._path, ""
            with contextlib.suppress(WeightcastError):
                self._calls.call("DELETE", path, once=True)


VersionCopy: TypeAlias = LocalCopy | RemoteCopy


def copy_newest(
    source: StoreAddress,
    target: StoreAddress,
    *,
    deadline_seconds: float = 60.0,
    on_progress: Callable[[int, int], None] = lambda done_bytes, total_bytes: None,
) -> Copied | None:
    """Copy the newest version of a store into another one; return None if that has it as its newest version.

    `deadline_seconds`: of each wait for a server, or for readers of the target. `on_progress` gets the raw bytes of
    the buckets that are there, and of all. Memory: two buckets for each request at once, `num_threads` of the
    addresses. Buckets that came before a failure are kept for the next copy of that version.

    Raises VersionNotFoundError if there is no version yet, IntegrityError if a bucket is damaged or the version is not
    whole, StaleVersionError if the target has a newer version of the run, EngineBusyError if a publisher has the target
    open, InsufficientMemoryError, PeerError.
    """
    start, reader = time.perf_counter(), StoreReader(source, label="copy", deadline_seconds=deadline_seconds)
    target_reader = StoreReader(target, label="copy", deadline_seconds=deadline_seconds)
    try:
        there = target_reader.commit()
        pinned = reader.pin_newest(None if there is None else there.newest.version)
        if pinned is None:
            if reader.commit() is None:
                raise not_found(reader.storage)
            return None
        with pinned:
            stored, manifest = pinned.stored, pinned.manifest
            begun: VersionCopy
            if isinstance(target_reader.storage, RemoteStorage):
                begun = RemoteCopy(target_reader.storage.calls, stored, manifest)
            else:
                begun = LocalCopy(target, stored, manifest, deadline_seconds=deadline_seconds)
            with begun as copy:
                num_threads = max(source.num_threads, target.num_threads)
                sent_bytes = _send(pinned, copy, num_threads, on_progress)
                copy.commit()
            seconds = time.perf_counter() - start
            return Copied(stored.number, stored.run, manifest.num_bytes, sent_bytes, seconds)
    except IntegrityError as exc:
        where = reader.storage.path(""), target_reader.storage.path("")
        raise IntegrityError(f"copying from {where[0]} to {where[1]} failed: {exc}") from exc
    finally:
        reader.close()
        target_reader.close()


def _send(pinned: PinnedVersion, copy: VersionCopy, num_threads: int, on_progress: Callable[[int, int], None]) -> int:
    """Send every bucket that the target lacks; return the number of bytes that were sent."""
    sizes = pinned.manifest.buckets

    def send(index: int) -> int:
        if copy.has(index):
            return 0
        data = pinned.read_stored(index) if copy.accepts_deltas else pinned.read_raw(index)
        copy.write(index, data)
        return len(data)

    with ThreadPoolExecutor(num_threads, "weightcast-copy") as pool:
        sent = [pool.submit(send, index) for index in range(len(sizes))]
        try:
            num_done = num_sent = 0
            for size, each in zip(sizes, sent, strict=True):
                num_sent += each.result()
                num_done += size
                on_progress(num_done, sum(sizes))
            return num_sent
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
