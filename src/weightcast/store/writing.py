"""The writing side of a store: one writer, a slot that no reader has pinned, the pointer last.

If a version is sent from several origins, the publishing rank has the writer, which takes the slot, makes room in all
files and seals. A rank that leads another origin writes the files of that origin alone, under a lock of its own.

Invariants: the current version's slot is never touched, nor one that a reader has pinned, or an origin's rank of a
former attempt may still write to; a slot's seal is gone before its first byte changes and comes back after its last; a
sealed version is only for readers that ask for it by name, until the pointer moves to it, and that only if it is still
what this writer saw last. A failure before that leaves the version before.
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
from weightcast.host import memory as host_memory
from weightcast.host.closing import on_failure
from weightcast.host.deadline import Deadline
from weightcast.store import files, locks
from weightcast.store.address import StoreAddress
from weightcast.store.locks import LockFile
from weightcast.store.records import (
    FORMAT,
    MAX_REASON_CHARACTERS,
    MAX_RECORD_BYTES,
    Commit,
    SlotAttempt,
    Stored,
    WriterRecord,
    encodable,
    read_record,
    seal,
    unseal,
)

logger = logging.getLogger(__name__)

_OURS = {files.POINTER, files.NEXT, files.WRITER, files.WRITER_LOCK, files.SLOTS, "lost+found"}


class OriginFiles:
    """Data files of a slot that is being written, open: those that some of the version's buckets lie in."""

    def __init__(self, slot: Path, layout: files.FileLayout, span: range) -> None:
        """`span`: the numbers of the buckets. Raises IntegrityError if something else is in a file's place, OSError."""
        self._layout = layout
        self._span = span
        self._open: dict[int, tuple[Path, int]] = {}
        with on_failure(self.close):
            for file in sorted({layout.at(index)[0] for index in span}):
                path = slot / files.data_name(file)
                self._open[file] = path, files.open_file(path, os.O_RDWR)

    def write(self, number: int, data: memoryview) -> None:
        """Write header and payload of one of these buckets, the first of which is number 0; from any thread.

        Raises InsufficientMemoryError, OSError.
        """
        file, offset = self._layout.at(self._span[number])
        path, descriptor = self._open[file]
        with files.room_for(path):
            files.write_at(descriptor, data, offset)

    def finish(self, *, fsync: bool) -> None:
        """All was written: close them, which is when a network filesystem's server has the bytes. Idempotent.

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
        """Close them, also half written. Idempotent."""
        while self._open:
            _, (_, descriptor) = self._open.popitem()
            with contextlib.suppress(OSError):  # what they hold is given up
                os.close(descriptor)


@dataclasses.dataclass(slots=True, eq=False)
class _Slot:
    """A slot that is being written, and the lock on it."""

    number: int
    path: Path
    lock: LockFile


@dataclasses.dataclass(slots=True, eq=False)
class _Attempt:
    """A version on its way into a slot. `sealed`: what the pointer will be, once it is whole."""

    version: WeightVersion
    manifest_digest: str
    layout: files.FileLayout
    slot: _Slot
    sealed: Commit | None = None


class _SlotWriter:
    """Base of the writers of all origins. `write` may run in several threads, the rest in one."""

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
        """Every bucket that is written here was written. See `OriginFiles.finish`."""
        assert self._files is not None
        self._files.finish(fsync=self._address.fsync)

    def close(self) -> None:
        """Write no more, and let go of the slot. Idempotent."""
        for part in (self._files, self._slot_lock):
            if part is not None:
                part.close()
        self._files = self._slot_lock = None


class StoreWriter(_SlotWriter):
    """Writes the versions of one run.

    Memory: none. Disk: the sum of the slots, each of which is as large as the largest version that it ever held.
    """

    def __init__(self, address: StoreAddress, run: str, *, deadline_seconds: float) -> None:
        """Take the store, and make it if there is none.

        Raises EngineBusyError, naming the writer that has it; ValueError if the directory holds other things;
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
                f"{self._directory} is no weightcast store, it holds {found}: name an empty or a new directory"
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
        """Number of the version that was begun last, by any writer and with any outcome; -1 if that is unknown."""
        return self._record.number

    @property
    def is_locked(self) -> bool:
        """False once it was closed, and in a process that was forked from the one that took the store."""
        return self._lock.is_open

    def ensure_lock(self) -> None:
        """Make sure that the store is still this writer's. A lock whose file was removed is taken again; a directory
        that was removed or renamed, or that is empty, is a store without versions again.

        Raises ClosedError in a forked process, EngineBusyError if another writer has got it.
        """
        if not self.is_locked:
            raise ClosedError(
                f"{self._lock.path} is not locked by this process (pid {os.getpid()}) but by pid {self._record.pid}, "
                "which it was forked from: publish there, or close that publisher and make one here"
            )
        if not self._lock.is_current():
            files.make_folder(self._directory)
            is_empty = not any(self._directory.iterdir())
            lost, self._lock = self._lock, self._lock_store()
            lost.close()
            if is_empty and self._seen is not None:
                logger.warning(
                    "%s was removed or renamed: it is made again, without the versions before", self._directory
                )
                self._seen = self._commit = None
            self._write_record(self._record)

    def begin(self, manifest: Manifest, version: WeightVersion, span: range) -> str:
        """Take a slot for a version and make room in it. Waits while readers hold all slots that there may be.

        `span`: the buckets that are written here. Returns what an `OriginWriter` needs to write others.

        Raises PeerTimeoutError, naming the readers, at the deadline; InsufficientMemoryError if there is no room;
        StaleVersionError if the number does not grow within its run, or the store has got another writer; ValueError
        if it is beyond the limits; IntegrityError if something that is no file is in the place of one.
        """
        if not 0 <= version.number <= MAX_VERSION:
            raise ValueError(f"version {version.number} is not from 0 to {MAX_VERSION}")
        self.ensure_lock()
        newest = self.newest
        if newest is not None and newest.run == version.run and version.number <= newest.number:
            raise StaleVersionError(
                f"version {version.number} is not above {newest.number}, the store's newest of this run"
            )
        self._check_pointer()  # whose slot is not ours to write
        if self._manifest is None or self._manifest[0] is not manifest:
            self._manifest = manifest, manifest.encode(), manifest.digest()
        _, data, digest = self._manifest
        layout, slot = _layout(manifest, self._address), self._free_slot()
        with on_failure(slot.lock.close):
            files.remove(slot.path / files.SEAL)
            self._prepare(slot, layout)
            held = None
            with contextlib.suppress(IntegrityError):
                held = files.read_file(slot.path / files.MANIFEST, MAX_MESSAGE_BYTES)
            if held != data:
                files.replace_file(slot.path / files.MANIFEST, data, fsync=self._address.fsync)
            number = self._record.attempt + 1
            self._write_record(msgspec.structs.replace(self._record, attempt=number, number=version.number, aborted=""))
            if len(span) < len(manifest.buckets):
                # For the others now. One that still writes here for a former attempt would have kept this writer out.
                slot.lock.unlock_from(locks.PINS_BYTES)
            self._files, self._slot_lock = OriginFiles(slot.path, layout, span), slot.lock
            self._attempt = _Attempt(version, digest, layout, slot)
        return encode(SlotAttempt(slot.number, number)).decode()

    def seal(self, digests: list[bytes]) -> Stored:
        """All files are finished, those of all origins: readers that know of the version can read it.

        `digests`: of all buckets. All that `commit` needs is done. Raises StaleVersionError if the store has got
        another writer, whose lock this one should have kept out.
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
        )
        files.replace_file(attempt.slot.path / files.SEAL, seal(Commit(FORMAT, stored)), fsync=self._address.fsync)
        super().close()
        self._check_pointer()
        commit = Commit(FORMAT, stored, former if former is None or former.slot != stored.slot else None)
        files.replace_file(self._directory / files.NEXT, seal(commit), fsync=self._address.fsync)
        attempt.sealed = commit
        return stored

    def commit(self) -> None:
        """Make the sealed version the newest, for all who read. Needs no room.

        Raises UpdateAbortedError if none is sealed, StaleVersionError if the store has got another writer,
        IntegrityError if the seal was removed.
        """
        attempt, path = self._attempt, self._directory / files.NEXT
        if attempt is None or attempt.sealed is None:
            raise UpdateAbortedError("no version is whole: it was committed or aborted, or buckets of it are missing")
        self._check_pointer()
        data, found = seal(attempt.sealed), files.read_file(path, MAX_RECORD_BYTES)
        if found is None:
            raise files.missing(path)
        if found != data:
            # Another writer's, say, whose engines have not taken it yet, and may refuse it.
            raise self._changed(path)
        os.replace(path, self._directory / files.POINTER)
        self._seen, self._commit, self._attempt = data, attempt.sealed, None
        if self._address.fsync:
            files.sync_directory(self._directory)

    def abort(self, reason: str) -> None:
        """Give the version up; its slot is free for the next. Says so to waiting readers. Idempotent."""
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
                    # A Ctrl-C came right after the commit's rename: the version is the store's newest.
                    self._seen, self._commit = data, attempt.sealed
                    return
            # Who has pinned the slot reads on: the seal is looked at only once, before.
            for path in (self._directory / files.NEXT, attempt.slot.path / files.SEAL):
                found = None
                with contextlib.suppress(IntegrityError):
                    found = read_record(path, Commit)
                # Another writer, which the lock should have kept out, may have put a version of its own there.
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
                name = "a publisher that has just begun" if holder is None else holder.describe()
                raise EngineBusyError(
                    f"{self._directory} is being written by {name}: close it first (asked by run {self._run})"
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
        """Remove what a writer that died left half replaced, or not committed."""
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
            f"{path} was changed by another process while run {self._run} had the store: there were two writers, or "
            "the filesystem lost a lock; close all publishers and begin again"
        )

    # --- slots ---

    def _free_slot(self) -> _Slot:
        """A slot that no reader has pinned: a new one while there are few, else the oldest, else another new one."""
        for _ in Deadline(self._deadline_seconds).polls():
            known = self._slots()
            previous = None if self._commit is None else self._commit.previous
            if len(known) >= self._address.num_slots:
                for number in self._by_age(known):
                    # With more than two slots the version before the newest is there while the next one is written.
                    is_kept = previous is not None and number == previous.slot and self._address.num_slots > 2
                    if is_kept and len(known) < self._address.max_slots:
                        continue
                    slot = self._try_slot(number)
                    if slot is not None:
                        return slot
            if len(known) < self._address.max_slots:
                # Not the newest version's, whose directory may have been removed.
                taken = known if self.newest is None else known | {self.newest.slot}
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
        """The slots that may be overwritten: without a whole version first, the version before the newest last."""
        newest, previous = self.newest, None if self._commit is None else self._commit.previous
        kept = None if previous is None else previous.slot
        ages = {number: self._sealed_at(number) for number in known if newest is None or number != newest.slot}
        return sorted(ages, key=lambda number: (number == kept, ages[number], number))

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
                    names = ["a trainer rank of a publish that was given up"]
            holders += [f"{name} holds slot {number}" for name in names]
        shown = "; ".join(holders) or "they have ended just now"
        return PeerTimeoutError(
            f"readers held every slot of {self._directory} that may be overwritten for {self._deadline_seconds:g} s: "
            f"{shown}. End them, or allow more than max_slots={self._address.max_slots}",
            peer=shown,
        )

    def _prepare(self, slot: _Slot, layout: files.FileLayout) -> None:
        """Make the slot's files and room in them. Raises InsufficientMemoryError before anything is written."""
        paths = [slot.path / files.data_name(file) for file in range(layout.num_files)]
        for path in set(slot.path.glob(files.data_name("*"))).difference(paths):
            files.remove(path)
        with contextlib.ExitStack() as stack:
            descriptors = []
            for path in paths:
                descriptors.append(files.open_file(path, os.O_RDWR | os.O_CREAT))
                stack.callback(os.close, descriptors[-1])
            needed = sum(
                max(0, size - os.fstat(descriptor).st_blocks * 512)
                for descriptor, size in zip(descriptors, layout.sizes_bytes, strict=True)
            )
            if needed and files.is_in_memory(slot.path):
                host_memory.require(needed, f"{slot.path}, in memory,", "put the store on a disk, or free memory")
            # With room for the readers' names, which a full disk must not keep from reading.
            files.grow(
                [slot.path / files.PINS, *paths],
                [slot.lock.descriptor, *descriptors],
                [locks.PINS_BYTES, *layout.sizes_bytes],
            )


class OriginWriter(_SlotWriter):
    """Writes one origin's files of versions that the `StoreWriter` of another rank has begun, maybe on another host.

    It opens nothing when it is made. It holds a lock on its part of the slot while it may write, so that no writer
    takes the slot for another version; the end of the process releases it.
    """

    @property
    def is_locked(self) -> bool:
        """False while nothing is written, and in a process that was forked from the one that writes."""
        return self._slot_lock is not None and self._slot_lock.is_open

    def begin(self, manifest: Manifest, origin: int, place: str) -> None:
        """Open the origin's files in the slot that the publishing rank's `begin` has named.

        Waits until that writer's record is seen here. Raises PeerTimeoutError at the deadline: the directory is not
        the same one, or the version was given up meanwhile; OSError, IntegrityError.
        """
        where: SlotAttempt = decode(place.encode(), SlotAttempt)
        slot = files.slot_path(self._address.directory, where.slot)
        for _ in Deadline(self._deadline_seconds).polls():
            if not self._is_written(where):
                continue
            # On a network filesystem names of new files may be seen later than a file that was replaced.
            with contextlib.suppress(FileNotFoundError):
                lock = LockFile(slot / files.PINS, os.O_RDWR)
                with on_failure(lock.close):
                    # The record again, under the lock: from here on no writer takes this slot for another attempt.
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
        """Return whether the publishing rank still makes this attempt, as far as this host sees."""
        record = read_record(self._address.directory / files.WRITER, WriterRecord)
        found = None if record is None else (record.run, record.attempt, record.aborted)
        return found == (self._run, where.attempt, "")

    def finish(self) -> None:
        super().finish()
        self.close()

    def abort(self, reason: str) -> None:
        """Stop writing; the publishing rank says why. Idempotent."""
        self.close()


def _layout(manifest: Manifest, address: StoreAddress) -> files.FileLayout:
    """`num_threads` files for each origin, as far as there may be. Raises ValueError for too many origins."""
    num_origins = len(manifest.spans)
    if num_origins > files.MAX_FILES:
        raise ValueError(
            f"{num_origins} origins have a data file each, a store's version has at most {files.MAX_FILES}: publish "
            "from fewer trainer hosts"
        )
    return files.FileLayout(manifest, num_origins * min(address.num_threads, files.MAX_FILES // num_origins))
