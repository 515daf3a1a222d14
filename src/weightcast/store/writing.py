"""The writing side of a store: one writer fills a slot that no reader has pinned, and then replaces the pointer.

If a version is sent from several origins, the publishing rank has the writer, which locks the slot, allocates all files
and seals. A rank that leads another origin writes only that origin's files, under another lock.

Invariants: never overwritten are the current version's slot, a slot pinned by a reader, and a slot that a rank of an
earlier attempt may still be writing; a slot's seal is removed before its first byte changes and written after its last;
a sealed version is read only by readers that ask for it by number, until the pointer names it; the pointer is replaced
only if it is still the one that this writer saw last. A failure before that leaves the former version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import socket
import time

import msgspec

from weightcast.errors import (
    IntegrityError,
    PeerError,
    PeerTimeoutError,
    StaleVersionError,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.format.bucket import root_digest
from weightcast.format.manifest import MAX_MESSAGE_BYTES, MAX_VERSION, Manifest, WeightVersion, decode, encode
from weightcast.host.closing import on_failure
from weightcast.host.deadline import Deadline
from weightcast.store import files
from weightcast.store.address import StoreAddress
from weightcast.store.reading import writable
from weightcast.store.records import (
    FORMAT,
    MAX_REASON_CHARACTERS,
    MAX_RECORD_BYTES,
    Commit,
    SlotAttempt,
    Stored,
    StoredBase,
    WriterRecord,
    encodable,
    seal,
    unseal,
)
from weightcast.store.storage import BucketReader, Slot, intact_record, read_record, slots_of

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class _Attempt:
    """A version that is being written.

    `sealed`: once it is complete, the future content of the pointer. `is_in_doubt`: the pointer may become that later.
    """

    version: WeightVersion
    manifest_digest: str
    num_files: int
    slot: int
    base: StoredBase | None
    sealed: Commit | None = None
    is_in_doubt: bool = False


class _SlotWriter:
    """Base of the writers of all origins. `write` is thread-safe; call the other methods from one thread."""

    def __init__(self, address: StoreAddress, run: str, *, deadline_seconds: float) -> None:
        self._address = address
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._storage = writable(address, deadline_seconds)
        self._slot: Slot | None = None

    @property
    def where(self) -> str:
        """The store, for messages."""
        return str(self._storage.path(""))

    def write(self, number: int, data: memoryview) -> None:
        """See `Slot.write`."""
        assert self._slot is not None
        self._slot.write(number, data)

    def finish(self) -> None:
        """See `Slot.finish`."""
        assert self._slot is not None
        self._slot.finish()

    def _release(self) -> None:
        """Stop writing, and release the slot."""
        if self._slot is not None:
            self._slot.close()
        self._slot = None

    def close(self) -> None:
        """Stop writing, and close the storage. Idempotent."""
        self._release()
        self._storage.close()


class StoreWriter(_SlotWriter):
    """Writes the versions of one run. Extra memory: none."""

    def __init__(self, address: StoreAddress, run: str, *, deadline_seconds: float) -> None:
        """Open the store for writing, and create it if there is none.

        Raises EngineBusyError that names the writer that has it open; ValueError if the directory has other files;
        IntegrityError if its pointer is damaged, or not a file; InsufficientMemoryError if there is no room;
        UnsupportedError if the object store can't keep two writers apart, PeerError if it does not answer.
        """
        super().__init__(address, run, deadline_seconds=deadline_seconds)
        self._attempt: _Attempt | None = None
        self._storage.lock(run)
        with on_failure(self._storage.unlock):
            self._seen = self._storage.read(files.POINTER, MAX_RECORD_BYTES)
            path = self._storage.path(files.POINTER)
            self._commit = None if self._seen is None else unseal(self._seen, Commit, path)
            former = intact_record(self._storage, files.WRITER, WriterRecord)
            attempt, number = max(self._storage.slot_numbers(), default=0), -1
            self._begun: WeightVersion | None = None
            if former is not None:
                attempt, number = former.attempt, former.number
                self._begun = WeightVersion(former.run, number)
            self._write_record(WriterRecord(FORMAT, run, socket.gethostname(), os.getpid(), attempt, number))
            self._storage.sweep()

    @property
    def newest(self) -> Stored | None:
        """The version that the pointer names."""
        return None if self._commit is None else self._commit.newest

    @property
    def last_number(self) -> int:
        """The larger number of the newest version and of the one that was begun last, by any writer; -1 for none."""
        return max(self._record.number, -1 if self.newest is None else self.newest.number)

    @property
    def is_locked(self) -> bool:
        """False after `close`, and in a child forked from the process that opened the store."""
        return self._storage.is_locked

    def ensure_lock(self) -> None:
        """Check that this writer still has the store's lock. If the lock's file was removed, lock again; if the
        directory was removed, renamed or emptied, create the store again, without versions.

        Raises ClosedError in a forked process, EngineBusyError if another writer has the store.
        """
        if self._storage.ensure_lock(self._run):
            if self._seen is not None and not self._storage.slot_numbers():
                logger.warning(
                    "%s was removed or renamed: it is created again, without the former versions",
                    self._storage.path(""),
                )
                self._seen = self._commit = None
            self._write_record(self._record)

    def begin(self, manifest: Manifest, version: WeightVersion, span: range, *, base: StoredBase | None = None) -> str:
        """Choose and allocate a slot for a version. Waits while readers have pinned all slots.

        `span`: the buckets that are written here. `base`: the newest version, if this one is written as a delta on it,
        for which no space is allocated. Returns the `join_at` with which an `OriginWriter` writes the others.

        Raises PeerTimeoutError that names the readers at the deadline; InsufficientMemoryError if there is no room;
        StaleVersionError if the number is not above the last of its run, or another writer has changed the store;
        ValueError if the number is out of range; IntegrityError if a file's path is not a regular file.
        """
        if not 0 <= version.number <= MAX_VERSION:
            raise ValueError(f"version is {version.number}; it must be from 0 to {MAX_VERSION}")
        self.ensure_lock()
        newest = self.newest
        if newest is not None and newest.run == version.run and version.number <= newest.number:
            raise StaleVersionError(
                f"version {version.number} is not above {newest.number}, the store's newest of this run: publish a "
                "higher version"
            )
        self._check_pointer()  # its slot must not be overwritten
        data, number = manifest.encode(), self._record.attempt + 1
        slot = self._storage.free_slot(
            self._needed(newest),
            self._needed(None if self._commit is None else self._commit.previous),
            number,
            continues=version == self._begun,
        )
        with on_failure(slot.close):
            num_files = slot.prepare(manifest, is_delta=base is not None)
            # Before anything else is written: a writer that has lost the store to another must not touch its slots.
            self._write_record(msgspec.structs.replace(self._record, attempt=number, number=version.number, aborted=""))
            self._begun = version
            held = None
            with contextlib.suppress(IntegrityError):
                held = self._storage.read(files.MANIFEST, MAX_MESSAGE_BYTES, slot.number)
            if held != data:
                self._storage.write(files.MANIFEST, data, slot.number)
            if len(span) < len(manifest.buckets):
                slot.allow_origins()
            slot.open(manifest, span)
            self._slot = slot
            self._attempt = _Attempt(version, manifest.digest(), num_files, slot.number, base)
        return encode(SlotAttempt(slot.number, number)).decode()

    def left(self, stored: Stored, manifest: Manifest) -> BucketReader | None:
        """Return what there may be of this version, which was begun, from a writer that did not complete it."""
        if self._attempt is None or self._slot is None:
            return None
        here = msgspec.structs.replace(stored, slot=self._attempt.slot, num_files=self._attempt.num_files)
        return self._slot.left(here, manifest)

    def keep(self, index: int) -> None:
        """Make what is `left` of a bucket a part of the version, to be checked then. Thread-safe."""
        assert self._slot is not None
        self._slot.keep(index)

    def seal(self, digests: list[bytes]) -> Stored:
        """Seal the version, after the files of all origins are finished: readers can read it by its number.

        `digests`: those of all buckets. After it, `commit` needs no room. Raises StaleVersionError if another writer
        has changed the store in spite of this one's lock.
        """
        attempt, former = self._attempt, self.newest
        assert attempt is not None
        self._storage.check_owner()
        stored = Stored(
            run=attempt.version.run,
            number=attempt.version.number,
            slot=attempt.slot,
            num_files=attempt.num_files,
            num_buckets=len(digests),
            manifest_digest=attempt.manifest_digest,
            root=root_digest(attempt.manifest_digest, digests),
            committed_at=time.time(),
            base=attempt.base,
        )
        self._storage.write(files.SEAL, seal(Commit(FORMAT, stored)), attempt.slot)
        self._release()
        self._check_pointer()
        commit = Commit(FORMAT, stored, former if former is None or former.slot != stored.slot else None)
        self._storage.write(files.NEXT, seal(commit))
        attempt.sealed = commit
        return stored

    def commit(self) -> None:
        """Make the sealed version the newest for all readers. Needs no room.

        Raises UpdateAbortedError if no version is sealed, StaleVersionError if another writer has changed the store,
        IntegrityError if the seal was removed, PeerError if an object store does not answer: the version may then
        become the newest one later.
        """
        attempt, path = self._attempt, self._storage.path(files.NEXT)
        if attempt is None or attempt.sealed is None:
            raise UpdateAbortedError(
                "there is no sealed version to commit: it was committed or aborted before, or lacks buckets; publish "
                "again"
            )
        self._check_pointer()
        data, found = seal(attempt.sealed), self._storage.read(files.NEXT, MAX_RECORD_BYTES)
        if found is None:
            raise files.missing(path)
        if found != data:
            # For example another writer's version, which its engines may still refuse.
            raise self._changed(path)
        try:
            self._storage.commit(data, self._seen)
        except PeerError:
            attempt.is_in_doubt = True
            raise
        self._seen, self._commit, self._attempt = data, attempt.sealed, None

    def abort(self, reason: str) -> None:
        """Abort the version: free its slot, and record the reason for waiting readers. Idempotent."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        self._release()
        if not self.is_locked:
            return
        aborted = encodable(reason)[:MAX_REASON_CHARACTERS] or "aborted"
        with contextlib.suppress(OSError, WeightcastError):
            if attempt.sealed is not None:
                data = seal(attempt.sealed)
                if self._storage.read(files.POINTER, MAX_RECORD_BYTES) == data:
                    # A Ctrl-C came right after the commit, or its answer was lost: the version is committed.
                    self._seen, self._commit = data, attempt.sealed
                    return
            # A reader that has pinned the slot goes on: it checks the seal only once, at the beginning.
            for name, slot in ((files.NEXT, None), (files.SEAL, attempt.slot)):
                found = intact_record(self._storage, name, Commit, slot)
                # Another writer may have put its version there in spite of the lock.
                is_ours = found is None or found.newest.version == attempt.version
                if is_ours and not attempt.is_in_doubt:
                    self._storage.remove(name, slot)
            self._write_record(msgspec.structs.replace(self._record, aborted=aborted))

    def close(self) -> None:
        """Release the store. Idempotent."""
        self.abort("the publisher was closed")
        self._storage.unlock()
        super().close()

    # --- the store ---

    def _write_record(self, record: WriterRecord) -> None:
        self._storage.write_owner(seal(record))
        self._record = record

    def _check_pointer(self) -> None:
        self._storage.check_owner()
        if self._storage.read(files.POINTER, MAX_RECORD_BYTES) != self._seen:
            raise self._changed(self._storage.path(files.POINTER))

    def _changed(self, path: object) -> StaleVersionError:
        return StaleVersionError(
            f"{path} was changed by another process while run {self._run} had the store open: there were two writers, "
            "or the filesystem lost a lock; close all publishers, and make a new one"
        )

    def _needed(self, stored: Stored | None) -> set[int]:
        """Return the slots that a version needs: its own, and those of the versions on which it is a delta."""
        if stored is None:
            return set()
        with contextlib.suppress(IntegrityError):
            return set(slots_of(self._storage, stored) or [stored.slot])
        return {stored.slot}

    def base_for(self, number: int, root: str, manifest_digest: str) -> StoredBase | None:
        """Return the newest version, if it is this one of this run, and the next version may be a delta on it."""
        newest = self.newest
        if newest is None or newest.run != self._run or newest.manifest_digest != manifest_digest:
            return None
        slots = slots_of(self._storage, newest)
        if (newest.number, newest.root) != (number, root) or slots is None:
            return None
        is_due = len(slots) >= self._address.full_every
        return None if is_due else StoredBase(newest.number, newest.slot, newest.root)


class OriginWriter(_SlotWriter):
    """Writes one origin's files of versions that the `StoreWriter` of another rank has begun, maybe on another host.

    It opens nothing on creation. It has a lock on its part of the slot while it may write, so that no writer uses the
    slot for another version; the end of the process releases the lock.
    """

    @property
    def is_locked(self) -> bool:
        """False while nothing is written, and in a child forked from the writing process."""
        return self._slot is not None and self._slot.is_open

    def begin(self, manifest: Manifest, origin: int, place: str) -> None:
        """Open the origin's buckets in the slot that the publishing rank's `begin` has chosen.

        Waits until that writer's record is visible here. Raises PeerTimeoutError at the deadline, if this is another
        directory or the version was aborted meanwhile; OSError, IntegrityError.
        """
        where: SlotAttempt = decode(place.encode(), SlotAttempt)
        for _ in Deadline(self._deadline_seconds).polls():
            if not self._is_written(where):
                continue
            # On a network filesystem new files may become visible later than a replaced one.
            with contextlib.suppress(FileNotFoundError):
                slot = self._storage.join_slot(where.slot, origin)
                if slot is None:
                    continue
                with on_failure(slot.close):
                    # Checked again under the lock, from which on no writer uses this slot for another attempt.
                    if self._is_written(where):
                        slot.open(manifest, manifest.spans[origin])
                        self._slot = slot
                        return
                slot.close()
        path = self._storage.path(files.WRITER)
        raise PeerTimeoutError(
            f"{path} on the host {socket.gethostname()} did not name attempt {where.attempt} of run {self._run} within "
            f"{self._deadline_seconds:g} s, as the publishing trainer rank's does: mount the store's directory under "
            "this path on every trainer host",
            peer="trainer",
        )

    def _is_written(self, where: SlotAttempt) -> bool:
        """Return whether the publishing rank is still in this attempt, as far as this host can see."""
        record = read_record(self._storage, files.WRITER, WriterRecord)
        found = None if record is None else (record.run, record.attempt, record.aborted)
        return found == (self._run, where.attempt, "")

    def finish(self) -> None:
        super().finish()
        self._release()

    def abort(self, reason: str) -> None:
        """Stop writing; the publishing rank records the reason. Idempotent."""
        self._release()
