"""Tensors that the trainer ranks hold together, put together on every rank.

Invariants: every rank makes the same exchanges in the same order; each region is sent by one rank, the first that holds
it; only typed records and raw bytes travel, through host memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import torch

from weightcast.errors import IncompatibleWeightsError, ManifestError
from weightcast.format.bucket import TORCH_DTYPES, narrow
from weightcast.format.geometry import Region, check_tiling
from weightcast.format.manifest import ITEMSIZE_BYTES, TensorSpec, decode, encode
from weightcast.seams.source import TensorPart
from weightcast.trainer.group.exchange import TrainerRanks


class _HeldParts(msgspec.Struct, frozen=True):
    """A rank to all: the tensors that it gathers, and which regions of each it holds."""

    specs: list[TensorSpec]
    regions: list[list[Region]]


def gather_whole(ranks: TrainerRanks, parts: Sequence[TensorPart]) -> list[torch.Tensor]:
    """See `Gather`. Memory: the tensors, and on the host as many messages as ranks of the largest one's size.

    Raises IncompatibleWeightsError, on every rank, if ranks gather different tensors or do not hold all of one.
    """
    own = _HeldParts([part.spec for part in parts], [[region for region, _ in part.held] for part in parts])
    held: list[_HeldParts] = [decode(row, _HeldParts) for row in ranks.gather(encode(own))]
    for rank, other in enumerate(held):
        if other.specs != held[0].specs:
            first, theirs = ([spec.name for spec in each.specs] for each in (held[0], other))
            raise _named(
                f"trainer ranks {ranks.ranks[0]} and {ranks.ranks[rank]} do not have the same adapters: {first[:4]} "
                f"and {theirs[:4]}; shard the same model on every rank"
            )
    senders: list[list[tuple[int, Region]]] = [[] for _ in held]
    for number, spec in enumerate(own.specs):
        holders: dict[Region, int] = {}
        for rank, other in enumerate(held):
            for region in other.regions[number]:
                holders.setdefault(region, rank)
        try:
            check_tiling(list(holders), spec.shape, spec.name)
        except ManifestError as exc:
            what = f"the ranks of trainer_group do not hold all of {spec.name!r}: {exc}"
            raise _named(f"{what}; pass the group of all ranks of the model") from exc
        for region, rank in holders.items():
            senders[rank].append((number, region))
    sizes = [sum(r.numel * ITEMSIZE_BYTES[own.specs[n].dtype] for n, r in each) for each in senders]
    rows = torch.zeros(len(held), max(sizes), dtype=torch.uint8)
    message = rows[ranks.group_rank].clone()
    mine = [dict(part.held) for part in parts]
    sent = senders[ranks.group_rank]
    for (number, region), view in zip(sent, _views(message, sent, own.specs), strict=True):
        view.copy_(mine[number][region].contiguous().reshape(-1).view(torch.uint8))
    if max(sizes):
        ranks.all_gather(rows, message)
    wholes = [torch.empty(p.spec.shape, dtype=TORCH_DTYPES[p.spec.dtype], device=p.device) for p in parts]
    for row, sent in zip(rows, senders, strict=True):
        for (number, region), view in zip(sent, _views(row, sent, own.specs), strict=True):
            # A copy of its own, since a dtype's view wants its elements aligned.
            values = view.clone().view(wholes[number].dtype).view(region.sizes)
            narrow(wholes[number], region).copy_(values)
    return wholes


def _views(
    message: torch.Tensor, sent: Sequence[tuple[int, Region]], specs: Sequence[TensorSpec]
) -> list[torch.Tensor]:
    """The bytes of each region in a rank's message."""
    ends = list(itertools.accumulate((r.numel * ITEMSIZE_BYTES[specs[number].dtype] for number, r in sent), initial=0))
    return [message[start:end] for start, end in itertools.pairwise(ends)]


def _named(message: str) -> IncompatibleWeightsError:
    error = IncompatibleWeightsError(message)
    error.names_trainer_ranks = True  # type: ignore[attr-defined]
    return error
