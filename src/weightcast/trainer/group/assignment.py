"""Which rank packs what for which origin, and the plan of all buckets. No communication: every rank computes the same.

An origin is memory that buckets leave from: of one rank, which leads it, and of all ranks that can map it.
Invariants: the publishing rank leads origin 0; each element is brought by one rank; a tensor or load group that the
ranks of one origin hold whole leaves whole from there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from weightcast import registry
from weightcast.errors import UnsupportedError
from weightcast.format.bucket import Layout
from weightcast.format.geometry import Region, merged, split
from weightcast.format.manifest import ITEMSIZE_BYTES, MAX_ORIGINS, TensorSpec
from weightcast.format.plan import plan
from weightcast.trainer.packer import HeldRegion, require_tiling

_MIN_SPLIT_BYTES = 1 << 20
_TOGETHER = "the ranks of trainer_group together must hold every element: pass the group of all ranks of the model"


class AssignedPart(NamedTuple):
    """A rank's share of the work: `region`, in part number `part` of those that it holds."""

    part: int
    region: Region


class Assignment(NamedTuple):
    """The division of work that all ranks have computed alike. `leaders`: of each origin, in order; `origins`: that of
    each rank; `held`: the regions that each holds; `assigned`: the parts of these that each packs.
    """

    layout: Layout
    leaders: Sequence[int]
    origins: Sequence[int]
    held: Sequence[Sequence[HeldRegion]]
    assigned: Sequence[Sequence[AssignedPart]]

    def parts_of(self, rank: int) -> list[HeldRegion]:
        return [HeldRegion(self.held[rank][part].tensor, region) for part, region in self.assigned[rank]]


def leaders_of(mappable: Sequence[Sequence[int]], *, maps_buckets: bool) -> list[int]:
    """The group rank that leads each rank's origin: the first that leads one and that it can map, else itself.

    `mappable`: the ranks before it whose memory each rank can map. Without `maps_buckets` each rank is an origin.
    """
    leading: list[int] = []
    for rank, others in enumerate(mappable):
        leading.append(next((other for other in others if maps_buckets and leading[other] == other), rank))
    return leading


def require_reach(url: str, assignment: Assignment, hosts: Sequence[str], ranks: Sequence[int]) -> None:
    """Raises UnsupportedError for origins from which the transport can't send. `ranks`: the trainer ranks."""
    scheme, origins = registry.scheme(url), registry.transport(url).origins
    outside = [
        str(rank)
        for rank, origin, host in zip(ranks, assignment.origins, hosts, strict=True)
        if origin and (origins == "one" or (origins == "host" and host != hosts[0]))
    ]
    if outside:
        where = "memory of one trainer rank" if origins == "one" else "one host"
        raise UnsupportedError(
            f"{scheme}:// sends from {where}, and trainer ranks {', '.join(outside)} can't reach that of rank "
            f"{ranks[0]} (another host, container, user or GPU): publish over gloo:// or nccl://"
        )


def assign_all(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[HeldRegion]], leading: Sequence[int], bucket_size_bytes: int
) -> Assignment:
    """Return which rank packs what for which origin. Origins without a bucket are left out, but for the first.

    Raises IncompatibleWeightsError unless the regions, replicas counted once, tile every tensor.
    """
    leaders = sorted(set(leading))
    assigned = assign(specs, held, [leaders.index(leader) for leader in leading])
    sending = {leading[rank] for rank, parts in enumerate(assigned) if parts}
    leaders = [leader for leader in leaders if leader in sending or leader == leaders[0]]
    if len(leaders) > MAX_ORIGINS:
        raise UnsupportedError(f"buckets would leave from {len(leaders)} trainer ranks; at most {MAX_ORIGINS} can send")
    origins = [leaders.index(leader) if leader in leaders else 0 for leader in leading]
    packed: list[defaultdict[str, list[Region]]] = [defaultdict(list) for _ in leaders]
    for origin, parts, regions in zip(origins, assigned, held, strict=True):
        for part, region in parts:
            packed[origin][specs[regions[part].tensor].name].append(region)
    of_origins = [{name: merged(found) for name, found in each.items()} for each in packed]
    manifest = plan(specs, bucket_size_bytes, origins=of_origins if len(leaders) > 1 else None)
    return Assignment(Layout(manifest), leaders, origins, held, assigned)


def assign(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[HeldRegion]], origins: Sequence[int]
) -> list[list[AssignedPart]]:
    """Return what each rank packs, by group rank. `origins`: the origin of each rank.

    A load group is brought to one origin where its ranks hold all of it; to that which has the least yet. Of a region
    that several of them hold, each packs a block; a small region goes to the rank that has the least to pack. Raises
    IncompatibleWeightsError unless the regions, replicas counted once, tile every tensor.
    """
    holders: list[dict[Region, list[tuple[int, int]]]] = [{} for _ in specs]
    for group_rank, parts in enumerate(held):
        for index, part in enumerate(parts):
            holders[part.tensor].setdefault(part.region, []).append((group_rank, index))
    require_tiling(specs, holders, _TOGETHER)
    assigned: list[list[AssignedPart]] = [[] for _ in held]
    loads, origin_loads = [0] * len(held), [0] * (1 + max(origins, default=0))
    groups: dict[str, list[int]] = {}
    for number, spec in enumerate(specs):
        groups.setdefault(spec.load_group, []).append(number)
    order = list(groups.values())
    if len(origin_loads) > 1:
        order.sort(key=lambda numbers: -sum(specs[number].num_bytes for number in numbers))
    for numbers in order:
        found = [
            (region, ITEMSIZE_BYTES[specs[number].dtype], candidates)
            for number in numbers
            for region, candidates in holders[number].items()
        ]
        if not found:
            continue
        able = [{origins[group_rank] for group_rank, _ in candidates} for _, _, candidates in found]
        common = set.intersection(*able)
        for (region, itemsize, candidates), possible in zip(found, able, strict=True):
            origin = min(common or possible, key=lambda number: (origin_loads[number], number))
            common = common and {origin}
            chosen = [candidate for candidate in candidates if origins[candidate[0]] == origin]
            if region.numel * itemsize < _MIN_SPLIT_BYTES:
                chosen = [min(chosen, key=lambda candidate: (loads[candidate[0]], candidate[0]))]
            for (group_rank, index), block in zip(chosen, split(region, len(chosen)), strict=False):
                assigned[group_rank].append(AssignedPart(index, block))
                loads[group_rank] += block.numel * itemsize
                origin_loads[origin] += block.numel * itemsize
    return assigned
