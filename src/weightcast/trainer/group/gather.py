"""The regions of all trainer ranks, moved into buckets on the publishing rank: one message per rank and bucket.

The plan of buckets is that of the whole tensors, however they are sharded. Invariants: each element is brought by one
rank, the publishing rank's own shards never travel; a rank sends its part of a bucket densely, in the manifest's
dtypes, so that both ends know every offset from the plan and the regions alone; bucket k + 1 comes in while k is
digested and sent; the publishing rank holds one bucket of gathered bytes, another rank one bucket's share.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.distributed import Work

from weightcast.format.bucket import Layout, write_trailer
from weightcast.format.geometry import is_run
from weightcast.format.manifest import WeightVersion
from weightcast.host.copy import copy_all
from weightcast.trainer.group.exchange import Instruction, TrainerRanks
from weightcast.trainer.group.slices import (
    CopyRuns,
    ShardSlice,
    ShardSlices,
    SliceSources,
    bucket_views,
    message_views,
    start_bytes,
)
from weightcast.trainer.packer import HeldRegion, Shard

_ALIGNMENT_BYTES = 64
"""Of each rank's place in the staging buffer; what one rank sends has no gaps."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


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
        self._packed = _buffer(size, device, pinned=False)
        self._message = self._packed if device.type == via.type else _buffer(size, via, pinned=True)
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


@dataclasses.dataclass(slots=True)
class _StagingSlot:
    """One rank's place in the staging buffer for one bucket."""

    group_rank: int
    start: int
    num_bytes: int


@dataclasses.dataclass(slots=True)
class _IncomingShards:
    """Where what comes for one bucket goes: `runs` of bytes, and views of the slices that lie scattered in `buffer`."""

    runs: CopyRuns = dataclasses.field(default_factory=CopyRuns)
    scattered: list[ShardSlice] = dataclasses.field(default_factory=list)
    sources: list[torch.Tensor] = dataclasses.field(default_factory=list)
    buffer: torch.Tensor | None = None
    targets: list[torch.Tensor] = dataclasses.field(default_factory=list)


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
        self._ranks, self._layout = ranks, layout
        self._own = ShardSlices(layout, shards)
        self._others = [ShardSlices(layout, parts) for parts in others]
        self._sources = SliceSources(self._own, shards)
        self._staging_slots = [self._laid_out(index) for index in range(len(layout.entries))]
        ends = (_aligned(s.start + s.num_bytes) for stretches in self._staging_slots for s in stretches)
        self._via, self._size = via, max(ends, default=0)
        self._staging: torch.Tensor | None = None
        self._landed: torch.Tensor | None = None
        self._arrivals: dict[int, _IncomingShards] = {}
        self._targets: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._works: list[Work] = []
        self._coming = -1

    def rebind(self, shards: Sequence[Shard]) -> None:
        """The same regions lie in other memory now."""
        self._sources = SliceSources(self._own, shards)

    @torch.no_grad()
    def pack(self, index: int, buffer: torch.Tensor, version: WeightVersion) -> bytes | torch.Tensor:
        """Fill `buffer` with bucket `index` and its trailer; return the digest, as `bucket.Packer.pack` does.

        Blocks until every rank's part is here, each wait at most for the deadline. When it returns, every rank has said
        that its part is right. Raises what any rank raised, on all of them, and PeerError.
        """
        self._ranks.version = version.number
        if self._coming != index:
            self._call(index)
        copy_all(self._own_targets(index, buffer), self._sources.of(index))
        self._ranks.arrived(self._works)
        self._coming = -1
        self._unpack(index, buffer)
        if index + 1 < len(self._layout.entries):
            self._call(index + 1)
        else:
            self._ranks.announce(Instruction.WAIT)
        manifest = self._layout.manifest
        return write_trailer(buffer, manifest.buckets[index], version, index, manifest.digest_kind)

    def drain(self) -> None:
        """Take what is still under way, for nobody: the ranks are then in step. Raises PeerError."""
        self._coming = -1
        self._ranks.arrived(self._works)

    def forget_views(self) -> None:
        """Drop every view of the transport's buffers."""
        self._targets.clear()
        self._arrivals.clear()

    def _call(self, index: int) -> None:
        """Have every rank send its part of a bucket. All of them have packed the one before without an error."""
        self.drain()
        self._ranks.announce(Instruction.BUCKET, index)
        self._coming = index
        staging = self._ready_staging()
        for staging_slot in self._staging_slots[index]:
            place = staging[staging_slot.start : staging_slot.start + staging_slot.num_bytes]
            self._works.append(self._ranks.receive(place, staging_slot.group_rank))

    def _ready_staging(self) -> torch.Tensor:
        if self._staging is None:
            self._staging = _buffer(self._size, self._via, pinned=True)
        return self._staging

    def _landed_beside(self, buffer: torch.Tensor, num_bytes: int) -> torch.Tensor:
        """The staging buffer's bytes on the bucket's device."""
        staging = self._ready_staging()
        if staging.device.type == buffer.device.type:
            return staging
        if self._landed is None:
            self._landed = _buffer(self._size, buffer.device, pinned=True)
        self._landed[:num_bytes].copy_(staging[:num_bytes])
        return self._landed

    def _laid_out(self, index: int) -> list[_StagingSlot]:
        stretches, start = [], 0
        for group_rank, slices in enumerate(self._others, start=1):
            if num_bytes := slices.sizes[index]:
                stretches.append(_StagingSlot(group_rank, start, num_bytes))
                start = _aligned(start + num_bytes)
        return stretches

    def _own_targets(self, index: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        known = self._targets.get(index)
        if known is None or known[0] is not buffer:
            views = bucket_views(self._own.of(index), self._layout.entries[index], buffer)
            known = self._targets[index] = buffer, views
        return known[1]

    def _unpack(self, index: int, buffer: torch.Tensor) -> None:
        """Copy what came for bucket `index` from the staging buffer to its places."""
        stretches = self._staging_slots[index]
        if not stretches:
            return
        landed = self._landed_beside(buffer, stretches[-1].start + stretches[-1].num_bytes)
        arrivals = self._arrivals.get(index)
        if arrivals is None:
            arrivals = self._arrivals[index] = self._sorted_out(index, landed)
        arrivals.runs.copy(buffer, landed)
        if arrivals.scattered:
            if arrivals.buffer is not buffer:
                arrivals.buffer = buffer
                arrivals.targets = bucket_views(arrivals.scattered, self._layout.entries[index], buffer)
            copy_all(arrivals.targets, arrivals.sources)

    def _sorted_out(self, index: int, staging: torch.Tensor) -> _IncomingShards:
        arrivals, entries = _IncomingShards(), self._layout.entries[index]
        for staging_slot in self._staging_slots[index]:
            scattered = []
            for cut in self._others[staging_slot.group_rank - 1].of(index):
                if is_run(cut.region, entries[cut.entry].piece.region.sizes):
                    target = start_bytes(entries[cut.entry], cut)
                    arrivals.runs.add(target, staging_slot.start + cut.offset_bytes, cut.num_bytes)
                else:
                    scattered.append(cut)
            arrivals.scattered += scattered
            arrivals.sources += message_views(scattered, staging, staging_slot.start)
        return arrivals


def _buffer(num_bytes: int, device: torch.device, *, pinned: bool) -> torch.Tensor:
    pin = pinned and device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)
