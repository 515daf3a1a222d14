"""Where the buckets of a manifest lie in one piece of memory, and the buffers that are slices of it."""

from __future__ import annotations

import dataclasses
import itertools
import mmap

import torch

from weightcast.format.bucket import TRAILER_BYTES, slot_size_bytes
from weightcast.format.geometry import align
from weightcast.format.manifest import Manifest


@dataclasses.dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Where the buckets of a manifest lie in an arena: bucket k in slot `slots[k]`, from byte `offsets[k]`."""

    slots: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes_bytes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """The arena that they need."""
        return max((offset + size for offset, size in zip(self.offsets, self.sizes_bytes, strict=True)), default=0)


def buffer_size_bytes(manifest: Manifest, index: int) -> int:
    """Bytes of bucket `index` with its trailer, aligned."""
    return align(manifest.buckets[index] + TRAILER_BYTES)


def place(manifest: Manifest, *, num_slots: int, staged: bool, adjoining: bool = False) -> ArenaLayout:
    """Staged: every bucket has a slot of its own. Streaming: bucket k goes into slot k % num_slots. Page-aligned.

    `adjoining`, for what is staged: payloads lie end to end, so that a tensor that is cut over several is one piece of
    memory. A trailer is where the next payload will be: it must have been checked before that is read.
    """
    indices = range(len(manifest.buckets))
    sizes = tuple(buffer_size_bytes(manifest, index) for index in indices)
    if staged:
        steps = map(align, manifest.buckets) if adjoining else map(pages, sizes)
        starts = itertools.accumulate(steps, initial=0)
        return ArenaLayout(tuple(indices), tuple(start for start, _ in zip(starts, sizes, strict=False)), sizes)
    slots = tuple(index % num_slots for index in indices)
    stride = pages(slot_size_bytes(manifest))
    return ArenaLayout(slots, tuple(slot * stride for slot in slots), sizes)


def pages(num_bytes: int) -> int:
    """Round up to whole pages."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Buffers:
    """Slices of an arena, one for each bucket index, made once."""

    def __init__(self, whole: torch.Tensor) -> None:
        self._whole = whole
        self._slices: dict[int, tuple[int, int, torch.Tensor]] = {}

    def get(self, index: int, offset_bytes: int, size_bytes: int) -> torch.Tensor:
        known = self._slices.get(index)
        if known is None or known[:2] != (offset_bytes, size_bytes):
            known = offset_bytes, size_bytes, self._whole[offset_bytes : offset_bytes + size_bytes]
            self._slices[index] = known
        return known[2]

    def forget_above(self, num_buckets: int) -> None:
        """Drop the slices of indices that a new manifest does not have."""
        for index in [index for index in self._slices if index >= num_buckets]:
            del self._slices[index]
