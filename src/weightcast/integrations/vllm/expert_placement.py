"""Which physical experts are copies of which expert now, and loaders that load an expert into all of them.

vLLM's load balancer (EPLB) moves experts between ranks. Each rank has some of the physical experts, which are numbered
over all ranks. vLLM's own loaders are called with the numbers that an expert's copies had at the start, and so would
load another expert than the router expects once they were moved.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from weightcast.errors import InstallError, UnsupportedError
from weightcast.integrations.vllm import internals

Placement: TypeAlias = Sequence[Sequence[int]]
"""By expert, the numbers of its physical experts: one, and one for each redundant copy."""


def expert_placements(model: nn.Module) -> dict[nn.Module, Placement]:
    """Return the present placement of each layer of experts that vLLM may move. Waits for the device.

    Raises UnsupportedError unless each physical expert is a copy of one expert.
    """
    vllm = internals.require()
    found: dict[nn.Module, Placement] = {}
    for name, runner in model.named_modules():
        balanced = runner.eplb_state if isinstance(runner, vllm.experts_runner) else None
        if balanced is None:
            continue
        counts = balanced.logical_replica_count.tolist()
        rows = balanced.logical_to_physical_map[:, : max(counts)].tolist()
        placement = [row[:count] for row, count in zip(rows, counts, strict=True)]
        if sorted(itertools.chain(*placement)) != list(range(sum(counts))):
            raise UnsupportedError(f"vLLM's record of where it has the experts of {name} is {placement}: restart vLLM")
        found |= {layer: placement for layer in runner.children() if isinstance(layer, vllm.experts)}
    return found


def require_unmoved(model: nn.Module, placements: Mapping[nn.Module, Placement]) -> None:
    """Raise InstallError (torn) if vLLM has moved experts since."""
    if expert_placements(model) != placements:
        raise InstallError("vLLM has moved experts between ranks during the install: publish again", torn=True)


def with_placement(loader: Callable[..., Any], placement: Placement | None) -> Callable[..., Any]:
    """Return a loader of a parameter that loads an expert into all of its physical experts.

    Returns `loader` itself for experts that vLLM does not move (None), and if it does not load single experts. It
    raises UnsupportedError for an expert outside the placement, such as a shared one that vLLM has added to the others.
    """
    if placement is None or "expert_id" not in inspect.signature(loader).parameters:
        return loader
    num_physical = sum(map(len, placement))

    @functools.wraps(loader, assigned=())  # vLLM inspects its attributes and signature
    def load(*args: Any, expert_id: int, **kwargs: Any) -> bool:
        # At vLLM's start physical expert i was expert i, and those after the last expert were redundant copies.
        if expert_id >= num_physical:
            raise UnsupportedError(f"{expert_id} is none of {num_physical} physical experts: start vLLM without EPLB")
        copies = placement[expert_id] if expert_id < len(placement) else ()
        are_loaded = [loader(*args, expert_id=physical, **kwargs) for physical in copies]
        return any(are_loaded)

    return load
