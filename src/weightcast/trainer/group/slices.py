"""One trainer rank's shards, cut at the pieces of each bucket; and the views and runs of bytes that moving them takes.

Pure geometry, from the plan and the regions alone: a rank and the publishing rank work it out alike, so that a message
needs no description. Invariants: a message is dense; its order is that of the pieces and of the rank's own list.
"""

from __future__ import annotations

import array
import ctypes
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from weightcast.format.bucket import TORCH_DTYPES, Entry, Layout, narrow
from weightcast.format.geometry import Region, common, relative, row_major, start_elements
from weightcast.format.manifest import ITEMSIZE_BYTES
from weightcast.host.copy import PLAIN_BYTES, copy_all
from weightcast.trainer.packer import HeldRegion, Shard


class ShardSlice(NamedTuple):
    """What of one piece a part brings: `region` of the tensor, from part number `part`, at `offset_bytes` of a message.

    `entry`: the piece's number in its bucket.
    """

    entry: int
    part: int
    region: Region
    dtype: str
    num_bytes: int
    offset_bytes: int = 0


class ShardSlices:
    """One rank's parts, cut at the pieces of each bucket; the same on the rank itself and on the publishing rank."""

    def __init__(self, layout: Layout, parts: Sequence[HeldRegion]) -> None:
        self._layout = layout
        self._parts: defaultdict[int, list[tuple[int, Region]]] = defaultdict(list)
        for number, part in enumerate(parts):
            self._parts[part.tensor].append((number, part.region))
        self.sizes = [sum(cut.num_bytes for cut in self._found(index)) for index in range(len(layout.entries))]
        """Bytes of the message for each bucket."""
        self._last: tuple[int, list[ShardSlice]] = (-1, [])

    def of(self, index: int) -> list[ShardSlice]:
        """The cuts of bucket `index` in the order of the message: wide dtypes first, so that all lie aligned.

        Only the last bucket's are kept: views are made of them once, and there may be many.
        """
        if self._last[0] != index:
            found = sorted(self._found(index), key=lambda cut: -ITEMSIZE_BYTES[cut.dtype])
            ends = itertools.accumulate((cut.num_bytes for cut in found), initial=0)
            self._last = index, [cut._replace(offset_bytes=end) for cut, end in zip(found, ends, strict=False)]
        return self._last[1]

    def _found(self, index: int) -> Iterator[ShardSlice]:
        for number, entry in enumerate(self._layout.entries[index]):
            piece, dtype = entry.piece.region, entry.record.dtype
            for part, region in self._parts.get(entry.tensor, ()):
                shared = piece if region == piece else common(piece, region)
                if shared is not None:
                    yield ShardSlice(number, part, shared, dtype, shared.numel * ITEMSIZE_BYTES[dtype])


def start_bytes(entry: Entry, cut: ShardSlice) -> int:
    """Where in its bucket the first element of a cut lies."""
    piece = entry.piece.region
    elements = start_elements(relative(cut.region, piece), piece.sizes)
    return entry.piece.offset_bytes + elements * ITEMSIZE_BYTES[cut.dtype]


class _Typed:
    """A buffer as each dtype, for making views of it."""

    def __init__(self, buffer: torch.Tensor) -> None:
        # The widest element has 16 bytes; a trailer, or unused room, lies behind every payload.
        self._buffer = buffer[: buffer.numel() // 16 * 16]
        self._typed: dict[str, torch.Tensor] = {}

    def view(self, dtype: str, offset_bytes: int, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = self._buffer.view(TORCH_DTYPES[dtype])
        return typed.as_strided(sizes, strides, typed.storage_offset() + offset_bytes // ITEMSIZE_BYTES[dtype])


def message_views(slices: Sequence[ShardSlice], buffer: torch.Tensor, start: int = 0) -> list[torch.Tensor]:
    """One view for each cut into a message that lies in `buffer` from byte `start` on."""
    typed = _Typed(buffer)
    return [
        typed.view(cut.dtype, start + cut.offset_bytes, cut.region.sizes, row_major(cut.region.sizes)) for cut in slices
    ]


def bucket_views(slices: Sequence[ShardSlice], entries: Sequence[Entry], buffer: torch.Tensor) -> list[torch.Tensor]:
    """One view for each cut into a bucket's buffer."""
    typed = _Typed(buffer)
    return [
        typed.view(
            cut.dtype,
            start_bytes(entries[cut.entry], cut),
            cut.region.sizes,
            row_major(entries[cut.entry].piece.region.sizes),
        )
        for cut in slices
    ]


class SliceSources:
    """Views of a rank's own shards, cut for each bucket; made once."""

    def __init__(self, slices: ShardSlices, shards: Sequence[Shard]) -> None:
        self._slices, self._shards = slices, shards
        self._views: dict[int, list[torch.Tensor]] = {}

    def of(self, index: int) -> list[torch.Tensor]:
        views = self._views.get(index)
        if views is None:
            pairs = [(self._shards[cut.part], cut.region) for cut in self._slices.of(index)]
            views = self._views[index] = [
                shard.data if region == shard.region else narrow(shard.data, relative(region, shard.region))
                for shard, region in pairs
            ]
        return views


class CopyRuns:
    """Bytes that go from the staging buffer to a bucket as they are: runs, joined where they meet on both sides."""

    def __init__(self) -> None:
        self._numbers = array.array("q")

    def add(self, target: int, source: int, num_bytes: int) -> None:
        numbers = self._numbers
        if numbers and (numbers[-3] + numbers[-1], numbers[-2] + numbers[-1]) == (target, source):
            numbers[-1] += num_bytes
        else:
            numbers.extend((target, source, num_bytes))

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return zip(self._numbers[0::3], self._numbers[1::3], self._numbers[2::3], strict=True)

    def copy(self, buffer: torch.Tensor, staging: torch.Tensor) -> None:
        if buffer.is_cuda or staging.is_cuda:
            # One call for all, and no views to keep: there are three for each run.
            pairs = [(buffer[t : t + size], staging[s : s + size]) for t, s, size in self]
            copy_all([target for target, _ in pairs], [source for _, source in pairs])
            return
        target, source = buffer.numpy().data, staging.numpy().data
        for to, of, size in self:
            if size < PLAIN_BYTES:
                target[to : to + size] = source[of : of + size]
            else:
                ctypes.memmove(buffer.data_ptr() + to, staging.data_ptr() + of, size)
