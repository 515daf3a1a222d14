"""What vLLM lacks on CPUs for experts that are served data-parallel or expert-parallel.

Every forward pass of such a model then ends its engine, weightcast or not. The tests add two collectives to its
communicator, so that engines that run in step, pause by consensus and resume together are tested here too, and have its
experts read the map that says which of them a rank has.
"""

from __future__ import annotations

import functools
import inspect
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


def read_expert_maps() -> None:
    """In vLLM's `CPUUnquantizedExperts`, in this process: its kernel takes every expert's number for a local one."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    stock = CPUUnquantizedExperts.apply

    @functools.wraps(stock)
    def apply(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        values = bound.arguments
        if values["expert_map"] is not None:
            local = values["expert_map"][values["topk_ids"]]
            values["topk_weights"] = values["topk_weights"].masked_fill(local < 0, 0)
            values["topk_ids"] = local.clamp(min=0).to(values["topk_ids"].dtype)
        stock(*bound.args, **bound.kwargs)

    signature = inspect.signature(stock)
    CPUUnquantizedExperts.apply = apply


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
