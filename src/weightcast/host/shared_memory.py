"""Anonymous memory that other processes of this user on this host can map: each under a name that no other has.

Invariants: its size is sealed, so that no access to a mapping of it can fail; it goes with the last process that has
it; a location that another process was told of is opened only if what is found there has the name and the size that
were told.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import weakref

import msgspec
import torch

from weightcast.errors import InsufficientMemoryError
from weightcast.host import memory as host_memory

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryLocation(msgspec.Struct, frozen=True):
    """Where another process finds it: as descriptor number `descriptor` of process `pid`."""

    pid: int
    descriptor: int
    name: str
    size_bytes: int


class SealedMemory(mmap.mmap):
    """The process's own; `allocate` makes it. Whoever has a tensor of it keeps it mapped."""

    location: MemoryLocation
    _close_descriptor: weakref.finalize  # type: ignore[type-arg]

    @classmethod
    def allocate(cls, size_bytes: int, what: str = "a buffer of this update", kind: str = "buckets") -> SealedMemory:
        """Zeros, in whole pages, which cost memory when they are first written.

        `what` needs them, for an error's text; `kind` and this process's id are in the name that /proc/PID/maps shows.
        Raises InsufficientMemoryError if the host or a cgroup hasn't that much left.
        """
        size_bytes = max(1, -(-size_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        host_memory.require(size_bytes, what, host_memory.LESS_AT_ONCE)
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
            raise InsufficientMemoryError(f"{size_bytes} bytes of shared memory could not be had: {exc}") from exc
        memory.location = MemoryLocation(os.getpid(), descriptor, name, size_bytes)
        memory._close_descriptor = weakref.finalize(memory, os.close, descriptor)
        memory._close_descriptor.atexit = False
        _allocated[memory.tensor().data_ptr()] = memory
        return memory

    def tensor(self) -> torch.Tensor:
        """All of it as a flat uint8 tensor, which keeps it mapped."""
        return torch.frombuffer(self, dtype=torch.uint8)

    def release(self, *, free: bool) -> None:
        """Close the descriptor; with `free` give the memory back at once: all that have it mapped read zeros then."""
        if free:
            self.madvise(mmap.MADV_REMOVE)
        self._close_descriptor()


_allocated: weakref.WeakValueDictionary[int, SealedMemory] = weakref.WeakValueDictionary()
"""By the address of the first byte."""


def shared_memory_of(tensor: torch.Tensor) -> SealedMemory | None:
    """The shared memory of this process that a tensor is a view of, if it is one."""
    return _allocated.get(tensor.untyped_storage().data_ptr()) if tensor.device.type == "cpu" else None


def map_shared(location: MemoryLocation) -> torch.Tensor | None:
    """Another process's shared memory, to be written too; None where this process can't reach it.

    That is so in another container or on another host, for another user, and if that process has ended.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(f"/proc/{location.pid}/fd/{location.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            found = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size
            if found == (f"/memfd:{location.name} (deleted)", location.size_bytes):
                return torch.frombuffer(mmap.mmap(descriptor, location.size_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    return None
