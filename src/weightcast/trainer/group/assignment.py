"""Assignment of regions to ranks and origins, and the plan of all buckets. Every rank computes it without
communication.

An origin is the memory that buckets are sent from. One rank leads it: it allocates the memory, and ranks that can map
that memory pack into it.
Invariants: the publishing rank leads origin 0; each element is packed by one rank; a tensor or load group of which the
ranks of one origin have every element is sent from that origin alone.
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


class AssignedRegion(HeldRegion, frozen=True, gc=False):
    """A region that a rank has to pack; it lies in part number `part` of those that the rank has."""

    part: int


class Assignment(NamedTuple):
    """The division of work, equal on all ranks.

    `leaders`: the group rank that leads each origin. By group rank: `origins`, the rank's origin; `assigned`, the
    regions that it packs.
    """

    layout: Layout
    leaders: Sequence[int]
    origins: Sequence[int]
    assigned: Sequence[Sequence[AssignedRegion]]


def leaders_of(mappable: Sequence[Sequence[int]], *, maps_buckets: bool) -> list[int]:
    """Return, by group rank, the leader of its origin: the first leader whose memory it can map, else the rank itself.

    `mappable`: by rank, the lower ranks whose memory it can map. Without `maps_buckets` each rank is an origin.
    """
    leading: list[int] = []
    for rank, others in enumerate(mappable):
        leading.append(next((other for other in others if maps_buckets and leading[other] == other), rank))
    return leading


def require_reach(url: str, assignment: Assignment, hosts: Sequence[str], ranks: Sequence[int]) -> None:
    """Raise UnsupportedError for origins from which the transport can't send. `ranks`: the trainer ranks."""
    scheme, origins = registry.scheme(url), registry.transport(url).origins
    outside = [
        str(rank)
        for rank, origin, host in zip(ranks, assignment.origins, hosts, strict=True)
        if origin and (origins == "one" or (origins == "host" and host != hosts[0]))
    ]
    if outside:
        where = "memory of one trainer rank" if origins == "one" else "one host"
        raise UnsupportedError(
            f"{scheme}:// sends from {where}, but trainer ranks {', '.join(outside)} can't map the memory of rank "
            f"{ranks[0]} (another host, container, user or GPU): publish over gloo:// or nccl://"
        )


def assign_all(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[HeldRegion]], leading: Sequence[int], bucket_size_bytes: int
) -> Assignment:
    """Assign every region to a rank and an origin. Origins without a bucket are dropped, except the first.

    Raises IncompatibleWeightsError unless the regions, replicas counted once, tile every tensor.
    """
    leaders = sorted(set(leading))
    assigned = assign(specs, held, [leaders.index(leader) for leader in leading])
    sending = {leading[rank] for rank, parts in enumerate(assigned) if parts}
    leaders = [leader for leader in leaders if leader in sending or leader == leaders[0]]
    if len(leaders) > MAX_ORIGINS:
        raise UnsupportedError(
            f"buckets would be sent from {len(leaders)} trainer ranks, at most {MAX_ORIGINS} are supported: publish "
            "with install='staged' over ipc:// or gloo://, which send from one rank per host"
        )
    origins = [leaders.index(leader) if leader in leaders else 0 for leader in leading]
    packed: list[defaultdict[str, list[Region]]] = [defaultdict(list) for _ in leaders]
    for origin, parts in zip(origins, assigned, strict=True):
        for part in parts:
            packed[origin][specs[part.tensor].name].append(part.region)
    of_origins = [{name: merged(found) for name, found in each.items()} for each in packed]
    manifest = plan(specs, bucket_size_bytes, origins=of_origins if len(leaders) > 1 else None)
    return Assignment(Layout(manifest), leaders, origins, assigned)


def assign(
    specs: Sequence[TensorSpec], held: Sequence[Sequence[HeldRegion]], origins: Sequence[int]
) -> list[list[AssignedRegion]]:
    """Return what each rank packs, by group rank. `origins`: the origin of each rank.

    A load group goes to one origin, if one's ranks have all of it: to the one with the fewest bytes so far. If several
    of them have a region, each packs a block of it; a small region goes to the rank with the fewest bytes so far.
    Raises IncompatibleWeightsError unless the regions, replicas counted once, tile every tensor.
    """
    holders: list[dict[Region, list[tuple[int, int]]]] = [{} for _ in specs]
    for group_rank, parts in enumerate(held):
        for index, part in enumerate(parts):
            holders[part.tensor].setdefault(part.region, []).append((group_rank, index))
    require_tiling(specs, holders, _TOGETHER)
    assigned: list[list[AssignedRegion]] = [[] for _ in held]
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
                assigned[group_rank].append(AssignedRegion(held[group_rank][index].tensor, block, index))
                loads[group_rank] += block.numel * itemsize
                origin_loads[origin] += block.numel * itemsize
    return assigned
