"""Memory that this process can still allocate, and memory that it shares with other processes.

The available memory is the least of the host's and that of every enclosing cgroup.

Sources: `MemAvailable` of proc(5); `memory.max`, `memory.current` and `inactive_file` of cgroup v2, and their v1
counterparts. A value that can't be read sets no limit. Nothing is cached.

Shared memory is anonymous, with a unique name. Invariants: it is sealed and never shrinks, so that no access to a
mapping can fail; memory of a fixed size is never resized; it is freed with the last process that has it; another
process's memory is mapped only if it has the expected name, size and seals.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.errors import InsufficientMemoryError, ManifestError, UnsupportedError
from weightcast.host.closing import on_failure
from weightcast.host.descriptors import shortage

if TYPE_CHECKING:
    import torch

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_UNKNOWN_BYTES = 1 << 62

LESS_AT_ONCE = 'publish with install="streaming" or smaller buckets, or free memory'
"""The remedy in errors about a transport's buffers."""


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that can be allocated now without swapping and within all cgroup limits; never negative.

    File pages that the kernel would reclaim first (`inactive_file`) count as available.
    """
    rooms: list[int] = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            rooms += [room for mount in (cgroups, cgroups / "unified") for room in _rooms_upwards(mount, path, _V2)]
        elif "memory" in controllers.split(","):
            rooms += _rooms_upwards(cgroups / "memory", path, _V1)
    host_kib = _fields(proc / "meminfo").get("MemAvailable:")
    if host_kib is not None:
        rooms.append(host_kib * 1024)
    return max(0, min(rooms, default=_UNKNOWN_BYTES))


def require(num_bytes: int, what: str, remedy: str) -> None:
    """Raise InsufficientMemoryError unless `num_bytes` are available.

    `what`: their purpose; `remedy`: for the error.
    """
    available = available_bytes()
    if num_bytes > available:
        raise InsufficientMemoryError(
            f"{what} needs {num_bytes} bytes, this host or container has {available} left: {remedy}"
        )


def host_identity() -> str:
    """Return an id that is equal for processes that can share memory: of one boot, network namespace and user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()}/{os.readlink(namespace)}/{os.geteuid()}"
    except OSError:
        return f"process {os.getpid()}"


def _rooms_upwards(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Yield the available memory of a cgroup and of each of its ancestors, up to the mount.

    In a container the path may be the host's, which is not visible; then the mount itself is the container's cgroup.
    """
    group = mount / path.lstrip("/")
    if ".." in group.parts or not group.is_dir():
        group = mount
    limit_name, usage_name, reclaimable_name = names
    while True:
        limit, usage = _text(group / limit_name).strip(), _text(group / usage_name).strip()
        if limit.isdigit() and usage.isdigit():
            yield int(limit) - int(usage) + _fields(group / "memory.stat").get(reclaimable_name, 0)
        if group == mount:
            return
        group = group.parent


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and words[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# --- memory that is shared ---

_NAME = "weightcast-buckets-"
_NEVER_SHRINKS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_NEVER_RESIZED = _NEVER_SHRINKS | fcntl.F_SEAL_GROW


class MappedMemory(mmap.mmap):
    """A mapping of shared memory, which exists as long as a tensor of it does, and keeps `memory` open."""

    memory: SharedMemory

    def tensor(self) -> torch.Tensor:
        """Return the memory as a flat uint8 tensor, which keeps it mapped."""
        import torch  # imported here, since it is slow and not all users of this module need it

        return torch.frombuffer(self, dtype=torch.uint8)

    def reread(self, part: torch.Tensor) -> None:
        """Reset the whole pages of `part`, in a private mapping, to the shared content."""
        start = int(part.storage_offset())
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.madvise(mmap.MADV_DONTNEED, first, start + part.numel() - first)

    def free(self) -> None:
        """Free the memory's pages at once (MADV_REMOVE): every process that maps them then reads zeros."""
        self.madvise(mmap.MADV_REMOVE)


class SharedMemory:
    """Anonymous memory of this or another process, with a descriptor that is open until `close`.

    `location`: text with which other processes of this user open it; empty if the descriptor came over a socket.
    """

    def __init__(self, descriptor: int, location: str = "") -> None:
        self.descriptor, self.location = descriptor, location
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False

    @classmethod
    def make(cls, size_bytes: int | None = None, what: str = "a buffer of this update") -> SharedMemory:
        """Make some, of whole pages of zeros, which cost memory when they are first written; None: it may `grow`.

        Raises InsufficientMemoryError that names `what` if the host or a cgroup hasn't that much left.
        """
        name = f"{_NAME}{os.getpid()}-{secrets.token_hex(16)}"
        try:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as exc:
            raise InsufficientMemoryError(f"can't make shared memory for {what}: {shortage(exc) or exc}") from exc
        size_bytes = None if size_bytes is None else _in_pages(size_bytes)
        memory = cls(descriptor, f"{os.getpid()}/{descriptor}/{size_bytes or 0}/{name}")
        with on_failure(memory.close):
            if size_bytes is not None:
                memory.grow(size_bytes, what)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _NEVER_SHRINKS if size_bytes is None else _NEVER_RESIZED)
        return memory

    @classmethod
    def open(cls, location: str) -> SharedMemory:
        """Open another process's.

        Raises UnsupportedError where this process can't reach it: in another container, on another host, for another
        user, or if that process has ended.
        """
        try:
            pid, number, size, name = location.split("/")
            memory = cls(os.open(f"/proc/{int(pid)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC), location)
            with on_failure(memory.close):
                found = os.readlink(f"/proc/self/fd/{memory.descriptor}")
                if found != f"/memfd:{name} (deleted)" or not name.startswith(_NAME):
                    raise OSError(f"descriptor {number} of process {pid} is another file")
                memory._check(int(size) or None)
            return memory
        except (OSError, ValueError, ManifestError) as exc:
            raise UnsupportedError(
                f"memory that processes of one host share can't be reached: {exc}. Have these processes in one "
                "container, or send over ipc://"
            ) from exc

    @classmethod
    def received(cls, descriptor: int, size_bytes: int) -> SharedMemory:
        """Own a descriptor that came over a socket, also if it is not of `size_bytes`, sealed: raises ManifestError."""
        memory = cls(descriptor)
        with on_failure(memory.close):
            memory._check(size_bytes)
        return memory

    @staticmethod
    def of(tensor: torch.Tensor) -> SharedMemory | None:
        """The memory that a tensor of this process is a view of, if it is mapped as shared."""
        mapping = _mapped.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None
        return None if mapping is None else mapping.memory

    def _check(self, size_bytes: int | None) -> None:
        """Raises ManifestError unless it has that size for good; None: unless it can't shrink."""
        try:
            size, seals = os.fstat(self.descriptor).st_size, fcntl.fcntl(self.descriptor, fcntl.F_GET_SEALS)
        except OSError as exc:
            raise ManifestError(f"a descriptor is not of anonymous shared memory: {exc}", fault="type") from exc
        if size_bytes is not None and (size != size_bytes or not size):
            raise ManifestError(f"shared memory has {size} bytes, {size_bytes} were announced", fault="size")
        expected = _NEVER_SHRINKS if size_bytes is None else _NEVER_RESIZED
        if seals & expected != expected:
            what = f"shared memory can be resized, its seals are {seals:#x}, expected {expected:#x}: not safe to map"
            raise ManifestError(what, fault="type")

    def grow(self, size_bytes: int, what: str) -> None:
        """Have at least that much, for `what`. Raises InsufficientMemoryError as `make`."""
        status = os.fstat(self.descriptor)
        size_bytes = max(_in_pages(size_bytes), status.st_size)
        require(size_bytes - 512 * status.st_blocks, what, LESS_AT_ONCE)
        if size_bytes > status.st_size:
            try:
                os.ftruncate(self.descriptor, size_bytes)
            except OSError as exc:
                raise InsufficientMemoryError(f"can't enlarge shared memory to {size_bytes} bytes: {exc}") from exc

    def map(self, *, private: bool = False) -> MappedMemory:
        """Map all of it. Writes to a `private` mapping stay this process's own, page by page.

        Raises InsufficientMemoryError.
        """
        size_bytes = os.fstat(self.descriptor).st_size
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0) if private else mmap.MAP_SHARED
        try:
            mapping = MappedMemory(self.descriptor, size_bytes, flags)
        except OSError as exc:
            raise InsufficientMemoryError(f"{size_bytes} bytes of shared memory could not be mapped: {exc}") from exc
        mapping.memory = self
        if not private:
            _mapped[mapping.tensor().data_ptr()] = mapping
        return mapping

    def close(self) -> None:
        """Close the descriptor; what is mapped stays. Idempotent."""
        self._close()


def _in_pages(size_bytes: int) -> int:
    return max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


_mapped: weakref.WeakValueDictionary[int, MappedMemory] = weakref.WeakValueDictionary()
"""By the address of the first byte."""
