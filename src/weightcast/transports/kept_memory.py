"""Memory of this process for the buckets of one update after the other."""

from __future__ import annotations

import contextlib
import mmap

import torch

from weightcast.errors import InsufficientMemoryError
from weightcast.format.bucket import ArenaLayout, BucketBuffer, Buffers
from weightcast.host import device as host_device
from weightcast.host import memory as host_memory
from weightcast.host.memory import CommonMemory, SealedMemory


def allocate(size_bytes: int, device: torch.device, what: str, remedy: str = host_memory.LESS_AT_ONCE) -> torch.Tensor:
    """On a CPU zeros, in huge pages where there are any.

    Raises InsufficientMemoryError if the host or the device has not that much left: `what` needs it, `remedy` helps.
    """
    if device.type != "cpu":
        return host_device.empty(size_bytes, device, what, remedy)
    host_memory.require(size_bytes, what, remedy)
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise InsufficientMemoryError(
            f"{what} needs {size_bytes} bytes, which could not be had ({exc}): {remedy}"
        ) from exc
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


class KeptMemory:
    """Kept while it is large enough; the same index is the same buffer while the manifest stays."""

    size_bytes: int
    arena_layout: ArenaLayout
    shared: CommonMemory | None = None
    """What others fill, too."""

    def __init__(self, device: torch.device, what: str, remedy: str = host_memory.LESS_AT_ONCE) -> None:
        """As for `allocate`."""
        self.device = device
        self._what, self._remedy = what, remedy
        self.free()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """That much more. Raises InsufficientMemoryError."""
        return allocate(size_bytes, self.device, self._what, self._remedy)

    def prepare(self, arena_layout: ArenaLayout) -> None:
        """Make room. What does not fit is freed first. Raises InsufficientMemoryError."""
        if arena_layout.size_bytes > self.size_bytes:
            self.free()
            self._buffers = Buffers(self.allocate(arena_layout.size_bytes))
            self.size_bytes = arena_layout.size_bytes
        self.arena_layout = arena_layout
        self._buffers.forget_above(len(arena_layout.slots))

    def buffer(self, index: int) -> BucketBuffer:
        return self._buffers.at(self.arena_layout, index)

    def target(self, index: int) -> BucketBuffer:
        """Where to write what `buffer` shows."""
        return self.buffer(index)

    def reread(self, buffer: BucketBuffer) -> bool:
        """Have `buffer` show what was written to its target, whatever this process has written over it since.

        False where both are the same memory.
        """
        return False

    def free(self) -> None:
        """What was handed out stays as long as it is referred to."""
        self.size_bytes = 0
        self.arena_layout = ArenaLayout((), (), (), ())
        self._buffers = Buffers(torch.empty(0, dtype=torch.uint8))

    def close(self) -> None:
        """Free it for good."""
        self.free()


class MemoryToSend(KeptMemory):
    """Memory that on a CPU other ranks of the trainer on this host can map, to pack into it."""

    _shared: SealedMemory | None

    def allocate(self, size_bytes: int) -> torch.Tensor:
        if self.device.type != "cpu":
            return super().allocate(size_bytes)
        self._shared = SealedMemory.allocate(size_bytes, self._what)
        return self._shared.tensor()

    def free(self) -> None:
        super().free()
        self._shared = None

    def close(self) -> None:
        """Free it for good, at once: an error that somebody keeps refers to buffers, which read as zeros then."""
        if self._shared is not None:
            self._shared.release(free=True)
        self.free()


class FilledTogether(KeptMemory):
    """As much for all ranks of an engine on one host, each of which writes a part. `buffer` is this process's own view.

    What an engine writes into that view stays its own, so that no rank spoils another's bytes.
    """

    shared: CommonMemory

    def __init__(self, shared: CommonMemory, what: str) -> None:
        """`what` needs the memory, for an error's text."""
        self.shared = shared
        self._view: mmap.mmap | None = None
        super().__init__(torch.device("cpu"), what)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        self._view = view = self.shared.map(size_bytes, self._what, private=True)
        targets = self.shared.map(size_bytes, self._what, private=False)
        self._targets = Buffers(torch.frombuffer(targets, dtype=torch.uint8))
        return torch.frombuffer(view, dtype=torch.uint8)

    def prepare(self, arena_layout: ArenaLayout) -> None:
        super().prepare(arena_layout)
        self._targets.forget_above(len(arena_layout.slots))

    def free(self) -> None:
        super().free()
        self._targets = self._buffers
        self._view = None

    def target(self, index: int) -> BucketBuffer:
        return self._targets.at(self.arena_layout, index)

    def reread(self, buffer: BucketBuffer) -> bool:
        assert self._view is not None
        for part in (buffer.header, buffer.payload):
            start, size_bytes = int(part.storage_offset()), part.numel()
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._view.madvise(mmap.MADV_DONTNEED, first, start + size_bytes - first)
        return True
