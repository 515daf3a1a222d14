"""The reading side of a store: finds versions, pins them against being overwritten, reads them.

Invariants: bytes are read only from a pinned slot with the seal of the requested version; a file's content is used only
after its digest was checked. A poll without a new version reads one small file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from weightcast.errors import IntegrityError, UnsupportedError, VersionNotFoundError, import_of_extra
from weightcast.format.bucket import (
    HEADER_BYTES,
    BucketBuffer,
    check_bucket,
    delta_length,
    root_digest,
    slot_size_bytes,
)
from weightcast.format.manifest import MAX_MESSAGE_BYTES, Manifest, WeightVersion
from weightcast.format.packed_base import add_delta, word_sizes
from weightcast.host.closing import Closeable, ClosedOnExit, on_failure
from weightcast.host.deadline import GRACE_SECONDS, POLL_SECONDS, Deadline
from weightcast.store import files
from weightcast.store.address import DirectoryAddress, ObjectStoreAddress, RemoteAddress, StoreAddress
from weightcast.store.directory import DirectoryStorage
from weightcast.store.records import Commit, ReaderRecord, Stored, StoreInfo, WriterRecord, encodable
from weightcast.store.remote import RemoteStorage
from weightcast.store.storage import (
    BucketReader,
    ReadStorage,
    Storage,
    base_of,
    intact_record,
    read_record,
    slots_of,
)

_ANY = "any version yet: publish one first"
_PREVIOUS = "the version before the newest: only one was published, or it was overwritten"


def writable(address: StoreAddress, deadline_seconds: float) -> Storage:
    """Return where a store lies. `deadline_seconds`: limit of each wait for a server.

    Raises ModuleNotFoundError if the package for it is not installed, UnsupportedError if it is only read.
    """
    match address:
        case RemoteAddress():
            raise UnsupportedError(
                f"the store at {address.url} is only read by this call: publish into a store of this host, "
                "file:///DIR, and copy its versions with `weightcast push`"
            )
        case DirectoryAddress():
            return DirectoryStorage(address, deadline_seconds)
        case ObjectStoreAddress():
            with import_of_extra():
                from weightcast.store.objects import ObjectStorage
            return ObjectStorage(address, deadline_seconds)
    raise TypeError(f"{address!r:.80} is not the address of a store; use StoreAddress.parse(url)")


def pinned(
    address: StoreAddress, *, previous: bool = False, version: WeightVersion | int | None = None, label: str = ""
) -> PinnedVersion:
    """Pin the newest version of a store, or the one before, or `version`: see `StoreReader.pin` and `pin_complete`.

    Raises VersionNotFoundError if the store lacks it, IntegrityError.
    """
    reader = StoreReader(address, label=label)
    with on_failure(reader.close):
        if previous:
            found, what = reader.pin_previous(), _PREVIOUS
        elif isinstance(version, int):
            found = reader.pin_complete(lambda stored: stored.number == version)
            held = [str(stored.number) for stored in reader.complete_versions()]
            what = f"version {version}: it has {', '.join(held)}" if held else _ANY
        else:
            found = reader.pin(version)
            what = _ANY if version is None else f"version {version.number} of run {version.run}"
        if found is None:
            raise not_found(reader.storage, what)
    found.parts.append(reader)
    return found


class StoreReader:
    """Reads the versions of a store, which may not exist yet. Call it from one thread at a time."""

    def __init__(self, address: StoreAddress, *, label: str = "", deadline_seconds: float = 60.0) -> None:
        """`deadline_seconds`: limit of each wait for a server that has the store.

        Raises ModuleNotFoundError if the package for it is not installed, ValueError if a token can't be read.
        """
        self.storage: ReadStorage
        if isinstance(address, RemoteAddress):
            self.storage = RemoteStorage(address, deadline_seconds)
        else:
            self.storage = writable(address, deadline_seconds)
        self._label = label
        self._manifests: dict[str, Manifest] = {}

    def close(self) -> None:
        """Close connections; pinned versions stay. Idempotent."""
        self.storage.close()

    def commit(self) -> Commit | None:
        """Return the present pointer; None if nothing was ever committed.

        Raises IntegrityError if the file is not a store's pointer.
        """
        return read_record(self.storage, files.POINTER, Commit)

    def writer(self) -> WriterRecord | None:
        """Return the record of the present or last writer. Raises IntegrityError."""
        return read_record(self.storage, files.WRITER, WriterRecord)

    def pin(self, version: WeightVersion | None = None) -> PinnedVersion | None:
        """Pin the newest version, or `version` if it is the newest, or sealed and about to be; None if it is neither.

        A sealed but uncommitted version is for the engines of the publish in progress. Waits only while another process
        locks the slot briefly. Raises IntegrityError if a part of the version is missing or damaged.
        """
        deadline, pause = Deadline(GRACE_SECONDS), 0.001
        while (commit := self._commit_of(version)) is not None:
            pinned = self._pin(commit.newest, must_hold=deadline.has_passed)
            if pinned is not None:
                # Read the pointer again: a newer version may have been committed meanwhile.
                if (again := self._commit_of(version)) is not None and again.newest == commit.newest:
                    return pinned
                pinned.close()
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        return None

    def pin_newest(self, known: WeightVersion | None) -> PinnedVersion | None:
        """Pin the newest version; None if it is `known`, or there is none. Raises what `pin` raises."""
        commit = self.commit()
        if commit is None or commit.newest.version == known:
            return None
        pinned = self.pin()
        if pinned is not None and pinned.stored.version == known:
            pinned.close()
            return None
        return pinned

    def _commit_of(self, version: WeightVersion | None) -> Commit | None:
        if version is None:
            return self.commit()
        # In this order, since a commit renames the first file to the second.
        commits = (read_record(self.storage, files.NEXT, Commit), self.commit())
        return next((commit for commit in commits if commit is not None and commit.newest.version == version), None)

    def pin_previous(self) -> PinnedVersion | None:
        """Pin the version before the newest; None if there is none, or if it was overwritten."""
        commit = self.commit()
        return None if commit is None or commit.previous is None else self._pin(commit.previous, must_hold=False)

    def pin_complete(self, is_wanted: Callable[[Stored], bool]) -> PinnedVersion | None:
        """Pin the newest wanted version of those that were committed, and have all of their buckets; else None."""
        for stored in self.complete_versions():
            if is_wanted(stored) and (pinned := self._pin(stored, must_hold=False)) is not None:
                return pinned
        return None

    def complete_versions(self) -> list[Stored]:
        """Return every complete version, the newest first. A slot that can't be read is skipped."""
        found, commit = list[Stored](), self.commit()
        for slot in () if commit is None else self.storage.slot_numbers():
            sealed = intact_record(self.storage, files.SEAL, Commit, slot)
            if sealed is not None and commit and _is_committed(sealed.newest, commit):
                found.append(sealed.newest)
        found = [stored for stored in found if slots_of(self.storage, stored) is not None]
        last = [] if commit is None else [commit.newest, commit.previous]
        by_time = sorted(found, key=lambda stored: stored.committed_at, reverse=True)
        return sorted(by_time, key=lambda stored: last.index(stored) if stored in last else len(last))

    def _pin(self, stored: Stored, *, must_hold: bool) -> PinnedVersion | None:
        """Pin a slot.

        None if it is being written or has another version; with `must_hold` this is an IntegrityError.
        """
        slot = self.storage.path("", stored.slot)
        reader = ReaderRecord(socket.gethostname(), os.getpid(), encodable(self._label))
        lock = self.storage.pin(stored.slot, reader)
        if lock is None:
            problem = f"{slot} is locked for writing, but by the pointer it has version {stored.number}"
        else:
            with on_failure(lock.close):
                sealed = read_record(self.storage, files.SEAL, Commit, stored.slot)
                if sealed is not None and sealed.newest == stored:
                    manifest, below = self.manifest(stored), base_of(self.storage, stored)
                    base = None if below is None else self._pin(below, must_hold=False)
                    if stored.base is None or base is not None:
                        with on_failure(lock.close if base is None else base.close):
                            return PinnedVersion(
                                stored, manifest, self.storage.open_slot(stored, manifest), lock=lock, base=base
                            )
            lock.close()
            found = "no whole version"
            if sealed is not None and sealed.newest == stored:
                found = f"a delta on version {stored.base and stored.base.number}, which was overwritten"
            elif sealed is not None:
                found = f"version {sealed.newest.number} of run {sealed.newest.run}"
            problem = f"{slot} has {found}, expected version {stored.number} of run {stored.run}"
        if must_hold:
            raise IntegrityError(problem)
        return None

    def manifest(self, stored: Stored) -> Manifest:
        """Return the manifest of a version. Raises IntegrityError if it is missing, or another one."""
        known = self._manifests.get(stored.manifest_digest)
        if known is not None:
            return known
        path = self.storage.path(files.MANIFEST, stored.slot)
        data = self.storage.read(files.MANIFEST, MAX_MESSAGE_BYTES, stored.slot)
        if data is None:
            raise files.missing(path)
        manifest = manifest_of(stored, data, path)
        self._manifests = {stored.manifest_digest: manifest}
        return manifest


class PinnedVersion(ClosedOnExit):
    """A version that no writer overwrites until `close`, or the end of this process. `read` is thread-safe."""

    def __init__(
        self,
        stored: Stored,
        manifest: Manifest,
        data: BucketReader,
        *,
        lock: Closeable | None = None,
        base: PinnedVersion | None = None,
    ) -> None:
        """`base`: the version on which it is a delta. `close` closes `data`, `lock` and `base`: the `parts`."""
        self._base = base
        self._word_bytes = [] if base is None else word_sizes(manifest)
        self.stored = stored
        self.manifest = manifest
        self._data = data
        self.parts: list[Closeable] = [part for part in (data, lock, base) if part is not None]

    def read(self, index: int, buffer: BucketBuffer, *, only_header: bool = False) -> None:
        """Read header and payload of bucket `index` into `buffer`, unchecked. Raises IntegrityError."""
        header, raw_bytes = buffer.header.numpy().data, self.manifest.buckets[index]
        payload = [] if only_header else [buffer.payload.numpy().data[:raw_bytes]]
        if self._base is None:
            self._data.read(index, [header, *payload], 0)
            return
        self._data.read(index, [header], 0)
        length = delta_length(buffer.header)
        if length is None:
            self._data.read(index, payload, HEADER_BYTES)
            return
        # Behind the delta's header are that of the raw payload, and the delta.
        length = 0 if only_header else min(length, raw_bytes)
        memory = torch.empty(HEADER_BYTES + length, dtype=torch.uint8)
        self._data.read(index, [memory.numpy().data], HEADER_BYTES)
        if not only_header:
            delta = BucketBuffer(buffer.header.clone(), memory[HEADER_BYTES:])
            origin = self.manifest.bucket_origins[index]
            check_bucket(delta, raw_bytes, self.stored.version, index, origin, encoded_bytes=length)
            self._base.read(index, buffer)
            add_delta(buffer.payload[:raw_bytes], delta.payload, self._word_bytes[index])
        buffer.header.copy_(memory[:HEADER_BYTES])

    def read_stored(self, index: int) -> memoryview:
        """Return what is stored of bucket `index`, unchecked: headers, and the raw payload or a delta."""
        if self._base is None:
            return self.read_raw(index)
        raw_bytes = self.manifest.buckets[index]
        buffer = BucketBuffer.of(torch.empty(HEADER_BYTES + raw_bytes, dtype=torch.uint8))
        self._data.read(index, [buffer.header.numpy().data], 0)
        data = buffer.flat(stored_bytes(buffer.header, raw_bytes)).numpy().data
        self._data.read(index, [data[HEADER_BYTES:]], HEADER_BYTES)
        return data

    def read_raw(self, index: int) -> memoryview:
        """Return header and raw payload of bucket `index`, unchecked."""
        num_bytes = HEADER_BYTES + self.manifest.buckets[index]
        buffer = BucketBuffer.of(torch.empty(num_bytes, dtype=torch.uint8))
        self.read(index, buffer)
        return buffer.flat(num_bytes).numpy().data

    def payloads(self) -> Iterator[torch.Tensor]:
        """Yield each bucket's payload, read, checked and decoded, valid until the next. Memory: one bucket.

        Raises IntegrityError, also at the end, if the buckets are not of one version.
        """
        manifest, origins = self.manifest, self.manifest.bucket_origins
        buffer, digests = BucketBuffer.of(torch.empty(slot_size_bytes(manifest), dtype=torch.uint8)), []
        for index, num_bytes in enumerate(manifest.buckets):
            self.read(index, buffer)
            header = check_bucket(buffer, num_bytes, self.stored.version, index, origins[index])
            digests.append(header.digest)
            yield buffer.payload
        root = root_digest(self.stored.manifest_digest, digests)
        if root != self.stored.root:
            raise IntegrityError(
                f"the buckets of version {self.stored.number} have the root digest {root}, its seal says "
                f"{self.stored.root}: they are not of one version; publish again"
            )

    def close(self) -> None:
        """Close its files and release its lock. Idempotent."""
        for part in self.parts:
            part.close()


def _is_committed(stored: Stored, commit: Commit) -> bool:
    """Return whether a sealed version is not later than the newest one. A clock may go back, a run's numbers grow."""
    newest = commit.newest
    if stored == commit.previous:
        return True
    if stored.run == newest.run:
        return stored.number <= newest.number
    return stored.committed_at <= newest.committed_at


def manifest_of(stored: Stored, data: bytes, path: object) -> Manifest:
    """Decode the manifest of a version, from the file `path`. Raises IntegrityError if it is another one."""
    found = hashlib.sha256(data).hexdigest()
    if found != stored.manifest_digest:
        raise IntegrityError(
            f"the digest of {path} is {found}, the pointer says {stored.manifest_digest}: publish again"
        )
    manifest = Manifest.decode(data)
    if len(manifest.buckets) != stored.num_buckets:
        raise IntegrityError(
            f"{path} has {len(manifest.buckets)} buckets, the pointer says {stored.num_buckets}: publish again"
        )
    return manifest


def stored_bytes(header: torch.Tensor, raw_bytes: int) -> int:
    """Return how long what is stored of a bucket is, by its first header; at most a raw bucket's length."""
    length = delta_length(header)
    return HEADER_BYTES + (raw_bytes if length is None else min(HEADER_BYTES + length, raw_bytes))


def store_status(address: StoreAddress) -> StoreInfo:
    """Return a store's versions, readers and writer. Changes nothing and never blocks on a lock.

    Raises VersionNotFoundError if there is no version, IntegrityError if a record is damaged.
    """
    with contextlib.closing(StoreReader(address)) as reader:
        storage, commit, writer = reader.storage, reader.commit(), reader.writer()
        if commit is None:
            raise not_found(storage)
        name = "unknown" if writer is None else writer.describe()
        return StoreInfo(commit.newest, commit.previous, name, bool(storage.has_writer(writer)), storage.slots())


def not_found(storage: ReadStorage, what: str = _ANY) -> VersionNotFoundError:
    """Return the error of a store that does not hold `what`, or is not there."""
    where = storage.path("")
    if isinstance(where, Path) and not where.is_dir():
        return VersionNotFoundError(
            f"the store {where} is not there: no such directory; check the path, or publish first"
        )
    return VersionNotFoundError(f"the store {where} does not hold {what}")
