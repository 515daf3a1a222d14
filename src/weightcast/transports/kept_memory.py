"""Memory that holds the buckets of an update and is kept for the next one."""

from __future__ import annotations

import contextlib
import mmap

import torch

from weightcast.errors import InsufficientMemoryError
from weightcast.format.bucket import ArenaLayout, BucketBuffer, Buffers
from weightcast.host import device as host_device
from weightcast.host import memory as host_memory
from weightcast.host.memory import MappedMemory, SharedMemory


def allocate(size_bytes: int, device: torch.device, what: str, remedy: str = host_memory.LESS_AT_ONCE) -> torch.Tensor:
    """Return a flat uint8 tensor of `size_bytes`; on a CPU it is zeros, in huge pages if the host has them.

    Raises InsufficientMemoryError if the host or the device has less available. The message says that `what` needs the
    memory and recommends `remedy`.
    """
    if device.type != "cpu":
        return host_device.empty(size_bytes, device, what, remedy)
    host_memory.require(size_bytes, what, remedy)
    try:
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as exc:
        raise InsufficientMemoryError(
            f"{what} needs {size_bytes} bytes, which this process can't map ({exc}): {remedy}"
        ) from exc
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


class KeptMemory:
    """Memory that is reused while it is large enough. While the manifest stays, a bucket index has the same buffer.

    With `shared`, all processes that map it use the same memory, and each fills a part of it. This process's writes
    into a `buffer` are then private, so that no process overwrites another's bytes.
    """

    size_bytes: int
    arena_layout: ArenaLayout

    def __init__(
        self,
        device: torch.device,
        what: str,
        remedy: str = host_memory.LESS_AT_ONCE,
        *,
        shared: SharedMemory | None = None,
    ) -> None:
        """Start without memory. `device`, `what`, `remedy`: see `allocate`."""
        self.device, self.shared = device, shared
        self._what, self._remedy = what, remedy
        self._view: MappedMemory | None = None
        self.free()

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """Allocate `size_bytes` of this process's own memory. Raises InsufficientMemoryError."""
        return allocate(size_bytes, self.device, self._what, self._remedy)

    def prepare(self, arena_layout: ArenaLayout) -> None:
        """Make room for `arena_layout`, freeing memory that is too small first. Raises InsufficientMemoryError."""
        if arena_layout.size_bytes > self.size_bytes:
            self.free()
            if self.shared is None:
                self._buffers = self._targets = Buffers(self.allocate(arena_layout.size_bytes))
            else:
                self.shared.grow(arena_layout.size_bytes, self._what)
                self._view = self.shared.map(private=True)
                self._buffers, self._targets = Buffers(self._view.tensor()), Buffers(self.shared.map().tensor())
            self.size_bytes = arena_layout.size_bytes
        self.arena_layout = arena_layout
        self._buffers.forget_above(len(arena_layout.slots))
        self._targets.forget_above(len(arena_layout.slots))

    def buffer(self, index: int) -> BucketBuffer:
        """Return the memory to read bucket `index` from."""
        return self._buffers.at(self.arena_layout, index)

    def target(self, index: int) -> BucketBuffer:
        """Return the memory to write bucket `index` to, which `buffer` then shows."""
        return self._targets.at(self.arena_layout, index)

    def reread(self, buffer: BucketBuffer) -> bool:
        """Drop this process's writes into `buffer`, so that it shows its target again.

        Return False, without effect, if both are the same memory.
        """
        if self._view is None:
            return False
        self._view.reread(buffer.header)
        self._view.reread(buffer.payload)
        return True

    def free(self) -> None:
        """Free the memory. Buffers that were returned stay valid as long as something refers to them."""
        self.size_bytes = 0
        self.arena_layout = ArenaLayout((), (), (), ())
        self._buffers = self._targets = Buffers(torch.empty(0, dtype=torch.uint8))
        self._view = None

    def close(self) -> None:
        """Free the memory. Do not call `prepare` afterwards."""
        self.free()


class MemoryToSend(KeptMemory):
    """Memory of a sender. On a CPU other trainer ranks of this host can map it, to pack their regions into it."""

    _mapping: MappedMemory | None

    def allocate(self, size_bytes: int) -> torch.Tensor:
        if self.device.type != "cpu":
            return super().allocate(size_bytes)
        self._mapping = SharedMemory.make(size_bytes, self._what).map()
        return self._mapping.tensor()

    def free(self) -> None:
        super().free()
        self._mapping = None

    def close(self) -> None:
        """Free the memory at once, even if an error's traceback still refers to buffers, which then read as zeros."""
        if self._mapping is not None:
            self._mapping.free()
            self._mapping.memory.close()
        self.free()
