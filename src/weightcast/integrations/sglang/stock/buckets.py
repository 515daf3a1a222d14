"""From a publisher's buckets to SGLang's: which tensor goes into which flattened bucket, and the copies that fill it.

SGLang takes whole tensors only, and lays a bucket out by itself from names and shapes. So a flattened bucket is filled
from one or several of the publisher's, one copy on the way, and is full once the last of its tensors is whole.
Invariant: flattened buckets are filled one after another, in the order of the publisher's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence

import torch

from weightcast.format.bucket import Entry, Layout, narrow
from weightcast.format.manifest import Manifest, TensorRecord, TensorSpec
from weightcast.host.copy import copy_all
from weightcast.integrations.sglang.stock.flattened import FlatTensor, buckets, lay_out, view

_CAPACITY_BUCKETS = 8
_CAPACITY_BYTES = 256 << 20
"""A request costs SGLang the same however little is in it: several of the publisher's buckets go into one of these."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlatPart:
    """A piece of the publisher's bucket, entry `entry`, and the tensor of the flattened bucket that it belongs to."""

    entry: int
    place: FlatTensor


class FlatBuckets:
    """The flattened buckets of a manifest. `names`: those of its aliases that the servers want as well.

    `places[k]`: the tensors of bucket k, `sizes[k]` its bytes, `parts[i]`: what the publisher's bucket i brings, and
    into which, in the order of these.
    """

    def __init__(self, manifest: Manifest, names: Collection[str] = ()) -> None:
        self.layout = Layout(manifest)
        largest = max(manifest.max_bucket_bytes, min(_CAPACITY_BUCKETS * manifest.max_bucket_bytes, _CAPACITY_BYTES))
        records = {name: record for record in _in_order(manifest) for name in _names(record, names)}
        specs = [TensorSpec(name, r.dtype, r.shape, group=r.load_group) for name, r in records.items()]
        self.places = [lay_out(held) for held in buckets(specs, largest)]
        self.sizes = [max(place.end for place in places) for places in self.places]
        homes: dict[str, list[tuple[int, FlatTensor]]] = {}
        for number, places in enumerate(self.places):
            for place in places:
                homes.setdefault(records[place.name].name, []).append((number, place))
        self.parts = [_parts(entries, homes) for entries in self.layout.entries]
        order = [number for parts in self.parts for number, _ in parts]
        assert order == sorted(order), "the plan brings a tensor after one of a later flattened bucket"

    @property
    def slot_bytes(self) -> int:
        return max(self.sizes, default=0)


def _in_order(manifest: Manifest) -> list[TensorRecord]:
    """The records in the order in which they travel; those without elements first."""
    return sorted(
        manifest.tensors, key=lambda r: (r.pieces[0].bucket, r.pieces[0].offset_bytes) if r.pieces else (-1, 0)
    )


def _names(record: TensorRecord, wanted: Collection[str]) -> list[str]:
    return [record.name, *(alias for alias in record.aliases if alias in wanted)]


def _parts(
    entries: Sequence[Entry], homes: dict[str, list[tuple[int, FlatTensor]]]
) -> list[tuple[int, list[FlatPart]]]:
    held: dict[int, list[FlatPart]] = {}
    for index, entry in enumerate(entries):
        for number, place in homes[entry.record.name]:
            held.setdefault(number, []).append(FlatPart(index, place))
    return sorted(held.items())


class Filler:
    """Copies the publisher's buckets into flattened ones, which lie in `slots` by turns."""

    def __init__(self, flat: FlatBuckets, slots: Sequence[torch.Tensor]) -> None:
        self.flat = flat
        self.slots = slots
        self._targets: dict[tuple[int, int], list[torch.Tensor]] = {}

    def slot(self, number: int) -> torch.Tensor:
        """Where flattened bucket `number` lies."""
        return self.slots[number % len(self.slots)][: self.flat.sizes[number]]

    def brings(self, index: int) -> Iterator[tuple[int, list[FlatPart]]]:
        """Which flattened buckets the publisher's bucket `index` has something of, in order."""
        yield from self.flat.parts[index]

    @torch.no_grad()
    def copy(self, index: int, buffer: torch.Tensor, number: int, parts: Sequence[FlatPart]) -> None:
        """Copy these parts of the publisher's bucket `index`, packed in `buffer`. On a GPU this is only queued."""
        entries, views = self.flat.layout.entries[index], self.flat.layout.views(index, buffer)
        targets = self._targets.get((index, number))
        if targets is None:
            slot = self.slot(number)
            targets = [narrow(view(slot, part.place), entries[part.entry].piece.region) for part in parts]
            self._targets[index, number] = targets
        copy_all(targets, [views[part.entry] for part in parts])
