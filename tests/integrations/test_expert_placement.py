"""Into which physical experts an expert is loaded, told without vLLM; see real_vllm/test_moved_experts.py."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from weightcast.errors import InstallError, UnsupportedError
from weightcast.integrations.vllm import internals
from weightcast.integrations.vllm.expert_placement import expert_placements, require_unmoved, with_placement

PLACEMENT = [[4, 1], [3], [0, 2]]


class Runner(nn.Module):
    """Has a record of its physical experts as vLLM's has: a row for each expert, with room for more copies."""

    def __init__(self, rows: list[list[int]] | None) -> None:
        super().__init__()
        self.experts = nn.Linear(1, 1)
        self.eplb_state = rows and types.SimpleNamespace(
            logical_to_physical_map=torch.tensor([row + [-1] * (8 - len(row)) for row in rows]),
            logical_replica_count=torch.tensor([len(row) for row in rows]),
        )


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    found = types.SimpleNamespace(experts_runner=Runner, experts=nn.Linear)
    monkeypatch.setattr(internals, "require", lambda: found)


def test_an_expert_is_loaded_into_all_its_copies_once() -> None:
    """vLLM's loaders are called for 5 physical experts, of which the last two are the first two again, or for 3."""
    calls: list[tuple[str, int]] = []

    def loader(param: str, loaded_weight: str, *, expert_id: int, return_success: bool = False) -> bool | None:
        calls.append((loaded_weight, expert_id))
        return expert_id < 3 if return_success else None

    load = with_placement(loader, PLACEMENT)
    found = [load("w13", f"expert {n % 3}", expert_id=n, return_success=True) for n in range(5)]
    assert sorted(calls, key=lambda call: call[1]) == [
        ("expert 2", 0),
        ("expert 0", 1),
        ("expert 2", 2),
        ("expert 1", 3),
        ("expert 0", 4),
    ]
    # Whether this rank, with physical experts 0 to 2, has a copy.
    assert found == [True, False, True, False, False]
    with pytest.raises(UnsupportedError, match="5 is none of 5 physical experts: start vLLM without EPLB"):
        load("w13", "a shared expert", expert_id=5)


def test_a_loader_that_does_not_say_which_expert_it_loads_fails() -> None:
    def loader(param: str, loaded_weight: str, expert_id: int = 0) -> None: ...

    with pytest.raises(TypeError, match="expert_id"):
        with_placement(loader, PLACEMENT)("w13", "weight")


def test_other_loaders_stay_as_they_are() -> None:
    def bias(param: str, loaded_weight: str) -> None: ...

    def of_expert(param: str, loaded_weight: str, *, expert_id: int) -> None: ...

    assert with_placement(bias, PLACEMENT) is bias
    assert with_placement(of_expert, None) is of_expert


def test_placements_are_those_of_layers_that_are_balanced() -> None:
    model = nn.ModuleList([Runner(PLACEMENT), Runner(None)])
    placements = expert_placements(model)
    assert placements == {model[0].experts: PLACEMENT}
    require_unmoved(model, placements)
    state: Any = model[0].eplb_state
    state.logical_to_physical_map[0, :2] = torch.tensor([3, 1])
    state.logical_to_physical_map[1, 0] = 4
    with pytest.raises(InstallError, match="moved experts") as caught:
        require_unmoved(model, placements)
    assert caught.value.torn


@pytest.mark.parametrize("rows", [[[0], [0]], [[0], [2]], [[-1], [0]]])
def test_a_record_that_makes_no_sense_is_refused(rows: list[list[int]]) -> None:
    with pytest.raises(UnsupportedError, match=r"where it has the experts of 0 is .+: restart vLLM"):
        expert_placements(nn.ModuleList([Runner(rows)]))
