"""Where a receiver's buckets arrive: staged, a place for each; streaming, three slots in turn. Kept between updates.

Invariants: the same index is the same tensor in every update while the manifest stays; a place that a broadcast of a
broken group may still write to is left to it and replaced.
"""

from __future__ import annotations

import torch

from weightcast.format.bucket import ArenaLayout, Buffers, place
from weightcast.format.manifest import Manifest
from weightcast.host import memory as host_memory

NUM_UNDER_WAY = 2
"""Broadcasts that a receiver waits for at once: the next one follows without a pause."""
NUM_SLOTS = 1 + NUM_UNDER_WAY
"""Streaming: one that is read, and those that arrive."""


class ReceiveSlots:
    """Costs `size_bytes`: staged, the whole version in host memory; streaming, `NUM_SLOTS` buckets on `device`."""

    def __init__(self, manifest: Manifest, *, staged: bool, device: torch.device) -> None:
        """Raises InsufficientMemoryError if the host, or a cgroup of it, hasn't that much left."""
        self.device = torch.device("cpu") if staged else device
        self.arena_layout = place(manifest, num_slots=NUM_SLOTS, staged=staged)
        self.size_bytes = self.arena_layout.size_bytes
        self._buffers = Buffers(_allocate(self.size_bytes, self.device))
        self._replaced: dict[int, torch.Tensor] = {}

    def fits(self, arena_layout: ArenaLayout, device: torch.device) -> bool:
        return self.device == device and self.size_bytes >= arena_layout.size_bytes and not self._replaced

    def use(self, arena_layout: ArenaLayout) -> None:
        """Lay it out for another manifest."""
        self.arena_layout = arena_layout
        self._buffers.forget_above(len(arena_layout.slots))

    def buffer(self, index: int) -> torch.Tensor:
        replaced = self._replaced.get(self.arena_layout.slots[index])
        if replaced is not None:
            return replaced[: self.arena_layout.sizes_bytes[index]]
        return self._buffers.get(index, self.arena_layout.offsets[index], self.arena_layout.sizes_bytes[index])

    def replace(self, index: int) -> None:
        """From now on bucket `index`, and whatever shares its slot, arrives elsewhere."""
        slot = self.arena_layout.slots[index]
        largest = max(
            size
            for other, size in zip(self.arena_layout.slots, self.arena_layout.sizes_bytes, strict=True)
            if other == slot
        )
        self._replaced[slot] = _allocate(largest, self.device)


def _allocate(size_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        host_memory.require(size_bytes, "receiving this update", host_memory.LESS_AT_ONCE)
    return torch.empty(max(size_bytes, 1), dtype=torch.uint8, device=device)
