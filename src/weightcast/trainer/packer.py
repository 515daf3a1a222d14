"""Packing: a rank's shards of tensors are copied into buckets, cast to the manifest's dtypes and digested.

Invariants: the packed regions tile every tensor, each element once; packing a bucket takes a few calls however many
tensors it has, and digests it in the same pass; on a GPU nothing waits for the device.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import msgspec
import torch

from weightcast.checkpoint.live import is_memory
from weightcast.errors import IncompatibleWeightsError, ManifestError, listed
from weightcast.format import device_digest
from weightcast.format.bucket import (
    HEADER_BYTES,
    TORCH_DTYPES,
    BucketBuffer,
    Digest,
    Layout,
    narrow,
    queued_digest,
    split_like,
    write_header,
)
from weightcast.format.device_digest import CopyAndDigest
from weightcast.format.geometry import (
    Region,
    check_tiling,
    common,
    is_inside,
    is_run,
    relative,
    row_major,
    start_elements,
    whole,
)
from weightcast.format.manifest import ITEMSIZE_BYTES, Manifest, TensorSpec, WeightVersion
from weightcast.format.packed_base import PackedBase
from weightcast.format.plan import plan
from weightcast.host.copy import PreparedCopies
from weightcast.native.tables import (
    Chunks,
    PackTable,
    Sums,
    added,
    digest,
    places,
    same_places,
    spans_of,
    unfilled_chunks,
)
from weightcast.seams.source import Held, LookedAtRegions, Regions
from weightcast.trainer.sent_digests import SentDigests

_CACHED_BYTES = 8 << 20
"""Largest bucket that is likely in a CPU cache when it is read again; a larger one is written past the caches."""
_MAX_INNER = 16
"""A last dim may be split in two (see `Held`) if the second one divides this: buckets are cut at multiples of 256
bytes, which are at least 16 elements."""
_ALONE = (
    "this rank publishes alone and does not hold all of these tensors: publish a model that is sharded over ranks "
    "(FSDP, HSDP, tensor parallelism) from all of them; call publish on every rank, with trainer_group='auto' or their "
    "group"
)


class Fill(Protocol):
    """Writes the raw payloads of buckets: a Packer or, with several trainer ranks, the PublishingRank."""

    def fill(self, index: int, payload: torch.Tensor, version: WeightVersion) -> Digest:
        """Write the raw payload of bucket `index` to the beginning of `payload`; return its digest."""

    def forget_views(self) -> None:
        """Drop every view of the transport's buffers."""


def pack(
    fill: Fill,
    manifest: Manifest,
    version: WeightVersion,
    index: int,
    buffer: BucketBuffer,
    sent: SentDigests | None = None,
    base: PackedBase | None = None,
) -> tuple[int, Digest]:
    """Fill bucket `index` and `finish` it, so that it can be sent. On a GPU the work is queued."""
    digest = fill.fill(index, buffer.payload, version)
    return finish(digest, manifest, version, index, buffer, sent, base), digest


def finish(
    digest: Digest,
    manifest: Manifest,
    version: WeightVersion,
    index: int,
    buffer: BucketBuffer,
    sent: SentDigests | None,
    base: PackedBase | None,
) -> int:
    """Write the header of a filled payload with this digest. Returns the number of bytes of `buffer` to send.

    `sent`: gets the digests of its tensors. `base`: keeps it.
    """
    if sent is not None:
        sent.add(index, buffer.payload)
    if base is not None:
        base.keep(index, buffer.payload, digest)
    origin, raw_bytes = manifest.bucket_origins[index], manifest.buckets[index]
    write_header(buffer.header, version, index, digest, raw_bytes=raw_bytes, origin=origin)
    return HEADER_BYTES + raw_bytes


class PackPlan:
    """A layout, and the packer for the source's present views. Several trainer ranks agree on the layout."""

    def __init__(self, specs: Sequence[TensorSpec], bucket_size_bytes: int) -> None:
        self.bucket_size_bytes = bucket_size_bytes
        self.seen = SeenRegions({})
        """The regions for which the packer was made."""
        self.cast(specs)

    def cast(self, specs: Sequence[TensorSpec]) -> None:
        """Pack in the dtypes of these specs from now on, planned for one origin; drop the packer."""
        self.specs = specs
        self._packer: Fill | None = None
        self.lay_out(Layout(plan(specs, self.bucket_size_bytes)))

    def lay_out(self, layout: Layout) -> None:
        """Pack into this layout from now on."""
        self.layout = layout
        self.manifest_digest = layout.manifest.digest()
        self.num_bytes = layout.manifest.num_bytes

    def use(self, regions: Regions, packer: Fill) -> None:
        """Use `packer` for these regions. With several trainer ranks the other ranks pack the rest."""
        self.seen, self._packer = SeenRegions(regions), packer

    def forget_views(self) -> None:
        """Drop every view of the transport's buffers."""
        self.layout.forget_views()
        if self._packer is not None:
            self._packer.forget_views()

    def packer(self, regions: Regions) -> Fill:
        """Return the packer for these regions.

        Raises IncompatibleWeightsError unless the regions, equal ones counted once, tile every tensor.
        """
        if self._packer is None or self.seen.regions is not regions:
            self.use(regions, Packer(self.layout, tiling(self.layout.manifest.tensors, regions)))
            assert self._packer is not None
        return self._packer


class ShardSlice(msgspec.Struct, frozen=True, gc=False):
    """A rank's part of one piece: `region` of the tensor, read from shard number `part`, at byte `start` of the
    payload.

    `entry`: the piece's number in its bucket. `is_run`: the region is contiguous in the payload.
    """

    entry: int
    part: int
    region: Region
    dtype: str
    start: int
    num_bytes: int
    is_run: bool


class ShardSlices:
    """One rank's regions, cut at the pieces of each bucket.

    The rank and its origin's leader compute the same slices.
    """

    def __init__(self, layout: Layout, parts: Sequence[HeldRegion]) -> None:
        self._layout = layout
        self._parts = parts
        tensors = [part.tensor for part in parts]
        self._order = sorted(range(len(parts)), key=tensors.__getitem__)
        counts = map(Counter(tensors).__getitem__, range(len(layout.manifest.tensors)))
        self._starts = list(itertools.accumulate(counts, initial=0))
        """Index in that order of each tensor's first part."""
        self._last: tuple[int, list[ShardSlice]] | None = None

    def of(self, index: int) -> list[ShardSlice]:
        """Return the slices of bucket `index`, by offset. Only those of the last bucket are cached, to save memory."""
        if self._last is None or self._last[0] != index:
            self._last = index, sorted(self._found(index), key=operator.attrgetter("start"))
        return self._last[1]

    def unfilled(self, index: int) -> Chunks:
        """Return the chunks of bucket `index` that this rank does not fill alone. It fills the gaps, too.

        A gap is shorter than the alignment, hence than a chunk, so no chunk consists of gaps only.
        """
        runs = ((cut.start, cut.start + cut.num_bytes) for cut in self._found(index) if cut.is_run)
        spans = spans_of(itertools.chain(runs, self._layout.gaps(index)))
        return unfilled_chunks(spans, self._layout.manifest.buckets[index])

    def _found(self, index: int) -> Iterator[ShardSlice]:
        parts, order, starts = self._parts, self._order, self._starts
        for number, entry in enumerate(self._layout.entries[index]):
            piece, dtype = entry.piece.region, entry.record.dtype
            itemsize, offset_bytes = ITEMSIZE_BYTES[dtype], entry.piece.offset_bytes
            for part in order[starts[entry.tensor] : starts[entry.tensor + 1]]:
                region = parts[part].region
                if region is piece or region == piece:
                    num_bytes = math.prod(piece.sizes) * itemsize
                    yield ShardSlice(number, part, piece, dtype, offset_bytes, num_bytes, True)
                elif (shared := common(piece, region)) is not None:
                    inner = relative(shared, piece)
                    start = offset_bytes + start_elements(inner, piece.sizes) * itemsize
                    num_bytes = shared.numel * itemsize
                    yield ShardSlice(number, part, shared, dtype, start, num_bytes, is_run(inner, piece.sizes))


class Packer(Fill):
    """Implements `Fill`: copies one rank's shards into buckets, cast to the manifest's dtypes.

    In host memory the same pass digests the chunks of a bucket that the rank fills alone. The packer keeps views of the
    source's memory: make a new one, or `rebind` it, if a tensor's storage has changed.
    """

    def __init__(self, layout: Layout, shards: Sequence[Shard]) -> None:
        self.slices = ShardSlices(layout, shards)
        self._layout = layout
        self._shards = shards
        self._sources: dict[int, list[torch.Tensor]] = {}
        self._tables: dict[int, PackTable] = {}
        """By bucket in host memory."""
        self._copies: dict[int, tuple[torch.Tensor, PreparedCopies, CopyAndDigest | None]] = {}
        """By bucket: the payload, and the copies into it that come before its table or, on a GPU, before the kernel."""

    def rebind(self, shards: Sequence[Shard]) -> None:
        """Take over new views of the same regions. Other dims may be split in two than before (see `Held`)."""
        self._shards = shards
        self._sources.clear()
        self._tables.clear()
        self._copies.clear()

    def forget_views(self) -> None:
        self._copies.clear()

    @torch.no_grad()
    def prepare(self) -> None:
        """Make the tables of all buckets in host memory that need no views of these. Idempotent."""
        for index, num_bytes in enumerate(self._layout.manifest.buckets):
            if index not in self._tables and not self._viewed(index):
                self._make_table(index, torch.empty(num_bytes, dtype=torch.uint8, device="meta"))

    @torch.no_grad()
    def pack(self, index: int, payload: torch.Tensor) -> tuple[Sums, Chunks]:
        """Fill this rank's part of bucket `index`, and the gaps, in host memory.

        Returns the partial digest of the chunks that it fills alone, and the marks of the other chunks.
        """
        raw = payload[: self._layout.manifest.buckets[index]]
        if index not in self._tables:
            self._make_table(index, raw)
        table = self._tables[index]
        if table.others:
            known = self._copies.get(index)
            if known is None or known[0] is not payload:
                sources = self.sources(index)
                copies = PreparedCopies(self._views(index, payload, table.others), [sources[k] for k in table.others])
                known = self._copies[index] = payload, copies, None
            known[1].run()
        return table.run(raw, cached=raw.nbytes <= _CACHED_BYTES), table.missing

    def _make_table(self, index: int, raw: torch.Tensor) -> None:
        targets: list[torch.Tensor | int] = [cut.start for cut in self.slices.of(index)]
        viewed = self._viewed(index)
        for number, view in zip(viewed, self._views(index, raw, viewed), strict=True):
            targets[number] = view
        self._tables[index] = PackTable(raw, targets, self.sources(index), self._layout.gaps(index))

    def _viewed(self, index: int) -> list[int]:
        """Return the numbers of the slices that are not copied as they are to one run of bytes."""
        return [
            number
            for number, (cut, source) in enumerate(zip(self.slices.of(index), self.sources(index), strict=True))
            if not cut.is_run or source.dtype is not TORCH_DTYPES[cut.dtype]
        ]

    @torch.no_grad()
    def fill(self, index: int, payload: torch.Tensor, version: WeightVersion) -> Digest:
        """Fill bucket `index`, all of which this rank packs; return its digest, on a GPU a tensor of two int64.

        Each byte is read once, on a GPU if the digest kernel is available. On a GPU all work is queued on the current
        stream and nothing waits.
        """
        raw = payload[: self._layout.manifest.buckets[index]]
        if not payload.is_cuda:
            sums, missing = self.pack(index, payload)
            return added(sums, digest(raw, missing)) if missing.any() else added(sums)
        self._layout.clear_gaps(index, payload)
        known = self._copies.get(index)
        if known is None or known[0] is not payload:
            targets, sources, fused = self._views(index, payload), self.sources(index), None
            if raw.nbytes and device_digest.kernel(payload.device) is not None:
                fused = CopyAndDigest(raw, targets, sources)
                targets, sources = [target for target, _ in fused.others], [source for _, source in fused.others]
            known = self._copies[index] = payload, PreparedCopies(targets, sources), fused
        _, copies, fused = known
        copies.run()
        return queued_digest(raw) if fused is None else fused.run()

    def _views(self, index: int, payload: torch.Tensor, numbers: Sequence[int] | None = None) -> list[torch.Tensor]:
        """Return views of a payload, one for each of this rank's slices, or for those of these numbers."""
        cuts, sources = self.slices.of(index), self.sources(index)
        wanted = range(len(cuts)) if numbers is None else numbers
        # Cut to a multiple of 16 bytes, the widest element, so that any dtype can view it.
        whole_buffer = payload[: payload.numel() // 16 * 16]
        typed = {dtype: whole_buffer.view(TORCH_DTYPES[dtype]) for dtype in {cuts[number].dtype for number in wanted}}
        views = []
        for number in wanted:
            cut = cuts[number]
            of_dtype, piece = typed[cut.dtype], self._layout.entries[index][cut.entry].piece
            offset = int(of_dtype.storage_offset()) + cut.start // ITEMSIZE_BYTES[cut.dtype]
            view = of_dtype.as_strided(cut.region.sizes, row_major(piece.region.sizes), offset)
            views.append(split_like(view, sources[number]))
        return views

    def sources(self, index: int) -> list[torch.Tensor]:
        """Return views of this rank's shards, one for each slice of bucket `index`."""
        views = self._sources.get(index)
        if views is None:
            cuts = self.slices.of(index)
            views = self._sources[index] = [self._shards[cut.part].view(cut.region) for cut in cuts]
        return views


# --- what a rank holds ---


class HeldRegion(msgspec.Struct, frozen=True, gc=False):
    """A region of tensor number `tensor` of the specs."""

    tensor: int
    region: Region


class Shard(HeldRegion, frozen=True, gc=False):
    """A region that this rank has, and its memory."""

    data: torch.Tensor

    def view(self, region: Region) -> torch.Tensor:
        """Return a view of this part of it."""
        return (
            self.data
            if region is self.region or region == self.region
            else narrow(self.data, relative(region, self.region))
        )


class SeenRegions:
    """Regions that a source returned, and the addresses of their views at that time."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        if not isinstance(regions, LookedAtRegions):
            self._held = list(itertools.chain.from_iterable(regions.values()))
            self._places = places([view for _, view in self._held])
            self._seen = list(map(_seen, self._held))

    def is_of(self, regions: Regions) -> bool:
        """Return whether the source returned the same object again.

        Raises IncompatibleWeightsError if it did but its views have moved or changed.
        """
        if regions is not self.regions or isinstance(regions, LookedAtRegions):
            return regions is self.regions
        held = list(itertools.chain.from_iterable(regions.values()))
        are_kept = len(held) == len(self._held) and all(map(operator.is_, held, self._held))
        if are_kept and same_places([view for _, view in held], self._places):
            return True
        found, formers = list(map(_seen, held)), self._seen
        if found == formers:
            return True
        moved = []
        if len(found) == len(formers):
            names = [name for name, parts in regions.items() for _ in parts]
            for name, (address, *_), (former, *_) in zip(names, found, formers, strict=True):
                if address != former:
                    moved.append(f"{name!r}: found a view at {address:#x}, expected it at {former:#x}")
        changed = "found other regions, or views of other shapes, strides or dtypes, in the same object"
        raise _misfit(moved or [changed], "when tensors move or change, have regions() return a new object")


def _seen(held: Held) -> tuple[int, object, object, object, object]:
    """Return all that a packer reads of a view but its values, the address first."""
    region, view = held
    return view.data_ptr(), region, view.shape, view.stride(), view.dtype


def held_shards(specs: Sequence[TensorSpec], regions: Regions) -> list[Shard]:
    """Return a rank's shards, without empty regions, in the order of the specs.

    Raises IncompatibleWeightsError for regions that do not fit the specs.
    """
    problems = [f"{name!r} is not in the specs" for name in regions.keys() - {spec.name for spec in specs}]
    is_looked_at = isinstance(regions, LookedAtRegions)
    shards: list[Shard] = []
    for number, spec in enumerate(specs):
        dtype, all_of_it = TORCH_DTYPES.get(spec.dtype), whole(spec.shape)
        for region, data in regions.get(spec.name, ()):
            # Only a plain floating point dtype is cast, and only to another one.
            is_cast = data.dtype is dtype or (
                dtype is not None and all(d.is_floating_point and d.itemsize > 1 for d in (dtype, data.dtype))
            )
            sizes: tuple[int, ...] = data.shape
            if len(sizes) > len(region.sizes) > 0 and sizes[-1] and _MAX_INNER % sizes[-1] == 0:
                sizes = (*sizes[:-2], sizes[-2] * sizes[-1])
            is_fitting = sizes == region.sizes and is_cast and not data.is_meta and (is_looked_at or is_memory(data))
            if region is not all_of_it and not is_inside(region, spec.shape):
                problems.append(
                    f"{spec.name!r}: found a region at {list(region.offsets)} of sizes {list(region.sizes)}, expected "
                    f"one inside the shape {list(spec.shape)}"
                )
            elif not is_fitting:
                problems.append(
                    f"{spec.name!r}: found a view of {list(data.shape)}, {data.dtype} on {data.device}"
                    f"{'' if is_memory(data) else ' without memory'}, expected {list(region.sizes)}, {spec.dtype} in "
                    f"memory, for the region at {list(region.offsets)} of the shape {list(spec.shape)}"
                )
            elif data.numel():
                shards.append(Shard(number, region, data))
    if problems:
        raise _misfit(problems, "have regions() return views of the sizes and dtypes that it and specs() declare")
    return shards


def tiling(specs: Sequence[TensorSpec], regions: Regions) -> list[Shard]:
    """Return the shards of a rank that publishes alone, equal regions once, in the order of the specs.

    Raises IncompatibleWeightsError unless they tile every tensor.
    """
    shards = held_shards(specs, regions)
    if len({shard.tensor for shard in shards}) < len(shards):
        shards = list({(shard.tensor, shard.region): shard for shard in shards}.values())
    found: list[tuple[Region, ...]] = [()] * len(specs)
    for shard in shards:
        found[shard.tensor] = (*found[shard.tensor], shard.region)
    require_tiling(specs, found, _ALONE)
    return shards


def require_tiling(specs: Sequence[TensorSpec], found: Sequence[Iterable[Region]], remedy: str) -> None:
    """Raise IncompatibleWeightsError unless the regions found for each tensor tile it."""
    problems = []
    for spec, of_tensor in zip(specs, found, strict=True):
        regions = tuple(of_tensor)
        if regions == (whole(spec.shape),):
            continue
        try:
            check_tiling(regions, spec.shape, spec.name)
        except ManifestError as exc:
            where = listed([f"{list(r.offsets)}+{list(r.sizes)}" for r in regions], separator=", ") or "none"
            problems.append(f"{spec.name!r} of shape {list(spec.shape)} from the regions {where}: {exc}")
    if problems:
        raise _misfit(problems, remedy)


def _misfit(problems: Sequence[str], remedy: str) -> IncompatibleWeightsError:
    shown = listed(problems)
    return IncompatibleWeightsError(f"the source's regions do not fit: {shown}. Remedy: {remedy}", problems)
