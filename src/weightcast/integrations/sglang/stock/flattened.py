"""SGLang's flattened bucket: tensors one after another in one uint8 tensor, nothing between them, and where each lies.

SGLang finds the places again by adding up sizes in the order of the names, and views each place in its tensor's dtype:
a place that is no multiple of the element size can't be viewed. Invariant: a bucket that is laid out here has the wide
dtypes first, so that every tensor is aligned to its element size however odd the narrow ones are.

`read` and `metadata` are for buckets that others have made, or will take: SGLang's own metadata says where each tensor
begins and ends, in bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from weightcast.errors import ManifestError
from weightcast.format.bucket import DTYPE_NAMES, TORCH_DTYPES
from weightcast.format.geometry import whole
from weightcast.format.manifest import ITEMSIZE_BYTES, TensorSpec
from weightcast.seams.source import Held, Regions


class Metadata(Protocol):
    """One tensor's place, as SGLang's FlattenedTensorMetadata has it; `numel` is its size in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTensor:
    """One tensor of a bucket: bytes `start` to `end`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def lay_out(specs: Iterable[TensorSpec]) -> list[FlatTensor]:
    """The places of these tensors in a bucket of their own, in the order in which SGLang is to be told of them."""
    ordered = sorted(specs, key=lambda spec: -ITEMSIZE_BYTES[spec.dtype])
    ends = itertools.accumulate(spec.num_bytes for spec in ordered)
    return [FlatTensor(s.name, s.dtype, s.shape, end - s.num_bytes, end) for s, end in zip(ordered, ends, strict=True)]


def buckets(specs: Sequence[TensorSpec], capacity_bytes: int) -> Iterator[list[TensorSpec]]:
    """The specs in order, cut into buckets of at most `capacity_bytes`; a larger tensor or load group has its own."""
    held: list[TensorSpec] = []
    held_bytes = 0
    for group in _load_groups(specs):
        num_bytes = sum(spec.num_bytes for spec in group)
        if held and held_bytes + num_bytes > capacity_bytes:
            yield held
            held, held_bytes = [], 0
        held += group
        held_bytes += num_bytes
    if held:
        yield held


def _load_groups(specs: Sequence[TensorSpec]) -> Iterator[list[TensorSpec]]:
    members: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        members.setdefault(spec.load_group, []).append(spec)
    yield from members.values()


def view(flat: torch.Tensor, place: FlatTensor) -> torch.Tensor:
    """A bucket's tensor as a view; a copy where its place is not aligned to its element size."""
    part, dtype = flat[place.start : place.end], TORCH_DTYPES[place.dtype]
    if (part.storage_offset() % dtype.itemsize) or (part.data_ptr() % dtype.itemsize):
        part = part.clone()
    return part.view(dtype).view(place.shape)


class FlattenedBucket:
    """`flat`, a one-dimensional uint8 tensor, and the places of the tensors in it."""

    def __init__(self, flat: torch.Tensor, places: Sequence[FlatTensor]) -> None:
        self.flat = flat
        self.places = tuple(places)

    @classmethod
    @torch.no_grad()
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> FlattenedBucket:
        """Copy these tensors, of any layout in memory, into a new bucket on their device.

        Raises ValueError for none at all, for a dtype that does not travel, for tensors of several devices.
        """
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1:
            raise ValueError(f"a bucket holds the tensors of one device, these are on {sorted(map(str, devices))}")
        places = lay_out(TensorSpec(name, _dtype_name(name, t.dtype), tuple(t.shape)) for name, t in tensors.items())
        flat = torch.empty(places[-1].end, dtype=torch.uint8, device=devices.pop())
        for place in places:
            view(flat, place).copy_(tensors[place.name])
        return cls(flat, places)

    @classmethod
    def read(cls, flat: torch.Tensor, metadata: Iterable[Metadata]) -> FlattenedBucket:
        """A bucket that another framework has made. Copies nothing.

        Raises ManifestError, naming the tensor, if a place is not in the bucket, is not of its tensor's size, or
        overlaps another; if a name comes twice or a dtype does not travel; TypeError if `flat` is not flat bytes.
        """
        if flat.dtype != torch.uint8 or flat.dim() != 1 or not flat.is_contiguous():
            raise TypeError(f"a flattened bucket is a contiguous uint8 vector, not {flat.dtype}{list(flat.shape)}")
        places = [_place(entry) for entry in metadata]
        _check(places, flat.numel())
        return cls(flat, places)

    def metadata(self) -> list[Metadata]:
        """What SGLang is told of each tensor, by attribute."""
        return [
            types.SimpleNamespace(
                name=place.name,
                shape=torch.Size(place.shape),
                dtype=TORCH_DTYPES[place.dtype],
                start_idx=place.start,
                end_idx=place.end,
                numel=place.end - place.start,
            )
            for place in self.places
        ]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor, as a view of the bucket where its place is aligned."""
        return {place.name: view(self.flat, place) for place in self.places}


class BucketSource:
    """A `Source` of flattened buckets that together hold a whole model, on one trainer rank.

    Their tensors are read when they are published; make another source for buckets in other memory.
    """

    def __init__(self, held: Iterable[FlattenedBucket]) -> None:
        """Raises ManifestError if a name is in two buckets."""
        self._regions: dict[str, tuple[Held, ...]] = {}
        self._specs: list[TensorSpec] = []
        for bucket in held:
            tensors = bucket.tensors()
            for place in bucket.places:
                if place.name in self._regions:
                    raise ManifestError(f"{place.name!r} is in two buckets", fault="duplicate")
                self._regions[place.name] = ((whole(place.shape), tensors[place.name]),)
                self._specs.append(TensorSpec(place.name, place.dtype, place.shape))

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"{name!r} is {dtype}, which can't travel")
    return DTYPE_NAMES[dtype]


def _place(entry: Metadata) -> FlatTensor:
    if entry.dtype not in DTYPE_NAMES:
        raise ManifestError(f"{entry.name!r} is {entry.dtype}, which can't travel", fault="dtype")
    shape, start, end = tuple(entry.shape), entry.start_idx, entry.end_idx
    dtype = DTYPE_NAMES[entry.dtype]
    num_bytes = math.prod(shape) * ITEMSIZE_BYTES[dtype]
    if min(shape, default=0) < 0 or end - start != num_bytes or entry.numel != num_bytes:
        raise ManifestError(
            f"{entry.name!r} {dtype}{list(shape)} has bytes {start} to {end} and says {entry.numel}, "
            f"it needs {num_bytes}",
            fault="size",
        )
    return FlatTensor(entry.name, dtype, shape, start, end)


def _check(places: Sequence[FlatTensor], num_bytes: int) -> None:
    seen: set[str] = set()
    end = 0
    for place in sorted(places, key=lambda place: (place.start, place.end)):
        if place.name in seen:
            raise ManifestError(f"{place.name!r} comes twice in one bucket", fault="duplicate")
        if place.start < 0 or place.end > num_bytes:
            raise ManifestError(
                f"{place.name!r} has bytes {place.start} to {place.end} of a bucket of {num_bytes}", fault="bucket"
            )
        if place.start < end and place.end > place.start:
            raise ManifestError(
                f"{place.name!r} begins at byte {place.start}, inside of another tensor", fault="overlap"
            )
        seen.add(place.name)
        end = max(end, place.end)
