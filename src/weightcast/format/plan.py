"""Pure geometry: which region goes into which bucket at which offset. No tensors, no I/O.

Invariants: buckets are filled in the order of the specs, a load group lies together (in one bucket where it fits),
a region that is larger than a bucket is cut into row-major blocks, and nothing but alignment is left unused between
two pieces. `Manifest.check()` proves the outcome.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from weightcast.errors import ManifestError
from weightcast.format.manifest import (
    ALIGNMENT_BYTES,
    ITEMSIZE_BYTES,
    MAX_PIECES_PER_TENSOR,
    PROTOCOL,
    DigestKind,
    Manifest,
    Piece,
    Region,
    TensorRecord,
    TensorSpec,
    check_specs,
)

MIN_BUCKET_BYTES = 1 << 20


def align(num_bytes: int) -> int:
    """Round up to the alignment of the wire format."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def fitting_bucket_size(num_bytes: int, largest_bytes: int) -> int:
    """A bucket size for an update of `num_bytes`: enough buckets for packing, moving and checking to overlap.

    An eighth of the whole, from MIN_BUCKET_BYTES up to `largest_bytes`, which is the transport's choice.
    """
    return min(largest_bytes, max(MIN_BUCKET_BYTES, num_bytes // 8))


def whole(shape: Sequence[int]) -> Region:
    """The region that is all of a tensor of that shape."""
    return Region(offsets=(0,) * len(shape), sizes=tuple(shape))


def common(a: Region, b: Region) -> Region | None:
    """What two regions of one tensor have in common; None for nothing."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = (min(ao + asz, bo + bs) for ao, asz, bo, bs in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    sizes = tuple(map(operator.sub, ends, offsets))
    return Region(offsets, sizes) if all(size > 0 for size in sizes) else None


def relative(region: Region, base: Region) -> Region:
    """A region as seen from the start of another one."""
    return Region(tuple(map(operator.sub, region.offsets, base.offsets)), region.sizes)


def plan(
    specs: Sequence[TensorSpec],
    bucket_size_bytes: int,
    *,
    regions: Mapping[str, Sequence[Region]] | None = None,
    digest_kind: DigestKind = "xxh3-128",
) -> Manifest:
    """Lay out `specs` in buckets of at most `bucket_size_bytes` payload bytes (rounded down to the alignment).

    `regions` says in which regions a tensor is held (default: whole); together they must tile it. Raises ValueError
    if a bucket could not hold a single aligned element, ManifestError if specs or regions are invalid.
    """
    capacity = bucket_size_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    if capacity <= 0:
        raise ValueError(f"bucket_size_bytes is {bucket_size_bytes}; it must be at least {ALIGNMENT_BYTES}")
    check_specs(specs)
    filler = _Filler(capacity)
    pieces: dict[str, tuple[Piece, ...]] = {}
    for group in _load_groups(specs):
        held = {s.name: (regions or {}).get(s.name) or (whole(s.shape),) for s in group}
        filler.keep_together(sum(align(r.numel * ITEMSIZE_BYTES[s.dtype]) for s in group for r in held[s.name]))
        for spec in group:
            itemsize = ITEMSIZE_BYTES[spec.dtype]
            pieces[spec.name] = tuple(
                p for region in held[spec.name] if region.numel for p in filler.place(region, itemsize)
            )
    records = tuple(
        TensorRecord(s.name, s.dtype, s.shape, aliases=s.aliases, group=s.group, pieces=pieces[s.name]) for s in specs
    )
    manifest = Manifest(PROTOCOL, digest_kind, tuple(filler.bucket_sizes()), records)
    manifest.check()
    return manifest


def _load_groups(specs: Sequence[TensorSpec]) -> Iterator[Sequence[TensorSpec]]:
    """The specs in order, members of one group drawn together to the place of its first."""
    members: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        members.setdefault(spec.group or f"\0{spec.name}", []).append(spec)
    yield from members.values()


class _Filler:
    """Hands out places in one bucket after the other."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sizes = [0]

    def bucket_sizes(self) -> list[int]:
        return [size for size in self._sizes if size]

    def keep_together(self, num_bytes: int) -> None:
        """Begin a new bucket if `num_bytes` fit into an empty one, but not into what is left of this one."""
        if self._room() < num_bytes <= self._capacity:
            self._next_bucket()

    def place(self, region: Region, itemsize: int) -> Iterator[Piece]:
        num_bytes = region.numel * itemsize
        if num_bytes <= self._capacity:
            self.keep_together(align(num_bytes))
            yield self._take(region, num_bytes)
            return
        yield from self._place_blocks(region, itemsize)

    def _place_blocks(self, region: Region, itemsize: int) -> Iterator[Piece]:
        """Cut along the first dim whose rows fit into a bucket; the dims before it advance one index at a time."""
        max_elements = self._capacity // itemsize
        dim = next(d for d in range(len(region.sizes)) if math.prod(region.sizes[d + 1 :]) <= max_elements)
        row_bytes = math.prod(region.sizes[dim + 1 :]) * itemsize
        if region.numel * itemsize > MAX_PIECES_PER_TENSOR * self._capacity:
            raise ManifestError(
                f"a region of {list(region.sizes)} needs more than {MAX_PIECES_PER_TENSOR} buckets of "
                f"{self._capacity} bytes: use larger buckets [count]",
                fault="count",
            )
        for outer in itertools.product(*(range(size) for size in region.sizes[:dim])):
            start = 0
            while start < region.sizes[dim]:
                if self._room() < row_bytes:
                    self._next_bucket()
                rows = min(self._room() // row_bytes, region.sizes[dim] - start)
                yield self._take(_block(region, outer, dim, start, rows), rows * row_bytes)
                start += rows

    def _room(self) -> int:
        return self._capacity - self._sizes[-1]

    def _next_bucket(self) -> None:
        if self._sizes[-1]:
            self._sizes.append(0)

    def _take(self, region: Region, num_bytes: int) -> Piece:
        piece = Piece(bucket=len(self._sizes) - 1, offset_bytes=self._sizes[-1], region=region)
        self._sizes[-1] += align(num_bytes)
        return piece


def _block(region: Region, outer: Sequence[int], dim: int, start: int, rows: int) -> Region:
    inside = (*outer, start, *(0 for _ in region.sizes[dim + 1 :]))
    return Region(
        offsets=tuple(a + b for a, b in zip(region.offsets, inside, strict=True)),
        sizes=(*(1 for _ in outer), rows, *region.sizes[dim + 1 :]),
    )


def compare_specs(
    offered: Iterable[TensorSpec],
    held: Iterable[TensorSpec],
    *,
    can_cast: Callable[[str, str], bool] | None = None,
) -> list[str]:
    """Every reason why `offered` is not a complete update for an engine that holds `held`; empty if it is one.

    Names may differ by aliases: a record is known if the engine has one of its names, and covers all of them. Dtypes
    may differ only where `can_cast(offered, held)` says so.
    """
    targets = tuple(held)
    by_name = {name: target for target in targets for name in target.names}
    covered: dict[str, str] = {}
    problems: list[str] = []
    for spec in offered:
        known = {by_name[name].name: by_name[name] for name in spec.names if name in by_name}
        if not known:
            problems.append(f"unknown tensor {spec.name!r} {spec.dtype}{list(spec.shape)}")
        for target in known.values():
            problems += _compare(spec, target, can_cast)
            if target.name in covered:
                problems.append(f"{spec.name!r} and {covered[target.name]!r} are both the engine's {target.name!r}")
            covered[target.name] = spec.name
    missing = (target for target in targets if target.name not in covered)
    return problems + [f"missing tensor {spec.name!r} {spec.dtype}{list(spec.shape)}" for spec in missing]


def _compare(spec: TensorSpec, target: TensorSpec, can_cast: Callable[[str, str], bool] | None) -> Iterator[str]:
    if spec.shape != target.shape:
        yield f"{spec.name!r} has the shape {list(spec.shape)}, the engine has {list(target.shape)}"
    if spec.dtype != target.dtype and not (can_cast and can_cast(spec.dtype, target.dtype)):
        yield f"{spec.name!r} is {spec.dtype}, the engine has {target.dtype}"
