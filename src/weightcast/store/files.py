"""Files of a store: small ones are read whole and replaced atomically, data files are allocated and laid out.

Invariants: no file is mapped, so that a truncated file is an error and not a signal; in the store's directory only
regular files and directories are accepted: links are not followed, FIFOs are not opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from weightcast.errors import InsufficientMemoryError, IntegrityError, Translated
from weightcast.format.bucket import HEADER_BYTES
from weightcast.format.manifest import Manifest
from weightcast.host.closing import on_failure

POINTER = "current.json"
NEXT = "next.json"
WRITER_LOCK = "writer.lock"
WRITER = "writer.json"
SLOTS = "slots"
MANIFEST = "manifest.json"
SEAL = "seal.json"
PINS = "pins"
FILE_ALIGNMENT_BYTES = 4096
MAX_STORED_SLOTS = 1 << 10
MAX_FILES = 1 << 10
_STALE_TRIES = 4
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV)
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_folder(path: Path) -> None:
    """Raise IntegrityError if the path exists and is not a directory; a link to one is refused, too."""
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not stat.S_ISDIR(mode):
            raise _misplaced(path, mode, "a directory")


def make_folder(path: Path) -> None:
    """Create a directory unless it exists. Raises InsufficientMemoryError, OSError."""
    try:
        with room_for(path):
            path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise OSError(exc.errno, f"the directory {path} can't be made: {exc.strerror}") from exc


def open_file(path: Path, flags: int) -> int:
    """Open a regular file. Raises IntegrityError if the path is not a regular file, OSError.

    Raises InsufficientMemoryError if the file is to be created and there is no room.
    """
    try:
        with room_for(path):
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as exc:
        if exc.errno in _NO_FILE:
            raise _misplaced(path, os.lstat(path).st_mode, "a file") from exc
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _misplaced(path, mode, "a file")
    return descriptor


def remove(path: Path) -> None:
    """Remove a file if it exists. Raises IntegrityError if it is a directory, OSError."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError as exc:
        raise _misplaced(path, stat.S_IFDIR, "a file") from exc


def _misplaced(path: Path, mode: int, expected: str) -> IntegrityError:
    found = _KINDS.get(stat.S_IFMT(mode), "something else")
    return IntegrityError(f"{path} is {found}, expected {expected}: remove it, and publish again")


def must_read(path: Path) -> Translated:
    """Return a context that raises IntegrityError for any OSError of reading the file `path`."""

    def raise_as_files(error: OSError) -> NoReturn:
        is_missing = isinstance(error, FileNotFoundError)
        raise missing(path) if is_missing else IntegrityError(f"{path} can't be read: {error.strerror}") from error

    return Translated(OSError, raise_as_files)


def missing(path: Path | str) -> IntegrityError:
    return IntegrityError(f"{path} is missing: a part of the store was removed; publish again")


def data_name(file: int | str) -> str:
    return f"data.{file}"


class FileLayout:
    """Aligned offsets of a manifest's buckets in `num_files` files, equally many for each origin.

    Bucket k of an origin with n files is in its file k mod n. An origin may have several files, since a filesystem lets
    only one thread at a time write to a file.
    """

    def __init__(self, manifest: Manifest, num_files: int) -> None:
        """`num_files`: a multiple of the number of origins."""
        self.num_files = num_files
        self.sizes_bytes = [0] * num_files
        self._places: list[tuple[int, int]] = []
        each = num_files // len(manifest.spans)
        for origin, span in enumerate(manifest.spans):
            for number, index in enumerate(span):
                file = origin * each + number % each
                offset = self.sizes_bytes[file]
                self._places.append((file, offset))
                end = offset + HEADER_BYTES + manifest.buckets[index]
                self.sizes_bytes[file] = -(-end // FILE_ALIGNMENT_BYTES) * FILE_ALIGNMENT_BYTES

    def at(self, index: int) -> tuple[int, int]:
        """Return the file number and the offset in bytes of a bucket."""
        return self._places[index]


def read_file(path: Path, max_bytes: int) -> bytes | None:
    """Return the present content of a small file; None if it does not exist. Raises IntegrityError.

    It is opened again if it becomes stale because another NFS client has replaced it.
    """
    for _ in range(_STALE_TRIES):
        with must_read(path):
            try:
                descriptor = open_file(path, os.O_RDONLY)
                try:
                    data = b""
                    while more := os.read(descriptor, max(os.fstat(descriptor).st_size, len(data)) + 1 - len(data)):
                        data += more
                        if len(data) > max_bytes:
                            raise IntegrityError(
                                f"{path} has more than {max_bytes} bytes, so it is not a file of a weightcast store: "
                                "remove it, and publish again"
                            )
                    return data
                finally:
                    os.close(descriptor)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as exc:
                if exc.errno != errno.ESTALE:
                    raise
    raise IntegrityError(f"{path} was replaced {_STALE_TRIES} times while it was read: read it again")


def replace_file(path: Path, data: bytes, *, fsync: bool = False) -> None:
    """Replace the file's content by `data`, atomically for readers. A crash leaves the former content.

    The new file is closed before it is renamed, since a network filesystem sends its bytes upon close.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")

    def discard() -> None:
        with contextlib.suppress(OSError):
            temporary.unlink()

    try:
        with on_failure(discard), room_for(path):
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                write_at(descriptor, memoryview(data), 0)
                if fsync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
    except IsADirectoryError as exc:
        raise _misplaced(path, stat.S_IFDIR, "a file") from exc
    if fsync:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of it. Raises OSError."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def read_at(descriptor: int, parts: Sequence[memoryview], offset: int, path: Path) -> None:
    """Fill `parts`, one after another. Raises IntegrityError if the file is too short, or can't be read."""
    left, end = list(parts), offset + sum(map(len, parts))
    try:
        while left:
            num_bytes = os.preadv(descriptor, left, offset)
            if not num_bytes:
                raise IntegrityError(
                    f"{path} ends after {offset} bytes, expected {end}: it was truncated; publish again"
                )
            offset += num_bytes
            while left and num_bytes >= len(left[0]):
                num_bytes -= len(left.pop(0))
            if num_bytes:
                left[0] = left[0][num_bytes:]
    except OSError as exc:
        raise IntegrityError(f"{path} can't be read from byte {offset} on: {exc.strerror}") from exc


def grow(opened: Sequence[tuple[Path, int, int]]) -> None:
    """Allocate space for open files: each one's path, descriptor and size in bytes. Files are never shrunk.

    Raises InsufficientMemoryError, with the files unchanged, if there is no room.
    """
    former = [os.fstat(descriptor) for _, descriptor, _ in opened]

    def cut_back() -> None:
        for (_, descriptor, _), stat in zip(opened, former, strict=True):
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, stat.st_size)

    with on_failure(cut_back):
        for (path, descriptor, size), stat in zip(opened, former, strict=True):
            if size > stat.st_size or size > stat.st_blocks * 512:
                with room_for(path):
                    os.posix_fallocate(descriptor, 0, size)


def room_for(path: Path) -> Translated:
    """Return a context that raises InsufficientMemoryError for an OSError of missing room; others are raised on."""

    def raise_as_memory(error: OSError) -> None:
        if error.errno not in _NO_SPACE:
            return
        what, remedy = f"{error.strerror}", "Free space, or use fewer slots (num_slots)"
        if error.errno == errno.EDQUOT:
            what = f"{what} (of bytes or of files)"
            remedy = "Free some, have the quota raised, or use fewer slots (num_slots)"
        elif error.errno == errno.ENOSPC and (free := _without_inodes(path)) is not None:
            what = f"the filesystem has no inodes left, though {free} bytes are free"
            remedy = "Remove files there, or create the filesystem with more inodes"
        found = f"no room for {path}: {what}; the former version stays. {remedy}"
        raise InsufficientMemoryError(found) from error

    return Translated(OSError, raise_as_memory)


def _without_inodes(path: Path) -> int | None:
    """Return the free bytes of the filesystem of `path` if it has no inodes left; else None."""
    folder = next((folder for folder in path.parents if folder.is_dir()), path)
    with contextlib.suppress(OSError):
        found = os.statvfs(folder)
        if found.f_files and not found.f_favail:
            return found.f_bavail * found.f_frsize
    return None


def is_in_memory(path: Path) -> bool:
    """Return whether a directory's filesystem keeps its files in host memory (tmpfs)."""
    device = os.stat(path).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        for words in map(str.split, lines):
            if words[2] == number and "-" in words:
                return words[words.index("-") + 1] in ("tmpfs", "ramfs")
    return False
