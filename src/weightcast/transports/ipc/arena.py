"""Host memory that a sender shares with receivers: anonymous, sealed against resizing, passed on as a descriptor.

Invariants: a receiver maps nothing whose size could change under it (that would be a SIGBUS); what a receiver writes
into its mapping stays its own (copy on write), so that no engine can spoil another's bytes; a tensor keeps its mapping
alive, so that nothing is ever unmapped under a view; the same place gives the same tensor object until the arena goes.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import torch

from weightcast.errors import InsufficientMemoryError, ManifestError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, Buffers, pages
from weightcast.host.closing import on_failure
from weightcast.host.memory import SEALS, SealedMemory
from weightcast.host.populate import Populating
from weightcast.transports.ipc.records import SharedArena
from weightcast.transports.receiving import MappedArena
from weightcast.transports.sending import OwnedArena

_WHAT = "the arena of this update"


class OwnedSharedArena(OwnedArena):
    """The sender's end. Costs `size_bytes` of host memory, which are populated in the background."""

    populating: Populating

    def __init__(self, generation: int, size_bytes: int) -> None:
        """Raises InsufficientMemoryError if the host or a cgroup hasn't that much left."""
        self._memory = SealedMemory.allocate(size_bytes, _WHAT)
        whole = self._memory.tensor()
        super().__init__(generation, whole, torch.device("cpu"))
        self.populating = Populating(whole, _WHAT)

    def announcement(self) -> tuple[SharedArena, int]:
        return SharedArena(self.generation, self.size_bytes), self._memory.location.descriptor

    def close(self, *, free: bool) -> None:
        # Before it is freed, which nothing may be touched after.
        self.populating.close()
        # Not unmapped here: views that the publisher keeps still point into it.
        self._memory.release(free=free)
        del self._memory
        super().close(free=free)


class MappedSharedArena(MappedArena):
    """The receiver's end. Owns the descriptor that it is made from, also if the construction fails."""

    def __init__(self, record: SharedArena, descriptor: int) -> None:
        """Raises ManifestError for a descriptor whose size or seals are not what was promised."""
        self.generation = record.generation
        self.size_bytes = record.size_bytes
        self._descriptor = descriptor
        with on_failure(lambda: os.close(descriptor)):
            try:
                size = os.fstat(descriptor).st_size
                seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            except OSError as exc:
                what = f"the arena's descriptor is no anonymous shared memory: {exc}"
                raise ManifestError(what, fault="type") from exc
            if size != record.size_bytes or not size:
                raise ManifestError(f"the arena has {size} bytes, {record.size_bytes} were announced", fault="size")
            if seals & SEALS != SEALS:
                raise ManifestError(
                    f"the arena can be resized, its seals are {seals:#x}: not safe to map", fault="type"
                )
            self.reset()

    def reset(self) -> None:
        """Map it anew: whatever this process wrote into the former mapping is not in the new one."""
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            mapping = mmap.mmap(self._descriptor, self.size_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as exc:
            raise InsufficientMemoryError(f"an arena of {self.size_bytes} bytes could not be mapped: {exc}") from exc
        self._mapping = mapping
        self.buffers = Buffers(torch.frombuffer(mapping, dtype=torch.uint8))

    def reread(self, buffer: BucketBuffer) -> bool:
        """Make `buffer`, which begins at a page, show the sender's bytes again where this process wrote over them."""
        size_bytes = pages(HEADER_BYTES + buffer.payload.numel())
        self._mapping.madvise(mmap.MADV_DONTNEED, int(buffer.header.storage_offset()), size_bytes)
        return True

    def close(self) -> None:
        """Let go of it; what is mapped stays as long as a tensor needs it."""
        os.close(self._descriptor)
        del self._mapping
