"""The plan of buckets: assigns each region a bucket and an offset. No tensors, no I/O.

Invariants: buckets are filled in the order of the specs; a load group is kept together (in one bucket if it fits); a
region larger than a bucket is cut into row-major blocks; pieces are separated only by alignment. `Manifest.check()`
checks this when a manifest is read.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence

from weightcast.errors import ManifestError
from weightcast.format.geometry import ALIGNMENT_BYTES, Region, align, whole
from weightcast.format.manifest import (
    ITEMSIZE_BYTES,
    MAX_PIECES_PER_TENSOR,
    Manifest,
    Piece,
    TensorRecord,
    TensorSpec,
    check_specs,
)

MIN_BUCKET_BYTES = 1 << 20


def fitting_bucket_size(num_bytes: int, largest_bytes: int) -> int:
    """Return a bucket size for an update of `num_bytes`, small enough that packing, sending and checking overlap.

    It is an eighth of the update, from MIN_BUCKET_BYTES up to `largest_bytes`.
    """
    return min(largest_bytes, max(MIN_BUCKET_BYTES, num_bytes // 8))


def largest_bucket_size(sizes: Mapping[str, int], device_type: str, install: str, *, is_alone: bool) -> int:
    """Return the transport's default bucket size for the device type, or its "cache" size, if it has one.

    The cache size is for weights on a CPU that one trainer rank (`is_alone`) streams: engines read a bucket while it is
    in the CPU's cache. Several ranks exchange messages for each bucket, so that larger buckets are faster.
    """
    is_cached = is_alone and install == "streaming" and device_type == "cpu" and "cache" in sizes
    return sizes["cache" if is_cached else device_type]


def plan(
    specs: Sequence[TensorSpec],
    bucket_size_bytes: int,
    *,
    origins: Sequence[Mapping[str, Sequence[Region]]] | None = None,
) -> Manifest:
    """Lay out `specs` in buckets of at most `bucket_size_bytes` payload bytes (rounded down to the alignment).

    `origins`: for each origin the regions of tensors that it sends (default: one origin, all tensors); together they
    must tile every tensor. Raises ValueError if a bucket is smaller than the alignment, ManifestError if specs or
    regions are invalid.
    """
    capacity = bucket_size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if capacity <= 0:
        raise ValueError(f"bucket_size_bytes is {bucket_size_bytes}; it must be at least {ALIGNMENT_BYTES}")
    check_specs(specs)
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        if spec.group:
            groups.setdefault(spec.group, []).append(spec)
    pieces: dict[str, tuple[Piece, ...]] = {}
    sizes: list[int] = []
    num_buckets: list[int] = []
    for held in (None,) if origins is None else origins:
        filler = _Filler(capacity, first=len(sizes))
        for spec in specs:
            members = groups[spec.group] if spec.group else (spec,)
            if members[0] is not spec:
                continue  # placed with the first member of its group
            found: list[tuple[TensorSpec, Region, int]] = []
            for member in members:
                regions = (whole(member.shape),) if held is None else held.get(member.name, ())
                for region in regions:
                    if num_bytes := math.prod(region.sizes) * ITEMSIZE_BYTES[member.dtype]:
                        found.append((member, region, num_bytes))
            if len(found) > 1:
                filler.keep_together(sum(align(num_bytes) for _, _, num_bytes in found))
            for member, region, num_bytes in found:
                added = filler.add(region, num_bytes, ITEMSIZE_BYTES[member.dtype])
                pieces[member.name] = (*pieces.get(member.name, ()), *added)
        filled = [size for size in filler.sizes if size]
        sizes += filled
        num_buckets.append(len(filled))
    records = tuple(TensorRecord(s.name, s.dtype, s.shape, s.aliases, s.group, pieces.get(s.name, ())) for s in specs)
    several = tuple(num_buckets) if len(num_buckets) > 1 else ()
    manifest = Manifest.of(records, tuple(sizes), origins=several)
    manifest.check_limits()
    if origins is not None:
        manifest.check_pieces()  # of the caller's regions
    return manifest


class _Filler:
    """Assigns offsets in one bucket after another. `sizes`: of the buckets so far; the last one is being filled.

    `first`: number of the first bucket.
    """

    def __init__(self, capacity: int, *, first: int) -> None:
        self._capacity = capacity
        self._first = first
        self.sizes = [0]

    def keep_together(self, num_bytes: int) -> None:
        """Begin a new bucket if `num_bytes` fit into an empty one, but not into the rest of this one."""
        if self._room() < num_bytes <= self._capacity:
            self.sizes.append(0)

    def add(self, region: Region, num_bytes: int, itemsize: int) -> Iterator[Piece]:
        """Yield one piece, or several row-major blocks if the region is larger than a bucket."""
        if num_bytes <= self._capacity:
            self.keep_together(align(num_bytes))
            yield self._add_piece(region, num_bytes)
            return
        if num_bytes > MAX_PIECES_PER_TENSOR * self._capacity:
            raise ManifestError(
                f"a region of {list(region.sizes)} needs more than {MAX_PIECES_PER_TENSOR} buckets of "
                f"{self._capacity} bytes: use larger buckets [count]",
                fault="count",
            )
        # Cut along the first dim whose rows fit into a bucket; the dims before it advance one index at a time.
        max_elements = self._capacity // itemsize
        dim = next(d for d in range(len(region.sizes)) if math.prod(region.sizes[d + 1 :]) <= max_elements)
        inner = region.sizes[dim + 1 :]
        row_bytes = math.prod(inner) * itemsize
        for outer in itertools.product(*(range(size) for size in region.sizes[:dim])):
            start = 0
            while start < region.sizes[dim]:
                self.keep_together(row_bytes)
                rows = min(self._room() // row_bytes, region.sizes[dim] - start)
                offsets = map(operator.add, region.offsets, (*outer, start, *(0 for _ in inner)))
                yield self._add_piece(Region(tuple(offsets), (*(1 for _ in outer), rows, *inner)), rows * row_bytes)
                start += rows

    def _room(self) -> int:
        return self._capacity - self.sizes[-1]

    def _add_piece(self, region: Region, num_bytes: int) -> Piece:
        piece = Piece(self._first + len(self.sizes) - 1, self.sizes[-1], region)
        self.sizes[-1] += align(num_bytes)
        return piece
