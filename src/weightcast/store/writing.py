"""The writing side of a store: one writer, a slot that nobody reads, the pointer last.

Invariants: the current version's slot is never touched, nor one that a reader has pinned; a slot's seal is gone before
its first byte changes and comes back after its last; the pointer moves only if it is still what this writer saw last.
Whatever fails before that leaves the version before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path

import msgspec

from weightcast import host_memory
from weightcast.bucket import root_digest
from weightcast.errors import (
    EngineBusyError,
    InsufficientMemoryError,
    IntegrityError,
    PeerTimeoutError,
    StaleVersionError,
)
from weightcast.manifest import Manifest, WeightVersion
from weightcast.store import locks
from weightcast.store.address import StoreAddress
from weightcast.store.files import (
    MANIFEST,
    PINS,
    POINTER,
    SEAL,
    SLOTS,
    WRITER,
    WRITER_LOCK,
    DataPlaces,
    data_name,
    grow,
    is_in_memory,
    no_space,
    read_file,
    replace_file,
    slot_path,
    write_at,
)
from weightcast.store.locks import LockFile
from weightcast.store.records import (
    FORMAT,
    MAX_REASON_CHARACTERS,
    MAX_RECORD_BYTES,
    Commit,
    Stored,
    Writer,
    seal,
    this_writer,
    unseal,
)

_POLL_SECONDS = 0.01
_OURS = {POINTER, WRITER, WRITER_LOCK, SLOTS, "lost+found"}


@dataclasses.dataclass(slots=True, eq=False)
class _Slot:
    """A slot that is being written: its lock, its open files and where the buckets go."""

    number: int
    path: Path
    lock: LockFile
    descriptors: list[int] = dataclasses.field(default_factory=list)

    def paths(self, num_files: int) -> list[Path]:
        return [self.path / data_name(file) for file in range(num_files)]

    def close_files(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())

    def close(self) -> None:
        self.close_files()
        self.lock.close()


@dataclasses.dataclass(slots=True, eq=False)
class _Attempt:
    """A version on its way into a slot."""

    version: WeightVersion
    manifest_digest: str
    num_buckets: int
    places: DataPlaces
    slot: _Slot


class StoreWriter:
    """Writes the versions of one run. `write` may run in several threads, the rest in one.

    Memory: none. Disk: the sum of the slots, each of which is as large as the largest version that it ever held.
    """

    def __init__(self, address: StoreAddress, run: str, *, deadline_seconds: float) -> None:
        """Take the store, and make it if there is none.

        Raises EngineBusyError, naming the writer that has it; ValueError if the directory holds other things;
        IntegrityError if its pointer is damaged.
        """
        self._address = address
        self._directory = address.directory
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._attempt: _Attempt | None = None
        self._manifest: tuple[Manifest, bytes, str] | None = None
        self._slot_manifests: dict[int, str] = {}
        _make_directory(self._directory)
        self._lock = self._take()
        try:
            self._seen = read_file(self._directory / POINTER, MAX_RECORD_BYTES)
            path = str(self._directory / POINTER)
            self._commit = None if self._seen is None else unseal(self._seen, Commit, path)
            self._sweep()
            self._record = this_writer(run)
            former = self._former_writer()
            if former is not None:
                self._record = msgspec.structs.replace(self._record, attempt=former.attempt)
            self._tell()
        except BaseException:
            self._lock.close()
            raise

    @property
    def newest(self) -> Stored | None:
        """The version that the pointer names."""
        return None if self._commit is None else self._commit.newest

    def begin(self, manifest: Manifest, version: WeightVersion) -> None:
        """Take a slot for a version and make room in it. Waits while readers hold all slots that there may be.

        Raises PeerTimeoutError, naming the readers, at the deadline; InsufficientMemoryError if there is no room;
        StaleVersionError if the number does not grow within its run, or the store has got another writer.
        """
        newest = self.newest
        if newest is not None and newest.run == version.run and version.number <= newest.number:
            raise StaleVersionError(
                f"version {version.number} is not above {newest.number}, the store's newest of this run"
            )
        self._check_pointer()  # whose slot is not ours to write
        data, digest = self._encoded(manifest)
        places = DataPlaces(manifest, self._address.num_threads)
        slot = self._free_slot()
        try:
            with contextlib.suppress(FileNotFoundError):
                (slot.path / SEAL).unlink()
            self._prepare(slot, places)
            if self._slot_manifests.get(slot.number) != digest:
                replace_file(slot.path / MANIFEST, data, fsync=self._address.fsync)
                self._slot_manifests[slot.number] = digest
            self._attempt = _Attempt(version, digest, len(manifest.buckets), places, slot)
            self._record = msgspec.structs.replace(
                self._record, attempt=self._record.attempt + 1, number=version.number, aborted=""
            )
            self._tell()
        except BaseException:
            self._attempt = None
            slot.close()
            raise

    def write(self, index: int, data: memoryview) -> None:
        """Write bucket `index` with its trailer. Raises InsufficientMemoryError, OSError."""
        attempt = self._attempt
        assert attempt is not None
        file, offset = attempt.places.at(index)
        try:
            write_at(attempt.slot.descriptors[file], data, offset)
        except OSError as exc:
            raise no_space(exc, attempt.slot.path / data_name(file)) from exc

    def commit(self, digests: list[bytes]) -> Stored:
        """Every bucket was written: make the version the newest.

        Raises StaleVersionError if the store has got another writer, whose lock this one should have kept out.
        """
        attempt, former = self._attempt, self.newest
        assert attempt is not None
        stored = Stored(
            run=attempt.version.run,
            number=attempt.version.number,
            slot=attempt.slot.number,
            num_files=attempt.places.num_files,
            num_buckets=attempt.num_buckets,
            manifest_digest=attempt.manifest_digest,
            root=root_digest(attempt.manifest_digest, digests),
            committed_at=time.time(),
        )
        if self._address.fsync:
            for descriptor in attempt.slot.descriptors:
                os.fdatasync(descriptor)
        # Closed before there is a seal: that is when a network filesystem's server has the bytes.
        attempt.slot.close_files()
        replace_file(attempt.slot.path / SEAL, seal(Commit(FORMAT, stored)), fsync=self._address.fsync)
        commit = Commit(FORMAT, stored, former if former is None or former.slot != stored.slot else None)
        self._move_pointer(commit)
        self._attempt = None
        attempt.slot.close()
        return stored

    def abort(self, reason: str) -> None:
        """Give the version up; its slot is free for the next. Says so to waiting readers. Idempotent."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        attempt.slot.close()
        self._record = msgspec.structs.replace(self._record, aborted=reason[:MAX_REASON_CHARACTERS] or "aborted")
        with contextlib.suppress(OSError, InsufficientMemoryError):
            self._tell()

    def close(self) -> None:
        """Let the store go. Idempotent."""
        self.abort("the publisher was closed")
        self._lock.close()

    # --- the store ---

    def _take(self) -> LockFile:
        path = self._directory / WRITER_LOCK
        lock = LockFile(path, os.O_RDWR | os.O_CREAT)
        try:
            if lock.try_lock():
                return lock
            holder = self._former_writer()
        except BaseException:
            lock.close()
            raise
        lock.close()
        name = "a publisher that has just begun" if holder is None else holder.describe()
        raise EngineBusyError(
            f"{self._directory} is being written by {name}: close it first (asked by run {self._run})"
        )

    def _former_writer(self) -> Writer | None:
        path = self._directory / WRITER
        data = read_file(path, MAX_RECORD_BYTES)
        with contextlib.suppress(IntegrityError):
            return None if data is None else unseal(data, Writer, str(path))
        return None

    def _tell(self) -> None:
        replace_file(self._directory / WRITER, seal(self._record))

    def _sweep(self) -> None:
        """Remove what a writer that died left half replaced."""
        for folder in (self._directory, *(self._directory / SLOTS).iterdir()):
            for name in (POINTER, WRITER, MANIFEST, SEAL):
                for path in folder.glob(f".{name}.*"):
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()

    def _move_pointer(self, commit: Commit) -> None:
        self._check_pointer()
        data = seal(commit)
        replace_file(self._directory / POINTER, data, fsync=self._address.fsync)
        self._seen, self._commit = data, commit

    def _check_pointer(self) -> None:
        path = self._directory / POINTER
        if read_file(path, MAX_RECORD_BYTES) != self._seen:
            raise StaleVersionError(
                f"{path} was changed by somebody else while run {self._run} had the store: there were two writers, or "
                "the filesystem lost a lock; close all publishers and begin anew"
            )

    def _encoded(self, manifest: Manifest) -> tuple[bytes, str]:
        if self._manifest is None or self._manifest[0] is not manifest:
            self._manifest = manifest, manifest.encode(), manifest.digest()
        return self._manifest[1:]

    # --- slots ---

    def _free_slot(self) -> _Slot:
        """A slot that nobody reads: a new one while there are few, else the oldest; up to the limit another new one."""
        end = time.monotonic() + self._deadline_seconds
        while True:
            known = self._slots()
            if len(known) >= self._address.num_slots:
                for number in self._by_age(known):
                    slot = self._try_slot(number)
                    if slot is not None:
                        return slot
            if len(known) < self._address.max_slots:
                number = next(n for n in range(len(known) + 1) if n not in known)
                slot_path(self._directory, number).mkdir()
                slot = self._try_slot(number)
                if slot is not None:
                    return slot
            if time.monotonic() >= end:
                raise self._nothing_free(known)
            time.sleep(_POLL_SECONDS)

    def _slots(self) -> set[int]:
        names = (entry.name for entry in (self._directory / SLOTS).iterdir())
        return {int(name) for name in names if name.isascii() and name.isdigit()}

    def _by_age(self, known: set[int]) -> list[int]:
        """The slots that may be overwritten: without a whole version first, the version before the newest last."""
        newest, previous = self.newest, None if self._commit is None else self._commit.previous
        kept = None if previous is None else previous.slot
        ages = {number: self._sealed_at(number) for number in known if newest is None or number != newest.slot}
        return sorted(ages, key=lambda number: (number == kept, ages[number], number))

    def _sealed_at(self, number: int) -> float:
        path = slot_path(self._directory, number) / SEAL
        with contextlib.suppress(IntegrityError):
            data = read_file(path, MAX_RECORD_BYTES)
            return 0.0 if data is None else unseal(data, Commit, str(path)).newest.committed_at
        return 0.0

    def _try_slot(self, number: int) -> _Slot | None:
        path = slot_path(self._directory, number)
        lock = LockFile(path / PINS, os.O_RDWR | os.O_CREAT)
        if lock.try_lock():
            return _Slot(number, path, lock)
        lock.close()
        return None

    def _nothing_free(self, known: set[int]) -> PeerTimeoutError:
        holders: list[str] = []
        for number in self._by_age(known):
            with contextlib.closing(LockFile(slot_path(self._directory, number) / PINS, os.O_RDWR)) as lock:
                holders += [f"{name} holds slot {number}" for name in locks.readers(lock)]
        shown = "; ".join(holders) or "they have let go just now"
        return PeerTimeoutError(
            f"readers held every slot of {self._directory} that may be overwritten for {self._deadline_seconds:g} s: "
            f"{shown}. End them, or allow more than max_slots={self._address.max_slots}",
            peer=shown,
        )

    def _prepare(self, slot: _Slot, places: DataPlaces) -> None:
        """Open the slot's files and make room in them. Raises InsufficientMemoryError before anything is written."""
        paths = slot.paths(places.num_files)
        for path in set(slot.path.glob(data_name("*"))).difference(paths):
            path.unlink()
        for path in paths:
            slot.descriptors.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        needed = sum(
            max(0, size - os.fstat(descriptor).st_blocks * 512)
            for descriptor, size in zip(slot.descriptors, places.sizes_bytes, strict=True)
        )
        if needed and is_in_memory(slot.path) and needed > (available := host_memory.available_bytes()):
            raise InsufficientMemoryError(
                f"{slot.path} needs {needed} bytes more of host memory, this host or container has {available} left: "
                "put the store on a disk, or free memory"
            )
        # With room for the readers' names, which a full disk must not keep from reading.
        grow(
            [slot.path / PINS, *paths],
            [slot.lock.descriptor, *slot.descriptors],
            [locks.PINS_BYTES, *places.sizes_bytes],
        )


def _make_directory(directory: Path) -> None:
    """Raises ValueError if it is there and holds other things than a store."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {entry.name for entry in directory.iterdir() if not entry.name.startswith(".")}
    foreign = sorted(names - _OURS)
    if foreign and WRITER_LOCK not in names:
        found = ", ".join(foreign[:4])
        raise ValueError(f"{directory} is no weightcast store, it holds {found}: name an empty or a new directory")
    (directory / SLOTS).mkdir(exist_ok=True)
