"""The trainer's weights: fp32 for the optimizer, bf16 for the forward pass and the engines."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from rl_demo.trainer import MAX_GRAD_NORM, full_weights, make_optimizer, mean_over_ranks, shard, update
from torch import nn

from weightcast.sources.module import ModuleSource


@pytest.fixture(autouse=True)
def _one_trainer_rank() -> Iterator[None]:
    """A default group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def one_weight() -> nn.Module:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> None:
    update(model, optimizer, model(torch.ones(1, 1)).float().sum() * factor)


def test_small_steps_add_up() -> None:
    """They would be lost in bf16, as the second model shows; what is published, and computed with, is bf16."""
    sharded, plain = one_weight(), one_weight().to(torch.bfloat16)
    shard(sharded, [])
    optimizer, plain_optimizer = make_optimizer(sharded, 1e-4), make_optimizer(plain, 1e-4)
    for _ in range(100):
        descend(sharded, optimizer)
        update(plain, plain_optimizer, plain(torch.ones(1, 1, dtype=torch.bfloat16)).sum())
    assert plain.weight.item() == 1.0
    assert full_weights(sharded)["weight"].item() == pytest.approx(0.99, abs=1e-4)
    output = sharded(torch.ones(1, 1))
    assert output.dtype == torch.bfloat16
    assert output.item() == full_weights(sharded)["weight"].bfloat16().item() < 1.0
    [spec] = ModuleSource(sharded, dtype=torch.bfloat16).specs()
    assert spec.dtype == "bfloat16"


@pytest.mark.parametrize(("gradient", "step"), [(64.0, MAX_GRAD_NORM), (0.25, 0.25)])
def test_gradients_are_clipped_and_cleared(gradient: float, step: float) -> None:
    layer = one_weight()
    descend(layer, torch.optim.SGD(layer.parameters(), lr=0.5), gradient)
    assert layer.weight.grad is None
    assert layer.weight.item() == pytest.approx(1 - 0.5 * step, abs=1e-4)


def test_shards_take_the_steps_that_the_whole_model_takes() -> None:
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)).to(torch.bfloat16)
    sharded = copy.deepcopy(plain)
    masters = copy.deepcopy(plain).float()
    shard(sharded, [sharded[0]])
    optimizer, whole_optimizer = make_optimizer(sharded, 1e-2), make_optimizer(masters, 1e-2)
    inputs = torch.ones(2, 8, dtype=torch.bfloat16)
    for _ in range(3):
        update(sharded, optimizer, sharded(inputs).square().sum().mul(64))
        plain.load_state_dict(masters.state_dict())
        plain.zero_grad()
        plain(inputs).square().sum().mul(64).backward()
        for master, weight in zip(masters.parameters(), plain.parameters(), strict=True):
            master.grad = weight.grad.float()
        norm = nn.utils.clip_grad_norm_(masters.parameters(), MAX_GRAD_NORM)
        whole_optimizer.step()
        assert norm > MAX_GRAD_NORM, "they are clipped"
    for name, weight in full_weights(sharded).items():
        assert torch.equal(weight, masters.state_dict()[name])


def test_a_mean_over_ranks_leaves_the_value_as_it_is() -> None:
    value = torch.tensor(2.5, requires_grad=True)
    assert mean_over_ranks(value) == 2.5
    assert value.requires_grad
