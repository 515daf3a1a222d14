"""The regions of all trainer ranks, packed into the publishing rank's buckets by the ranks that hold them.

The plan of buckets is that of the whole tensors, however they are sharded. Invariants: each element is packed by one
rank; a rank that can map the publishing rank's buffers writes each of its slices to its place there, any other sends
its part of a bucket in one message; nothing is digested before every rank has said that its part is whole, and nothing
sent before every rank has digested its blocks; once a rank has said so, it writes to that bucket no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch
from torch.distributed import Work

from weightcast.format.bucket import Digest, Layout, queued_digest
from weightcast.format.manifest import ITEMSIZE_BYTES, WeightVersion, encode
from weightcast.host.copy import copy_all
from weightcast.host.memory import MemoryLocation, SealedMemory, map_shared, shared_memory_of
from weightcast.trainer.group.exchange import Instruction, RankStatus, TrainerRanks
from weightcast.trainer.packer import (
    BlockDigests,
    HeldRegion,
    PartPacker,
    Shard,
    ShardSlice,
    ShardSlices,
    bucket_views,
    typed_views,
)

_ALIGNMENT_BYTES = 64
"""Of each rank's place in the staging buffer; what one rank sends has no gaps."""

_MAX_DIGESTED_ALONE = 64
"""Blocks that the publishing rank digests sooner than another exchange takes."""


class SharedBuffers(msgspec.Struct, frozen=True):
    """The publishing rank to all: the memory of its buckets, and where the digests of a bucket's blocks are written.

    Without `buckets` nothing can be mapped.
    """

    buckets: MemoryLocation | None
    digests: MemoryLocation


class Contribution:
    """What another rank brings. Memory: where it has to be sent, the largest part of a bucket, or twice that."""

    def __init__(self, ranks: TrainerRanks, layout: Layout, shards: Sequence[Shard], *, via: torch.device) -> None:
        """`shards`: what was assigned to this rank. `via`: where messages lie."""
        self._ranks, self._layout, self._via = ranks, layout, via
        self._part = PartPacker(layout, shards)
        self._device = shards[0].data.device if shards else via
        self._mapped: tuple[torch.Tensor, BlockDigests] | None = None
        """The memory of the publishing rank's buckets, and the digests of the present one's blocks."""
        self._payloads: dict[int, tuple[int, torch.Tensor]] = {}
        """Of buckets in that memory, each with the byte where it begins: the same tensor as long as it stays there."""
        self._packed: torch.Tensor | None = None
        self._message: torch.Tensor | None = None

    def rebind(self, shards: Sequence[Shard]) -> None:
        """The same regions lie in other memory now."""
        self._part.rebind(shards)

    @property
    def is_mapped(self) -> bool:
        """Whether this rank packs into the publishing rank's buckets, and sends nothing."""
        return self._mapped is not None

    def map(self, buffers: SharedBuffers) -> None:
        """Pack into these buckets from now on, if this rank can map them."""
        self.close()
        if buffers.buckets is not None:
            buckets, digests = map_shared(buffers.buckets), map_shared(buffers.digests)
            if buckets is not None and digests is not None:
                self._mapped = buckets, BlockDigests(digests)

    def close(self) -> None:
        """Drop every view of the publishing rank's memory, and unmap it."""
        self._part.forget_views()
        self._payloads.clear()
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped[1].close()

    def bring(self, index: int, offset_bytes: int) -> None:
        """Pack this rank's part of bucket `index`, whose payload begins at that byte; or send it.

        Waits until it has gone. What goes wrong in packing is raised at the next exchange. Raises PeerError.
        """
        manifest, num_bytes = self._layout.manifest, self._part.slices.sizes[index]
        if self._mapped is not None:
            with self._ranks.error_at_next_exchange():
                digests = self._mapped[1]
                digests.begin(manifest.buckets[index])
                payload = self._payload(index, offset_bytes)
                self._part.pack(index, payload, digests if manifest.digest_kind == "xxh3-128" else None)
        elif num_bytes:
            with self._ranks.error_at_next_exchange():
                self._pack_message(index, num_bytes)
            message = _pinned(num_bytes, self._via) if self._message is None else self._message
            self._ranks.send(message[:num_bytes], 0)

    def digest(self, index: int, offset_bytes: int, statuses: Sequence[RankStatus]) -> None:
        """Digest this rank's share of the blocks of bucket `index` that several ranks filled.

        What goes wrong is raised at the next exchange.
        """
        if self._mapped is not None:
            with self._ranks.error_at_next_exchange():
                digests, ranks = self._mapped[1], mapping_ranks(statuses)
                blocks = digests.missing()[ranks.index(self._ranks.group_rank) :: len(ranks)]
                digests.add(self._payload(index, offset_bytes), blocks)

    def _payload(self, index: int, offset_bytes: int) -> torch.Tensor:
        known = self._payloads.get(index)
        if known is None or known[0] != offset_bytes:
            assert self._mapped is not None
            end = offset_bytes + self._layout.manifest.buckets[index]
            known = self._payloads[index] = offset_bytes, self._mapped[0][offset_bytes:end]
        return known[1]

    @torch.no_grad()
    def _pack_message(self, index: int, num_bytes: int) -> None:
        if self._packed is None or self._message is None:
            largest = _aligned(max(self._part.slices.sizes))
            self._packed = torch.empty(largest, dtype=torch.uint8, device=self._device)
            self._message = self._packed if self._device.type == self._via.type else _pinned(largest, self._via)
        copy_all(message_views(self._part.slices.of(index), self._packed), self._part.sources(index))
        if self._message is not self._packed:
            self._message[:num_bytes].copy_(self._packed[:num_bytes])


class GroupPacker:
    """The publishing rank's side: has every rank pack its part of a bucket, and digest its share of the whole.

    Memory: where ranks can't map the buckets, one staging buffer of at most a bucket, and a second where messages do
    not arrive on the buckets' device.
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
        self._own = PartPacker(layout, shards)
        self._others = [ShardSlices(layout, parts) for parts in others]
        self._shared: MemoryLocation | None = None
        """What the other ranks were told to map."""
        self._digest_memory: SealedMemory | None = None
        self._digests: BlockDigests | None = None
        self._num_missing: dict[int, int] = {}
        """For each bucket, how many blocks no rank filled alone when it was packed last."""
        self._staging: torch.Tensor | None = None
        self._landed: torch.Tensor | None = None
        """The staging buffer's bytes on the buckets' device."""
        self._works: list[Work] = []

    def rebind(self, shards: Sequence[Shard]) -> None:
        """The same regions lie in other memory now."""
        self._own.rebind(shards)

    @torch.no_grad()
    def fill(self, index: int, payload: torch.Tensor, version: WeightVersion) -> Digest:
        """Write the payload of bucket `index`; return its digest, as `Packer.fill` does.

        Waits until every rank has packed and digested its part, each wait at most for the deadline. Raises what any
        rank raised, on all of them, and PeerError.
        """
        ranks, manifest = self._ranks, self._layout.manifest
        num_bytes, kind, offset_bytes = manifest.buckets[index], manifest.digest_kind, int(payload.storage_offset())
        ranks.version = version.number
        self._share(payload)
        self._layout.clear_gaps(index, payload)
        digests = None if kind != "xxh3-128" else self._digests
        if digests is not None:
            digests.reset(num_bytes)
        statuses = ranks.announce(Instruction.BUCKET, index, offset_bytes)
        messages = self._receive(index, statuses)
        self._own.pack(index, payload, digests)
        self._unpack(index, payload, messages)
        if digests is None:
            ranks.announce(Instruction.WAIT)
            return queued_digest(payload[:num_bytes], kind)
        is_shared_out = self._num_missing.get(index, num_bytes) > _MAX_DIGESTED_ALONE
        ranks.announce(Instruction.DIGEST if is_shared_out else Instruction.WAIT, index, offset_bytes)
        missing = digests.missing()
        self._num_missing[index] = len(missing)
        if is_shared_out:
            digests.add(payload, missing[:: len(mapping_ranks(statuses))])
            ranks.announce(Instruction.WAIT)
        else:
            digests.add(payload, missing)
        return digests.whole()

    def drain(self) -> None:
        """Take what is still under way: the ranks are then in step. Raises PeerError."""
        self._ranks.arrived(self._works)

    def forget_views(self) -> None:
        """Drop every view of the transport's buffers."""
        self._own.forget_views()

    def close(self) -> None:
        """Drop them, and free what the other ranks have mapped besides."""
        self.forget_views()
        if self._digests is not None and self._digest_memory is not None:
            self._digests.close()
            self._digest_memory.release(free=False)
        self._digests = self._digest_memory = None

    def _share(self, payload: torch.Tensor) -> None:
        """Have the other ranks map the memory of the buckets, if it can be shared, unless they have it."""
        shared = shared_memory_of(payload)
        location = None if shared is None else shared.location
        if self._digest_memory is None:
            size_bytes = BlockDigests.size_bytes(self._layout.manifest)
            self._digest_memory = SealedMemory.allocate(size_bytes, kind="digests")
            self._digests = BlockDigests(self._digest_memory.tensor())
        elif location == self._shared:
            return
        buffers = SharedBuffers(location, self._digest_memory.location)
        self._ranks.announce_when_idle(Instruction.MAP, data=encode(buffers))
        self._shared = location

    def _receive(self, index: int, statuses: Sequence[RankStatus]) -> list[_Message]:
        """Begin to receive the parts of the ranks that send theirs."""
        messages, start = [], 0
        for group_rank, slices in enumerate(self._others, start=1):
            if slices.sizes[index] and not statuses[group_rank].is_mapped:
                messages.append(_Message(group_rank, slices, start))
                start = _aligned(start + slices.sizes[index])
        if messages and self._staging is None:
            sums = map(sum, zip(*([_aligned(size) for size in slices.sizes] for slices in self._others), strict=True))
            self._staging = _pinned(max(sums), self._via)
        for group_rank, slices, start in messages:
            assert self._staging is not None
            self._works.append(self._ranks.receive(self._staging[start : start + slices.sizes[index]], group_rank))
        return messages

    def _unpack(self, index: int, payload: torch.Tensor, messages: Sequence[_Message]) -> None:
        """Copy what comes for bucket `index` from the staging buffer to its places."""
        self.drain()
        staging = self._staging
        if not messages or staging is None:
            return
        if staging.device.type != payload.device.type:
            if self._landed is None:
                self._landed = torch.empty(staging.numel(), dtype=torch.uint8, device=payload.device)
            num_bytes = messages[-1].start + messages[-1].slices.sizes[index]
            staging = self._landed[:num_bytes].copy_(staging[:num_bytes])
        for _, slices, start in messages:
            cuts = slices.of(index)
            copy_all(bucket_views(cuts, self._layout.entries[index], payload), message_views(cuts, staging, start))


class _Message(NamedTuple):
    """One rank's part of a bucket, and its place in the staging buffer."""

    group_rank: int
    slices: ShardSlices
    start: int


def mapping_ranks(statuses: Sequence[RankStatus]) -> list[int]:
    """The group ranks that have the buckets mapped: the publishing one, whose they are, and those that say so."""
    return [group_rank for group_rank, status in enumerate(statuses) if not group_rank or status.is_mapped]


def message_order(cuts: Sequence[ShardSlice]) -> list[int]:
    """The numbers of the cuts in the order of a message: wide dtypes first, so that all lie aligned without gaps."""
    return sorted(range(len(cuts)), key=lambda number: -ITEMSIZE_BYTES[cuts[number].dtype])


def message_views(cuts: Sequence[ShardSlice], buffer: torch.Tensor, start: int = 0) -> list[torch.Tensor]:
    """One view for each cut into a message that lies in `buffer` from byte `start` on, in the order of the cuts."""
    starts = [0] * len(cuts)
    for number in message_order(cuts):
        starts[number], start = start, start + cuts[number].num_bytes
    return typed_views(buffer, ((cut, at, cut.region.sizes) for cut, at in zip(cuts, starts, strict=True)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    pin = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)
