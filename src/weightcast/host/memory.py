"""How much more memory this process may take, memory that it shares with others, and when garbage is collected.

The room is the host's and that of every enclosing cgroup, whichever is less.

Sources: `MemAvailable` of proc(5); `memory.max`, `memory.current` and `inactive_file` of cgroup v2, and their v1
counterparts. What can't be read sets no limit. Nothing is cached: the answer is about now.

Shared memory is anonymous, each under a name that no other has. Invariants: its size is sealed, so that no access to a
mapping of it can fail; it goes with the last process that has it; a location that another process was told of is opened
only if what is found there has the name and the size that were told.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weightcast.errors import InsufficientMemoryError, UnsupportedError
from weightcast.host.closing import on_failure
from weightcast.host.descriptors import shortage

if TYPE_CHECKING:
    import torch

_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_UNKNOWN_BYTES = 1 << 62

LESS_AT_ONCE = 'publish with install="streaming" or smaller buckets, or free memory'
"""The remedy for a transport's buffers."""


def available_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken now without swapping and without meeting a cgroup's limit; never negative.

    File pages that the kernel would give back first (`inactive_file`) count as available.
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
    """Raises InsufficientMemoryError unless that much can be taken; `what` needs it, `remedy` says what to do."""
    available = available_bytes()
    if num_bytes > available:
        raise InsufficientMemoryError(
            f"{what} needs {num_bytes} bytes, this host or container has {available} left: {remedy}"
        )


def host_identity() -> str:
    """Equal for processes that can share memory: of one boot, one network namespace and one user."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()}/{os.readlink(namespace)}/{os.geteuid()}"
    except OSError:
        return f"process {os.getpid()}"


def _rooms_upwards(mount: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """The room in a cgroup and in each of its ancestors, up to the mount.

    In a container the path may be the host's, which is not visible there: the mount itself is the container's then.
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

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryLocation(msgspec.Struct, frozen=True):
    """Where another process finds it: as descriptor number `descriptor` of process `pid`."""

    pid: int
    descriptor: int
    name: str
    size_bytes: int


class SealedMemory(mmap.mmap):
    """This process's own, made by `allocate`. It stays mapped as long as a tensor of it is referred to."""

    location: MemoryLocation
    _close_descriptor: weakref.finalize  # type: ignore[type-arg]

    @classmethod
    def allocate(cls, size_bytes: int, what: str = "a buffer of this update", kind: str = "buckets") -> SealedMemory:
        """Zeros, in whole pages, which cost memory when they are first written.

        `what` needs them, for an error's text; `kind` and this process's id are in the name that /proc/PID/maps shows.
        Raises InsufficientMemoryError if the host or a cgroup hasn't that much left.
        """
        size_bytes = max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        require(size_bytes, what, LESS_AT_ONCE)
        name = f"weightcast-{kind}-{os.getpid()}-{secrets.token_hex(16)}"
        try:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, size_bytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
                memory = cls(descriptor, size_bytes)
            except OSError:
                os.close(descriptor)
                raise
        except OSError as exc:
            reason = shortage(exc) or exc
            raise InsufficientMemoryError(f"{size_bytes} bytes of shared memory could not be had: {reason}") from exc
        memory.location = MemoryLocation(os.getpid(), descriptor, name, size_bytes)
        memory._close_descriptor = weakref.finalize(memory, os.close, descriptor)
        memory._close_descriptor.atexit = False
        _allocated[memory.tensor().data_ptr()] = memory
        return memory

    def tensor(self) -> torch.Tensor:
        """All of it as a flat uint8 tensor, which keeps it mapped."""
        import torch  # Here, since it takes long, and not everything that asks for memory needs it.

        return torch.frombuffer(self, dtype=torch.uint8)

    def release(self, *, free: bool) -> None:
        """Close the descriptor; with `free` give the memory back at once: all that have it mapped read zeros then."""
        if free:
            self.madvise(mmap.MADV_REMOVE)
        self._close_descriptor()


class CommonMemory:
    """Shared memory that several processes fill together. It grows and never shrinks: no access to a mapping can fail.

    `location`: where other processes of this user find it, as text.
    """

    _NAME = "weightcast-common-"

    def __init__(self, descriptor: int, location: str) -> None:
        self._descriptor = descriptor
        self.location = location
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False

    @classmethod
    def create(cls) -> CommonMemory:
        """Of this process's own; empty."""
        name = f"{cls._NAME}{os.getpid()}-{secrets.token_hex(16)}"
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        return cls(descriptor, f"{os.getpid()}/{descriptor}/{name}")

    @classmethod
    def find(cls, location: str) -> CommonMemory:
        """Another process's. Raises UnsupportedError where this process can't reach it: from another container, say."""
        pid, _, rest = location.partition("/")
        number, _, name = rest.partition("/")
        try:
            if not (pid.isdecimal() and number.isdecimal() and name.startswith(cls._NAME)):
                raise OSError(f"{location!r} is no such place")
            descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            with on_failure(lambda: os.close(descriptor)):
                if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{name} (deleted)":
                    raise OSError(f"descriptor {number} of process {pid} is another file")
                if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise OSError("it can be cut short, which is not safe to map")
                return cls(descriptor, location)
        except OSError as exc:
            raise UnsupportedError(
                f"the memory that an engine's ranks on one host share can't be reached: {exc}. Have these ranks in one "
                "container, or send over ipc://"
            ) from exc

    def map(self, size_bytes: int, what: str, *, private: bool) -> mmap.mmap:
        """At least that much of it, for `what`. What is written to a `private` mapping stays this process's own.

        Raises InsufficientMemoryError if the host or a cgroup hasn't that much left.
        """
        status = os.fstat(self._descriptor)
        size_bytes = max(-(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, status.st_size)
        require(size_bytes - 512 * status.st_blocks, what, LESS_AT_ONCE)
        try:
            if size_bytes > status.st_size:
                os.ftruncate(self._descriptor, size_bytes)
            return mmap.mmap(self._descriptor, size_bytes, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        except OSError as exc:
            raise InsufficientMemoryError(f"{size_bytes} bytes of shared memory could not be mapped: {exc}") from exc

    def close(self) -> None:
        """What is mapped stays. Idempotent."""
        self._close()


_allocated: weakref.WeakValueDictionary[int, SealedMemory] = weakref.WeakValueDictionary()
"""By the address of the first byte."""


def shared_memory_of(tensor: torch.Tensor) -> SealedMemory | None:
    """The shared memory of this process that a tensor is a view of, if it is one."""
    return _allocated.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None


def map_shared(location: MemoryLocation) -> torch.Tensor | None:
    """Another process's shared memory, to be written too; None where this process can't reach it.

    That is so in another container or on another host, for another user, and if that process has ended.
    """
    import torch

    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{location.pid}/fd/{location.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size
            if found == (f"/memfd:{location.name} (deleted)", location.size_bytes):
                return torch.frombuffer(mmap.mmap(descriptor, location.size_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    return None
