"""Memory for the buckets of one update after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weightcast.format.bucket import ArenaLayout, BucketBuffer, Buffers


class KeptMemory:
    """Kept while it is large enough; the same index is the same buffer while the manifest stays."""

    size_bytes: int
    arena_layout: ArenaLayout

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        """`allocate`: makes a tensor of that many bytes."""
        self._allocate = allocate
        self.free()

    def prepare(self, arena_layout: ArenaLayout) -> None:
        """Make room. What does not fit is freed first. Raises what `allocate` raises."""
        if arena_layout.size_bytes > self.size_bytes:
            self.free()
            self._buffers = Buffers(self._allocate(arena_layout.size_bytes))
            self.size_bytes = arena_layout.size_bytes
        self.arena_layout = arena_layout
        self._buffers.forget_above(len(arena_layout.slots))

    def buffer(self, index: int) -> BucketBuffer:
        return self._buffers.at(self.arena_layout, index)

    def free(self) -> None:
        """What was handed out stays as long as it is referred to."""
        self.size_bytes = 0
        self.arena_layout = ArenaLayout((), (), (), ())
        self._buffers = Buffers(torch.empty(0, dtype=torch.uint8))
