"""The regions of all trainer ranks, packed into the publishing rank's buckets by the ranks that hold them.

The plan of buckets is that of the whole tensors, however they are sharded. Invariants: each element is packed by one
rank; a rank that can map the publishing rank's buffers writes each of its slices to its place there, any other sends
its part of a bucket in one message; nothing is digested before every rank has said that its part is whole, and nothing
sent before every rank has digested its blocks; once a rank has said so, it writes to that bucket no more.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch.distributed import Work

from weightcast.format.bucket import (
    DIGEST_BLOCK_BYTES,
    DIGEST_BYTES,
    TORCH_DTYPES,
    Buffers,
    Entry,
    Layout,
    blocks_digest,
    buffer_size_bytes,
    narrow,
    put_trailer,
    write_trailer,
)
from weightcast.format.geometry import Region, common, relative, row_major, start_elements
from weightcast.format.manifest import ITEMSIZE_BYTES, WeightVersion, encode
from weightcast.host.copy import copy_all
from weightcast.host.shared_memory import MemoryLocation, SharedMemory, map_shared, shared_memory_of
from weightcast.trainer.group.exchange import Instruction, RankStatus, TrainerRanks
from weightcast.trainer.packer import HeldRegion, Shard

_ALIGNMENT_BYTES = 64
"""Of each rank's place in the staging buffer; what one rank sends has no gaps."""


class SharedBuffers(msgspec.Struct, frozen=True):
    """The publishing rank to all: the memory of its buckets, and where the digests of a bucket's blocks are written.

    Without `buckets` nothing can be mapped.
    """

    buckets: MemoryLocation | None
    digests: MemoryLocation


class Contribution:
    """A rank's part of each bucket. Memory: where it has to be sent, the largest of these parts, or twice that."""

    def __init__(self, ranks: TrainerRanks, layout: Layout, shards: Sequence[Shard], *, via: torch.device) -> None:
        """`shards`: what was assigned to this rank. `via`: where messages lie."""
        self._ranks, self._layout, self._via = ranks, layout, via
        self._slices = ShardSlices(layout, shards)
        self._shards = shards
        self._sources: dict[int, list[torch.Tensor]] = {}
        self._targets: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._mapped: tuple[Buffers, torch.Tensor] | None = None
        """The publishing rank's buckets, and where the digests of blocks go."""
        self._packed: torch.Tensor | None = None
        self._message: torch.Tensor | None = None

    def rebind(self, shards: Sequence[Shard]) -> None:
        """The same regions lie in other memory now."""
        self._shards = shards
        self._sources.clear()

    @property
    def is_mapped(self) -> bool:
        """Whether this rank packs into the publishing rank's buckets, and sends nothing."""
        return self._mapped is not None

    def map(self, buffers: SharedBuffers) -> None:
        """Pack into these buckets from now on, if this rank can map them."""
        self.forget_views()
        self._mapped = None
        if buffers.buckets is not None:
            buckets, digests = map_shared(buffers.buckets), map_shared(buffers.digests)
            if buckets is not None and digests is not None:
                self._mapped = Buffers(buckets), digests

    def bring(self, index: int, offset_bytes: int) -> None:
        """Pack this rank's part of bucket `index`, which begins at that byte; or send it, and block until it has gone.

        What goes wrong in packing is raised at the next exchange. Raises PeerError.
        """
        size = self._slices.sizes[index]
        if self._mapped is not None:
            with self._ranks.error_at_next_exchange():
                self.pack(index, self._bucket(index, offset_bytes))
        elif size:
            with self._ranks.error_at_next_exchange():
                self._pack_message(index, size)
            message = _pinned(size, self._via) if self._message is None else self._message
            self._ranks.send(message[:size], 0)

    def digest(self, index: int, offset_bytes: int, statuses: Sequence[RankStatus]) -> None:
        """Digest this rank's blocks of bucket `index`, which is whole; an error is raised at the next exchange."""
        if self._mapped is not None:
            with self._ranks.error_at_next_exchange():
                payload = self._bucket(index, offset_bytes)[: self._layout.manifest.buckets[index]]
                digest_blocks(payload, self._mapped[1], mapping_ranks(statuses), self._ranks.group_rank)

    def _bucket(self, index: int, offset_bytes: int) -> torch.Tensor:
        assert self._mapped is not None
        return self._mapped[0].get(index, offset_bytes, buffer_size_bytes(self._layout.manifest, index))

    @torch.no_grad()
    def pack(self, index: int, buffer: torch.Tensor) -> None:
        """Copy this rank's slices of bucket `index` to their places in `buffer`."""
        known = self._targets.get(index)
        if known is None or known[0] is not buffer:
            views = bucket_views(self._slices.of(index), self._layout.entries[index], buffer)
            known = self._targets[index] = buffer, views
        copy_all(known[1], self._sources_of(index))

    @torch.no_grad()
    def _pack_message(self, index: int, size: int) -> None:
        if self._packed is None or self._message is None:
            largest = max(self._slices.sizes)
            device = self._shards[0].data.device
            self._packed = torch.empty(_aligned(largest), dtype=torch.uint8, device=device)
            self._message = self._packed if device.type == self._via.type else _pinned(_aligned(largest), self._via)
        copy_all(message_views(self._slices.of(index), self._packed), self._sources_of(index))
        if self._message is not self._packed:
            self._message[:size].copy_(self._packed[:size])

    def _sources_of(self, index: int) -> list[torch.Tensor]:
        views = self._sources.get(index)
        if views is None:
            pairs = [(self._shards[cut.part], cut.region) for cut in self._slices.of(index)]
            views = self._sources[index] = [
                shard.data if region == shard.region else narrow(shard.data, relative(region, shard.region))
                for shard, region in pairs
            ]
        return views

    def forget_views(self) -> None:
        """Drop every view of the buckets."""
        self._targets.clear()


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
        self._own = Contribution(ranks, layout, shards, via=via)
        self._others = [ShardSlices(layout, parts) for parts in others]
        self._shared: MemoryLocation | None = None
        """What the other ranks were told to map."""
        self._digests: SharedMemory | None = None
        self._staging: torch.Tensor | None = None
        self._landed: torch.Tensor | None = None
        """The staging buffer's bytes on the buckets' device."""
        self._works: list[Work] = []

    def rebind(self, shards: Sequence[Shard]) -> None:
        """The same regions lie in other memory now."""
        self._own.rebind(shards)

    @torch.no_grad()
    def pack(self, index: int, buffer: torch.Tensor, version: WeightVersion) -> bytes | torch.Tensor:
        """Fill `buffer` with bucket `index` and its trailer; return the digest, as `Packer.pack` does.

        Blocks until every rank has packed and digested its part, each wait at most for the deadline. Raises what any
        rank raised, on all of them, and PeerError.
        """
        ranks, manifest = self._ranks, self._layout.manifest
        num_bytes, kind, offset_bytes = manifest.buckets[index], manifest.digest_kind, int(buffer.storage_offset())
        ranks.version = version.number
        self._share(buffer)
        statuses = ranks.announce(Instruction.BUCKET, index, offset_bytes)
        messages = self._receive(index, statuses)
        self._own.pack(index, buffer)
        self._unpack(index, buffer, messages)
        if kind != "xxh3-128" or self._digests is None or len(mapping_ranks(statuses)) == 1:
            ranks.announce(Instruction.WAIT)
            return write_trailer(buffer, num_bytes, version, index, kind)
        digests = self._digests.tensor()
        ranks.announce(Instruction.DIGEST, index, offset_bytes)
        digest_blocks(buffer[:num_bytes], digests, mapping_ranks(statuses), 0)
        ranks.announce(Instruction.WAIT)
        digest = blocks_digest(digests.numpy().data[: -(-num_bytes // DIGEST_BLOCK_BYTES) * DIGEST_BYTES])
        put_trailer(buffer, num_bytes, version, index, digest)
        return digest

    def drain(self) -> None:
        """Take what is still under way: the ranks are then in step. Raises PeerError."""
        self._ranks.arrived(self._works)

    def forget_views(self) -> None:
        """Drop every view of the transport's buffers."""
        self._own.forget_views()

    def _share(self, buffer: torch.Tensor) -> None:
        """Have the other ranks map the memory of the buckets, if it can be shared, unless they have it."""
        shared = shared_memory_of(buffer)
        location = None if shared is None else shared.location
        if location == self._shared:
            return
        if self._digests is None:
            num_blocks = -(-self._layout.manifest.max_bucket_bytes // DIGEST_BLOCK_BYTES)
            self._digests = SharedMemory.allocate(num_blocks * DIGEST_BYTES)
        buffers = SharedBuffers(location, self._digests.location)
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

    def _unpack(self, index: int, buffer: torch.Tensor, messages: Sequence[_Message]) -> None:
        """Copy what comes for bucket `index` from the staging buffer to its places."""
        self.drain()
        staging = self._staging
        if not messages or staging is None:
            return
        if staging.device.type != buffer.device.type:
            if self._landed is None:
                self._landed = torch.empty(staging.numel(), dtype=torch.uint8, device=buffer.device)
            num_bytes = messages[-1].start + messages[-1].slices.sizes[index]
            staging = self._landed[:num_bytes].copy_(staging[:num_bytes])
        for _, slices, start in messages:
            found = slices.of(index)
            copy_all(bucket_views(found, self._layout.entries[index], buffer), message_views(found, staging, start))


class _Message(NamedTuple):
    """One rank's part of a bucket, and its place in the staging buffer."""

    group_rank: int
    slices: ShardSlices
    start: int


def mapping_ranks(statuses: Sequence[RankStatus]) -> list[int]:
    """The group ranks that have the buckets mapped: the publishing one, whose they are, and those that say so."""
    return [group_rank for group_rank, status in enumerate(statuses) if not group_rank or status.is_mapped]


def digest_blocks(payload: torch.Tensor, digests: torch.Tensor, ranks: Sequence[int], group_rank: int) -> None:
    """Write the digests of this rank's blocks to their places in `digests`; `ranks` take one block each in turn."""
    data, target = payload.numpy().data, digests.numpy().data
    for block in range(ranks.index(group_rank), -(-len(data) // DIGEST_BLOCK_BYTES), len(ranks)):
        start = block * DIGEST_BLOCK_BYTES
        digest = xxhash.xxh3_128_digest(data[start : start + DIGEST_BLOCK_BYTES])
        target[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] = digest


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
        """Bytes of the rank's part of each bucket."""
        self._last: tuple[int, list[ShardSlice]] = (-1, [])

    def of(self, index: int) -> list[ShardSlice]:
        """The cuts of bucket `index` in the order of a message: wide dtypes first, so that all lie aligned.

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


def message_views(slices: Sequence[ShardSlice], buffer: torch.Tensor, start: int = 0) -> list[torch.Tensor]:
    """One view for each cut into a message that lies in `buffer` from byte `start` on."""
    return _views(buffer, ((cut, start + cut.offset_bytes, cut.region.sizes) for cut in slices))


def bucket_views(slices: Sequence[ShardSlice], entries: Sequence[Entry], buffer: torch.Tensor) -> list[torch.Tensor]:
    """One view for each cut into a bucket's buffer."""
    return _views(buffer, (_place(cut, entries[cut.entry]) for cut in slices))


def _place(cut: ShardSlice, entry: Entry) -> tuple[ShardSlice, int, Sequence[int]]:
    piece = entry.piece.region
    elements = start_elements(relative(cut.region, piece), piece.sizes)
    return cut, entry.piece.offset_bytes + elements * ITEMSIZE_BYTES[cut.dtype], piece.sizes


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


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _pinned(num_bytes: int, device: torch.device) -> torch.Tensor:
    pin = device.type == "cpu" and torch.cuda.is_available()
    return torch.empty(num_bytes, dtype=torch.uint8, device=device, pin_memory=pin)
