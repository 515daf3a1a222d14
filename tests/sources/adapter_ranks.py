"""Trainer ranks that shard models with PEFT adapters; every scene makes its own assertions on every rank."""

from __future__ import annotations

import copy
import datetime
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from core.direct import DirectEngine, RecordingEngine
from gather.published import published
from publishers import publisher_of
from sources.test_adapters import CASES, adapted, lora, merged_by_peft, same, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from weightcast.engines.lora import LoraLayers
from weightcast.engines.module import ModuleEngine
from weightcast.errors import IncompatibleWeightsError, NotFiniteError, PeerError
from weightcast.format.adapters import tensor_name
from weightcast.seams.source import Gather, TensorPart
from weightcast.sources.joined import JoinedSource
from weightcast.sources.module import ModuleSource
from weightcast.sources.peft import PeftAdapterSource
from weightcast.sources.tensors import TensorSource
from weightcast.trainer.export import export
from weightcast.trainer.options import Adapter

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from peft import PeftModel, get_peft_model

_COLUMN = ("q_proj.base_layer.weight", "q_proj.base_layer.bias", "q_proj.lora_B.default.weight")
_ROW = ("down_proj.base_layer.weight", "down_proj.lora_A.default.weight")
"""Of tensor parallelism: cut along the outputs, and along the inputs."""


def run(rank: int, size: int, file: str, scene: str) -> None:
    """A rank's process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    SCENES[scene](Path(file).parent)
    if scene != a_rank_that_dies.__name__:
        dist.destroy_process_group()


# --- models ---


def built(case: str, dtype: torch.dtype) -> Any:
    build, config = CASES[case]
    model = get_peft_model(build().to(dtype), copy.deepcopy(config))
    train(model)
    return model


def small(dtype: torch.dtype = torch.bfloat16) -> PeftModel:
    """Sizes that no number of ranks divides; two adapters are active, of other ranks and scales; a third is not."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)).to(dtype)
    model = get_peft_model(base, lora(target_modules=["0", "1"], lora_bias=True), adapter_name="one")
    model.add_adapter("two", lora(target_modules=["0"], r=4, use_rslora=True))
    model.add_adapter("three", lora(target_modules=["1"]))
    model.base_model.set_adapter(["one", "two"])
    train(model)
    return model


def shard(model: nn.Module, kind: str) -> nn.Module:
    size = dist.get_world_size()
    match kind:
        case "fsdp":
            _fsdp(model, _mesh(dp=size))
        case "columns":
            _cut(model, _mesh(dp=size), lambda _, parameter: parameter.ndim - 1)
        case "hsdp":
            _fsdp(model, _mesh(replica=2, dp=size // 2))
        case "tp":
            _tp(model, _mesh(tp=size))
        case "fsdp+tp":
            mesh = _mesh(dp=size // 2, tp=2)
            _tp(model, mesh["tp"])
            _fsdp(model, mesh["dp"])
        case "base only" | "adapters only":
            what = "base_layer" if kind == "base only" else "lora_"
            _cut(model, _mesh(dp=size), lambda name, _: 0 if what in name else None)
        case "each layer":
            for part in model.modules():
                if type(part).__name__ == "Linear" and type(part).__module__.startswith("peft."):
                    fully_shard(part, mesh=_mesh(dp=size))
    return model


def _mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    for part in model.modules():
        if type(part).__name__ == "LlamaDecoderLayer":
            fully_shard(part, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _tp(model: nn.Module, mesh: DeviceMesh) -> None:
    _cut(model, mesh, lambda name, _: 0 if name.endswith(_COLUMN) else 1 if name.endswith(_ROW) else None)


def _cut(model: nn.Module, mesh: DeviceMesh, dim_of: Callable[[str, torch.Tensor], int | None]) -> None:
    """Shard parameters along a dim, into as equal parts as it gives."""
    for prefix, part in model.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if (dim := dim_of(f"{prefix}.{name}", parameter)) is not None:
                sharded = distribute_tensor(parameter.data, mesh, [Shard(dim)], src_data_rank=None)
                part.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


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


# --- scenes ---


def _kinds_of_adapters(cases: Sequence[str], _: Path) -> None:
    for case in cases:
        model, whole = (built(case, torch.bfloat16) for _ in range(2))
        shard(model, "fsdp")
        source = ModuleSource(model)
        regions = source.regions()
        step(model, 2)
        check(source, whole, model)
        assert source.regions() is regions, case


def every_layout(_: Path) -> None:
    kinds = {
        2: ("columns", "tp", "each layer", "base only", "adapters only"),
        4: ("fsdp", "columns", "hsdp", "fsdp+tp"),
    }
    for kind in kinds[dist.get_world_size()]:
        for dtype in (torch.float32, torch.bfloat16):
            model, whole = (adapted().to(dtype) for _ in range(2))
            shard(model, kind)
            source = ModuleSource(model)
            assert bool(source.num_gathers) == (kind != "base only")
            step(model, 2)
            check(source, whole, model)


def a_hundred_publishes(_: Path) -> None:
    """The frozen base does not drift, and each version is what peft makes of the gathered model."""
    model, whole = shard(small(), "fsdp"), small()
    frozen = {name: p.full_tensor().clone() for name, p in model.named_parameters() if not p.requires_grad}
    engines = [DirectEngine("engine", RecordingEngine())] if dist.get_rank() == 0 else []
    with publisher_of(ModuleSource(model), transport="memory://", engines=engines, deadline_seconds=30.0) as publisher:
        for version in range(100):
            step(model, version)
            publisher.publish()
            expected = truth(whole, model)
            if engines:
                same(dict(engines[0].engine.held), expected)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or torch.equal(_bits(parameter.full_tensor()), _bits(frozen[name])), name
    for engine in engines:
        engine.close()


def joined_with_other_tensors_and_reassigned(_: Path) -> None:
    model, whole = shard(small(), "fsdp"), small()
    source = JoinedSource(TensorSource({"more": torch.ones(3)}), ModuleSource(model))
    for active in (["one", "two"], ["two"], ["one"]):
        for each in (model, whole):
            each.base_model.set_adapter(active)
        step(model, 1)
        found, expected = published(source), truth(whole, model)
        assert dist.get_rank() or torch.equal(found.pop("more"), torch.ones(3))
        assert dist.get_rank() or not same(found, expected)


def what_can_not_be_merged(path: Path) -> None:
    model = shard(small(), "fsdp")
    source = ModuleSource(model)
    together = "call publish on every rank"
    with pytest.raises(ValueError, match=together):
        published(source, trainer_group=None)
    with pytest.raises(ValueError, match=together):
        export(source, path / f"exported-{dist.get_rank()}")
    # One rank has other adapters than the other.
    model.base_model.set_adapter(["one", "two"] if dist.get_rank() else ["three"])
    _raises_on_every_rank(source, IncompatibleWeightsError, "do not have the same adapters, .*lora_A.three")
    model.base_model.set_adapter(["one", "two"])
    check(source, small(), model)


def an_error_on_one_rank(_: Path) -> None:
    """It is raised on every rank, and the next publish is whole."""
    model, whole = shard(small(), "fsdp"), small()
    layer = model.base_model.model[1]
    source = ModuleSource(model)
    scaling = dict(layer.scaling)
    if dist.get_rank() == 1:
        layer.scaling = {}
    _raises_on_every_rank(source, (ValueError, KeyError), "trainer rank 1|peft can't merge the adapter")
    layer.scaling = scaling
    check(source, whole, model)


def _raises_on_every_rank(source: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        published(source)


class _Dying(ModuleSource):
    def complete(self, gather: Gather) -> None:
        def once(parts: Sequence[TensorPart]) -> Sequence[torch.Tensor]:
            if dist.get_rank() == dist.get_world_size() - 1:
                os._exit(0)
            return gather(parts)

        super().complete(once)


def a_rank_that_dies(_: Path) -> None:
    source = _Dying(shard(small(), "fsdp"))
    with pytest.raises(PeerError, match=f"rank {dist.get_world_size() - 1}"):
        published(source)
    os._exit(0)  # the default group has lost a member


def nan_on_one_rank(_: Path) -> None:
    torch.manual_seed(0)
    model = shard(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)), "fsdp")
    weight = model.get_parameter("1.weight").to_local().detach()
    last = dist.get_world_size() - 1
    assert published(ModuleSource(model), check_finite=True).keys() or dist.get_rank()
    for value, what in ((float("nan"), "holds NaN"), (float("inf"), "holds infinity")):
        if dist.get_rank() == last:
            weight[0, 0] = value
        for install in ("staged", "streaming"):
            with pytest.raises(
                NotFiniteError, match=f"trainer rank {last}: .*'1.weight' {what}" if dist.get_rank() != last else what
            ):
                published(ModuleSource(model), check_finite=True, install=install)


def dtypes_of_the_engine(_: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5))
    served = copy.deepcopy(model).to(torch.bfloat16)
    served[1].bias.data = served[1].bias.data.float()
    expected = {name: tensor.clone().to(served.get_parameter(name).dtype) for name, tensor in model.named_parameters()}
    engines = [DirectEngine("engine", ModuleEngine(served))] if dist.get_rank() == 0 else []
    source = ModuleSource(shard(model, "fsdp"), dtype="engine")
    with publisher_of(source, transport="memory://", engines=engines) as publisher:
        for _ in range(2):
            publisher.publish()
            assert dist.get_rank() or all(torch.equal(served.get_parameter(n), t) for n, t in expected.items())
            for parameter in served.parameters():
                parameter.data.zero_()
    for engine in engines:
        engine.close()


def an_adapter_alone(_: Path) -> None:
    """Published from shards as the target of a publish: each tensor is what peft itself saves of the whole model."""
    build, config = CASES["all-linear"]
    for kind in ("fsdp", "tp", "fsdp+tp", "each layer"):
        model = get_peft_model(build(), copy.deepcopy(config))
        train(model)
        shard(model, kind)
        served = build()
        layers = LoraLayers(served)
        engines = [DirectEngine("engine", ModuleEngine(served, adapters=layers))] if dist.get_rank() == 0 else []
        source = PeftAdapterSource(model)
        target = Adapter("policy", keep=0)
        with publisher_of(source, transport="memory://", engines=engines, target=target) as publisher:
            for seed in range(3):
                step(model, seed)
                report = publisher.publish()
                expected = {name.replace(".default", ""): t for name, t in values(model).items() if "lora_" in name}
                assert report.num_tensors == len(expected)
                if dist.get_rank() == 0:
                    (loaded,) = (layers._loaded[label] for label in layers.names() if "@" in label)
                    for module, lora in loaded.items():
                        assert torch.equal(lora.a, expected[tensor_name(module, "A")])
                        assert torch.equal(lora.b, expected[tensor_name(module, "B")])
                    assert 2 * len(loaded) == len(expected)
        for engine in engines:
            engine.close()


KINDS = {f"kinds_of_adapters_{n}": functools.partial(_kinds_of_adapters, list(CASES)[n::2]) for n in range(2)}
ON_TWO = (
    every_layout, a_hundred_publishes, joined_with_other_tensors_and_reassigned, what_can_not_be_merged,
    an_error_on_one_rank, a_rank_that_dies, nan_on_one_rank, dtypes_of_the_engine, an_adapter_alone,
)  # fmt: skip
ON_FOUR = (every_layout, a_hundred_publishes, a_rank_that_dies)
SCENES: dict[str, Callable[[Path], None]] = {**KINDS, **{scene.__name__: scene for scene in ON_TWO}}
