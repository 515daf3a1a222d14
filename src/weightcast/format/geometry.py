"""Regions of tensors: their intersections, tilings, and offsets in memory.

All intersection, tiling, stride and alignment code of the package is here. It does not need torch.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence

import msgspec

from weightcast.errors import malformed

ALIGNMENT_BYTES = 256
_FREE_STEPS = 1 << 18
_STEPS_PER_REGION = 32
"""Steps per region: a grid of n dims needs n (n + 1) / 2; the rest is for regions that no plane separates."""


class Region(msgspec.Struct, frozen=True, gc=False):
    """A hyper-rectangle of a tensor: `offsets[d] <= index[d] < offsets[d] + sizes[d]` for every dim d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def covers(self, shape: Sequence[int]) -> bool:
        """Return whether this region is all of a tensor of this shape."""
        return self.sizes == tuple(shape) and not any(self.offsets)


def align(num_bytes: int) -> int:
    """Round up to the alignment of the wire format."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@functools.lru_cache(maxsize=1024)
def whole(shape: tuple[int, ...]) -> Region:
    """Return the region of all elements of a tensor of this shape. Cached, since a model has few shapes."""
    return Region(offsets=(0,) * len(shape), sizes=tuple(shape))


def common(a: Region, b: Region) -> Region | None:
    """Return the intersection of two regions of one tensor; None if it is empty."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = (min(ao + asz, bo + bs) for ao, asz, bo, bs in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True))
    sizes = tuple(map(operator.sub, ends, offsets))
    return Region(offsets, sizes) if all(size > 0 for size in sizes) else None


def relative(region: Region, base: Region) -> Region:
    """Return a region with offsets relative to another region's."""
    return Region(tuple(map(operator.sub, region.offsets, base.offsets)), region.sizes)


def is_inside(region: Region, shape: Sequence[int]) -> bool:
    """Return whether a region, which may be empty, has as many dims as the shape and is inside it."""
    offsets, sizes = region.offsets, region.sizes
    if not len(offsets) == len(sizes) == len(shape):
        return False
    if sizes == shape and not any(offsets):  # fast path: most regions are whole tensors
        return not sizes or min(sizes) >= 0
    return all(
        offset >= 0 and size >= 0 and offset + size <= limit
        for offset, size, limit in zip(offsets, sizes, shape, strict=True)
    )


@functools.lru_cache(maxsize=1024)
def row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(math.prod(sizes[d + 1 :]) for d in range(len(sizes)))


def start_elements(region: Region, shape: Sequence[int]) -> int:
    """Return the index of a region's first element in a contiguous tensor of that shape."""
    return sum(map(operator.mul, region.offsets, row_major(tuple(shape))))


def is_run(region: Region, shape: Sequence[int]) -> bool:
    """Return whether a region's elements are contiguous in a contiguous tensor of this shape."""
    dim = next((dim for dim, size in enumerate(region.sizes) if size != 1), len(shape))
    return tuple(region.sizes[dim + 1 :]) == tuple(shape[dim + 1 :])


def runs_as_blocks(shape: Sequence[int], start: int, stop: int) -> Iterator[Region]:
    """Yield elements `start` to `stop` of a contiguous tensor as regions, in the order of the elements."""
    if start >= stop:
        return
    if not shape:
        yield Region((), ())
        return
    inner = tuple(shape[1:])
    row = math.prod(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if head:
        end = tail if first == last else row
        yield from (Region((first, *r.offsets), (1, *r.sizes)) for r in runs_as_blocks(inner, head, end))
        first += 1
    if first < last:
        yield Region((first, *(0 for _ in inner)), (last - first, *inner))
    if tail and first <= last:
        yield from (Region((last, *r.offsets), (1, *r.sizes)) for r in runs_as_blocks(inner, 0, tail))


def split(region: Region, num_parts: int) -> list[Region]:
    """Split a region into at most `num_parts` parts of similar size, along the first dim that is long enough."""
    dim = next((dim for dim, size in enumerate(region.sizes) if size >= num_parts), None)
    if num_parts == 1 or dim is None:
        return [region]
    parts, size = [], region.sizes[dim]
    for start, stop in itertools.pairwise(size * part // num_parts for part in range(num_parts + 1)):
        offsets, sizes = list(region.offsets), list(region.sizes)
        offsets[dim], sizes[dim] = offsets[dim] + start, stop - start
        parts.append(Region(tuple(offsets), tuple(sizes)))
    return parts


def merged(regions: Sequence[Region]) -> list[Region]:
    """Return the same elements in fewer regions: adjacent ones are joined, dim after dim. Regions must not overlap."""
    found = list(regions)
    for dim in range(len(found[0].sizes) if found else 0):
        rows: dict[tuple[object, ...], list[Region]] = {}
        for region in sorted(found, key=lambda r: r.offsets[dim]):
            others = [(o, s) for d, (o, s) in enumerate(zip(region.offsets, region.sizes, strict=True)) if d != dim]
            row = rows.setdefault(tuple(others), [])
            if row and row[-1].offsets[dim] + row[-1].sizes[dim] == region.offsets[dim]:
                last, size = row.pop(), region.sizes[dim]
                sizes = (*last.sizes[:dim], last.sizes[dim] + size, *last.sizes[dim + 1 :])
                region = Region(last.offsets, sizes)
            row.append(region)
        found = [region for row in rows.values() for region in row]
    return sorted(found, key=lambda r: r.offsets)


class CheckSteps:
    """Budget for checking all regions of one message, or of one tensor, in steps of about a microsecond."""

    def __init__(self, num_regions: int) -> None:
        self._left = _FREE_STEPS + num_regions * _STEPS_PER_REGION

    def use(self, num_steps: int, name: str) -> None:
        """Use up `num_steps`. Raises ManifestError if fewer are left."""
        self._left -= num_steps
        if self._left < 0:
            raise malformed("count", f"the regions of {name!r} are too entangled to check: use fewer regions")


def check_tiling(regions: Sequence[Region], shape: Sequence[int], name: str, steps: CheckSteps | None = None) -> None:
    """Prove that `regions` (inside `shape`, none empty) cover each element exactly once. Raises ManifestError.

    Disjoint regions whose numbers of elements add up to the tensor's cover it. `steps`: see `check_disjoint`.
    """
    covered = sum(region.numel for region in regions)
    if covered != math.prod(shape):
        raise malformed(
            "coverage", f"the regions of {name!r} hold {covered} of its {math.prod(shape)} elements: missing or doubled"
        )
    check_disjoint(regions, name, steps)


def check_disjoint(regions: Sequence[Region], name: str, steps: CheckSteps | None = None) -> None:
    """Prove that no two of these regions of one tensor, none empty, have an element in common. Raises ManifestError.

    Regions are separated recursively by planes that no region crosses: O(n log n) for the regions of a planner or a
    mesh. Only regions that no plane separates, and that share an index of the first dim, are compared pairwise.
    Adversarial inputs are refused once `steps` are used up; a message has one budget for all of its tensors.
    """
    num_dims = len(regions[0].sizes) if regions else 0
    steps = steps or CheckSteps(len(regions))
    stack = [list(regions)]
    while stack:
        group = stack.pop()
        parts = _parted(group, num_dims, steps, name)
        if len(parts) == 1:
            _compare(group, steps, name)
        stack += (part for part in parts if 1 < len(part) < len(group))


def _compare(regions: list[Region], steps: CheckSteps, name: str) -> None:
    """Compare each region with the earlier ones that contain its first index of the first dim."""
    reaching: list[Region] = []
    for region in sorted(regions, key=lambda r: r.offsets):
        steps.use(len(reaching), name)
        reaching = [r for r in reaching if r.offsets[:1] == () or r.offsets[0] + r.sizes[0] > region.offsets[0]]
        if any(common(region, other) for other in reaching):
            raise malformed("overlap", f"regions of {name!r} overlap near {list(region.offsets)}")
        reaching.append(region)


def _parted(regions: list[Region], num_dims: int, steps: CheckSteps, name: str) -> list[list[Region]]:
    """Return groups of the regions that are separated by planes, across the first dim that has any."""
    for dim in range(num_dims if len(regions) > 1 else 0):
        steps.use(len(regions), name)
        parts: list[list[Region]] = []
        end = -1
        for region in sorted(regions, key=lambda r: r.offsets[dim]):
            if region.offsets[dim] >= end:
                parts.append([])
            parts[-1].append(region)
            end = max(end, region.offsets[dim] + region.sizes[dim])
        if len(parts) > 1:
            return parts
    return [regions]
