"""Why the optimizer keeps fp32 masters: without them a bf16 model stands still."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from weightcast.demo.masters import MasterAdamW
from weightcast.demo.ranks import TrainerProcesses


def bf16_weight() -> torch.nn.Linear:
    layer = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    return layer


def descend(layer: torch.nn.Linear) -> None:
    layer.weight.sum().backward()


def test_small_steps_add_up() -> None:
    layer = bf16_weight()
    optimizer = MasterAdamW(layer, learning_rate=1e-4)
    for _ in range(100):
        descend(layer)
        optimizer.step()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.item() == pytest.approx(0.99, abs=0.004)


def test_they_would_be_lost_in_bf16() -> None:
    layer = bf16_weight()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        descend(layer)
        optimizer.step()
        optimizer.zero_grad()
    assert layer.weight.item() == 1.0


def test_gradients_are_clipped_and_cleared() -> None:
    layer = bf16_weight()
    optimizer = MasterAdamW(layer, learning_rate=1e-2, max_grad_norm=1.0)
    (layer.weight.sum() * 64).backward()
    assert optimizer.step() == pytest.approx(64)
    assert layer.weight.grad is None


def test_the_learning_rate_can_be_changed() -> None:
    layer = bf16_weight()
    optimizer = MasterAdamW(layer, learning_rate=1.0)
    optimizer.set_learning_rate(0.0)
    descend(layer)
    optimizer.step()
    assert layer.weight.item() == 1.0


@pytest.fixture
def trainer_rank() -> Iterator[None]:
    """A default group of one rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("trainer_rank")
def test_shards_take_the_steps_that_the_whole_model_takes() -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)).to(torch.bfloat16)
    sharded = copy.deepcopy(plain)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    models = plain, sharded
    optimizers = [MasterAdamW(model, learning_rate=1e-2) for model in models]
    for _ in range(3):
        for model in models:
            model(torch.ones(2, 8, dtype=torch.bfloat16)).square().sum().mul(64).backward()
        norms = [optimizer.step() for optimizer in optimizers]
        assert norms[0] == pytest.approx(norms[1])
        assert norms[0] > 1, "they are clipped"
    for name, weight in TrainerProcesses().whole(sharded).items():
        assert torch.equal(weight, plain.state_dict()[name])
