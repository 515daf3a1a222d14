"""A filesystem in user space that sees other hosts' changes as late as an NFS client may: `BACKING MOUNTPOINT SECONDS`.

Two mounts over one directory are two hosts. What holds is close-to-open: bytes that are written reach the directory
when the file is closed, a file that is opened shows what was there then, and cached bytes may stay while it is open.
Attributes and names, also that there is none, are believed for SECONDS. A file that another mount has replaced is
stale. Renames are at once and atomic, locks are those of the directory's own files.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
import threading
import time
from typing import Any

import mfusepy

BLOCK_BYTES = 4096
_FLOCK = struct.Struct("@hhqqi4x")
_STAT_FIELDS = ["mode", "ino", "nlink", "uid", "gid", "size", "blocks", "mtime", "ctime", "atime"]
_STAT = tuple(f"st_{field}" for field in _STAT_FIELDS)


class Open:
    """An open file: the backing descriptor, and what this mount has written and not yet handed over."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.inode = os.fstat(descriptor).st_ino
        self.dirty: dict[int, bytes] = {}


class CloseToOpen(mfusepy.Operations):  # type: ignore[misc]
    use_ns = False

    def __init__(self, backing: str, late_seconds: float) -> None:
        self._backing = backing
        self._late_seconds = late_seconds
        self._lock = threading.RLock()
        self._open: dict[int, Open] = {}
        self._names: dict[str, tuple[float, dict[str, Any] | int]] = {}
        self._pages: dict[int, tuple[tuple[int, int], dict[int, bytes]]] = {}

    def _path(self, path: str) -> str:
        return self._backing + path

    def _seen(self, path: str) -> dict[str, Any] | int:
        """Attributes, or the errno, as this mount believes them."""
        known = self._names.get(path)
        if known is not None and time.monotonic() - known[0] < self._late_seconds:
            return known[1]
        try:
            found: dict[str, Any] | int = _attributes(os.lstat(self._path(path)))
        except OSError as exc:
            found = exc.errno or errno.EIO
        self._names[path] = time.monotonic(), found
        return found

    def _forget(self, *paths: str) -> None:
        for path in paths:
            self._names.pop(path, None)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        with self._lock:
            if fh is not None and fh in self._open:
                self._flush(fh)
                return _attributes(os.fstat(self._open[fh].descriptor))
            found = self._seen(path)
            if isinstance(found, int):
                raise mfusepy.FuseOSError(found)
            return found

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._path(path))]

    def open(self, path: str, flags: int) -> int:
        return self._opened(path, flags & ~os.O_CREAT, 0)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        with self._lock:
            self._forget(path)
        return self._opened(path, os.O_RDWR | os.O_CREAT, mode)

    def _opened(self, path: str, flags: int, mode: int) -> int:
        with self._lock:
            # Always readable: a write of part of a block reads the rest.
            access = os.O_RDWR if flags & os.O_ACCMODE != os.O_RDONLY else os.O_RDONLY
            descriptor = os.open(self._path(path), (flags & ~os.O_ACCMODE) | access, mode)
            self._open[descriptor] = file = Open(descriptor)
            stat = os.fstat(descriptor)
            change = (stat.st_mtime_ns, stat.st_size)
            known = self._pages.get(file.inode)
            if known is None or known[0] != change:
                self._pages[file.inode] = change, {}
            return descriptor

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        with self._lock:
            file = self._open[fh]
            self._flush(fh)
            stat = os.fstat(fh)
            if stat.st_nlink == 0 and self._pages[file.inode][1].get(offset // BLOCK_BYTES) is None:
                raise mfusepy.FuseOSError(errno.ESTALE)
            pages, data = self._pages[file.inode][1], b""
            for block in range(offset // BLOCK_BYTES, (offset + size - 1) // BLOCK_BYTES + 1):
                if block not in pages:
                    pages[block] = os.pread(fh, BLOCK_BYTES, block * BLOCK_BYTES)
                data += pages[block]
                if len(pages[block]) < BLOCK_BYTES:
                    break
            start = offset % BLOCK_BYTES
            return data[start : start + size]

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        with self._lock:
            self._open[fh].dirty[offset] = bytes(data)
            return len(data)

    def _flush(self, fh: int) -> None:
        file = self._open[fh]
        dirty, file.dirty = file.dirty, {}
        if not dirty:
            return
        for offset, data in dirty.items():
            os.pwrite(fh, data, offset)
        # Every change has an attribute of its own, as NFS's change attribute.
        os.utime(fh, ns=(0, time.time_ns()))
        stat = os.fstat(fh)
        self._pages[file.inode] = (stat.st_mtime_ns, stat.st_size), {}

    def flush(self, path: str, fh: int) -> None:
        with self._lock:
            self._flush(fh)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self.flush(path, fh)

    def release(self, path: str, fh: int) -> None:
        with self._lock:
            self._flush(fh)
            del self._open[fh]
            os.close(fh)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        with self._lock:
            if fh is not None:
                self._flush(fh)
            os.truncate(self._path(path) if fh is None else fh, length)
            self._forget(path)

    def lock(self, path: str, fh: int, cmd: int, lock: Any) -> int:
        """As an NFS client: of this open file, at the server."""
        flock = ctypes.cast(lock, ctypes.POINTER(ctypes.c_byte * _FLOCK.size)).contents
        kind, whence, start, size, _ = _FLOCK.unpack(bytes(flock))
        command = fcntl.F_OFD_GETLK if cmd == fcntl.F_GETLK else fcntl.F_OFD_SETLK
        found = fcntl.fcntl(fh, command, _FLOCK.pack(kind, whence, start, size, 0))
        if cmd == fcntl.F_GETLK:
            ctypes.memmove(flock, found, _FLOCK.size)
        return 0

    def rename(self, old: str, new: str) -> None:
        with self._lock:
            os.rename(self._path(old), self._path(new))
            self._forget(old, new)

    def unlink(self, path: str) -> None:
        with self._lock:
            os.unlink(self._path(path))
            self._forget(path)

    def mkdir(self, path: str, mode: int) -> None:
        with self._lock:
            os.mkdir(self._path(path), mode)
            self._forget(path)

    def rmdir(self, path: str) -> None:
        with self._lock:
            os.rmdir(self._path(path))
            self._forget(path)


def _attributes(stat: os.stat_result) -> dict[str, Any]:
    return {name: getattr(stat, name) for name in _STAT}


if __name__ == "__main__":
    backing, mountpoint, seconds = sys.argv[1:]
    mfusepy.FUSE(
        CloseToOpen(backing, float(seconds)),
        mountpoint,
        foreground=True,
        nothreads=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        direct_io=True,
    )
