"""Kernel locks on ranges of files, taken by a slot's readers and writer and by the store's writer.

They are open-file-description locks (fcntl(2), F_OFD_SETLK): a crash releases them, threads with separate descriptors
exclude each other, and NFS forwards them to its server. A forked child closes the inherited descriptors, so that a lock
ends with the process that took it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import random
import struct
from pathlib import Path

import msgspec

from weightcast.errors import ManifestError, UnsupportedError
from weightcast.format.manifest import decode
from weightcast.host.closing import close_in_child, on_failure
from weightcast.store.files import must_read, open_file
from weightcast.store.records import ReaderRecord

PIN_BYTES = 256
NUM_PINS = 256
PINS_BYTES = NUM_PINS * PIN_BYTES
_NUM_TRIES = 32
_FLOCK = struct.Struct("@hhqqi4x")
_TO_END = 0


class LockFile:
    """An open file whose byte ranges are locked. Closing it, or the end of the process, releases all of them."""

    def __init__(self, path: Path, flags: int) -> None:
        """Open the file. Raises what `open_file` raises."""
        self.path = path
        # Unbuffered, so that closing it in a child writes nothing.
        self._file = close_in_child(io.FileIO(open_file(path, flags), "rb"))
        self.is_writable = flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def descriptor(self) -> int:
        return self._file.fileno()

    @property
    def is_open(self) -> bool:
        """False after `close`, and in a child forked from the process that opened it."""
        return not self._file.closed

    def is_current(self) -> bool:
        """Return whether the path still names this file, so that others who open the path see its locks."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return os.path.samestat(os.lstat(self.path), os.fstat(self.descriptor))
        return False

    def try_lock(self, start: int = 0, size: int = _TO_END) -> bool:
        """Lock a range, exclusively if the file was opened for writing. Returns False if another process has a part."""
        kind = fcntl.F_WRLCK if self.is_writable else fcntl.F_RDLCK
        try:
            self._call(fcntl.F_OFD_SETLK, kind, start, size)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock_from(self, start: int) -> None:
        """Release the locks from byte `start` on."""
        self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, start, _TO_END)

    def conflict(self, start: int = 0, size: int = _TO_END) -> tuple[int, int] | None:
        """Return a range that others have locked in this one, as (start, size), size 0 if endless; None if there is
        none.
        """
        kind, _, first, found, _ = _FLOCK.unpack(self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, start, size))
        return None if kind == fcntl.F_UNLCK else (first, found)

    def close(self) -> None:
        """Release everything. Idempotent."""
        if not self._file.closed:
            # Unlock explicitly: FUSE is not notified when a lock disappears with its file descriptor.
            with contextlib.suppress(OSError, UnsupportedError):
                self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, _TO_END)
            self._file.close()

    def _call(self, command: int, kind: int, start: int, size: int) -> bytes:
        try:
            return fcntl.fcntl(self.descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, start, size, 0))
        except OSError as exc:
            if exc.errno in (errno.EAGAIN, errno.EACCES):
                raise
            raise UnsupportedError(
                f"{self.path} can't be locked ({exc.strerror}): put the store on a filesystem with byte-range locks"
            ) from exc


def pin(path: Path, reader: ReaderRecord) -> LockFile | None:
    """Pin a slot for reading, by a lock on one record of its `pins`, which then names `reader`; None during a write.

    If the file can't be written, the record has no name. Raises IntegrityError if there is no such file.
    """
    record = msgspec.json.encode(reader)
    if len(record) > PIN_BYTES:
        label = reader.label.encode("ascii", "replace").decode()[:64]
        record = msgspec.json.encode(ReaderRecord(reader.host[:64], reader.pid, label))[:PIN_BYTES]
    with must_read(path):
        try:
            file = LockFile(path, os.O_RDWR)
        except OSError as exc:
            if exc.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            file = LockFile(path, os.O_RDONLY)
    first = random.randrange(NUM_PINS)
    with on_failure(file.close):
        for number in range(_NUM_TRIES):
            start = (first + number) % NUM_PINS * PIN_BYTES
            if file.try_lock(start, PIN_BYTES):
                if file.is_writable:
                    with contextlib.suppress(OSError):
                        os.pwrite(file.descriptor, record.ljust(PIN_BYTES), start)
                return file
    file.close()
    return None


def readers(path: Path) -> list[str]:
    """Return descriptions of the readers that have pinned a slot. Raises IntegrityError, OSError."""
    found, ranges = list[str](), [(0, PINS_BYTES)]
    with contextlib.closing(LockFile(path, os.O_RDONLY)) as file:
        while ranges:
            # The kernel reports any one lock in a range, not the first: search on both sides of it.
            start, end = ranges.pop()
            conflict = file.conflict(start, end - start)
            if conflict is None or conflict[1] != PIN_BYTES:  # the writer's lock is larger than a record
                continue
            record, name = max(start, conflict[0]), "a reader that could not write its name"
            with contextlib.suppress(ManifestError):
                name = decode(os.pread(file.descriptor, PIN_BYTES, record), ReaderRecord).describe()
            found.append(name)
            ranges += [pair for pair in ((start, record), (record + PIN_BYTES, end)) if pair[0] < pair[1]]
    return sorted(found)
