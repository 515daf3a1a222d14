"""Digests of the sent tensors, and their comparison with an engine's live memory.

Invariant: an engine whose weights differ has failed, and refuses to serve until a complete update; its result names the
tensors that can't be compared.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import torch

from weightcast.errors import listed
from weightcast.format.bucket import TORCH_DTYPES, Layout, narrow
from weightcast.format.geometry import Region, common, is_run, relative, start_elements
from weightcast.format.manifest import ITEMSIZE_BYTES, TensorRecord
from weightcast.format.packed_base import MAX_WORD_BYTES
from weightcast.format.tensor_digest import add, lanes_of, of_lanes, tensor_digest
from weightcast.native.deltas import Pieces, pieces_of
from weightcast.seams.source import Regions
from weightcast.trainer.fleet import FleetMember

_MAX_LOCATED = 8


class SentDigests:
    """Digests of every tensor of a layout, computed from the packed buckets and added up by tensor."""

    def __init__(self, layout: Layout, regions: Regions) -> None:
        """`regions`: this rank's regions of the source, used to locate a block that differs."""
        self._layout = layout
        self._regions = regions
        self.by_bucket: dict[int, list[str]] = {}
        """By bucket, the digests of its pieces, computed on this or another trainer rank."""

    def add(self, index: int, payload: torch.Tensor, pieces: Pieces | None = None) -> None:
        """Take the digests of the packed bucket `index`, in place of former ones: those of `pieces`, if they are given.

        `pieces`: see `pieces`; what has no words there is computed. On a GPU this waits for the bucket.
        """
        entries = self._layout.entries[index]
        rows = [(0,) * 5] * len(entries) if pieces is None else pieces.tolist()
        self.by_bucket[index] = [
            of_lanes(lanes) if num_words else tensor_digest(entry.view(payload), entry.piece.region, entry.record.shape)
            for entry, (_, num_words, _, *lanes) in zip(entries, rows, strict=True)
        ]

    def pieces(self, index: int, word_bytes: int) -> Pieces:
        """Return the digests of bucket `index` as rows that follow changes of its words, which have so many bytes.

        A piece that has words of another size, or is several runs of its tensor, has a row of no words.
        """
        rows = []
        for entry, digest in zip(self._layout.entries[index], self.by_bucket[index], strict=True):
            region, shape, itemsize = entry.piece.region, entry.record.shape, ITEMSIZE_BYTES[entry.record.dtype]
            is_followed = min(itemsize, MAX_WORD_BYTES) == word_bytes and is_run(region, shape)
            first, position = entry.piece.offset_bytes, start_elements(region, shape) * itemsize
            words = (number // word_bytes for number in (first, is_followed * entry.num_bytes, position))
            rows.append((*words, *lanes_of(digest)))
        return pieces_of(rows)

    def by_name(self) -> dict[str, tuple[TensorRecord, str]]:
        """Return each tensor's record and digest, under each of its names."""
        digests: dict[int, list[str]] = {}
        for index, found in self.by_bucket.items():
            for entry, digest in zip(self._layout.entries[index], found, strict=True):
                digests.setdefault(entry.tensor, []).append(digest)
        return {
            name: (record, functools.reduce(add, digests.get(number, []), "0" * 32))
            for number, record in enumerate(self._layout.manifest.tensors)
            for name in record.names
        }

    def prove(self, sent: Mapping[str, tuple[TensorRecord, str]], member: FleetMember) -> None:
        """Compare with the weights of the member's engine, and quarantine the engine if they differ. Raises PeerError.

        `sent`: the result of `by_name`, computed once for all members.
        """
        held = member.held()
        if held is None:
            member.result.unproven = dict.fromkeys(sent, "this engine's weights can't be read")
            return
        problems, proven = list(held.differing.values()), set[str]()
        unproven, wrong, where = dict(held.unproven), dict[str, TensorRecord](), dict[str, str]()
        try:
            for spec in held.tensors:
                # A tied parameter has its own name and those of the tensor that it is tied to.
                record, digest = next((sent[name] for name in spec.names if name in sent), (None, ""))
                found = held.digests.get(spec.name)
                if record is None or found is None:
                    continue
                if spec.dtype != record.dtype:
                    unproven[spec.name] = f"it was sent as {record.dtype}, the engine has it as {spec.dtype}"
                elif found != digest:
                    wrong[spec.name] = record
                proven.update(record.names)
            member.result.num_compared = len(proven)
            if wrong:
                where = self._located(member, dict(itertools.islice(wrong.items(), _MAX_LOCATED)))
        finally:
            # Quarantine an engine that differs, even if an error has kept us from locating the difference.
            problems += (f"{name!r} {where.get(name, '')}".rstrip() for name in wrong)
            if problems:
                member.quarantine(f"its live memory is not what was sent: {listed(problems)}")
        silent = dict.fromkeys(sent.keys() - proven, "the engine reports no digest of it")
        member.result.unproven = {name: reason for name, reason in (silent | unproven).items() if name in sent}

    def _located(self, member: FleetMember, wrong: Mapping[str, TensorRecord]) -> dict[str, str]:
        """Return by name, in words, the engine ranks and blocks that differ, as far as this rank has those elements."""
        held = member.held(list(wrong))
        found: dict[str, str] = {}
        for name, record in wrong.items():
            blocks = [] if held is None else held.blocks.get(name, [])
            found[name] = "; ".join(
                f"on rank {block.engine_rank} at {list(block.region.offsets)}, sizes {list(block.region.sizes)}"
                for block in blocks
                if self._digest(record, block.region) not in (None, block.digest)
            )
        return found

    def _digest(self, record: TensorRecord, region: Region) -> str | None:
        """Return the digest of a region of the sent tensor; None if this rank does not have all of it."""
        digest, num_elements = "0" * 32, 0
        for held, tensor in self._regions.get(record.name, ()):
            shared = common(region, held)
            if shared is not None:
                part = narrow(tensor, relative(shared, held)).to(TORCH_DTYPES[record.dtype])
                digest = add(digest, tensor_digest(part.reshape(shared.sizes), shared, record.shape))
                num_elements += shared.numel
        return digest if num_elements == region.numel else None
