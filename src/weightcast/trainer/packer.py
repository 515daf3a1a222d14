"""What a rank holds of the source's tensors, and its copy into buckets, cast to the manifest's dtypes and digested.

Invariants: what is packed tiles every tensor, each element once; packing a bucket is a few calls however many tensors
it holds; on a CPU it is digested while it is in the cache, on a GPU nothing waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
import xxhash

from weightcast.checkpoint.live import is_memory
from weightcast.errors import IncompatibleWeightsError, ManifestError, listed
from weightcast.format.bucket import TORCH_DTYPES, Entry, Layout, narrow, put_trailer, write_trailer
from weightcast.format.geometry import Region, check_tiling, common, is_inside, relative
from weightcast.format.manifest import ITEMSIZE_BYTES, TensorSpec, WeightVersion
from weightcast.host.copy import copy_all, copy_plain, is_plain
from weightcast.seams.source import Held, Regions

_HASH_STEP_BYTES = 512 << 10
_ALONE = (
    "this rank publishes alone and does not hold all of these: a model that is sharded over ranks (FSDP, HSDP, tensor "
    "parallelism) is published by all of them; call publish on every rank, with trainer_group='auto' or their group"
)

Parts: TypeAlias = torch.Tensor | Sequence[tuple[Region, torch.Tensor]]
"""A tensor's memory: all of it, or what lies at each of several regions."""


class BucketPacker(Protocol):
    """Fills buckets: a Packer, or with several trainer ranks a GatheringPacker."""

    def pack(self, index: int, buffer: torch.Tensor, version: WeightVersion) -> bytes | torch.Tensor: ...


class PackPlan:
    """A layout and the packer for the source's present views."""

    def __init__(self, specs: Sequence[TensorSpec], layout: Layout, bucket_size_bytes: int) -> None:
        self.specs = specs
        self.layout = layout
        self.bucket_size_bytes = bucket_size_bytes
        self.manifest_digest = layout.manifest.digest()
        self.num_bytes = layout.manifest.num_bytes
        self._regions: SeenRegions | None = None
        self._packer: BucketPacker | None = None

    def is_of(self, regions: Regions) -> bool:
        """Whether the packer was made for these very views, with which the specs can't have changed either."""
        return self._regions is not None and self._regions.is_of(regions)

    def use(self, regions: Regions, packer: BucketPacker) -> None:
        """Have `packer` pack these regions, which other trainer ranks complete."""
        self._regions, self._packer = SeenRegions(regions), packer

    def packer(self, regions: Regions) -> BucketPacker:
        """Raises IncompatibleWeightsError unless the regions, equal ones counted once, tile every tensor."""
        if self._packer is None or self._regions is None or self._regions.regions is not regions:
            self.use(regions, Packer(self.layout, tiling(self.specs, regions)))
            assert self._packer is not None
        return self._packer


class Packer:
    """Copies source tensors into buckets, casting to the manifest's dtypes on the way.

    Holds views of the sources only; make a new one when a source's storage has changed.
    """

    @torch.no_grad()
    def __init__(self, layout: Layout, tensors: Mapping[str, Parts]) -> None:
        """`tensors`: each whole, or as regions that tile it, which the caller has proven."""
        self._layout = layout
        self._sources: list[list[torch.Tensor]] = []
        self._cuts: list[list[tuple[int, Region | None]]] = []
        """For each bucket with a piece that takes several copies: each copy's entry, and its part of the piece."""
        for entries in layout.entries:
            parts = [part for number, entry in enumerate(entries) for part in _parts(number, entry, tensors)]
            self._sources.append([source for _, _, source in parts])
            is_cut = any(region is not None for _, region, _ in parts)
            self._cuts.append([(number, region) for number, region, _ in parts] if is_cut else [])
        self._known_steps: list[list[tuple[int, int, int]] | None] = [None] * len(layout.entries)

    @torch.no_grad()
    def pack(self, index: int, buffer: torch.Tensor, version: WeightVersion) -> bytes | torch.Tensor:
        """Fill `buffer` with bucket `index` and its trailer; return the digest, on a GPU as two int64 still to come.

        On a CPU the payload is digested in steps while each is hot in cache. On a GPU everything is queued on the
        current stream and nothing waits.
        """
        layout, sources, cuts = self._layout, self._sources[index], self._cuts[index]
        # Parts of pieces are not kept: they are few, and the layout can't forget them.
        views = layout.views(index, buffer)
        targets = [views[n] if region is None else narrow(views[n], region) for n, region in cuts] if cuts else views
        num_bytes = layout.manifest.buckets[index]
        layout.clear_gaps(index, buffer)
        if layout.manifest.digest_kind != "xxh3-128":
            torch._foreach_copy_(targets, sources)
            return write_trailer(buffer, num_bytes, version, index, layout.manifest.digest_kind)
        copy = copy_all if cuts else torch._foreach_copy_
        hasher, data, start = xxhash.xxh3_128(), buffer.numpy().data, 0
        for first, last, end in self._steps(index, targets):
            target = targets[first]
            if last - first == 1 and is_plain(target, sources[first]):
                begin = end - target.nbytes
                for done in range(0, target.nbytes, _HASH_STEP_BYTES):
                    size = min(_HASH_STEP_BYTES, target.nbytes - done)
                    copy_plain(target, sources[first], done, size)
                    hasher.update(data[start : begin + done + size])
                    start = begin + done + size
            else:
                copy(targets[first:last], sources[first:last])
            hasher.update(data[start:end])
            start = end
        hasher.update(data[start:num_bytes])
        digest = hasher.digest()
        put_trailer(buffer, num_bytes, version, index, digest)
        return digest

    def _steps(self, index: int, targets: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
        """Runs of copies, large plain ones alone, others of about _HASH_STEP_BYTES: (first, last, end in bytes)."""
        known = self._known_steps[index]
        if known is not None:
            return known
        entries, cuts = self._layout.entries[index], self._cuts[index]
        numbers = [number for number, _ in cuts] if cuts else range(len(entries))
        alone = [is_plain(*pair) for pair in zip(targets, self._sources[index], strict=True)]
        steps, first, start = [], 0, 0
        for last, number in enumerate(numbers, start=1):
            is_last = last == len(numbers)
            if not is_last and numbers[last] == number:
                continue  # in the middle of a piece
            piece, dtype = entries[number].piece, entries[number].record.dtype
            end = piece.offset_bytes + piece.region.numel * ITEMSIZE_BYTES[dtype]
            if is_last or alone[last - 1] or alone[last] or end - start >= _HASH_STEP_BYTES:
                steps.append((first, last, end))
                first, start = last, end
        self._known_steps[index] = steps
        return steps


def _parts(
    number: int, entry: Entry, tensors: Mapping[str, Parts]
) -> Iterator[tuple[int, Region | None, torch.Tensor]]:
    """What copies a piece takes: the entry's number, which part of the piece (None: all of it), from which memory."""
    held, piece = tensors[entry.record.name], entry.piece.region
    if isinstance(held, torch.Tensor):
        yield number, None, narrow(held, piece)
        return
    for region, data in held:
        shared = common(piece, region)
        if shared is not None:
            part = None if shared == piece else relative(shared, piece)
            yield number, part, narrow(data, relative(shared, region))


@torch.no_grad()
def joined(spec: TensorSpec, parts: Parts) -> torch.Tensor:
    """A contiguous tensor of what lies in its parts: its own memory if that is all of it and contiguous."""
    if isinstance(parts, torch.Tensor):
        return parts.contiguous()
    tensor = torch.empty(spec.shape, dtype=parts[0][1].dtype if parts else TORCH_DTYPES[spec.dtype])
    for region, part in parts:
        narrow(tensor, region).copy_(part)
    return tensor


# --- what a rank holds ---


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
