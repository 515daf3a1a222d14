"""Copies a source's views into buckets, cast to the manifest's dtypes, and digests each while it is in the cache.

Invariants: packing a bucket is a few calls however many tensors it holds; on a GPU nothing waits for the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
import xxhash

from weightcast.format.bucket import TORCH_DTYPES, Entry, Layout, narrow, put_trailer, write_trailer
from weightcast.format.geometry import Region, common, relative
from weightcast.format.manifest import ITEMSIZE_BYTES, TensorSpec, WeightVersion
from weightcast.host.copy import copy_all, copy_plain, is_plain

_HASH_STEP_BYTES = 512 << 10

Parts: TypeAlias = torch.Tensor | Sequence[tuple[Region, torch.Tensor]]
"""A tensor's memory: all of it, or what lies at each of several regions."""


class Packer:
    """Copies source tensors into buckets, casting to the manifest's dtypes on the way.

    Holds views of the sources only; make a new one when a source's storage has changed.
    """

    @torch.no_grad()
    def __init__(
        self,
        layout: Layout,
        tensors: Mapping[str, Parts],
    ) -> None:
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
        layout = self._layout
        targets, num_bytes = self._targets(index, buffer), layout.manifest.buckets[index]
        if layout.manifest.digest_kind != "xxh3-128":
            torch._foreach_copy_(targets, self._sources[index])
            return write_trailer(buffer, num_bytes, version, index, layout.manifest.digest_kind)
        copy = copy_all if self._cuts[index] else torch._foreach_copy_
        hasher, data, sources, start = xxhash.xxh3_128(), buffer.numpy().data, self._sources[index], 0
        for first, last, end in self._steps(index, targets):
            if last - first == 1 and is_plain(targets[first], sources[first]):
                start = self._pack_plain(targets[first], sources[first], data, start, end, hasher)
            else:
                copy(targets[first:last], sources[first:last])
            hasher.update(data[start:end])
            start = end
        hasher.update(data[start:num_bytes])
        digest = hasher.digest()
        put_trailer(buffer, num_bytes, version, index, digest)
        return digest

    def _targets(self, index: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Where each source goes. Parts of pieces are not kept: they are few, and the layout can't forget them."""
        views, slices = self._layout.views(index, buffer), self._cuts[index]
        return [views[n] if region is None else narrow(views[n], region) for n, region in slices] if slices else views

    def _pack_plain(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        data: memoryview,
        start: int,
        end: int,
        hasher: xxhash.xxh3_128,
    ) -> int:
        """Copy a large tensor that ends at byte `end`, digesting from `start` on; return where the digest has come."""
        num_bytes = target.nbytes
        for done in range(0, num_bytes, _HASH_STEP_BYTES):
            size = min(_HASH_STEP_BYTES, num_bytes - done)
            copy_plain(target, source, done, size)
            hasher.update(data[start : end - num_bytes + done + size])
            start = end - num_bytes + done + size
        return start

    def _steps(self, index: int, targets: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
        """Runs of copies, large plain ones alone, others of about _HASH_STEP_BYTES: (first, last, end in bytes)."""
        known = self._known_steps[index]
        if known is not None:
            return known
        ends = self._ends(index)
        steps, first, start = [], 0, 0
        alone = [is_plain(*pair) for pair in zip(targets, self._sources[index], strict=True)]
        for number, end in enumerate(ends, start=1):
            if end is None:
                continue
            is_last = number == len(ends)
            if is_last or alone[number - 1] or alone[number] or end - start >= _HASH_STEP_BYTES:
                steps.append((first, number, end))
                first, start = number, end
        self._known_steps[index] = steps
        return steps

    def _ends(self, index: int) -> list[int | None]:
        """Up to which byte the bucket is whole after each copy; None in the middle of a piece."""
        entries, slices = self._layout.entries[index], self._cuts[index]
        numbers = [number for number, _ in slices] if slices else range(len(entries))
        ends: list[int | None] = [_end_bytes(entries[number]) for number in numbers]
        for place, (number, after) in enumerate(itertools.pairwise(numbers)):
            if number == after:
                ends[place] = None
        return ends


def _end_bytes(entry: Entry) -> int:
    return entry.piece.offset_bytes + entry.piece.region.numel * ITEMSIZE_BYTES[entry.record.dtype]


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
