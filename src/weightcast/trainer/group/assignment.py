"""What each trainer rank holds, and which rank brings which region of a tensor, one rank as well as many.

Invariants: a region that several ranks hold is brought by one; what is brought tiles every tensor, each element once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from weightcast.checkpoint.live import is_memory
from weightcast.errors import IncompatibleWeightsError, ManifestError, listed
from weightcast.format.bucket import TORCH_DTYPES
from weightcast.format.geometry import Region, check_tiling, is_inside
from weightcast.format.manifest import ITEMSIZE_BYTES, TensorSpec
from weightcast.seams.source import Held, Regions

_ALONE = (
    "this rank publishes alone and does not hold all of these: a model that is sharded over ranks (FSDP, HSDP, tensor "
    "parallelism) is published by all of them; call publish on every rank, with trainer_group='auto' or their group"
)
_TOGETHER = "the ranks of trainer_group together must hold every element: pass the group of all ranks of the model"


@dataclasses.dataclass(frozen=True, slots=True)
class HeldRegion:
    """A region of tensor number `tensor` of the specs."""

    tensor: int
    region: Region


@dataclasses.dataclass(frozen=True, slots=True)
class Shard(HeldRegion):
    """A part that this rank holds, and its memory."""

    data: torch.Tensor


def held_shards(specs: Sequence[TensorSpec], regions: Regions) -> list[Shard]:
    """What a rank holds, without empty regions, in the order of the specs.

    Raises IncompatibleWeightsError for regions that are not of these specs.
    """
    problems = [f"{name!r} is not in the specs" for name in regions.keys() - {spec.name for spec in specs}]
    shards: list[Shard] = []
    for number, spec in enumerate(specs):
        for region, data in regions.get(spec.name, ()):
            if not is_inside(region, spec.shape):
                problems.append(
                    f"{spec.name!r}: found a region at {list(region.offsets)} of sizes {list(region.sizes)}, expected "
                    f"one inside of the shape {list(spec.shape)}"
                )
            elif not _is_fitting(spec, region, data):
                problems.append(
                    f"{spec.name!r}: found a view of {list(data.shape)}, {data.dtype} on {data.device}"
                    f"{'' if is_memory(data) else ' without memory'}, expected {list(region.sizes)}, {spec.dtype} in "
                    f"memory, for the region at {list(region.offsets)} of the shape {list(spec.shape)}"
                )
            elif region.numel:
                shards.append(Shard(number, region, data))
    if problems:
        raise _misfit(problems, "have regions() return views of the sizes and dtypes that it and specs() declare")
    return shards


class SeenRegions:
    """Regions that a source gave, and where the memory of their views was."""

    def __init__(self, regions: Regions) -> None:
        self.regions, self._addresses = regions, _addresses(regions)

    def is_of(self, regions: Regions) -> bool:
        """Whether the source gives the same object again. Raises IncompatibleWeightsError if its views have moved."""
        if regions is not self.regions:
            return False
        if (addresses := _addresses(regions)) != self._addresses:
            names = [name for name, held in regions.items() for _ in held]
            moved = [
                f"{name!r}: found a view at {address:#x}, expected it at {former:#x}"
                for name, address, former in zip(names, addresses, self._addresses, strict=False)
                if address != former
            ] or [f"found {len(addresses)} views, expected {len(self._addresses)}"]
            raise _misfit(moved, "where tensors move, have regions() return another object")
        return True


def _addresses(regions: Regions) -> list[int]:
    return [data.data_ptr() for held in regions.values() for _, data in held]


def assign(specs: Sequence[TensorSpec], held: Sequence[Sequence[HeldRegion]]) -> list[list[int]]:
    """Who brings what: for each rank, the indices into `held[rank]`. The first rank brings all that it holds.

    What several others hold goes to the one that has the least to send. Raises IncompatibleWeightsError unless the
    regions, replicas counted once, tile every tensor.
    """
    holders: list[dict[Region, list[tuple[int, int]]]] = [{} for _ in specs]
    for group_rank, parts in enumerate(held):
        for index, part in enumerate(parts):
            holders[part.tensor].setdefault(part.region, []).append((group_rank, index))
    problems = [problem for spec, found in zip(specs, holders, strict=True) if (problem := _gap(spec, list(found)))]
    if problems:
        raise _misfit(problems, _ALONE if len(held) == 1 else _TOGETHER)
    assigned: list[list[int]] = [[] for _ in held]
    loads = [0] * len(held)
    for spec, found in zip(specs, holders, strict=True):
        for region, candidates in found.items():
            group_rank, index = min(candidates, key=lambda c: (c[0] != 0, loads[c[0]], c[0]))
            assigned[group_rank].append(index)
            loads[group_rank] += region.numel * ITEMSIZE_BYTES[spec.dtype]
    return [sorted(indices) for indices in assigned]


def tiling(specs: Sequence[TensorSpec], regions: Regions) -> dict[str, torch.Tensor | list[Held]]:
    """What a rank that is alone brings: each tensor whole, or in regions that tile it, equal ones once.

    Raises IncompatibleWeightsError.
    """
    shards = held_shards(specs, regions)
    (assigned,) = assign(specs, [shards])
    by_name: dict[str, list[Held]] = {}
    for shard in (shards[index] for index in assigned):
        by_name.setdefault(specs[shard.tensor].name, []).append((shard.region, shard.data))
    return {name: parts[0][1] if len(parts) == 1 else parts for name, parts in by_name.items()}


def _gap(spec: TensorSpec, regions: list[Region]) -> str:
    """Why these regions do not tile the tensor, or empty."""
    if len(regions) == 1 and regions[0].covers(spec.shape):
        return ""
    try:
        check_tiling(regions, spec.shape, spec.name)
    except ManifestError as exc:
        where = listed([f"{list(r.offsets)}+{list(r.sizes)}" for r in regions], separator=", ") or "none"
        return f"{spec.name!r} of shape {list(spec.shape)} from the regions {where}: {exc}"
    return ""


def _misfit(problems: Sequence[str], remedy: str) -> IncompatibleWeightsError:
    shown = listed(problems)
    return IncompatibleWeightsError(f"the source's regions do not fit: {shown}. Remedy: {remedy}", problems)


def _is_fitting(spec: TensorSpec, region: Region, data: torch.Tensor) -> bool:
    """Whether a view can be packed as this region, cast where plain floating point is cast to plain floating point."""
    dtype = TORCH_DTYPES.get(spec.dtype)
    is_cast = dtype is not None and all(d.is_floating_point and d.itemsize > 1 for d in (dtype, data.dtype))
    return (
        tuple(data.shape) == region.sizes and (data.dtype == dtype or is_cast) and not data.is_meta and is_memory(data)
    )
