"""This rank's place, as Megatron's own global state has it. The only module here that imports Megatron."""

from __future__ import annotations

from weightcast.sources.megatron.layouts import Axis
from weightcast.sources.megatron.mapping import Parallel


def current() -> Parallel:
    """Raises ValueError where Megatron is missing, or its model parallel groups were not made."""
    try:
        from megatron.core import parallel_state as state
    except ImportError as exc:
        raise ValueError("megatron.core can't be imported here: give this rank's place as `parallel`") from exc
    if not state.model_parallel_is_initialized():
        raise ValueError("Megatron's parallel_state is not initialized: call initialize_model_parallel first")
    return Parallel(
        tensor=Axis(state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_world_size()),
        expert=Axis(state.get_expert_model_parallel_rank(), state.get_expert_model_parallel_world_size()),
        expert_tensor=Axis(state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()),
    )
