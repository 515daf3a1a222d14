"""All-gather of sharded tensors: every rank gets the whole tensors.

Invariants: every rank makes the same exchanges in the same order; only typed records and raw bytes are sent, through
host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast.errors import IncompatibleWeightsError, ManifestError
from weightcast.format.bucket import TORCH_DTYPES, narrow
from weightcast.format.geometry import check_tiling
from weightcast.seams.source import TensorPart
from weightcast.trainer.group import records
from weightcast.trainer.group.group import Group


def gather_whole(group: Group, parts: Sequence[TensorPart]) -> list[torch.Tensor]:
    """Return the whole tensors; see `Gather`. Extra host memory: number of ranks x the largest rank's message.

    Raises IncompatibleWeightsError, on every rank, if ranks gather different tensors or together lack elements of one.
    """
    pieces = [values.contiguous().reshape(-1).view(torch.uint8).cpu() for part in parts for _, values in part.held]
    message = torch.cat([torch.empty(0, dtype=torch.uint8), *pieces])
    regions_held = [[region for region, _ in part.held] for part in parts]
    own = records.HeldParts([part.spec for part in parts], regions_held, message.numel())
    held: list[records.HeldParts] = group.exchange(own)
    for rank, other in enumerate(held):
        if other.specs != held[0].specs:
            first, theirs = ([spec.name for spec in each.specs] for each in (held[0], other))
            raise IncompatibleWeightsError(
                f"trainer ranks {group.ranks[0]} and {group.ranks[rank]} do not have the same adapters, but "
                f"{first[:4]} and {theirs[:4]}: shard the same model on every rank",
            )
    for number, spec in enumerate(own.specs):
        distinct = dict.fromkeys(region for other in held for region in other.regions[number])
        try:
            check_tiling(list(distinct), spec.shape, spec.name)
        except ManifestError as exc:
            what = f"the ranks of trainer_group do not hold all of {spec.name!r}: {exc}"
            raise IncompatibleWeightsError(f"{what}; pass the group of all ranks of the model") from exc
    longest = max(other.num_bytes for other in held)
    rows = torch.empty(len(held), longest, dtype=torch.uint8)
    if longest:
        group.all_gather(rows, torch.nn.functional.pad(message, (0, longest - message.numel())))
    wholes = [torch.empty(p.spec.shape, dtype=TORCH_DTYPES[p.spec.dtype], device=p.device) for p in parts]
    for row, other in zip(rows, held, strict=True):
        start = 0
        for whole, regions in zip(wholes, other.regions, strict=True):
            for region in regions:
                end = start + region.numel * whole.itemsize
                # Cloned, because `view(dtype)` needs aligned elements.
                narrow(whole, region).copy_(row[start:end].clone().view(whole.dtype).view(region.sizes))
                start = end
    return wholes
