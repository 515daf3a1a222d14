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
from pathlib import Path

import msgspec

from weightcast.errors import (
    ClosedError,
    EngineBusyError,
    InsufficientMemoryError,
    IntegrityError,
    PeerTimeoutError,
    StaleVersionError,
    UpdateAbortedError,
)
from weightcast.format.bucket import root_digest
from weightcast.format.manifest import MAX_MESSAGE_BYTES, MAX_VERSION, Manifest, WeightVersion, decode, encode
from weightcast.format.packed_base import PackedBase
from weightcast.host import memory as host_memory
from weightcast.host.closing import on_failure
from weightcast.host.deadline import Deadline
from weightcast.store import files, locks
from weightcast.store.address import StoreAddress
from weightcast.store.locks import LockFile
from weightcast.store.reading import slots_of
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
    read_record,
    seal,
    unseal,
)

logger = logging.getLogger(__name__)

_OURS = {files.POINTER, files.NEXT, files.WRITER, files.WRITER_LOCK, files.SLOTS, "lost+found"}


class OriginFiles:
    """The open data files of a slot that is being written, which contain some of the version's buckets."""

    def __init__(self, slot: Path, layout: files.FileLayout, span: range) -> None:
        """`span`: the numbers of the buckets. Raises IntegrityError if a path is not a regular file, OSError."""
        self._layout = layout
        self._span = span
        self._open: dict[int, tuple[Path, int]] = {}
        with on_failure(self.close):
            for file in sorted({layout.at(index)[0] for index in span}):
                path = slot / files.data_name(file)
                self._open[file] = path, files.open_file(path, os.O_RDWR)

    def write(self, number: int, data: memoryview) -> None:
        """Write header and payload of one of these buckets, counted from 0. Thread-safe.

        Raises InsufficientMemoryError, OSError.
        """
        file, offset = self._layout.at(self._span[number])
        path, descriptor = self._open[file]
        with files.room_for(path):
            files.write_at(descriptor, data, offset)

    def finish(self, *, fsync: bool) -> None:
        """Close the files after all was written, so that a network filesystem's server has the bytes. Idempotent.

        Raises InsufficientMemoryError, OSError.
        """
        while self._open:
            _, (path, descriptor) = self._open.popitem()
            with files.room_for(path):
                try:
                    if fsync:
                        os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        """Close the files, also partly written ones. Idempotent."""
        while self._open:
            _, (_, descriptor) = self._open.popitem()
            with contextlib.suppress(OSError):  # their content is discarded anyway
                os.close(descriptor)


@dataclasses.dataclass(slots=True, eq=False)
class _Slot:
    """A slot that is being written, and the lock on it."""

    number: int
    path: Path
    lock: LockFile


@dataclasses.dataclass(slots=True, eq=False)
class _Attempt:
    """A version that is being written. `sealed`: once it is complete, the future content of the pointer."""

    version: WeightVersion
    manifest_digest: str
    layout: files.FileLayout
    slot: _Slot
    base: StoredBase | None
    sealed: Commit | None = None


class _SlotWriter:
    """Base of the writers of all origins. `write` is thread-safe; call the other methods from one thread."""

    def __init__(self, address: StoreAddress, run: str, *, deadline_seconds: float) -> None:
        self._address = address
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._files: OriginFiles | None = None
        self._slot_lock: LockFile | None = None

    def write(self, number: int, data: memoryview) -> None:
        """See `OriginFiles.write`."""
        assert self._files is not None
        self._files.write(number, data)

    def finish(self) -> None:
        """Close the files after the last bucket; see `OriginFiles.finish`."""
        assert self._files is not None
        self._files.finish(fsync=self._address.fsync)

    def close(self) -> None:
        """Close the files and release the slot. Idempotent."""
        for part in (self._files, self._slot_lock):
            if part is not None:
                part.close()
        self._files = self._slot_lock = None


class StoreWriter(_SlotWriter):
    """Writes the versions of one run.

    Disk: the sum of the slots, each as large as its largest version so far. Extra memory: none.
    """

    def __init__(self, address: StoreAddress, run: str, *, deadline_seconds: float) -> None:
        """Open the store for writing, and create it if there is none.

        Raises EngineBusyError that names the writer that has it open; ValueError if the directory has other files;
        IntegrityError if its pointer is damaged, or not a file; InsufficientMemoryError if there is no room.
        """
        super().__init__(address, run, deadline_seconds=deadline_seconds)
        self._directory = address.directory
        self._attempt: _Attempt | None = None
        self._manifest: tuple[Manifest, bytes, str] | None = None
        files.make_folder(self._directory)
        names = {entry.name for entry in self._directory.iterdir() if not entry.name.startswith(".")}
        foreign = sorted(names - _OURS)
        if foreign and files.WRITER_LOCK not in names:
            found = ", ".join(foreign[:4])
            raise ValueError(
                f"{self._directory} is not a weightcast store, since it has {found}: name an empty or a new directory"
            )
        self._lock = self._lock_store()
        with on_failure(self._lock.close):
            path = self._directory / files.POINTER
            self._seen = files.read_file(path, MAX_RECORD_BYTES)
            self._commit = None if self._seen is None else unseal(self._seen, Commit, path)
            self._sweep()
            former = self._former_writer()
            attempt, number = (0, -1) if former is None else (former.attempt, former.number)
            self._write_record(WriterRecord(FORMAT, run, socket.gethostname(), os.getpid(), attempt, number))

    @property
    def newest(self) -> Stored | None:
        """The version that the pointer names."""
        return None if self._commit is None else self._commit.newest

    @property
    def last_number(self) -> int:
        """Number of the version that was begun last, by any writer and whatever its outcome; -1 if unknown."""
        return self._record.number

    @property
    def is_locked(self) -> bool:
        """False after `close`, and in a child forked from the process that opened the store."""
        return self._lock.is_open

    def ensure_lock(self) -> None:
        """Check that this writer still has the store's lock. If the lock's file was removed, lock again; if the
        directory was removed, renamed or emptied, create the store again, without versions.

        Raises ClosedError in a forked process, EngineBusyError if another writer has the store.
        """
        if not self.is_locked:
            raise ClosedError(
                f"{self._lock.path} is locked by pid {self._record.pid}, from which this process (pid {os.getpid()}) "
                "was forked: publish in that process, or close the publisher there and make one here"
            )
        if not self._lock.is_current():
            files.make_folder(self._directory)
            is_empty = not any(self._directory.iterdir())
            lost, self._lock = self._lock, self._lock_store()
            lost.close()
            if is_empty and self._seen is not None:
                logger.warning(
                    "%s was removed or renamed: it is created again, without the former versions", self._directory
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
        if self._manifest is None or self._manifest[0] is not manifest:
            self._manifest = manifest, manifest.encode(), manifest.digest()
        _, data, digest = self._manifest
        layout, slot = _layout(manifest, self._address), self._free_slot()
        with on_failure(slot.lock.close):
            files.remove(slot.path / files.SEAL)
            self._prepare(slot, layout, is_delta=base is not None)
            held = None
            with contextlib.suppress(IntegrityError):
                held = files.read_file(slot.path / files.MANIFEST, MAX_MESSAGE_BYTES)
            if held != data:
                files.replace_file(slot.path / files.MANIFEST, data, fsync=self._address.fsync)
            number = self._record.attempt + 1
            self._write_record(msgspec.structs.replace(self._record, attempt=number, number=version.number, aborted=""))
            if len(span) < len(manifest.buckets):
                # Unlock the other origins' bytes for their writers. A writer of a former attempt would have blocked
                # this.
                slot.lock.unlock_from(locks.PINS_BYTES)
            self._files, self._slot_lock = OriginFiles(slot.path, layout, span), slot.lock
            self._attempt = _Attempt(version, digest, layout, slot, base)
        return encode(SlotAttempt(slot.number, number)).decode()

    def seal(self, digests: list[bytes]) -> Stored:
        """Seal the version, after the files of all origins are finished: readers can read it by its number.

        `digests`: those of all buckets. After it, `commit` needs no room. Raises StaleVersionError if another writer
        has changed the store in spite of this one's lock.
        """
        attempt, former = self._attempt, self.newest
        assert attempt is not None
        stored = Stored(
            run=attempt.version.run,
            number=attempt.version.number,
            slot=attempt.slot.number,
            num_files=attempt.layout.num_files,
            num_buckets=len(digests),
            manifest_digest=attempt.manifest_digest,
            root=root_digest(attempt.manifest_digest, digests),
            committed_at=time.time(),
            base=attempt.base,
        )
        files.replace_file(attempt.slot.path / files.SEAL, seal(Commit(FORMAT, stored)), fsync=self._address.fsync)
        super().close()
        self._check_pointer()
        commit = Commit(FORMAT, stored, former if former is None or former.slot != stored.slot else None)
        files.replace_file(self._directory / files.NEXT, seal(commit), fsync=self._address.fsync)
        attempt.sealed = commit
        return stored

    def commit(self) -> None:
        """Make the sealed version the newest for all readers. Needs no room.

        Raises UpdateAbortedError if no version is sealed, StaleVersionError if another writer has changed the store,
        IntegrityError if the seal was removed.
        """
        attempt, path = self._attempt, self._directory / files.NEXT
        if attempt is None or attempt.sealed is None:
            raise UpdateAbortedError(
                "there is no sealed version to commit: it was committed or aborted before, or lacks buckets; publish "
                "again"
            )
        self._check_pointer()
        data, found = seal(attempt.sealed), files.read_file(path, MAX_RECORD_BYTES)
        if found is None:
            raise files.missing(path)
        if found != data:
            # For example another writer's version, which its engines may still refuse.
            raise self._changed(path)
        os.replace(path, self._directory / files.POINTER)
        self._seen, self._commit, self._attempt = data, attempt.sealed, None
        if self._address.fsync:
            files.sync_directory(self._directory)

    def abort(self, reason: str) -> None:
        """Abort the version: free its slot, and record the reason for waiting readers. Idempotent."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        super().close()
        if not self.is_locked:
            return
        aborted = encodable(reason)[:MAX_REASON_CHARACTERS] or "aborted"
        with contextlib.suppress(OSError, InsufficientMemoryError, IntegrityError):
            if attempt.sealed is not None:
                data = seal(attempt.sealed)
                if files.read_file(self._directory / files.POINTER, MAX_RECORD_BYTES) == data:
                    # A Ctrl-C came right after the commit's rename: the version is committed.
                    self._seen, self._commit = data, attempt.sealed
                    return
            # A reader that has pinned the slot goes on: it checks the seal only once, at the beginning.
            for path in (self._directory / files.NEXT, attempt.slot.path / files.SEAL):
                found = None
                with contextlib.suppress(IntegrityError):
                    found = read_record(path, Commit)
                # Another writer may have put its version there in spite of the lock.
                if found is None or found.newest.version == attempt.version:
                    files.remove(path)
            if self._lock.is_current():
                self._write_record(msgspec.structs.replace(self._record, aborted=aborted))

    def close(self) -> None:
        """Release the store. Idempotent."""
        self.abort("the publisher was closed")
        self._lock.close()

    # --- the store ---

    def _lock_store(self) -> LockFile:
        lock = LockFile(self._directory / files.WRITER_LOCK, os.O_RDWR | os.O_CREAT)
        with on_failure(lock.close):
            if not lock.try_lock():
                holder = self._former_writer()
                name = "a publisher that has just started" if holder is None else holder.describe()
                raise EngineBusyError(
                    f"{self._directory} is being written by {name}: close it first (requested by run {self._run})"
                )
        return lock

    def _former_writer(self) -> WriterRecord | None:
        with contextlib.suppress(IntegrityError):
            return read_record(self._directory / files.WRITER, WriterRecord)
        return None

    def _write_record(self, record: WriterRecord) -> None:
        self._record = record
        files.replace_file(self._directory / files.WRITER, seal(record))

    def _sweep(self) -> None:
        """Remove temporary and uncommitted files of a writer that died."""
        files.remove(self._directory / files.NEXT)
        for folder in (self._directory, *(files.slot_path(self._directory, number) for number in self._slots())):
            for name in (files.POINTER, files.NEXT, files.WRITER, files.MANIFEST, files.SEAL):
                for path in folder.glob(f".{name}.*"):
                    files.remove(path)

    def _check_pointer(self) -> None:
        path = self._directory / files.POINTER
        if files.read_file(path, MAX_RECORD_BYTES) != self._seen:
            raise self._changed(path)

    def _changed(self, path: Path) -> StaleVersionError:
        return StaleVersionError(
            f"{path} was changed by another process while run {self._run} had the store open: there were two writers, "
            "or the filesystem lost a lock; close all publishers, and make a new one"
        )

    # --- slots ---

    def _free_slot(self) -> _Slot:
        """Return a slot that no reader has pinned: a new one up to `num_slots`, else the oldest, else a new one."""
        for _ in Deadline(self._deadline_seconds).polls():
            known = self._slots()
            previous = self._needed(None if self._commit is None else self._commit.previous)
            if len(known) >= self._address.num_slots:
                for number in self._by_age(known):
                    # With more than two slots, keep the version before the newest while the next one is written.
                    is_kept = number in previous and self._address.num_slots > 2
                    if is_kept and len(known) < self._address.max_slots:
                        continue
                    slot = self._try_slot(number)
                    if slot is not None:
                        return slot
            if len(known) < self._address.max_slots:
                # Not the newest version's number, whose directory may have been removed.
                taken = known | self._needed(self.newest)
                number = next(n for n in range(len(taken) + 1) if n not in taken)
                files.make_folder(files.slot_path(self._directory, number))
                slot = self._try_slot(number)
                if slot is not None:
                    return slot
        raise self._nothing_free(known)

    def _slots(self) -> set[int]:
        files.check_folder(self._directory / files.SLOTS)
        files.make_folder(self._directory / files.SLOTS)
        return files.slot_numbers(self._directory)

    def _by_age(self, known: set[int]) -> list[int]:
        """Return the slots that may be overwritten: incomplete ones first, the version before the newest last."""
        kept = self._needed(None if self._commit is None else self._commit.previous)
        ages = {number: self._sealed_at(number) for number in known - self._needed(self.newest)}
        return sorted(ages, key=lambda number: (number in kept, ages[number], number))

    def _needed(self, stored: Stored | None) -> set[int]:
        """Return the slots that a version needs: its own, and those of the versions on which it is a delta."""
        if stored is None:
            return set()
        with contextlib.suppress(IntegrityError):
            return set(slots_of(self._directory, stored) or [stored.slot])
        return {stored.slot}

    def base_for(self, base: PackedBase) -> StoredBase | None:
        """Return the newest version, if `base` has its packed buckets and the next version may be a delta on it."""
        newest = self.newest
        if newest is None or newest.run != self._run or newest.manifest_digest != base.manifest_digest:
            return None
        slots = slots_of(self._directory, newest)
        if (newest.number, newest.root) != (base.number, base.root) or slots is None:
            return None
        is_due = len(slots) >= self._address.full_every
        return None if is_due else StoredBase(newest.number, newest.slot, newest.root)

    def _sealed_at(self, number: int) -> float:
        path = files.slot_path(self._directory, number) / files.SEAL
        with contextlib.suppress(IntegrityError):
            sealed = read_record(path, Commit)
            return 0.0 if sealed is None else sealed.newest.committed_at
        return 0.0

    def _try_slot(self, number: int) -> _Slot | None:
        path = files.slot_path(self._directory, number)
        lock = LockFile(path / files.PINS, os.O_RDWR | os.O_CREAT)
        if lock.try_lock():
            return _Slot(number, path, lock)
        lock.close()
        return None

    def _nothing_free(self, known: set[int]) -> PeerTimeoutError:
        holders = []
        for number in self._by_age(known):
            path = files.slot_path(self._directory, number) / files.PINS
            names = locks.readers(path)
            with contextlib.closing(LockFile(path, os.O_RDONLY)) as lock:
                if not names and lock.conflict(locks.PINS_BYTES) is not None:
                    names = ["a trainer rank of an aborted publish"]
            holders += [f"{name} holds slot {number}" for name in names]
        shown = "; ".join(holders) or "they have just ended"
        return PeerTimeoutError(
            f"readers held every slot of {self._directory} that may be overwritten for {self._deadline_seconds:g} s: "
            f"{shown}. End them, or allow more than max_slots={self._address.max_slots}",
            peer=shown,
        )

    def _prepare(self, slot: _Slot, layout: files.FileLayout, *, is_delta: bool) -> None:
        """Create and allocate the slot's files. Raises InsufficientMemoryError before anything is written.

        The files of a delta have the size of a full version's, and holes where nothing is written.
        """
        paths = [slot.path / files.data_name(file) for file in range(layout.num_files)]
        for path in set(slot.path.glob(files.data_name("*"))).difference(paths):
            files.remove(path)
        with contextlib.ExitStack() as stack:
            descriptors = []
            for path in paths:
                descriptors.append(files.open_file(path, os.O_RDWR | os.O_CREAT))
                stack.callback(os.close, descriptors[-1])
            if is_delta:
                for descriptor, size in zip(descriptors, layout.sizes_bytes, strict=True):
                    os.ftruncate(descriptor, 0)
                    os.ftruncate(descriptor, size)
                files.grow([slot.path / files.PINS], [slot.lock.descriptor], [locks.PINS_BYTES])
                return
            needed = sum(
                max(0, size - os.fstat(descriptor).st_blocks * 512)
                for descriptor, size in zip(descriptors, layout.sizes_bytes, strict=True)
            )
            if needed and files.is_in_memory(slot.path):
                host_memory.require(needed, f"{slot.path}, in memory,", "put the store on a disk, or free memory")
            # Including the readers' records, so that a full disk does not keep readers from pinning.
            files.grow(
                [slot.path / files.PINS, *paths],
                [slot.lock.descriptor, *descriptors],
                [locks.PINS_BYTES, *layout.sizes_bytes],
            )


class OriginWriter(_SlotWriter):
    """Writes one origin's files of versions that the `StoreWriter` of another rank has begun, maybe on another host.

    It opens nothing on creation. It has a lock on its part of the slot while it may write, so that no writer uses the
    slot for another version; the end of the process releases the lock.
    """

    @property
    def is_locked(self) -> bool:
        """False while nothing is written, and in a child forked from the writing process."""
        return self._slot_lock is not None and self._slot_lock.is_open

    def begin(self, manifest: Manifest, origin: int, place: str) -> None:
        """Open the origin's files in the slot that the publishing rank's `begin` has chosen.

        Waits until that writer's record is visible here. Raises PeerTimeoutError at the deadline, if this is another
        directory or the version was aborted meanwhile; OSError, IntegrityError.
        """
        where: SlotAttempt = decode(place.encode(), SlotAttempt)
        slot = files.slot_path(self._address.directory, where.slot)
        for _ in Deadline(self._deadline_seconds).polls():
            if not self._is_written(where):
                continue
            # On a network filesystem new files may become visible later than a replaced one.
            with contextlib.suppress(FileNotFoundError):
                lock = LockFile(slot / files.PINS, os.O_RDWR)
                with on_failure(lock.close):
                    # Checked again under the lock, from which on no writer uses this slot for another attempt.
                    if lock.try_lock(locks.PINS_BYTES + origin, 1) and self._is_written(where):
                        self._files = OriginFiles(slot, _layout(manifest, self._address), manifest.spans[origin])
                        self._slot_lock = lock
                        return
                lock.close()
        path = self._address.directory / files.WRITER
        raise PeerTimeoutError(
            f"{path} on the host {socket.gethostname()} did not name attempt {where.attempt} of run {self._run} within "
            f"{self._deadline_seconds:g} s, as the publishing trainer rank's does: mount the store's directory under "
            "this path on every trainer host",
            peer="trainer",
        )

    def _is_written(self, where: SlotAttempt) -> bool:
        """Return whether the publishing rank is still in this attempt, as far as this host can see."""
        record = read_record(self._address.directory / files.WRITER, WriterRecord)
        found = None if record is None else (record.run, record.attempt, record.aborted)
        return found == (self._run, where.attempt, "")

    def finish(self) -> None:
        super().finish()
        self.close()

    def abort(self, reason: str) -> None:
        """Stop writing; the publishing rank records the reason. Idempotent."""
        self.close()


def _layout(manifest: Manifest, address: StoreAddress) -> files.FileLayout:
    """Return a layout with `num_threads` files for each origin, within the limit. Raises ValueError for too many."""
    num_origins = len(manifest.spans)
    if num_origins > files.MAX_FILES:
        raise ValueError(
            f"{num_origins} origins need a data file each, but a store's version has at most {files.MAX_FILES} files: "
            "publish from fewer trainer hosts"
        )
    return files.FileLayout(manifest, num_origins * min(address.num_threads, files.MAX_FILES // num_origins))
