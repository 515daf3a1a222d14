"""Collectives that vLLM's communicator for CPUs lacks, and without which experts can't be served data-parallel there.

Every forward pass of such a model then ends its engine, weightcast or not. The tests add the two, so that engines that
run in step, pause by consensus and resume together are tested here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def add_collectives() -> None:
    """To vLLM's `CpuCommunicator`, in this process. Idempotent; what vLLM has of its own stays."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for method in (all_gatherv, reduce_scatterv):
        if method.__name__ not in vars(CpuCommunicator):
            setattr(CpuCommunicator, method.__name__, method)


def all_gatherv(communicator: Any, input_: Any, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """Every rank's rows, one after another, for a tensor or each of a list; rank r has `sizes[r]` of them."""
    assert dim == 0
    if not isinstance(input_, torch.Tensor):
        return [all_gatherv(communicator, tensor, dim, sizes) for tensor in input_]
    num_rows = sizes or [len(input_)] * communicator.world_size
    padded = input_.new_zeros(max(num_rows), *input_.shape[1:])
    padded[: len(input_)] = input_
    rows = [torch.empty_like(padded) for _ in num_rows]
    dist.all_gather(rows, padded, group=communicator.cpu_group)
    return torch.cat([of_rank[:num] for of_rank, num in zip(rows, num_rows, strict=True)])


def reduce_scatterv(communicator: Any, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    num_rows = sizes or [len(input_) // communicator.world_size] * communicator.world_size
    total = input_.clone()
    dist.all_reduce(total, group=communicator.cpu_group)
    return total.split(list(num_rows))[communicator.rank_in_group].contiguous()
