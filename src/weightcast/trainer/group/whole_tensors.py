"""All-gather of sharded tensors: every rank gets the whole tensors.

Invariants: every rank makes the same exchanges in the same order; each region is sent by one rank, the first that holds
it; only typed records and raw bytes are sent, through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast.errors import IncompatibleWeightsError, ManifestError
from weightcast.format.bucket import TORCH_DTYPES, narrow
from weightcast.format.geometry import Region, check_tiling
from weightcast.format.manifest import ITEMSIZE_BYTES, TensorSpec
from weightcast.seams.source import TensorPart
from weightcast.trainer.group import records
from weightcast.trainer.group.group import Group


def gather_whole(group: Group, parts: Sequence[TensorPart]) -> list[torch.Tensor]:
    """Return the whole tensors; see `Gather`. Extra host memory: number of ranks x the largest rank's message.

    Raises IncompatibleWeightsError, on every rank, if ranks gather different tensors or together lack elements of one.
    """
    own = records.HeldParts([part.spec for part in parts], [[region for region, _ in part.held] for part in parts])
    held: list[records.HeldParts] = group.exchange(own)
    for rank, other in enumerate(held):
        if other.specs != held[0].specs:
            first, theirs = ([spec.name for spec in each.specs] for each in (held[0], other))
            raise IncompatibleWeightsError(
                f"trainer ranks {group.ranks[0]} and {group.ranks[rank]} do not have the same adapters, but "
                f"{first[:4]} and {theirs[:4]}: shard the same model on every rank",
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
            raise IncompatibleWeightsError(f"{what}; pass the group of all ranks of the model") from exc
        for region, rank in holders.items():
            senders[rank].append((number, region))
    sizes = [sum(_num_bytes(own.specs[number], region) for number, region in each) for each in senders]
    rows = torch.zeros(len(held), max(sizes), dtype=torch.uint8)
    message, mine = rows[group.group_rank].clone(), [dict(part.held) for part in parts]
    if senders[group.group_rank]:
        found = [mine[number][region].contiguous().reshape(-1) for number, region in senders[group.group_rank]]
        message[: sizes[group.group_rank]] = torch.cat([values.view(torch.uint8) for values in found]).cpu()
    if max(sizes):
        group.all_gather(rows, message)
    wholes = [torch.empty(p.spec.shape, dtype=TORCH_DTYPES[p.spec.dtype], device=p.device) for p in parts]
    for row, sent in zip(rows, senders, strict=True):
        start = 0
        for number, region in sent:
            end = start + _num_bytes(own.specs[number], region)
            # Cloned, because `view(dtype)` needs aligned elements.
            values = row[start:end].clone().view(wholes[number].dtype).view(region.sizes)
            narrow(wholes[number], region).copy_(values)
            start = end
    return wholes


def _num_bytes(spec: TensorSpec, region: Region) -> int:
    return region.numel * ITEMSIZE_BYTES[spec.dtype]
