"""Trainer ranks that shard a model by FSDP2 and publish deltas; every rank makes its own assertions."""

from __future__ import annotations

import datetime
import warnings
from typing import Any

import torch
import torch.distributed as dist
from core.direct import DirectEngine
from publishers import publisher_of
from torch import nn
from torch.distributed.fsdp import fully_shard

from weightcast.engines.module import ModuleEngine
from weightcast.sources.module import ModuleSource
from weightcast.trainer.group import rank as group_rank


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(48, 63), nn.Linear(63, 40, bias=False), nn.LayerNorm(40)).bfloat16()


def change(model: nn.Module, number: int) -> None:
    """Change the first rows of every parameter of a model that is not sharded."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[: 1 + number % 3] += 0.125 * number


def run(rank: int, size: int, file: str, transport: str, num_hosts: int) -> None:
    """Publish five versions from so many hosts; an engine that is added in between gets the first one in full."""
    group_rank.host_identity = lambda: f"host {rank * num_hosts // size}"
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    expected, model = model_of(0), model_of(0)
    fully_shard(model)
    served = [model_of(1), model_of(2)]
    clients = [DirectEngine(f"engine-{number}", ModuleEngine(each)) for number, each in enumerate(served)]
    options: dict[str, Any] = {"transport": transport, "delta": "always", "bucket_size_bytes": 4096}
    engines = clients[:1] if rank == 0 else []
    with publisher_of(ModuleSource(model), engines=engines, deadline_seconds=60.0, **options) as publisher:
        for number in range(5):
            if number == 2:
                publisher.add_engine(clients[1])
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == (0, 1, 1, 2, 2)[number]
            if rank == 0:
                for each in served[: 1 + (number >= 2)]:
                    for name, tensor in expected.state_dict().items():
                        assert torch.equal(each.state_dict()[name], tensor), (number, name)
            change(expected, number)
            whole = dict(expected.named_parameters())
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    local = parameter.to_local()  # type: ignore[attr-defined]
                    chunks = whole[name].chunk(size)
                    if rank < len(chunks):
                        local.copy_(chunks[rank])
    for client in clients:
        client.close()
    dist.destroy_process_group()
