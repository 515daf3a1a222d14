"""The regions of all trainer ranks, packed into the buckets of origins by the ranks that hold them.

A round is the next bucket of each origin. Invariants: each element is packed by one rank, and into the origin beside
it; a rank that can map its origin's buffers writes each of its slices to its place there, any other sends its part of a
bucket to the rank that leads the origin, in one message; what a rank fills alone it digests while it packs, the rest is
digested by the rank that leads once every rank has said that its part is whole; once a rank has said so, it writes to
that bucket no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from weightcast.format.bucket import Digest, Layout, queued_digest, split_like
from weightcast.format.manifest import ITEMSIZE_BYTES, decode, encode
from weightcast.host import device as host_device
from weightcast.host import memory as host_memory
from weightcast.host.copy import copy_all
from weightcast.host.memory import MemoryLocation, map_shared, shared_memory_of
from weightcast.native.tables import Chunks, Sums, added, digest
from weightcast.trainer.group.exchange import Arrival, RankStatus, TrainerRanks
from weightcast.trainer.packer import (
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


class SharedBuffers(msgspec.Struct, frozen=True):
    """A rank that leads an origin to all: the memory of its buckets. Without it nothing can be mapped."""

    buckets: MemoryLocation | None = None


class Contribution:
    """What a rank brings that leads no origin. Memory: where it has to be sent, the largest part of a bucket, or twice
    that.
    """

    def __init__(
        self,
        ranks: TrainerRanks,
        layout: Layout,
        shards: Sequence[Shard],
        *,
        leader: int,
        origin: int,
        via: torch.device,
    ) -> None:
        """`shards`: what was assigned to this rank, all for number `origin`, which group rank `leader` leads.

        `via`: where messages lie.
        """
        self.leader = leader
        self._ranks, self._layout, self._via = ranks, layout, via
        self._span = layout.manifest.spans[origin]
        self._part = PartPacker(layout, shards)
        self._device = shards[0].data.device if shards else via
        self._mapped: torch.Tensor | None = None
        """The memory of the origin's buckets."""
        self._sums: Sums = 0, 0
        self._payloads: dict[int, tuple[int, torch.Tensor]] = {}
        """Of buckets in that memory, each with the byte where it begins: the same tensor as long as it stays there."""
        self._packed: torch.Tensor | None = None
        self._message: torch.Tensor | None = None
        self._message_views: dict[int, list[torch.Tensor]] = {}
        """By bucket: a view costs more than the copy of what is small."""

    def rebind(self, shards: Sequence[Shard]) -> None:
        """The same regions lie in other memory now."""
        self._part.rebind(shards)
        self._message_views.clear()

    def status(self) -> RankStatus:
        """What this rank brings to an exchange."""
        # As an exchange takes them: signed words of 64 bits.
        low, high = ((word ^ 1 << 63) - (1 << 63) for word in self._sums)
        return RankStatus(is_mapped=self._mapped is not None, sum_low=low, sum_high=high)

    def map(self, buffers: SharedBuffers) -> None:
        """Pack into these buckets from now on, if this rank can map them; else send."""
        self.close()
        if buffers.buckets is not None:
            self._mapped = map_shared(buffers.buckets)

    def close(self) -> None:
        """Drop every view of the origin's memory, and unmap it."""
        self._part.forget_views()
        self._payloads.clear()
        self._mapped = None

    def bring(self, number: int, statuses: Sequence[RankStatus]) -> None:
        """Pack this rank's part of the origin's bucket of a round, if it has one; or send it.

        Waits until it has gone. What goes wrong in packing is raised at the next exchange. Raises PeerError.
        """
        offset_bytes = statuses[self.leader].offset_bytes
        if offset_bytes < 0:
            return
        index = self._span[number]
        num_bytes = self._part.slices.sizes[index]
        if self._mapped is not None:
            with self._ranks.error_at_next_exchange():
                self._sums, _ = self._part.pack(index, self._payload(index, offset_bytes))
        elif num_bytes:
            with self._ranks.error_at_next_exchange():
                self._pack_message(index, num_bytes)
            message = _pinned(num_bytes, self._via) if self._message is None else self._message
            self._ranks.send(message[:num_bytes], self.leader)

    def _payload(self, index: int, offset_bytes: int) -> torch.Tensor:
        known = self._payloads.get(index)
        if known is None or known[0] != offset_bytes:
            assert self._mapped is not None
            end = offset_bytes + self._layout.manifest.buckets[index]
            known = self._payloads[index] = offset_bytes, self._mapped[offset_bytes:end]
        return known[1]

    @torch.no_grad()
    def _pack_message(self, index: int, num_bytes: int) -> None:
        if self._packed is None or self._message is None:
            largest = _aligned(max(self._part.slices.sizes))
            is_one = self._device.type == self._via.type
            self._message = _pinned(largest, self._via)
            self._packed = self._message if is_one else _pinned(largest, self._device)
        sources = self._part.sources(index)
        if index not in self._message_views:
            views = message_views(self._part.slices.of(index), self._packed)
            self._message_views[index] = list(map(split_like, views, sources))
        copy_all(self._message_views[index], sources)
        if self._message is not self._packed:
            self._message[:num_bytes].copy_(self._packed[:num_bytes])


class OriginPacker:
    """The side of the rank that leads an origin: has the ranks beside it pack their parts of a bucket, and digest it.

    Memory: where ranks can't map the buckets, one staging buffer of at most a bucket, and a second where messages do
    not arrive on the buckets' device.
    """

    def __init__(
        self,
        ranks: TrainerRanks,
        layout: Layout,
        shards: Sequence[Shard],
        others: Mapping[int, Sequence[HeldRegion]],
        *,
        origin: int,
        via: torch.device,
    ) -> None:
        """`shards`: what was assigned to this rank; `others`: to each of the other ranks of this origin, by group rank.

        `origin`: its number. `via`: where messages arrive.
        """
        self._ranks, self._layout, self._via = ranks, layout, via
        self._first = layout.manifest.spans[origin].start
        self._own = PartPacker(layout, shards)
        self._others = {rank: ShardSlices(layout, parts) for rank, parts in others.items()}
        self._shared: MemoryLocation | None = None
        """What the other ranks were told to map."""
        self._packed: tuple[Sums, Chunks] | None = None
        """Of this rank's part of the last bucket, in host memory: see `PartPacker.pack`."""
        self._unfilled: dict[tuple[int, int], Chunks] = {}
        """By rank and bucket, the chunks that another rank does not fill alone."""
        self._staging: torch.Tensor | None = None
        self._landed: torch.Tensor | None = None
        """The staging buffer's bytes on the buckets' device."""
        self._unpacked: dict[int, _Unpacking] = {}
        """By bucket: a view costs more than the copy of what is small."""
        self._arrivals: list[Arrival] = []

    def rebind(self, shards: Sequence[Shard]) -> None:
        """The same regions lie in other memory now."""
        self._own.rebind(shards)

    def status(self, index: int, payload: torch.Tensor) -> RankStatus:
        """What this rank brings to the exchange before bucket `index` is packed into `payload`."""
        return RankStatus(
            next_round=index - self._first,
            offset_bytes=int(payload.storage_offset()),
            is_moved=self._buffers(payload).buckets != self._shared and bool(self._others),
        )

    def share(self, payload: torch.Tensor) -> SharedBuffers:
        """What the other ranks of the origin are to map."""
        buffers = self._buffers(payload)
        self._shared = buffers.buckets
        return buffers

    @torch.no_grad()
    def pack(self, index: int, payload: torch.Tensor, statuses: Sequence[RankStatus]) -> None:
        """Write this rank's part of the payload of bucket `index`, and what others send. Raises PeerError."""
        self._packed = None
        try:
            messages = self._receive(index, statuses)
            if payload.is_cuda:
                self._layout.clear_gaps(index, payload)
                self._own.copy(index, payload)
            else:
                self._packed = self._own.pack(index, payload)
            self._ranks.arrived(self._arrivals)
            self._unpack(index, payload, messages)
        finally:
            # Whatever went wrong here, the ranks that send are not left waiting.
            self._ranks.arrived(self._arrivals)

    def digest(self, index: int, payload: torch.Tensor, packed: Sequence[RankStatus]) -> Digest:
        """The payload's digest, once all have packed, as they say in `packed`; see `Fill.fill`."""
        payload = payload[: self._layout.manifest.buckets[index]]
        if self._packed is None:
            return queued_digest(payload)
        sums, missing = self._packed
        parts, num_idle = [sums], 0
        for rank, slices in self._others.items():
            if packed[rank].is_mapped:
                if (rank, index) not in self._unfilled:
                    self._unfilled[rank, index] = slices.unfilled(index)
                parts.append((packed[rank].sum_low, packed[rank].sum_high))
                missing = missing & self._unfilled[rank, index]
                num_idle += 1
        # The other ranks wait meanwhile, and their cores with them.
        return added(*parts, digest(payload, missing, threads=1 + num_idle))

    def forget_views(self) -> None:
        """Drop every view of the transport's buffers."""
        self._own.forget_views()
        self._unpacked.clear()

    def close(self) -> None:
        """As every holder of a share: drop what it has of the transport."""
        self.forget_views()

    def _buffers(self, payload: torch.Tensor) -> SharedBuffers:
        shared = shared_memory_of(payload)
        return SharedBuffers(None if shared is None else shared.location)

    def _receive(self, index: int, statuses: Sequence[RankStatus]) -> list[_Message]:
        """Begin to receive the parts of the ranks that send theirs."""
        messages, start = [], 0
        for group_rank, slices in self._others.items():
            if slices.sizes[index] and not statuses[group_rank].is_mapped:
                messages.append(_Message(group_rank, slices, start))
                start = _aligned(start + slices.sizes[index])
        if messages and self._staging is None:
            sizes = (slices.sizes for slices in self._others.values())
            self._staging = _pinned(max(sum(map(_aligned, each)) for each in zip(*sizes, strict=True)), self._via)
        for group_rank, slices, start in messages:
            assert self._staging is not None
            self._arrivals.append(self._ranks.receive(self._staging[start : start + slices.sizes[index]], group_rank))
        return messages

    def _unpack(self, index: int, payload: torch.Tensor, messages: Sequence[_Message]) -> None:
        """Copy what came for bucket `index` from the staging buffer to its places."""
        staging = self._staging
        if not messages or staging is None:
            return
        if staging.device.type != payload.device.type:
            if self._landed is None:
                self._landed = _pinned(staging.numel(), payload.device)
            num_bytes = messages[-1].start + messages[-1].slices.sizes[index]
            self._landed[:num_bytes].copy_(staging[:num_bytes])
            staging = self._landed
        known = self._unpacked.get(index)
        if known is None or known.payload is not payload or known.messages != messages:
            known = self._unpacked[index] = _Unpacking(payload, messages, [], [])
            for _, slices, start in messages:
                cuts = slices.of(index)
                known.targets.extend(bucket_views(cuts, self._layout.entries[index], payload))
                known.sources.extend(message_views(cuts, staging, start))
        copy_all(known.targets, known.sources)


class _Unpacking(NamedTuple):
    """The copies that bring these messages to their places in a payload."""

    payload: torch.Tensor
    messages: Sequence[_Message]
    targets: list[torch.Tensor]
    sources: list[torch.Tensor]


class _Message(NamedTuple):
    """One rank's part of a bucket, and its place in the staging buffer."""

    group_rank: int
    slices: ShardSlices
    start: int


def mapped_again(
    ranks: TrainerRanks,
    statuses: list[RankStatus],
    *,
    shared: SharedBuffers | None = None,
    contribution: Contribution | None = None,
) -> list[RankStatus]:
    """After the exchange that begins a round: have ranks map the memory of origins that has moved, if any has.

    `shared`: what this rank has others map. Every rank calls it; returns what the ranks have brought, up to date.
    """
    if not any(status.is_moved for status in statuses):
        return statuses
    rows = ranks.gather(encode(SharedBuffers() if shared is None else shared))
    is_mapped = False
    with ranks.error_at_next_exchange():
        if contribution is not None:
            if statuses[contribution.leader].is_moved:
                contribution.map(decode(rows[contribution.leader], SharedBuffers))
            is_mapped = bool(contribution.status().is_mapped)
    now = ranks.exchange(RankStatus(command=statuses[0].command, version=ranks.version, is_mapped=is_mapped))
    return [status._replace(is_mapped=each.is_mapped) for status, each in zip(statuses, now, strict=True)]


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
    """Memory for messages; on a CPU such as a GPU copies from and to at once. Raises InsufficientMemoryError."""
    if device.type != "cpu":
        return host_device.empty(num_bytes, device, "gathering a bucket", host_memory.LESS_AT_ONCE)
    return host_device.pinned(num_bytes) if torch.cuda.is_available() else torch.empty(num_bytes, dtype=torch.uint8)
