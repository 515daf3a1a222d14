"""The regions of all trainer ranks, moved into buckets on the publishing rank: one message per rank and bucket.

The plan of buckets is that of the whole tensors, however they are sharded. Invariants: each element is brought by one
rank, the publishing rank's own shards never travel; a rank sends its part of a bucket densely, in the manifest's
dtypes and in the order of the pieces and of its own list, so that both ends know every offset from the plan and the
regions alone; bucket k + 1 comes in while k is digested and sent; the publishing rank holds one bucket of gathered
bytes, another rank one bucket's share.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed import Work

from weightcast.format.bucket import TORCH_DTYPES, Entry, Layout, narrow, write_trailer
from weightcast.format.geometry import Region, common, is_run, relative, row_major, start_elements
from weightcast.format.manifest import ITEMSIZE_BYTES, WeightVersion
from weightcast.host.copy import PLAIN_BYTES, copy_all
from weightcast.trainer.group.exchange import Instruction, TrainerRanks
from weightcast.trainer.packer import HeldRegion, Shard

_ALIGNMENT_BYTES = 64
"""Of each rank's place in the staging buffer; what one rank sends has no gaps."""


class Contribution:
    """A rank's side that is not the publishing one: its part of each bucket, packed and sent when it is told to.

    Memory: the largest of its messages; twice that where a GPU's weights travel by way of host memory.
    """

    def __init__(self, ranks: TrainerRanks, layout: Layout, shards: Sequence[Shard], *, via: torch.device) -> None:
        """`shards`: what was assigned to this rank, in the order of its own list. `via`: where messages lie."""
        self._ranks = ranks
        self._slices = ShardSlices(layout, shards)
        size = _aligned(max(self._slices.sizes, default=0))
        device = shards[0].data.device if shards else via
        self._packed = torch.empty(size, dtype=torch.uint8, device=device)
        self._message = self._packed if device.type == via.type else _pinned(size, via)
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._sources = SliceSources(self._slices, shards)

    def rebind(self, shards: Sequence[Shard]) -> None:
        """The same regions lie in other memory now."""
        self._sources = SliceSources(self._slices, shards)

    @torch.no_grad()
    def send(self, index: int) -> None:
        """Pack and send this rank's part of bucket `index`; blocks until it has gone.

        If it can't be packed, the others get their bytes first and learn why at the next exchange. Raises PeerError.
        """
        size = self._slices.sizes[index]
        if not size:
            return
        with self._ranks.error_at_next_exchange():
            self._pack(index, size)
        self._ranks.send(self._message[:size], 0)

    def _pack(self, index: int, size: int) -> None:
        targets = self._targets.get(index)
        if targets is None:
            targets = self._targets[index] = message_views(self._slices.of(index), self._packed)
        copy_all(targets, self._sources.of(index))
        if self._message is not self._packed:
            self._message[:size].copy_(self._packed[:size])


class _StagingSlot(NamedTuple):
    """One rank's place in the staging buffer for one bucket."""

    group_rank: int
    start: int
    num_bytes: int


@dataclasses.dataclass(slots=True)
class _Moves:
    """What goes where for one bucket: runs of bytes and scattered slices that came, and this rank's own slices."""

    runs: CopyRuns
    scattered: list[ShardSlice]
    sources: list[torch.Tensor]
    buffer: torch.Tensor | None = None
    targets: Sequence[torch.Tensor] = ()
    own_targets: Sequence[torch.Tensor] = ()
    """Views of `buffer`."""


class GatheringPacker:
    """The publishing rank's side: fills buckets from its own shards and from what the other ranks send.

    Memory: one staging buffer of at most a bucket; a second where messages do not arrive on the buckets' device.
    """

    def __init__(
        self,
        ranks: TrainerRanks,
        layout: Layout,
        shards: Sequence[Shard],
        others: Sequence[Sequence[HeldRegion]],
        *,
        via: torch.device,
    ) -> None:
        """`others[r]`: what was assigned to group rank r + 1. `via`: where messages arrive."""
        self._ranks, self._layout, self._via = ranks, layout, via
        self._own = ShardSlices(layout, shards)
        self._others = [ShardSlices(layout, parts) for parts in others]
        self._sources = SliceSources(self._own, shards)
        self._slots: list[list[_StagingSlot]] = [[] for _ in layout.entries]
        self._size = 0
        for index, slots in enumerate(self._slots):
            start = 0
            for group_rank, slices in enumerate(self._others, start=1):
                if num_bytes := slices.sizes[index]:
                    slots.append(_StagingSlot(group_rank, start, num_bytes))
                    start = _aligned(start + num_bytes)
            self._size = max(self._size, start)
        self._staging: torch.Tensor | None = None
        self._landed: torch.Tensor | None = None
        """The staging buffer's bytes on the buckets' device."""
        self._moves: dict[int, _Moves] = {}
        self._works: list[Work] = []
        self._coming = -1

    def rebind(self, shards: Sequence[Shard]) -> None:
        """The same regions lie in other memory now."""
        self._sources = SliceSources(self._own, shards)

    @torch.no_grad()
    def pack(self, index: int, buffer: torch.Tensor, version: WeightVersion) -> bytes | torch.Tensor:
        """Fill `buffer` with bucket `index` and its trailer; return the digest, as `Packer.pack` does.

        Blocks until every rank's part is here, each wait at most for the deadline. When it returns, every rank has said
        that its part is right. Raises what any rank raised, on all of them, and PeerError.
        """
        self._ranks.version = version.number
        if self._coming != index:
            self._call(index)
        copy_all(self._moves_of(index, buffer).own_targets, self._sources.of(index))
        self.drain()
        self._unpack(index, buffer)
        if index + 1 < len(self._layout.entries):
            self._call(index + 1)
        else:
            self._ranks.announce(Instruction.WAIT)
        manifest = self._layout.manifest
        self._layout.clear_gaps(index, buffer)
        return write_trailer(buffer, manifest.buckets[index], version, index, manifest.digest_kind)

    def drain(self) -> None:
        """Take what is still under way: the ranks are then in step. Raises PeerError."""
        self._coming = -1
        self._ranks.arrived(self._works)

    def forget_views(self) -> None:
        """Drop every view of the transport's buffers."""
        self._moves.clear()

    def _call(self, index: int) -> None:
        """Have every rank send its part of a bucket. All of them have packed the one before without an error."""
        self.drain()
        self._ranks.announce(Instruction.BUCKET, index)
        self._coming = index
        if self._staging is None:
            self._staging = _pinned(self._size, self._via)
        for group_rank, start, num_bytes in self._slots[index]:
            self._works.append(self._ranks.receive(self._staging[start : start + num_bytes], group_rank))

    def _unpack(self, index: int, buffer: torch.Tensor) -> None:
        """Copy what came for bucket `index` from the staging buffer to its places."""
        if not self._slots[index]:
            return
        landed, moves, last = self._landed_for(buffer), self._moves_of(index, buffer), self._slots[index][-1]
        if landed is not self._staging and self._staging is not None:
            num_bytes = last.start + last.num_bytes
            landed[:num_bytes].copy_(self._staging[:num_bytes])
        moves.runs.copy(buffer, landed)
        copy_all(moves.targets, moves.sources)

    def _landed_for(self, buffer: torch.Tensor) -> torch.Tensor:
        assert self._staging is not None
        if self._staging.device.type == buffer.device.type:
            return self._staging
        if self._landed is None:
            self._landed = _pinned(self._size, buffer.device)
        return self._landed

    def _moves_of(self, index: int, buffer: torch.Tensor) -> _Moves:
        entries, moves = self._layout.entries[index], self._moves.get(index)
        if moves is None:
            moves = self._moves[index] = _Moves(CopyRuns(), [], [])
            for slot in self._slots[index]:
                scattered = []
                for cut in self._others[slot.group_rank - 1].of(index):
                    if is_run(cut.region, entries[cut.entry].piece.region.sizes):
                        target = _start_bytes(entries[cut.entry], cut)
                        moves.runs.add(target, slot.start + cut.offset_bytes, cut.num_bytes)
                    else:
                        scattered.append(cut)
                moves.scattered += scattered
                moves.sources += message_views(scattered, self._landed_for(buffer), slot.start)
        if moves.buffer is not buffer:
            moves.buffer = buffer
            moves.targets = bucket_views(moves.scattered, entries, buffer)
            moves.own_targets = bucket_views(self._own.of(index), entries, buffer)
        return moves


# --- geometry, from the plan and the regions alone ---


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


def message_views(slices: Sequence[ShardSlice], buffer: torch.Tensor, start: int = 0) -> list[torch.Tensor]:
    """One view for each cut into a message that lies in `buffer` from byte `start` on."""
    return _views(buffer, ((cut, start + cut.offset_bytes, cut.region.sizes) for cut in slices))


def bucket_views(slices: Sequence[ShardSlice], entries: Sequence[Entry], buffer: torch.Tensor) -> list[torch.Tensor]:
    """One view for each cut into a bucket's buffer."""
    pairs = ((cut, entries[cut.entry]) for cut in slices)
    return _views(buffer, ((cut, _start_bytes(entry, cut), entry.piece.region.sizes) for cut, entry in pairs))


def _views(buffer: torch.Tensor, places: Iterable[tuple[ShardSlice, int, Sequence[int]]]) -> list[torch.Tensor]:
    """A view of each cut: at which byte its first element lies, and within a block of which sizes its rows lie."""
    # The widest element has 16 bytes; a trailer, or unused room, lies behind every payload.
    whole = buffer[: buffer.numel() // 16 * 16]
    by_dtype: dict[str, torch.Tensor] = {}
    views = []
    for cut, start, sizes in places:
        typed = by_dtype.get(cut.dtype)
        if typed is None:
            typed = by_dtype[cut.dtype] = whole.view(TORCH_DTYPES[cut.dtype])
        offset = typed.storage_offset() + start // ITEMSIZE_BYTES[cut.dtype]
        views.append(typed.as_strided(cut.region.sizes, row_major(sizes), offset))
    return views


def _start_bytes(entry: Entry, cut: ShardSlice) -> int:
    """Where in its bucket the first element of a cut lies."""
    piece = entry.piece.region
    elements = start_elements(relative(cut.region, piece), piece.sizes)
    return entry.piece.offset_bytes + elements * ITEMSIZE_BYTES[cut.dtype]


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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    pin = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)
