"""What the trainer ranks agree on before bytes move: the same specs, who holds what, who brings what to which origin.

Invariants: ranks that differ raise the same error, all of them; nothing is exchanged beyond the first row of a publish
while nothing has changed on any rank; the shards that a rank is asked for are ones that it said it holds.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections import defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import msgspec
import torch

from weightcast import registry
from weightcast.errors import IncompatibleWeightsError
from weightcast.format.bucket import Layout, narrow
from weightcast.format.geometry import Region, merged, relative, split
from weightcast.format.manifest import ITEMSIZE_BYTES, RunId, TensorSpec, decode, encode
from weightcast.format.plan import plan
from weightcast.host import device as host_device
from weightcast.seams.source import CollectiveSource, Regions, Source
from weightcast.seams.transport import Origins
from weightcast.trainer.engine_dtypes import cast_by_name
from weightcast.trainer.finite import require_finite
from weightcast.trainer.group.exchange import Instruction, RankStatus, TrainerRanks
from weightcast.trainer.group.gather import Contribution, OriginPacker
from weightcast.trainer.group.origins import GroupPacker, OriginSender, RankPlace, choose, homes, own_url
from weightcast.trainer.group.whole_tensors import gather_whole
from weightcast.trainer.packer import HeldRegion, SeenRegions, Shard, held_shards, require_tiling

_MIN_SPLIT_BYTES = 1 << 20
_TOGETHER = "the ranks of trainer_group together must hold every element: pass the group of all ranks of the model"


class _HeldShards(msgspec.Struct, frozen=True):
    """A rank to all: the regions that it holds, by number of the specs, and where it is."""

    parts: list[HeldRegion]
    place: RankPlace


class Settings(msgspec.Struct, frozen=True):
    """The publishing rank to all: what it takes to make the same plan. `url`: of its transport.

    `spread`, `num_origins`: where origins may be, and how many at most. `dtypes`: what tensors are cast to, by name, in
    the place of the specs' dtypes.
    """

    run: RunId
    url: str
    bucket_size_bytes: int
    backend: Literal["gloo", "nccl"]
    spread: Origins
    num_origins: int
    dtypes: dict[str, str] = {}


class _Address(msgspec.Struct, frozen=True):
    """A rank to the publishing one: of its origin's sender. Empty: it needs none, or has none, and the next exchange
    raises why.
    """

    address: str


class Sharing(NamedTuple):
    """What all ranks have computed alike. `leaders`: of each origin; `homes`: the origin to which each rank brings what
    was `assigned` to it; `held`: what each holds.
    """

    layout: Layout
    leaders: Sequence[int]
    homes: Sequence[int]
    held: Sequence[Sequence[HeldRegion]]
    assigned: Sequence[Sequence[AssignedPart]]

    def beside(self, origin: int) -> dict[int, list[HeldRegion]]:
        """What the ranks of an origin bring, but for the one that leads it."""
        return {
            rank: [HeldRegion(self.held[rank][part].tensor, region) for part, region in parts]
            for rank, parts in enumerate(self.assigned)
            if self.homes[rank] == origin and rank != self.leaders[origin]
        }


class Shares:
    """This rank's side, kept from publish to publish. `own`: the origin that it leads, on another than the publishing
    rank; `addresses`: on the publishing rank, those of the other origins' senders.
    """

    def __init__(self, ranks: TrainerRanks, deadline_seconds: float) -> None:
        self.own: OriginSender | None = None
        self.addresses: tuple[str, ...] = ()
        self.run = ""
        self._ranks = ranks
        self._deadline_seconds = deadline_seconds
        self._source: object = None
        self._regions: SeenRegions | None = None
        self._specs: Sequence[TensorSpec] = ()
        self._cast_specs: Sequence[TensorSpec] = ()
        """As they are published."""
        self._digest = (0, 0)
        self._shards: list[Shard] = []
        self._parts: list[HeldRegion] = []
        self._assigned: Sequence[AssignedPart] = ()
        self._is_settled = False
        self._settings: Settings | None = None
        self._backend: Literal["gloo", "nccl"] = "gloo"
        self._layout: Layout | None = None
        self._holder: Contribution | OriginPacker | GroupPacker | None = None
        """What this rank packs with."""

    # --- what this rank has ---

    def look(self, source: Source, regions: Regions) -> None:
        """See what this rank holds now. No communication. Raises IncompatibleWeightsError."""
        self._source = source
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
        if self._holder is not None and self._is_settled:
            self._holder.rebind(self._own_shards())

    def status(self, layout: Layout | None = None, settings: Settings | None = None) -> RankStatus:
        """What this rank brings to the first exchange. `layout`, `settings`: the publishing rank's."""
        low, high = self._digest
        is_news = not self._is_settled
        if layout is not None:
            is_news = is_news or layout is not self._layout or settings != self._settings
        number = 0
        gpu = next((shard.data.device for shard in self._shards if shard.data.is_cuda), None)
        if gpu is not None:
            uuid = host_device.uuid_of(gpu)
            number = struct.unpack_from("<q", hashlib.sha256(uuid.encode()).digest())[0] | 1
        return RankStatus(
            command=Instruction.START,
            version=self._ranks.version,
            news=is_news,
            digest_low=low,
            digest_high=high,
            device=number,  # it tells GPUs apart; host memory is 0
            num_gathers=self._source.num_gathers if isinstance(self._source, CollectiveSource) else 0,
        )

    def forget(self) -> None:
        """Ranks lost each other: agree again."""
        self._is_settled = False

    def close(self) -> None:
        """Free this rank's origin, and drop what holds on to the transport's buffers. Idempotent."""
        self._lead_none()
        if self._holder is not None:
            self._holder.close()

    def _lead_none(self) -> None:
        own, self.own = self.own, None
        if own is not None:
            own.close()

    def _own_shards(self) -> list[Shard]:
        """What this rank brings."""
        own = []
        for part, region in self._assigned:
            shard = self._shards[part]
            data = shard.data if region == shard.region else narrow(shard.data, relative(region, shard.region))
            own.append(Shard(shard.tensor, region, data))
        return own

    def _share(self, settings: Settings) -> Sharing:
        """Have every rank know what all hold, and so who brings what. What goes wrong on one rank is raised by all."""
        ranks, sharing, low, high = self._ranks, cast(Sharing, None), 0, 0
        place = RankPlace.of(self._device() if self.own is None else self.own.device)
        rows = ranks.gather(encode(_HeldShards(self._parts, place)))
        with ranks.error_at_next_exchange():
            holdings: list[_HeldShards] = [decode(row, _HeldShards) for row in rows]
            held, places = [each.parts for each in holdings], [each.place for each in holdings]
            self._cast_specs = cast_by_name(self._specs, settings.dtypes)
            sharing = share(self._cast_specs, held, places, settings)
            low, high = struct.unpack_from("<qq", bytes.fromhex(sharing.layout.manifest.digest()))
        statuses = ranks.exchange(
            RankStatus(command=Instruction.SETTLE, version=ranks.version, digest_low=low, digest_high=high)
        )
        with ranks.error_at_next_exchange():
            if (low, high) != (first := (statuses[0].digest_low, statuses[0].digest_high)):
                raise IncompatibleWeightsError(
                    f"this rank's plan of buckets has the digest {low:x}, the publishing rank's {first[0]:x}: install "
                    "the same weightcast on every trainer rank"
                )
        self._assigned = sharing.assigned[ranks.group_rank]
        if self._holder is not None:
            self._holder.close()
        self._holder = None
        return sharing

    def complete(self, statuses: Sequence[RankStatus]) -> None:
        """After the shares are settled: have every value computed that takes several ranks. Raises on every rank alike.

        `statuses`: of the first exchange.
        """
        ranks, counts = self._ranks, [status.num_gathers for status in statuses]
        if not any(counts):
            return
        with ranks.error_at_next_exchange():
            if len(set(counts)) > 1:
                found = ", ".join(f"{n} on rank {rank}" for rank, n in zip(ranks.ranks, counts, strict=True))
                raise IncompatibleWeightsError(
                    "the trainer ranks do not have the same adapters in sharded layers (calls to gather them: "
                    f"{found}): have the same adapters active on every rank"
                )
            assert isinstance(self._source, CollectiveSource)
            self._source.complete(functools.partial(gather_whole, ranks))
        ranks.exchange(RankStatus(command=Instruction.SETTLE, version=ranks.version))

    def check_finite(self) -> None:
        """Look for NaN and infinity in what this rank brings. Raises NotFiniteError on every rank, which names one."""
        with self._ranks.error_at_next_exchange():
            require_finite(self._cast_specs, self._own_shards())
        self._ranks.exchange(RankStatus(command=Instruction.SETTLE, version=self._ranks.version))

    # --- the publishing rank ---

    def lead(self, statuses: Sequence[RankStatus], layout: Layout, settings: Settings) -> Layout:
        """After the first exchange: have every rank know its share. Raises on every rank alike.

        `layout`: what buckets are packed by so far. Returns what they are packed by from now on.
        """
        self._compare(statuses)
        gpus = {status.device for status in statuses}
        self._backend = "nccl" if 0 not in gpus and len(gpus) == len(statuses) else "gloo"
        # Another rank may have lost the group, and forgotten its share, where this one has not.
        self._is_settled = not any(status.news for status in statuses)
        return self.settle(layout, settings)

    def settle(self, layout: Layout, settings: Settings) -> Layout:
        """Have every rank know its share under these settings, unless all do. See `lead`."""
        if self._is_settled and settings == self._settings and layout is self._layout:
            return layout
        self._is_settled, ranks = False, self._ranks
        with ranks.uninterrupted():
            found = msgspec.structs.replace(settings, backend=self._backend)
            ranks.announce_when_idle(Instruction.SETTLE, data=encode(found))
            sharing = self._share(found)
            rows = ranks.gather(encode(_Address("")))
            via = self._connected(self._backend)
        others: list[_Address] = [decode(rows[rank], _Address) for rank in sharing.leaders[1:]]
        self.addresses = tuple(other.address for other in others if other.address)
        if sharing.layout.manifest != layout.manifest:
            layout = sharing.layout
        packer = OriginPacker(ranks, layout, self._own_shards(), sharing.beside(0), origin=0, via=via)
        self._holder = GroupPacker(ranks, layout.manifest, sharing.leaders, packer)
        self._layout, self._settings, self._is_settled = layout, settings, True
        return layout

    def packer(self) -> GroupPacker:
        """What fills buckets in this publish."""
        assert isinstance(self._holder, GroupPacker)
        return self._holder

    # --- the others ---

    def follow(self, statuses: Sequence[RankStatus]) -> None:
        """After the first exchange: learn what to bring, if anything has changed."""
        self._compare(statuses)
        if any(status.news for status in statuses):
            self.agree(self._ranks.next_instruction().argument)

    def agree(self, num_bytes: int) -> None:
        """Take the publishing rank's settings, which have that length, and prepare what they ask of this rank."""
        self._is_settled, ranks = False, self._ranks
        settings: Settings = decode(ranks.broadcast(b"", num_bytes), Settings)
        self.run = settings.run
        sharing = self._share(settings)
        address = ""
        with ranks.error_at_next_exchange():
            if ranks.group_rank in sharing.leaders:
                address = self._lead(settings)
            else:
                self._lead_none()
        ranks.gather(encode(_Address(address)))
        via, own = self._connected(settings.backend), self._own_shards()
        layout, origin = sharing.layout, sharing.homes[ranks.group_rank]
        if self.own is not None:
            self._holder = OriginPacker(ranks, layout, own, sharing.beside(origin), origin=origin, via=via)
            self.own.use(layout.manifest, origin, self._holder)
        else:
            self._holder = Contribution(ranks, layout, own, leader=sharing.leaders[origin], origin=origin, via=via)
        self._is_settled = True

    @property
    def contribution(self) -> Contribution | None:
        """What this rank brings; None if it leads an origin."""
        return self._holder if isinstance(self._holder, Contribution) else None

    def _lead(self, settings: Settings) -> str:
        """Lead an origin; return the address of its sender. One that was made for the same run is kept."""
        if self.own is not None and self.own.run != settings.run:
            self._lead_none()
        if self.own is None:
            device, run, seconds = self._device(), settings.run, self._deadline_seconds
            transport = registry.transport(settings.url)
            make = transport.joined_sender or transport.sender
            sender = make(own_url(settings.url), run=run, device=device, deadline_seconds=seconds)
            self.own = OriginSender(self._ranks, sender, run, device, seconds)
        return self.own.address

    # --- both ---

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


def share(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[HeldRegion]], places: Sequence[RankPlace], settings: Settings
) -> Sharing:
    """Who brings what to which origin, and the plan of all buckets; every rank computes the same.

    Each tensor lies whole in an origin that can have all of it. Raises IncompatibleWeightsError unless the regions,
    replicas counted once, tile every tensor.
    """
    make_plan = functools.partial(plan, specs, settings.bucket_size_bytes)
    leaders = choose(places, settings.spread, settings.num_origins)
    while True:
        beside = homes(places, settings.spread, leaders)
        assigned = assign(specs, held, beside)
        brought: list[defaultdict[str, list[Region]]] = [defaultdict(list) for _ in leaders]
        for home, parts, regions in zip(beside, assigned, held, strict=True):
            for part, region in parts:
                brought[home or 0][specs[regions[part].tensor].name].append(region)
        if len(leaders) == 1:
            manifest = make_plan()
            break
        if all(brought):
            manifest = make_plan(origins=[{n: merged(found) for n, found in each.items()} for each in brought])
            break
        # An origin without a bucket is none; if it is the publishing rank's, all others send to that.
        leaders = [leader for leader, found in zip(leaders, brought, strict=True) if found] if brought[0] else [0]
    return Sharing(Layout(manifest), leaders, [home or 0 for home in beside], held, assigned)


def assign(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[HeldRegion]], beside: Sequence[int | None]
) -> list[list[AssignedPart]]:
    """Who brings what, by group rank; every rank computes the same. `beside`: the origin that each rank is beside.

    A load group is brought to one origin where the ranks beside it hold all of it; to that which has the least yet.
    Of a region that several of them hold, each brings a block; a small region goes to the rank that has the least to
    bring. Ranks beside no origin bring what nobody else holds. Raises IncompatibleWeightsError unless the regions,
    replicas counted once, tile every tensor.
    """
    holders: list[dict[Region, list[tuple[int, int]]]] = [{} for _ in specs]
    for group_rank, parts in enumerate(held):
        for index, part in enumerate(parts):
            holders[part.tensor].setdefault(part.region, []).append((group_rank, index))
    require_tiling(specs, holders, _TOGETHER)
    assigned: list[list[AssignedPart]] = [[] for _ in held]
    loads, origin_loads = [0] * len(held), [0] * (1 + max((home or 0 for home in beside), default=0))
    groups: dict[str, list[int]] = {}
    for number, spec in enumerate(specs):
        groups.setdefault(spec.load_group, []).append(number)
    order = list(groups.values())
    if len(origin_loads) > 1:
        order.sort(key=lambda numbers: -sum(specs[number].num_bytes for number in numbers))
    for numbers in order:
        found = [
            (region, ITEMSIZE_BYTES[specs[number].dtype], [c for c in each if beside[c[0]] is not None] or each)
            for number in numbers
            for region, each in holders[number].items()
        ]
        if not found:
            continue
        able = [{beside[group_rank] or 0 for group_rank, _ in candidates} for _, _, candidates in found]
        shared = set.intersection(*able)
        for (region, itemsize, candidates), origins in zip(found, able, strict=True):
            origin = min(shared or origins, key=lambda number: (origin_loads[number], number))
            shared = shared and {origin}
            chosen = [candidate for candidate in candidates if (beside[candidate[0]] or 0) == origin]
            if region.numel * itemsize < _MIN_SPLIT_BYTES:
                chosen = [min(chosen, key=lambda candidate: (loads[candidate[0]], candidate[0]))]
            for (group_rank, index), block in zip(chosen, split(region, len(chosen)), strict=False):
                assigned[group_rank].append(AssignedPart(index, block))
                loads[group_rank] += block.numel * itemsize
                origin_loads[origin] += block.numel * itemsize
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
