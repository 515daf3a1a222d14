"""The places where vLLM's load balancer (EPLB) has each expert now, and loaders that load an expert there.

A place is the number of a physical expert, counted over all ranks. vLLM's own loaders are called with the places that
the experts had at its start, and so would load others than the router expects once vLLM has moved them.
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

Places: TypeAlias = Sequence[Sequence[int]]
"""By expert, its places: one, and one for each redundant copy."""


def expert_places(model: nn.Module) -> dict[nn.Module, Places]:
    """Return, by layer of experts that vLLM may move between ranks, where they are. Waits for the device.

    Raises UnsupportedError unless each place has one expert.
    """
    vllm = internals.require()
    found: dict[nn.Module, Places] = {}
    for name, runner in model.named_modules():
        balanced = runner.eplb_state if isinstance(runner, vllm.experts_runner) else None
        if balanced is None:
            continue
        counts = balanced.logical_replica_count.tolist()
        rows = balanced.logical_to_physical_map[:, : max(counts)].tolist()
        places = [row[:count] for row, count in zip(rows, counts, strict=True)]
        if sorted(itertools.chain(*places)) != list(range(sum(counts))):
            raise UnsupportedError(f"vLLM's record of where it has the experts of {name} is {places}: restart vLLM")
        found |= {layer: places for layer in runner.children() if isinstance(layer, vllm.experts)}
    return found


def require_same_places(model: nn.Module, places: Mapping[nn.Module, Places]) -> None:
    """Raise InstallError (torn) if vLLM has moved experts since they were at these places."""
    if expert_places(model) != places:
        raise InstallError("vLLM has moved experts between ranks during the install: publish again", torn=True)


def at_places(loader: Callable[..., Any], places: Places | None) -> Callable[..., Any]:
    """Return a loader of a parameter that loads an expert to all of its places.

    Returns `loader` itself for experts that stay where they are (None), and if it does not load single experts. It
    raises UnsupportedError for an expert without a place, such as a shared one that vLLM has added to the others.
    """
    if places is None or "expert_id" not in inspect.signature(loader).parameters:
        return loader

    num_places = sum(map(len, places))

    @functools.wraps(loader, assigned=())  # vLLM inspects its attributes and signature
    def load(*args: Any, expert_id: int, **kwargs: Any) -> bool:
        # At vLLM's start expert i was at place i; redundant copies had the places after the last expert's.
        if expert_id >= num_places:
            raise UnsupportedError(f"{expert_id} is none of the {num_places} places: start vLLM without EPLB")
        now = places[expert_id] if expert_id < len(places) else ()
        are_loaded = [loader(*args, expert_id=place, **kwargs) for place in now]
        return any(are_loaded)

    return load
