"""vLLM's load balancer of experts (EPLB) on CPUs, where vLLM refuses it in its configuration.

The tests put into its workers what vLLM lacks there: a record of the experts' places, made as for a GPU, and its kernel
that routes tokens to places. The policy that chooses places, and the code that moves experts, are vLLM's own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

OPTION = "test_redundant_experts"
"""In vLLM's additional config: how many experts have a second place."""


def balance_experts() -> None:
    """In vLLM's workers for CPUs, in this process, for an engine with that option. Idempotent."""
    from vllm.model_executor.layers.fused_moe.router import base_router
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    if base_router.eplb_map_to_physical_and_record is not route:
        base_router.eplb_map_to_physical_and_record = route
        CPUWorker.__init__ = _configuring(CPUWorker.__init__)
        CPUModelRunner.load_model = _registering(CPUModelRunner.load_model)


def _configuring(stock: Any) -> Any:
    @functools.wraps(stock)
    def init(worker: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.config.parallel import EPLBConfig

        if OPTION in vllm_config.additional_config:
            vllm_config.parallel_config.enable_eplb = True
            vllm_config.parallel_config.eplb_config = EPLBConfig(
                num_redundant_experts=vllm_config.additional_config[OPTION],
                step_interval=1 << 30,  # the tests say when
                use_async=False,
                communicator="torch_nccl",  # of tensors in host memory it is gloo
            )
        stock(worker, vllm_config, *args, **kwargs)

    return init


def _registering(stock: Any) -> Any:
    @functools.wraps(stock)
    def load_model(runner: Any, *args: Any, **kwargs: Any) -> None:
        from vllm.distributed.eplb.eplb_state import EplbState

        stock(runner, *args, **kwargs)
        if runner.parallel_config.enable_eplb:
            runner._moe_model, runner.eplb_state = runner.model, EplbState(runner.parallel_config, runner.device)
            runner.eplb_state.add_model(runner.model, runner.model_config)

    return load_model


def route(topk_ids: torch.Tensor, logical_to_physical_map: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
    """The places of the experts that the router has chosen; of an expert with several, by the token's number."""
    counts = others["logical_replica_count"][topk_ids.long()]
    token = torch.arange(len(topk_ids)).unsqueeze(1)
    return logical_to_physical_map[topk_ids.long(), token % counts].to(topk_ids.dtype)


def rebalance(worker: Any, load: list[list[int]]) -> list[list[int]]:
    """Move experts to the places that vLLM's policy chooses for this load of each, by layer.

    Returns the expert of each place. A part of `EplbState.rearrange`, which also measures how long that takes on a GPU.
    """
    from vllm.distributed.eplb import eplb_state as eplb
    from vllm.distributed.parallel_state import get_ep_group

    state, group = worker.model_runner.eplb_state, get_ep_group().device_group
    (of_model,) = state.model_states.values()
    former, model = of_model.physical_to_logical_map, of_model.model
    places = state.policy.rebalance_experts(
        torch.tensor(load), model.num_physical_experts, model.num_expert_groups, 1, group.size(), former
    )
    eplb.rearrange_expert_weights_inplace(
        former, places, model.expert_weights, of_model.expert_buffer, group, of_model.communicator
    )
    eplb._commit_eplb_maps(of_model, places)
    return places.tolist()
