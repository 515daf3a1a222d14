"""What a trainer rank holds of the source's tensors: its regions, proven to fit the specs and to tile the tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from weightcast.checkpoint.live import is_memory
from weightcast.errors import IncompatibleWeightsError, ManifestError, listed
from weightcast.format.bucket import TORCH_DTYPES, narrow
from weightcast.format.geometry import Region, check_tiling, is_inside
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Held, Regions

_ALONE = (
    "this rank publishes alone and does not hold all of these: a model that is sharded over ranks (FSDP, HSDP, tensor "
    "parallelism) is published by all of them; call publish on every rank, with trainer_group='auto' or their group"
)

Parts: TypeAlias = torch.Tensor | Sequence[tuple[Region, torch.Tensor]]
"""A tensor's memory: all of it, or what lies at each of several regions."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldRegion:
    """A region of tensor number `tensor` of the specs."""

    tensor: int
    region: Region


@dataclasses.dataclass(frozen=True, slots=True)
class Shard(HeldRegion):
    """A part that this rank holds, and its memory."""

    data: torch.Tensor


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


def held_shards(specs: Sequence[TensorSpec], regions: Regions) -> list[Shard]:
    """What a rank holds, without empty regions, in the order of the specs.

    Raises IncompatibleWeightsError for regions that are not of these specs.
    """
    problems = [f"{name!r} is not in the specs" for name in regions.keys() - {spec.name for spec in specs}]
    shards: list[Shard] = []
    for number, spec in enumerate(specs):
        dtype = TORCH_DTYPES.get(spec.dtype)
        for region, data in regions.get(spec.name, ()):
            # Plain floating point is cast to plain floating point.
            is_cast = dtype is not None and all(d.is_floating_point and d.itemsize > 1 for d in (dtype, data.dtype))
            is_fitting = tuple(data.shape) == region.sizes and (data.dtype == dtype or is_cast)
            if not is_inside(region, spec.shape):
                problems.append(
                    f"{spec.name!r}: found a region at {list(region.offsets)} of sizes {list(region.sizes)}, expected "
                    f"one inside of the shape {list(spec.shape)}"
                )
            elif not is_fitting or data.is_meta or not is_memory(data):
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


def tiling(specs: Sequence[TensorSpec], regions: Regions) -> dict[str, torch.Tensor | list[Held]]:
    """What a rank that is alone brings: each tensor whole, or in regions that tile it, equal ones once.

    Raises IncompatibleWeightsError.
    """
    found: list[dict[Region, torch.Tensor]] = [{} for _ in specs]
    for shard in held_shards(specs, regions):
        found[shard.tensor].setdefault(shard.region, shard.data)
    require_tiling(specs, found, _ALONE)
    held = {spec.name: list(parts.items()) for spec, parts in zip(specs, found, strict=True) if parts}
    return {name: parts[0][1] if len(parts) == 1 else parts for name, parts in held.items()}


def require_tiling(specs: Sequence[TensorSpec], found: Sequence[Mapping[Region, object]], remedy: str) -> None:
    """Raises IncompatibleWeightsError unless the regions that were found of each tensor tile it."""
    problems = []
    for spec, by_region in zip(specs, found, strict=True):
        regions = list(by_region)
        if len(regions) == 1 and regions[0].covers(spec.shape):
            continue
        try:
            check_tiling(regions, spec.shape, spec.name)
        except ManifestError as exc:
            where = listed([f"{list(r.offsets)}+{list(r.sizes)}" for r in regions], separator=", ") or "none"
            problems.append(f"{spec.name!r} of shape {list(spec.shape)} from the regions {where}: {exc}")
    if problems:
        raise _misfit(problems, remedy)


def _addresses(regions: Regions) -> list[int]:
    return [data.data_ptr() for held in regions.values() for _, data in held]


def _misfit(problems: Sequence[str], remedy: str) -> IncompatibleWeightsError:
    shown = listed(problems)
    return IncompatibleWeightsError(f"the source's regions do not fit: {shown}. Remedy: {remedy}", problems)


@torch.no_grad()
def joined(spec: TensorSpec, parts: Parts) -> torch.Tensor:
    """A contiguous tensor of what lies in its parts: its own memory if that is all of it and contiguous."""
    if isinstance(parts, torch.Tensor):
        return parts.contiguous()
    tensor = torch.empty(spec.shape, dtype=parts[0][1].dtype if parts else TORCH_DTYPES[spec.dtype])
    for region, part in parts:
        narrow(tensor, region).copy_(part)
    return tensor
