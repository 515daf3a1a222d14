"""What one trainer rank of a sharded-source test does: shards a model, reports its regions' bytes and the truth.

Every rank writes a file of its own; the parent puts all together. Case names are `model/parallelism`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from weightcast.checkpoint import checkpoint_tensors
from weightcast.sources.module import ModuleSource


class Odd(nn.Module):
    """Sizes that no number of ranks divides, some smaller than that number, beside a buffer and a tied weight."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(7, 5, bias=False)
        self.other = nn.Linear(7, 5, bias=False)
        if tied:
            self.other.weight = self.head.weight
        self.register_buffer("mean", torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x) * self.scale
        return self.down(h).sum() + self.head(h).sum() + self.other(h).sum()


def qwen3(moe: bool, tied: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 20, "vocab_size": 50, "tie_word_embeddings": tied,
    }  # fmt: skip
    if moe:
        fields |= {"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
    config = AutoConfig.for_model("qwen3_moe" if moe else "qwen3", **fields)
    return AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return, no-untyped-call]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": lambda: Odd(tied=False),
    "odd-tied": lambda: Odd(tied=True),
    "qwen3": lambda: qwen3(moe=False, tied=False),
    "qwen3-tied": lambda: qwen3(moe=False, tied=True),
    "qwen3-moe": lambda: qwen3(moe=True, tied=False),
}


def shard(model: nn.Module, parallelism: str, size: int) -> None:
    """Shard in place, over all `size` ranks."""
    axes = parallelism.split("+")
    if axes == ["fsdp"] or axes == ["offload"]:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
        _fsdp(model, mesh, **({"offload_policy": CPUOffloadPolicy(pin_memory=False)} if axes == ["offload"] else {}))
    elif axes == ["tp"]:
        _tp(model, init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    elif axes == ["hsdp"]:
        _fsdp(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "dp")))
    elif axes == ["fsdp", "tp"]:
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        _tp(model, mesh["tp"])
        _fsdp(model, mesh["dp"])
    elif axes == ["hsdp", "tp"]:
        mesh = init_device_mesh("cpu", (2, size // 4, 2), mesh_dim_names=("replica", "dp", "tp"))
        _tp(model, mesh["tp"])
        _fsdp(model, mesh["replica", "dp"])
    elif axes == ["cols"]:
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("a", "b"))
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                placements = [Replicate(), Shard(parameter.ndim - 1)]
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.data, mesh, placements)))
    else:
        raise ValueError(parallelism)


def _fsdp(model: nn.Module, mesh: Any, **options: Any) -> None:
    for layer in getattr(getattr(model, "model", None), "layers", []):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _tp(model: nn.Module, mesh: Any) -> None:
    if isinstance(model, Odd):
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return
    column, row = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    plan = {name: ColwiseParallel() for name, _ in model.named_modules() if name.endswith(column)}
    plan |= {name: RowwiseParallel() for name, _ in model.named_modules() if name.endswith(row)}
    parallelize_module(model, mesh, plan)


def report(case: str, size: int) -> dict[str, Any]:
    """Specs, this rank's regions with their bytes after a step of training, and the truth by name."""
    kind, _, parallelism = case.partition("/")
    torch.manual_seed(7)
    model = MODELS[kind]()
    shard(model, parallelism, size)
    source = ModuleSource(model)
    specs, regions = source.specs(), source.regions()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(number + 2)  # in place, as an optimizer does
    is_kept = source.specs() is specs and source.regions() is regions
    torch.manual_seed(7)
    truth = MODELS[kind]()
    with torch.no_grad():
        for number, parameter in enumerate(truth.parameters()):
            parameter.mul_(number + 2)
    return {
        "specs": [(s.name, s.dtype, s.shape, s.aliases) for s in specs],
        "regions": [(n, r.offsets, r.sizes, t.contiguous()) for n, held in regions.items() for r, t in held],
        "expected_specs": [(s.name, s.dtype, s.shape, s.aliases) for s in checkpoint_tensors(truth)[0]],
        "expected": {name: view.clone() for name, view in checkpoint_tensors(truth)[1].items()},
        "full": {name: p.full_tensor() for name, p in model.named_parameters() if isinstance(p, DTensor)},
        "is_kept": is_kept,
    }


def main(rank: int, size: int, directory: str, cases: list[str]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=size)
    try:
        for case in cases:
            torch.save(report(case, size), Path(directory) / f"{case.replace('/', '.')}.{rank}.pt")
    finally:
        dist.destroy_process_group()
