"""SGLang's flattened buckets: their layout, and the copies that fill them from the publisher's buckets.

A flattened bucket is one uint8 tensor with its tensors end to end. SGLang accepts only whole tensors, computes their
offsets by adding up sizes in the order of the names, and can't view an offset that is not a multiple of the element
size. So a flattened bucket is filled by copies from one or several of the publisher's buckets, and is full once its
last tensor is complete.

Invariants: a bucket has the wide dtypes first, so that every tensor is aligned; buckets are filled one after another,
in the order of the publisher's.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from weightcast.format.bucket import TORCH_DTYPES, Layout, narrow
from weightcast.format.manifest import ITEMSIZE_BYTES, Manifest, TensorSpec
from weightcast.host.copy import copy_all

_NUM_SLOTS = 2
_CAPACITY_BUCKETS = 8
_CAPACITY_BYTES = 256 << 20
"""A request takes SGLang the same time however small it is, so several publisher buckets go into one of these."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTensor:
    """One tensor of a flattened bucket: bytes `start` to `end`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of the tensor in the bucket `flat`."""
        return flat[self.start : self.end].view(TORCH_DTYPES[self.dtype]).view(self.shape)


def lay_out(specs: Iterable[TensorSpec]) -> list[FlatTensor]:
    """Return the layout of a bucket with these tensors, in the order in which SGLang gets their names."""
    ordered = sorted(specs, key=lambda spec: -ITEMSIZE_BYTES[spec.dtype])
    ends = itertools.accumulate(spec.num_bytes for spec in ordered)
    return [FlatTensor(s.name, s.dtype, s.shape, end - s.num_bytes, end) for s, end in zip(ordered, ends, strict=True)]


def buckets(specs: Sequence[TensorSpec], capacity_bytes: int) -> Iterator[list[TensorSpec]]:
    """Yield the specs in order, in buckets of at most `capacity_bytes`; a larger tensor or load group has its own."""
    groups: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.load_group, []).append(spec)
    held: list[TensorSpec] = []
    held_bytes = 0
    for group in groups.values():
        num_bytes = sum(spec.num_bytes for spec in group)
        if held and held_bytes + num_bytes > capacity_bytes:
            yield held
            held, held_bytes = [], 0
        held += group
        held_bytes += num_bytes
    if held:
        yield held


class FlatBuckets:
    """The flattened buckets of a manifest, which use one or two slots in turn, allocated by `allocate`.

    `names`: the manifest's aliases that the servers need as well. `places[k]`: the tensors of flattened bucket k.
    `parts[i]`: for the publisher's bucket i, by flattened bucket, the index of each entry for it and the memory to copy
    it to.
    """

    def __init__(self, manifest: Manifest, names: Collection[str], allocate: Callable[[int], torch.Tensor]) -> None:
        self.manifest = manifest
        self.names = names
        self._layout = Layout(manifest)
        capacity = max(manifest.max_bucket_bytes, min(_CAPACITY_BUCKETS * manifest.max_bucket_bytes, _CAPACITY_BYTES))
        # In the order of sending; tensors without elements first.
        records = sorted(
            manifest.tensors, key=lambda r: (r.pieces[0].bucket, r.pieces[0].offset_bytes) if r.pieces else (-1, 0)
        )
        sources = {name: r for r in records for name in r.names if name == r.name or name in names}
        specs = [TensorSpec(name, r.dtype, r.shape, group=r.load_group) for name, r in sources.items()]
        self.places = [lay_out(held) for held in buckets(specs, capacity)]
        self._sizes = [places[-1].end for places in self.places]
        slot_bytes = max(self._sizes, default=0)
        self._slots = [allocate(slot_bytes) for _ in self.places[:_NUM_SLOTS]]
        homes: dict[str, list[tuple[int, FlatTensor]]] = {}
        for number, places in enumerate(self.places):
            for place in places:
                homes.setdefault(sources[place.name].name, []).append((number, place))
        self.parts: list[dict[int, list[tuple[int, torch.Tensor]]]] = []
        for entries in self._layout.entries:
            parts: dict[int, list[tuple[int, torch.Tensor]]] = {}
            for index, entry in enumerate(entries):
                for number, place in homes[entry.record.name]:
                    target = narrow(place.view(self.bucket(number)), entry.piece.region)
                    parts.setdefault(number, []).append((index, target))
            self.parts.append(dict(sorted(parts.items())))
        order = [number for parts in self.parts for number in parts]
        assert order == sorted(order), "the plan has a tensor after one of a later flattened bucket"

    def bucket(self, number: int) -> torch.Tensor:
        """Return the memory of flattened bucket `number`."""
        return self._slots[number % len(self._slots)][: self._sizes[number]]

    @torch.no_grad()
    def fill(self, number: int, index: int, payload: torch.Tensor) -> None:
        """Copy the pieces that the publisher's bucket `index` has for flattened bucket `number`. On a GPU: queued."""
        parts, views = self.parts[index][number], self._layout.views(index, payload)
        copy_all([target for _, target in parts], [views[entry] for entry, _ in parts])
