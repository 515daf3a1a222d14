"""What the trainer ranks agree on before bytes move: the same specs, who holds what, and who brings what.

Invariants: ranks that differ raise the same error, all of them; nothing is exchanged beyond the first row of a publish
while nothing has changed on any rank; the shards that a rank is asked for are ones that it said it holds.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import torch

from weightcast.errors import IncompatibleWeightsError
from weightcast.format.bucket import Layout, narrow
from weightcast.format.geometry import Region, relative, split
from weightcast.format.manifest import ITEMSIZE_BYTES, DigestKind, Manifest, RunId, TensorSpec, decode, encode
from weightcast.format.plan import plan
from weightcast.seams.source import Regions, Source
from weightcast.trainer.group.device_senders import DeviceArenas, SenderAssignment, SenderFactory, SenderLocation
from weightcast.trainer.group.exchange import Instruction, RankStatus, TrainerRanks
from weightcast.trainer.group.gather import Contribution, GroupPacker
from weightcast.trainer.packer import HeldRegion, SeenRegions, Shard, held_shards, require_tiling

_MIN_SPLIT_BYTES = 1 << 20
_TOGETHER = "the ranks of trainer_group together must hold every element: pass the group of all ranks of the model"


class _HeldPart(msgspec.Struct, frozen=True, array_like=True):
    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _HeldShards(msgspec.Struct, frozen=True):
    """A rank to all: the regions that it holds, by number of the specs, and where it and an arena of its own are."""

    parts: tuple[_HeldPart, ...]
    location: SenderLocation


class Settings(msgspec.Struct, frozen=True):
    """The publishing rank to all: what it takes to make the same plan."""

    run: RunId
    bucket_size_bytes: int
    digest_kind: DigestKind
    manifest_digest: str
    backend: Literal["gloo", "nccl"]
    assignment: SenderAssignment


class Shares:
    """This rank's side, kept from publish to publish."""

    def __init__(self, ranks: TrainerRanks, sender_factory: SenderFactory | None) -> None:
        self.arenas = DeviceArenas(ranks, sender_factory)
        self.run = ""
        self._ranks = ranks
        self._regions: SeenRegions | None = None
        self._specs: Sequence[TensorSpec] = ()
        self._digest = (0, 0)
        self._shards: list[Shard] = []
        self._parts: list[HeldRegion] = []
        self._assigned: Sequence[AssignedPart] = ()
        self._is_settled = False
        self._contribution: Contribution | None = None
        self._packer: GroupPacker | None = None
        self._layout: Layout | None = None
        self._others: list[list[HeldRegion]] = []
        self._via = torch.device("cpu")

    # --- what this rank has ---

    def look(self, source: Source, regions: Regions) -> None:
        """See what this rank holds now. No communication. Raises IncompatibleWeightsError."""
        if self._regions is not None and self._regions.is_of(regions):
            return
        self._regions = None
        specs = source.specs()
        if specs is not self._specs:
            self._specs, self._is_settled = specs, False
            data = msgspec.json.encode([[s.name, s.dtype, s.shape, s.aliases, s.group] for s in specs])
            low, high = struct.unpack_from("<qq", hashlib.sha256(data).digest())
            self._digest = (low, high)
        shards = held_shards(specs, regions)
        parts = [HeldRegion(shard.tensor, shard.region) for shard in shards]
        if parts != self._parts:
            self._parts, self._is_settled = parts, False
        self._shards, self._regions = shards, SeenRegions(regions)
        for holder in (self._contribution, self._packer):
            if holder is not None and self._is_settled:
                holder.rebind(self._own_shards())

    def status(self, layout: Layout | None) -> RankStatus:
        """What this rank brings to the first exchange. `layout`: the publishing rank's plan."""
        low, high = self._digest
        is_news = not self._is_settled or layout is not (self._layout if self._ranks.is_publishing else None)
        number = 0
        gpu = next((shard.data.device for shard in self._shards if shard.data.is_cuda), None)
        if gpu is not None:
            uuid = str(torch.cuda.get_device_properties(gpu).uuid)
            number = struct.unpack_from("<q", hashlib.sha256(uuid.encode()).digest())[0] | 1
        return RankStatus(
            command=Instruction.START,
            version=self._ranks.version,
            news=is_news,
            digest_low=low,
            digest_high=high,
            device=number,  # it tells GPUs apart; host memory is 0
        )

    def forget(self) -> None:
        """Ranks lost each other: agree again."""
        self._is_settled = False

    def close(self) -> None:
        """Free this rank's arena, and drop what holds on to the transport's buffers."""
        self.arenas.close()
        for part in (self._packer, self._contribution):
            if part is not None:
                part.close()

    def _own_shards(self) -> list[Shard]:
        """What this rank brings."""
        own = []
        for part, region in self._assigned:
            shard = self._shards[part]
            data = shard.data if region == shard.region else narrow(shard.data, relative(region, shard.region))
            own.append(Shard(shard.tensor, region, data))
        return own

    def _settle(self, device: torch.device) -> tuple[list[list[HeldRegion]], list[SenderLocation]]:
        """Have every rank know what all hold, and so who brings what. `device`: where this rank's arena would be.

        Returns what each rank brings, and where each is; what goes wrong is raised at the next exchange.
        """
        ranks = self._ranks
        held = tuple(_HeldPart(part.tensor, part.region.offsets, part.region.sizes) for part in self._parts)
        rows = ranks.gather(encode(_HeldShards(held, self.arenas.location(device))))
        brought: list[list[HeldRegion]] = [[] for _ in rows]
        locations: list[SenderLocation] = []
        with ranks.error_at_next_exchange():
            holdings: list[_HeldShards] = [decode(row, _HeldShards) for row in rows]
            locations = [holding.location for holding in holdings]
            held_by_all = [[HeldRegion(p.tensor, Region(p.offsets, p.sizes)) for p in each.parts] for each in holdings]
            first = locations[0]
            near = [location.host == first.host and first.device_type == "cpu" for location in locations]
            assigned = assign(self._specs, held_by_all, [True, *near[1:]])
            self._assigned = assigned[ranks.group_rank]
            brought = [
                [HeldRegion(regions[part].tensor, region) for part, region in parts]
                for regions, parts in zip(held_by_all, assigned, strict=True)
            ]
        return brought, locations

    # --- the publishing rank ---

    def lead(
        self, statuses: Sequence[RankStatus], layout: Layout, bucket_size_bytes: int, run: str, device: torch.device
    ) -> None:
        """After the first exchange: have every rank know its share. Raises on every rank alike.

        `device`: of the publishing rank's own arena.
        """
        self._compare(statuses)
        if not any(status.news for status in statuses):
            return
        self._is_settled, ranks = False, self._ranks
        brought, locations = self._settle(device)
        ranks.announce(Instruction.SETTLE)
        gpus = {status.device for status in statuses}
        is_nccl = 0 not in gpus and len(gpus) == len(statuses)
        backend: Literal["gloo", "nccl"] = "nccl" if is_nccl else "gloo"
        arenas, manifest = self.arenas.assignment(locations), layout.manifest
        settings = Settings(run, bucket_size_bytes, manifest.digest_kind, manifest.digest(), backend, arenas)
        ranks.announce_when_idle(Instruction.SETTLE, data=encode(settings))
        self._layout, self._others, self._via = layout, brought[1:], self._connected(backend)
        self.arenas.lead(arenas, locations, device)
        if self._packer is not None:
            self._packer.close()
        self._packer = None

    def packer(self) -> GroupPacker:
        """What fills buckets in this publish."""
        if self._packer is None:
            assert self._layout is not None
            self._packer = GroupPacker(self._ranks, self._layout, self._own_shards(), self._others, via=self._via)
            self._is_settled = True
        return self._packer

    def drain(self) -> None:
        """Take what is still on its way to the packer. Raises PeerError."""
        if self._packer is not None:
            self._packer.drain()

    # --- the others ---

    def follow(self, statuses: Sequence[RankStatus]) -> Contribution | None:
        """After the first exchange: what this rank brings; None if it can't, which the next exchange raises."""
        self._compare(statuses)
        if self._contribution is not None and not any(status.news for status in statuses):
            return self._contribution
        self._is_settled, ranks, device = False, self._ranks, self._device()
        self._settle(device)
        ranks.next_instruction()
        settings: Settings = decode(ranks.broadcast(b"", ranks.next_instruction().argument), Settings)
        self.run, via = settings.run, self._connected(settings.backend)
        self.arenas.follow(settings.assignment, settings.run, device)
        if self._contribution is not None:
            self._contribution.close()
        contribution = None
        with ranks.error_at_next_exchange():
            manifest = plan(self._specs, settings.bucket_size_bytes, digest_kind=settings.digest_kind)
            if manifest.digest() != settings.manifest_digest:
                raise IncompatibleWeightsError(
                    f"this rank's plan of buckets has the digest {manifest.digest()[:16]}, the publishing rank's "
                    f"{settings.manifest_digest[:16]}: install the same weightcast on every trainer rank"
                )
            self._layout = Layout(manifest)
            self._contribution = contribution = Contribution(ranks, self._layout, self._own_shards(), via=via)
        self._is_settled = ranks.error is None
        return contribution

    # --- both ---

    @property
    def manifest(self) -> Manifest:
        """Of the plan that was agreed on."""
        assert self._layout is not None
        return self._layout.manifest

    def _compare(self, statuses: Sequence[RankStatus]) -> None:
        """Raises IncompatibleWeightsError on all ranks, naming the first difference, unless all have the same specs."""
        digests = [(status.digest_low, status.digest_high) for status in statuses]
        if len(set(digests)) == 1:
            return
        self._is_settled = False
        ranks = self._ranks
        if ranks.is_publishing:
            data = msgspec.json.encode(list(self._specs))
            ranks.announce(Instruction.SETTLE, len(data))
            ranks.broadcast(data, len(data))
        else:
            num_bytes = ranks.next_instruction().argument
            theirs: list[TensorSpec] = decode(ranks.broadcast(b"", num_bytes), list[TensorSpec])
            if self._digest != digests[0]:
                ranks.error = _difference(theirs, self._specs, ranks.ranks[0], ranks.ranks[ranks.group_rank])
        ranks.exchange(RankStatus(command=Instruction.SETTLE, version=ranks.version))

    def _connected(self, backend: Literal["gloo", "nccl"]) -> torch.device:
        """Where messages lie; with NCCL, connect."""
        if backend == "gloo":
            return torch.device("cpu")
        device = self._device()
        self._ranks.connect_nccl(device)
        return device

    def _device(self) -> torch.device:
        devices = (shard.data.device for shard in self._shards)
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


class AssignedPart(NamedTuple):
    """What a rank brings: `region`, which is in part number `part` of those that it holds."""

    part: int
    region: Region


def assign(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[HeldRegion]], near: Sequence[bool]
) -> list[list[AssignedPart]]:
    """Who brings what, by group rank; every rank computes the same. `near`: who can reach the memory of the buckets.

    Of a region that several ranks hold, each of those that are near brings a block, or each of all where none is; a
    small region goes to the rank that has the least to bring. Raises IncompatibleWeightsError unless the regions,
    replicas counted once, tile every tensor.
    """
    holders: list[dict[Region, list[tuple[int, int]]]] = [{} for _ in specs]
    for group_rank, parts in enumerate(held):
        for index, part in enumerate(parts):
            holders[part.tensor].setdefault(part.region, []).append((group_rank, index))
    require_tiling(specs, holders, _TOGETHER)
    assigned: list[list[AssignedPart]] = [[] for _ in held]
    loads = [0] * len(held)
    for spec, found in zip(specs, holders, strict=True):
        for region, candidates in found.items():
            chosen = [candidate for candidate in candidates if near[candidate[0]]] or candidates
            if region.numel * ITEMSIZE_BYTES[spec.dtype] < _MIN_SPLIT_BYTES:
                chosen = [min(chosen, key=lambda candidate: (loads[candidate[0]], candidate[0]))]
            for (group_rank, index), block in zip(chosen, split(region, len(chosen)), strict=False):
                assigned[group_rank].append(AssignedPart(index, block))
                loads[group_rank] += block.numel * ITEMSIZE_BYTES[spec.dtype]
    return assigned


def _difference(
    theirs: Sequence[TensorSpec], ours: Sequence[TensorSpec], their_rank: int, our_rank: int
) -> IncompatibleWeightsError:
    number = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]), None)
    number = min(len(theirs), len(ours)) if number is None else number
    error = IncompatibleWeightsError(
        f"the trainer ranks do not describe the same model: tensor {number} is {_described(theirs, number)} on trainer "
        f"rank {their_rank} and {_described(ours, number)} on trainer rank {our_rank}; specs() must be of the whole "
        "model, the same on every rank"
    )
    error.names_trainer_ranks = True  # type: ignore[attr-defined]
    return error


def _described(specs: Sequence[TensorSpec], number: int) -> str:
    if number >= len(specs):
        return f"missing ({len(specs)} tensors)"
    spec = specs[number]
    more = f", aliases {list(spec.aliases)}" * bool(spec.aliases) + f", group {spec.group!r}" * bool(spec.group)
    return f"{spec.name!r} {spec.dtype}{list(spec.shape)}{more}"
