"""Digests of the sent tensors, and their comparison with an engine's live memory.

Invariant: an engine that holds something else has failed, and refuses to serve until a complete update has healed it;
what an engine can't prove is in its result, by name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping

import torch

from weightcast.errors import listed
from weightcast.format.bucket import TORCH_DTYPES, Layout, narrow
from weightcast.format.geometry import Region, common, relative
from weightcast.format.manifest import TensorRecord
from weightcast.format.tensor_digest import add, tensor_digest
from weightcast.seams.source import Regions
from weightcast.trainer.fleet import FleetMember

_MAX_LOCATED = 8


class SentDigests:
    """The digest of every tensor of a layout, from its buckets as they are packed, added up by tensor."""

    def __init__(self, layout: Layout, regions: Regions) -> None:
        """`regions`: what this rank holds of the source, by which a block that differs is found."""
        self._layout = layout
        self._regions = regions
        self.by_bucket: dict[int, list[str]] = {}
        """Of the pieces of each bucket that was added, here or by another trainer rank."""

    def add(self, index: int, payload: torch.Tensor) -> None:
        """Read bucket `index`, which is packed; on a GPU this waits for it. Again for the same one: replaces it."""
        views = zip(self._layout.entries[index], self._layout.views(index, payload), strict=True)
        self.by_bucket[index] = [tensor_digest(view, e.piece.region, e.record.shape) for e, view in views]
        self._layout.forget_views()  # the transport's memory is not to be kept by them

    def by_name(self) -> dict[str, tuple[TensorRecord, str]]:
        """Each tensor's record and digest, under every name that it has."""
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
        """Compare with what the member's engine holds; one that differs is quarantined. Raises PeerError.

        `sent`: what `by_name` returns, which is the same for all members.
        """
        held = member.held()
        if held is None:
            member.result.unproven = dict.fromkeys(sent, "this engine's weights can't be read")
            return
        problems, proven = list(held.differing.values()), set[str]()
        unproven, wrong, where = dict(held.unproven), dict[str, TensorRecord](), dict[str, str]()
        try:
            for spec in held.tensors:
                # A tied parameter has the names of the tensor that it is to equal besides its own.
                record, digest = next((sent[name] for name in spec.names if name in sent), (None, ""))
                found = held.digests.get(spec.name)
                if record is None or found is None:
                    continue
                if spec.dtype != record.dtype:
                    unproven[spec.name] = f"it was sent as {record.dtype} and is held as {spec.dtype}"
                elif found != digest:
                    wrong[spec.name] = record
                proven.update(record.names)
            if wrong:
                where = self._located(member, dict(itertools.islice(wrong.items(), _MAX_LOCATED)))
        finally:
            # An engine that is known to differ does not serve on, whatever has kept this from saying where.
            problems += (f"{name!r} {where.get(name, '')}".rstrip() for name in wrong)
            if problems:
                member.quarantine(f"its live memory is not what was sent: {listed(problems)}")
        silent = dict.fromkeys(sent.keys() - proven, "the engine does not say what it holds of it")
        member.result.unproven = {name: reason for name, reason in (silent | unproven).items() if name in sent}

    def _located(self, member: FleetMember, wrong: Mapping[str, TensorRecord]) -> dict[str, str]:
        """Which ranks and blocks of an engine differ, in words, as far as this rank holds the same elements."""
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
        """Of a region of what was sent; None where this rank does not hold all of it."""
        digest, num_elements = "0" * 32, 0
        for held, tensor in self._regions.get(record.name, ()):
            shared = common(region, held)
            if shared is not None:
                part = narrow(tensor, relative(shared, held)).to(TORCH_DTYPES[record.dtype])
                digest = add(digest, tensor_digest(part.reshape(shared.sizes), shared, record.shape))
                num_elements += shared.numel
        return digest if num_elements == region.numel else None
