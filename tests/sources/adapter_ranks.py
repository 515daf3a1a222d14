"""Trainer ranks that shard models with PEFT adapters; every scene makes its own assertions on every rank."""

from __future__ import annotations

import copy
import datetime
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gather.published import published
from sources.test_adapters import CASES, merged_by_peft, same, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from weightcast.sources.module import ModuleSource

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import get_peft_model

WHOLE_ONLY = {"multihead"}
"""Cases of adapters that can't be merged from shards."""


def run(rank: int, size: int, file: str, scene: str) -> None:
    """A rank's process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    try:
        SCENES[scene](Path(file).parent)
    finally:
        if scene != "a_rank_dies":
            dist.destroy_process_group()


def built(case: str, dtype: torch.dtype) -> Any:
    build, config = CASES[case]
    model = get_peft_model(build().to(dtype), copy.deepcopy(config))
    train(model)
    return model


def shard(model: nn.Module, kind: str) -> None:
    size = dist.get_world_size()
    match kind:
        case "fsdp":
            _fsdp(model, init_device_mesh("cpu", (size,)))
        case "hsdp":
            _fsdp(model, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replica", "dp")))
        case "columns":
            _fsdp(model, init_device_mesh("cpu", (size,)), shard_placement_fn=lambda p: Shard(p.ndim - 1))
        case "tp" | "fsdp+tp":
            mesh = init_device_mesh("cpu", (1 if kind == "tp" else size // 2, size if kind == "tp" else 2))
            _tp(model, DeviceMesh("cpu", mesh.mesh[dist.get_rank() // 2 if kind == "fsdp+tp" else 0]))


def _fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    for part in model.modules():
        if type(part).__name__ == "LlamaDecoderLayer":
            fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole, by torch's own gathering."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in found.items()}


def step(model: nn.Module, seed: int) -> None:
    """As an optimizer's step: everything trainable changes, in place, on each rank what it holds."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                if isinstance(parameter, DTensor):
                    whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
                parameter.copy_(whole)


def truth(whole: Any, model: nn.Module) -> dict[str, torch.Tensor]:
    """What peft makes of the gathered model."""
    with torch.no_grad():
        held = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
        for name, value in values(model).items():
            held[name].copy_(value)
    return merged_by_peft(whole)


def check(source: Any, whole: Any, model: nn.Module) -> None:
    """Publish; the engine has what peft makes of the gathered model, and the live model is as it was."""
    before, places = values(model), [_place(p) for p in model.parameters()]
    found = published(source)
    after = values(model)
    assert all(torch.equal(_bits(after[name]), _bits(value)) for name, value in before.items())
    assert places == [_place(p) for p in model.parameters()]
    expected = truth(whole, model)
    if dist.get_rank() == 0:
        same(found, expected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).contiguous().view(torch.uint8)


def _place(parameter: torch.Tensor) -> tuple[int, int]:
    local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return id(parameter), local.data_ptr()


def every_kind_of_adapter(path: Path) -> None:
    for case in [c for c in CASES if not os.environ.get("ONLY") or c in os.environ["ONLY"].split(",")]:
        for dtype in (torch.float32, torch.bfloat16):
            model, whole = built(case, dtype), built(case, dtype)
            shard(model, "fsdp")
            if case in WHOLE_ONLY:
                with pytest.raises(ValueError, match="which can't be merged here"):
                    ModuleSource(model)
                continue
            print(case, dtype, flush=True)
            source = ModuleSource(model)
            for seed in range(2):
                step(model, seed)
                check(source, whole, model)
            assert source.regions() is source.regions()


SCENES: dict[str, Callable[[Path], None]] = {f.__name__: f for f in (every_kind_of_adapter,)}
if __name__ == "__main__":
    import sys
    import tempfile

    with tempfile.TemporaryDirectory() as d:
        torch.multiprocessing.start_processes(
            run, (int(sys.argv[2]), d + "/meet", sys.argv[1]), nprocs=int(sys.argv[2]), start_method="spawn"
        )
