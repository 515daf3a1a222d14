"""The storage of a store in a directory: slots are files that are overwritten, under locks of fcntl.

Invariant: a slot that a reader has pinned, and a slot that a rank of an earlier attempt may still be writing, is never
overwritten.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from weightcast.errors import ClosedError, EngineBusyError, IntegrityError, PeerTimeoutError
from weightcast.format.manifest import Manifest
from weightcast.host import memory as host_memory
from weightcast.host.closing import on_failure
from weightcast.host.deadline import Deadline
from weightcast.store import files, locks
from weightcast.store.address import DirectoryAddress
from weightcast.store.locks import LockFile
from weightcast.store.records import Commit, ReaderRecord, SlotInfo, Stored, WriterRecord
from weightcast.store.storage import intact_record

_OURS = {files.POINTER, files.NEXT, files.WRITER, files.WRITER_LOCK, files.SLOTS, "lost+found"}


class SlotFiles:
    """The open data files of a complete version; see `BucketReader`."""

    def __init__(self, slot: Path, stored: Stored, manifest: Manifest) -> None:
        num_files, num_origins = stored.num_files, len(manifest.spans)
        if num_files % num_origins:
            raise IntegrityError(
                f"{slot} has {num_files} data files by its seal, but its manifest has {num_origins} origins, of which "
                "each has the same number of files: the two are not of one version; publish again"
            )
        self._layout = files.FileLayout(manifest, num_files)
        self._paths = [slot / files.data_name(file) for file in range(num_files)]
        self._descriptors: list[int] = []
        with on_failure(self.close):
            for path in self._paths:
                with files.must_read(path):
                    self._descriptors.append(files.open_file(path, os.O_RDONLY))

    def read(self, index: int, parts: Sequence[memoryview], start: int) -> None:
        file, offset = self._layout.at(index)
        files.read_at(self._descriptors[file], parts, offset + start, self._paths[file])

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


class LockedSlot:
    """A slot that is being written: the lock on it, and its open data files; see `Slot`."""

    def __init__(self, number: int, path: Path, lock: LockFile, address: DirectoryAddress) -> None:
        self.number = number
        self._is_left = False
        self._path = path
        self._lock = lock
        self._address = address
        self._open: dict[int, tuple[Path, int]] = {}

    @property
    def is_open(self) -> bool:
        return self._lock.is_open

    def prepare(self, manifest: Manifest, *, is_delta: bool) -> int:
        """Create and allocate the slot's files.

        The files of a delta have the size of a full version's, and holes where nothing is written. Bytes of a writer
        that died or aborted stay, so that the same version can be continued.
        """
        layout = _layout(manifest, self._address)
        self._is_left = not os.path.lexists(self._path / files.SEAL)
        files.remove(self._path / files.SEAL)
        paths = [self._path / files.data_name(file) for file in range(layout.num_files)]
        for path in set(self._path.glob(files.data_name("*"))).difference(paths):
            files.remove(path)
        with contextlib.ExitStack() as stack:
            descriptors = []
            for path in paths:
                descriptors.append(files.open_file(path, os.O_RDWR | os.O_CREAT))
                stack.callback(os.close, descriptors[-1])
            # The readers' records, too, so that a full disk does not keep readers from pinning.
            grown = [(self._path / files.PINS, self._lock.descriptor, locks.PINS_BYTES)]
            data_files = zip(paths, descriptors, layout.sizes_bytes, strict=True)
            if is_delta:
                for _, descriptor, size in data_files:
                    if not self._is_left:
                        os.ftruncate(descriptor, 0)
                    os.ftruncate(descriptor, size)
            else:
                grown += data_files
                needed = sum(max(0, size - os.fstat(descriptor).st_blocks * 512) for _, descriptor, size in grown[1:])
                if needed and files.is_in_memory(self._path):
                    host_memory.require(needed, f"{self._path}, in memory,", "put the store on a disk, or free memory")
            files.grow(grown)
        return layout.num_files

    def left(self, stored: Stored, manifest: Manifest) -> SlotFiles | None:
        return SlotFiles(self._path, stored, manifest) if self._is_left else None

    def keep(self, index: int) -> None: ...

    def allow_origins(self) -> None:
        # Unlock the other origins' bytes for their writers. A writer of a former attempt would have blocked this.
        self._lock.unlock_from(locks.PINS_BYTES)

    def open(self, manifest: Manifest, span: range) -> None:
        """See `Slot`. Raises IntegrityError if a path is not a regular file, OSError."""
        self._layout, self._span = _layout(manifest, self._address), span
        for file in sorted({self._layout.at(index)[0] for index in span}):
            path = self._path / files.data_name(file)
            self._open[file] = path, files.open_file(path, os.O_RDWR)

    def write(self, number: int, data: memoryview) -> None:
        file, offset = self._layout.at(self._span[number])
        path, descriptor = self._open[file]
        with files.room_for(path):
            files.write_at(descriptor, data, offset)

    def finish(self) -> None:
        """Close the files after all was written, so that a network filesystem's server has the bytes."""
        while self._open:
            _, (path, descriptor) = self._open.popitem()
            with files.room_for(path):
                try:
                    if self._address.fsync:
                        os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)

    def close(self) -> None:
        while self._open:
            _, (_, descriptor) = self._open.popitem()
            with contextlib.suppress(OSError):  # their content is discarded anyway
                os.close(descriptor)
        self._lock.close()


class DirectoryStorage:
    """See `Storage`. Disk: the sum of the slots, each as large as its largest version so far."""

    def __init__(self, address: DirectoryAddress, deadline_seconds: float) -> None:
        self._address = address
        self._directory = address.directory
        self._deadline_seconds = deadline_seconds
        self._lock: LockFile | None = None

    def path(self, name: str, slot: int | None = None) -> Path:
        folder = self._directory
        if slot is not None:
            folder = folder / files.SLOTS / str(slot)
            files.check_folder(folder.parent)
            files.check_folder(folder)
        return folder / name if name else folder

    def read(self, name: str, max_bytes: int, slot: int | None = None) -> bytes | None:
        return files.read_file(self.path(name, slot), max_bytes)

    def slot_numbers(self) -> set[int]:
        folder = self._directory / files.SLOTS
        files.check_folder(folder)
        with contextlib.suppress(FileNotFoundError):
            names = {path.name for path in folder.iterdir()}
            return set(map(int, names.intersection(map(str, range(files.MAX_STORED_SLOTS)))))
        return set()

    def slots(self) -> list[SlotInfo]:
        found = []
        for slot in sorted(self.slot_numbers()):
            path, readers, num_bytes = self.path("", slot), list[str](), 0
            with contextlib.suppress(FileNotFoundError):
                readers = locks.readers(path / files.PINS)
            for file in path.iterdir():
                with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
                    num_bytes += file.lstat().st_blocks * 512
            found.append(SlotInfo(slot, num_bytes, readers))
        return found

    def has_writer(self, record: WriterRecord | None) -> bool:
        path = self.path(files.WRITER_LOCK)
        with files.must_read(path):
            try:
                lock = LockFile(path, os.O_RDONLY)
            except FileNotFoundError:
                return False
        with contextlib.closing(lock):
            return lock.conflict() is not None

    def pin(self, slot: int, reader: ReaderRecord) -> LockFile | None:
        return locks.pin(self.path(files.PINS, slot), reader)

    def open_slot(self, stored: Stored, manifest: Manifest) -> SlotFiles:
        return SlotFiles(self.path("", stored.slot), stored, manifest)

    def close(self) -> None: ...

    # --- for writers ---

    def lock(self, run: str) -> None:
        files.make_folder(self._directory)
        names = {entry.name for entry in self._directory.iterdir() if not entry.name.startswith(".")}
        foreign = sorted(names - _OURS)
        if foreign and files.WRITER_LOCK not in names:
            found = ", ".join(foreign[:4])
            raise ValueError(
                f"{self._directory} is not a weightcast store, since it has {found}: name an empty or a new directory"
            )
        self._lock = self._new_lock(run)

    def ensure_lock(self, run: str) -> bool:
        lock = self._lock
        if lock is None or not lock.is_open:
            owner = self._owner()
            raise ClosedError(
                f"{self.path(files.WRITER_LOCK)} is locked by {owner}, from which this process (pid {os.getpid()}) was "
                "forked: publish in that process, or close the publisher there and make one here"
            )
        if lock.is_current():
            return False
        files.make_folder(self._directory)
        self._lock = self._new_lock(run)
        lock.close()
        return True

    @property
    def is_locked(self) -> bool:
        return self._lock is not None and self._lock.is_open

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def sweep(self) -> None:
        left, newest = (intact_record(self, name, Commit) for name in (files.NEXT, files.POINTER))
        if left is not None and left != newest:  # its writer has ended after the seal, before the commit
            self.remove(files.SEAL, left.newest.slot)
        self.remove(files.NEXT)
        for folder in (self._directory, *(self.path("", number) for number in self._made_slots())):
            for name in (files.POINTER, files.NEXT, files.WRITER, files.MANIFEST, files.SEAL):
                for path in folder.glob(f".{name}.*"):
                    files.remove(path)

    def write(self, name: str, data: bytes, slot: int | None = None) -> None:
        files.replace_file(self.path(name, slot), data, fsync=self._address.fsync)

    def write_owner(self, data: bytes) -> None:
        if self._lock is not None and self._lock.is_current():
            files.replace_file(self.path(files.WRITER), data)

    def check_owner(self) -> None: ...

    def remove(self, name: str, slot: int | None = None) -> None:
        files.remove(self.path(name, slot))

    def commit(self, data: bytes, former: bytes | None) -> None:
        os.replace(self.path(files.NEXT), self.path(files.POINTER))
        if self._address.fsync:
            files.sync_directory(self._directory)

    def free_slot(self, newest: set[int], previous: set[int], attempt: int, *, continues: bool) -> LockedSlot:
        """Return a slot that no reader has pinned: one without a version, or a new one up to `num_slots`, else the
        oldest, else a new one.
        """
        for _ in Deadline(self._deadline_seconds).polls():
            known = self._made_slots()
            # In the order of overwriting: incomplete ones first, the version before the newest last.
            by_age = sorted(known - newest, key=lambda number: (number in previous, self._sealed_at(number), number))
            for number in by_age:
                if len(known) < self._address.num_slots and self._sealed_at(number):
                    continue
                # With more than two slots, keep the version before the newest while the next one is written.
                is_kept = number in previous and self._address.num_slots > 2
                if is_kept and len(known) < self._address.max_slots:
                    continue
                slot = self._try_slot(number)
                if slot is not None:
                    return slot
            if len(known) < self._address.max_slots:
                # Not the newest version's number, whose directory may have been removed.
                taken = known | newest
                number = next(n for n in range(len(taken) + 1) if n not in taken)
                files.make_folder(self.path("", number))
                slot = self._try_slot(number)
                if slot is not None:
                    return slot
        holders = []
        for number in by_age:
            path = self.path(files.PINS, number)
            names = locks.readers(path)
            with contextlib.closing(LockFile(path, os.O_RDONLY)) as lock:
                if not names and lock.conflict(locks.PINS_BYTES) is not None:
                    names = ["a trainer rank of an aborted publish"]
            holders += [f"{name} holds slot {number}" for name in names]
        shown = "; ".join(holders) or "they have just ended"
        raise PeerTimeoutError(
            f"readers held every slot of {self._directory} that may be overwritten for {self._deadline_seconds:g} s: "
            f"{shown}. End them, or allow more than max_slots={self._address.max_slots}",
            peer=shown,
        )

    def join_slot(self, slot: int, origin: int) -> LockedSlot | None:
        path = self.path("", slot)
        lock = LockFile(path / files.PINS, os.O_RDWR)
        with on_failure(lock.close):
            if lock.try_lock(locks.PINS_BYTES + origin, 1):
                return LockedSlot(slot, path, lock, self._address)
        lock.close()
        return None

    def _new_lock(self, run: str) -> LockFile:
        lock = LockFile(self.path(files.WRITER_LOCK), os.O_RDWR | os.O_CREAT)
        with on_failure(lock.close):
            if not lock.try_lock():
                raise EngineBusyError(
                    f"{self._directory} is being written by {self._owner()}: close it first (requested by run {run})"
                )
        return lock

    def _owner(self) -> str:
        holder = intact_record(self, files.WRITER, WriterRecord)
        return "a publisher that has just started" if holder is None else holder.describe()

    def _made_slots(self) -> set[int]:
        files.check_folder(self._directory / files.SLOTS)
        files.make_folder(self._directory / files.SLOTS)
        return self.slot_numbers()

    def _sealed_at(self, number: int) -> float:
        sealed = intact_record(self, files.SEAL, Commit, number)
        return 0.0 if sealed is None else sealed.newest.committed_at

    def _try_slot(self, number: int) -> LockedSlot | None:
        path = self.path("", number)
        lock = LockFile(path / files.PINS, os.O_RDWR | os.O_CREAT)
        if lock.try_lock():
            return LockedSlot(number, path, lock, self._address)
        lock.close()
        return None


def _layout(manifest: Manifest, address: DirectoryAddress) -> files.FileLayout:
    """Return a layout with `num_threads` files for each origin, within the limit. Raises ValueError for too many."""
    num_origins = len(manifest.spans)
    if num_origins > files.MAX_FILES:
        raise ValueError(
            f"{num_origins} origins need a data file each, but a store's version has at most {files.MAX_FILES} files: "
            "publish from fewer trainer hosts"
        )
    return files.FileLayout(manifest, num_origins * min(address.num_threads, files.MAX_FILES // num_origins))
