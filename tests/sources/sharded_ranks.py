"""Real trainer ranks for the sharded sources: each shards models, takes a step, reports what it holds and the truth.

`rig` is a process that imports once and forks the ranks; every rank writes files of its own into the directory, and the
test puts them together. A case is `model/parallelism`; a scene makes its own assertions on every rank.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fp8_blocks import CONFIG, quantised
from gather.published import published
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from weightcast.checkpoint.live import checkpoint_tensors
from weightcast.engines.module import ModuleEngine
from weightcast.errors import IncompatibleWeightsError
from weightcast.sources.fp8_blocks import Fp8BlockSource
from weightcast.sources.module import ModuleSource
from weightcast.trainer.publisher import Publisher

DEADLINE_SECONDS = 60.0


class Odd(nn.Module):
    """Sizes that no number of ranks divides, some smaller than that, beside buffers and perhaps a tied weight."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.randn(1))
        self.head = nn.Linear(5, 9, bias=False)
        self.other = nn.Linear(5, 9, bias=False)
        if tied:
            self.other.weight = self.head.weight
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x) * self.scale).sum() + self.head(x).sum() + self.other(x).sum()


def mixed() -> nn.Module:
    model = Odd()
    model.head.to(torch.bfloat16)
    return model


def qwen3(*, moe: bool = False, tied: bool = False) -> nn.Module:
    fields: dict[str, Any] = {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 20, "vocab_size": 50, "tie_word_embeddings": tied,
    }  # fmt: skip
    if moe:
        fields |= {"moe_intermediate_size": 12, "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields))
    return Qwen3ForCausalLM(Qwen3Config(**fields))


def turned() -> nn.Module:
    """Parameters of three dims, as they lie in memory in another order, and one in row-major order."""
    model = Odd()
    model.cube = nn.Parameter(torch.randn(3, 4, 5))
    model.turned = nn.Parameter(torch.randn(4, 5, 3).permute(2, 0, 1))
    model.up.weight = nn.Parameter(torch.randn(5, 7).t())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd,
    "odd-tied": lambda: Odd(tied=True),
    "odd-mixed": mixed,
    "turned": turned,
    "qwen3": qwen3,
    "qwen3-tied": lambda: qwen3(tied=True),
    "qwen3-moe": lambda: qwen3(moe=True),
}

CASES = {
    2: [
        *("odd/fsdp", "odd-tied/fsdp", "odd-mixed/fsdp", "odd/offload", "odd/tp", "odd/strided", "odd/single"),
        *("qwen3/fsdp-bf16", "qwen3-tied/fsdp", "qwen3/tp", "qwen3-moe/fsdp"),
    ],
    4: [
        *("odd/fsdp", "odd-tied/fsdp", "odd/fsdp+tp", "odd/hsdp", "odd/hsdp+tp", "odd/grid", "odd/some"),
        *("qwen3/fsdp+tp", "qwen3-tied/hsdp", "qwen3-moe/fsdp+tp", "qwen3-moe/hsdp+tp", "qwen3-moe/grid"),
    ],
}
"""By number of ranks."""

FSDP1_CASES = {
    2: [
        *("odd/fsdp1", "odd-tied/fsdp1-flat", "odd/fsdp1-whole", "qwen3-tied/fsdp1-bf16"),
        *("qwen3-moe/fsdp1-zero2", "qwen3-moe/fsdp1-flat", "turned/fsdp1", "turned/fsdp1-flat"),
    ],
    4: ["odd-tied/fsdp1", "odd/fsdp1-flat", "qwen3-moe/fsdp1-hybrid"],
}


def shard(model: nn.Module, parallelism: str, size: int) -> nn.Module:
    """Shard in place, or wrap. `hsdp+tp` has three axes of 2, 1 and 2 devices; `single` and `some` leave ranks out."""
    if parallelism.startswith("fsdp1"):
        return fsdp1(model, parallelism, size)
    match parallelism:
        case "fsdp":
            _fsdp(model, _mesh(dp=size))
        case "fsdp-bf16":
            _fsdp(model, _mesh(dp=size), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        case "offload":
            _fsdp(model, _mesh(dp=size), offload_policy=CPUOffloadPolicy(pin_memory=False))
        case "tp":
            _tp(model, _mesh(tp=size))
        case "hsdp":
            _fsdp(model, _mesh(replica=2, dp=size // 2))
        case "fsdp+tp":
            mesh = _mesh(dp=size // 2, tp=2)
            _tp(model, mesh["tp"])
            _fsdp(model, mesh["dp"])
        case "hsdp+tp":
            mesh = _mesh(replica=2, dp=size // 4, tp=2)
            _tp(model, mesh["tp"])
            _fsdp(model, mesh["replica", "dp"])
        case "grid":  # expert parallelism is like this: the experts on one axis, their columns on the other
            _distribute(model, _mesh(a=2, b=size // 2), lambda ndim: [Shard(0), Shard(ndim - 1)])
        case "strided":
            _distribute(model, _mesh(a=size), lambda _: [_StridedShard(0, split_factor=3)])
        case "single":
            _distribute(model, DeviceMesh("cpu", [0]), lambda _: [Shard(0)])
        case "some":
            _distribute(model, DeviceMesh("cpu", [1, 3]), lambda _: [Shard(0)])
        case _:
            raise ValueError(parallelism)
    return model


def fsdp1(model: nn.Module, kind: str, size: int) -> nn.Module:
    """Wrapped by FSDP1: the layers of a model of transformers, or each Linear whose parameters nobody shares."""
    layers = {type(model.model.layers[0])} if isinstance(model, PreTrainedModel) else {nn.Linear}
    is_tied = isinstance(model, Odd) and model.other.weight is model.head.weight
    strategies = {
        "fsdp1-zero2": ShardingStrategy.SHARD_GRAD_OP,
        "fsdp1-whole": ShardingStrategy.NO_SHARD,
        "fsdp1-hybrid": ShardingStrategy.HYBRID_SHARD,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and says so of NO_SHARD as well
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=None if is_tied else ModuleWrapPolicy(layers),
            sharding_strategy=strategies.get(kind, ShardingStrategy.FULL_SHARD),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if kind == "fsdp1-bf16" else None,
            use_orig_params=kind != "fsdp1-flat",
            device_mesh=_mesh(replica=2, dp=size // 2) if kind == "fsdp1-hybrid" else None,
            device_id=torch.device("cpu"),
        )


def _mesh(**axes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def _distribute(model: nn.Module, mesh: DeviceMesh, placements: Callable[[int], list[Placement]]) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            sharded = distribute_tensor(parameter.data, mesh, placements(parameter.ndim), src_data_rank=None)
            module.register_parameter(name, nn.Parameter(sharded))


def _fsdp(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    for layer in model.model.layers if isinstance(model, PreTrainedModel) else ():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def _tp(model: nn.Module, mesh: DeviceMesh) -> None:
    column, row = ("up", "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("down", "o_proj", "down_proj")
    plan: dict[str, Any] = {}
    for name, module in model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            module.requires_grad_(False)  # each rank has the gradient of its own heads only: replicas would drift apart
        if isinstance(module, nn.Linear) and name.endswith((*column, *row)):
            plan[name] = ColwiseParallel() if name.endswith(column) else RowwiseParallel()
    parallelize_module(model, mesh, plan)


def train(model: nn.Module) -> None:
    """One whole step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    if isinstance(getattr(model, "module", model), PreTrainedModel):
        tokens = torch.arange(24).reshape(2, 12) % 50
        model(input_ids=tokens, labels=tokens).loss.backward()
    else:
        model(torch.ones(2, 5)).backward()
    optimizer.step()
    optimizer.zero_grad()


def scale(model: nn.Module) -> None:
    """As an optimizer does: in place."""
    summoned = (
        FullyShardedDataParallel.summon_full_params(model) if isinstance(model, FullyShardedDataParallel) else None
    )
    with summoned or contextlib.nullcontext(), torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(number + 2)


def is_trainable(kind: str, parallelism: str) -> bool:
    if parallelism.startswith("fsdp1"):
        return True
    if kind.startswith("odd"):
        return parallelism in ("fsdp", "hsdp", "offload") and kind != "odd-mixed"
    return parallelism != "grid"


def seeded(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return MODELS[kind]()


def truth(kind: str, model: nn.Module, trained: bool) -> nn.Module:
    """The same model, whole: by torch's own gathering, or, where no training took place, by doing the same to it."""
    whole = seeded(kind)
    if not trained:
        scale(whole)
        return whole
    if isinstance(model, FullyShardedDataParallel):
        whole.load_state_dict(_full_state_dict(model))
        return whole
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            whole.get_parameter(name).copy_(full)
    return whole


def _full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """By FSDP1's own gathering, on every rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def report(case: str, size: int) -> dict[str, Any]:
    """Specs, this rank's regions with their values after a step, and what the whole should be."""
    kind, _, parallelism = case.partition("/")
    model = seeded(kind)
    model = shard(model, parallelism, size)
    source = ModuleSource(model)
    specs, regions = source.specs(), source.regions()
    before = {name: [data.clone() for _, data in held] for name, held in regions.items()}
    trained = is_trainable(kind, parallelism)
    (train if trained else scale)(model)
    expected_specs, expected = checkpoint_tensors(truth(kind, model, trained))
    return {
        "is_kept": source.specs() is specs and source.regions() is regions,
        "moved": sum(
            not torch.equal(old, new) for n in before for old, (_, new) in zip(before[n], regions[n], strict=True)
        ),
        "specs": _plain(specs),
        "expected_specs": _plain(expected_specs),
        "regions": [(n, r.offsets, r.sizes, data.contiguous()) for n, held in regions.items() for r, data in held],
        "expected": {name: view.clone() for name, view in expected.items()},
        "full": _full_tensors(model),
        "published": published(source),
    }


def _plain(specs: Iterable[Any]) -> list[Any]:
    return [(spec.name, spec.dtype, spec.shape, spec.aliases) for spec in specs]


def _full_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What torch itself gathers, on ranks that take part."""
    return {
        name: parameter.full_tensor()
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor) and parameter.device_mesh.get_coordinate() is not None
    }


# --- scenes, on two ranks ---


def whole_parameters_after_a_forward_pass() -> None:
    """An evaluation leaves FSDP2's gathered copies in the module, which no optimizer updates."""
    model = seeded("qwen3")
    _fsdp(model, _mesh(dp=2), reshard_after_forward=False)
    source = ModuleSource(model)
    regions = source.regions()
    for look in (lambda: source.regions() is regions, lambda: _same(ModuleSource(model).regions(), regions)):
        with torch.no_grad():
            model(input_ids=torch.arange(8)[None])
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), "torch has changed"
        assert look()
    train(model)
    assert source.regions() is regions
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert _same({name: regions[name]}, ModuleSource(model).regions())


def _same(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    return all(
        (region, data.data_ptr(), data.stride()) == (region_2, data_2.data_ptr(), data_2.stride())
        for name, held in some.items()
        for (region, data), (region_2, data_2) in zip(held, others[name], strict=True)
    )


def a_partial_sum_is_refused() -> None:
    model = nn.Linear(3, 4)
    partial = DTensor.from_local(torch.ones(4, 3), _mesh(dp=2), [Partial()])
    model.weight = nn.Parameter(partial)
    _refused(
        lambda: ModuleSource(model), "'weight' has the placements", "a partial sum can't be published", "Replicate()"
    )


def a_local_tensor_of_another_shape_is_refused() -> None:
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(
        DTensor.from_local(torch.ones(3, 3), _mesh(dp=2), [Shard(0)], shape=(5, 3), stride=(3, 1))
    )
    rank = dist.get_rank()
    if rank == 0:
        ModuleSource(model)
    else:
        _refused(
            lambda: ModuleSource(model),
            "'weight' of shape [5, 3]",
            "must have the local shape [2, 3] at (1,)",
            "this rank has [3, 3]",
        )


def _refused(make: Callable[[], object], *words: str) -> None:
    with pytest.raises(ValueError, match=".*".join(map(re.escape, words))):
        make()


def a_model_made_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Odd(tied=True)
    _fsdp(model, _mesh(dp=2))
    source = ModuleSource(model)
    specs = source.specs()
    assert [(spec.name, spec.aliases) for spec in specs if spec.aliases] == [("head.weight", ("other.weight",))]
    _refused(source.regions, "is on the meta device")
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(3)
    assert source.specs() is specs
    assert all((data == 3).all() for n, held in source.regions().items() if n != "mean" for _, data in held)


def each_rank_quantises_its_own_blocks() -> None:
    """FSDP2's shards of whole blocks, some with an edge. Shards that cut blocks are refused on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 512), nn.LayerNorm(512), nn.Linear(512, 200, bias=False)).to(torch.bfloat16)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fully_shard(model)
    for sizes, words in ((CONFIG["weight_block_size"], "'2.weight' of [200, 512]"), ([100, 128], "'0.weight'")):
        source = Fp8BlockSource(ModuleSource(model), CONFIG | {"weight_block_size": sizes})
        with pytest.raises(ValueError, match=rf"shards cut blocks.*{re.escape(words)}"):
            source.regions()
        _refused(lambda of=source: published(of), "shards cut blocks", words)
    ignored = CONFIG | {"modules_to_not_convert": ["2"]}
    source = Fp8BlockSource(ModuleSource(model), ignored)
    for _ in range(2):
        found = published(source)
        assert dist.get_rank() or _same_bits(found, quantised(tensors, "0.weight"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        tensors = {name: tensor * 3 for name, tensor in tensors.items()}


def _same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in expected.items()
    )


def new_memory_and_new_dtypes() -> None:
    model = seeded("odd")
    _fsdp(model, _mesh(dp=2))
    source = ModuleSource(model)
    specs, regions = source.specs(), source.regions()
    model.scratch = torch.ones(3)
    assert source.regions() is regions, "a buffer that does not belong may come and go"
    model.mean = torch.ones(6)
    assert source.specs() is specs
    assert source.regions() is not regions
    regions = source.regions()
    model.to(torch.bfloat16)
    assert source.regions() is not regions
    assert {spec.dtype for spec in source.specs()} == {"bfloat16"}
    assert {data.dtype for held in source.regions().values() for _, data in held} == {torch.bfloat16}


def sharded_after_the_source_was_made() -> None:
    model = seeded("odd")
    source = ModuleSource(model)
    specs, regions = source.specs(), source.regions()
    _fsdp(model, _mesh(dp=2))
    assert source.specs() is specs
    assert source.regions() is not regions
    assert source.regions()["up.weight"][0][0].sizes == ((4, 5), (3, 5))[dist.get_rank()]


def _evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 5))


def fsdp1_shows_other_tensors_in_between() -> None:
    """After an evaluation, and between a forward and its backward pass, what is published is what optimizers update."""
    for kind in ("fsdp1", "fsdp1-zero2", "fsdp1-flat", "fsdp1-bf16"):
        model = fsdp1(seeded("odd"), kind, 2)
        source = ModuleSource(model)
        specs, regions = source.specs(), source.regions()
        _evaluate(model)
        assert source.regions() is regions
        loss = model(torch.ones(2, 5))
        assert source.regions() is regions
        assert _same(ModuleSource(model).regions(), regions)
        loss.backward()
        train(model)
        assert (source.regions() is regions, source.specs() is specs) == (True, True)
        assert _is_published(source, model)


def _is_published(source: ModuleSource, model: nn.Module) -> bool:
    found, expected = published(source), _full_state_dict(model)
    return dist.get_rank() > 0 or (
        found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    )


def fsdp1_whole_parameters_inside_of_summon_full_params() -> None:
    """All ranks publish what they are changing; or rank 0, which alone was given them, with the others or without."""
    for kind in ("fsdp1", "fsdp1-flat"):
        model = fsdp1(seeded("odd"), kind, 2)
        source = ModuleSource(model)
        regions = source.regions()
        with FullyShardedDataParallel.summon_full_params(model):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            inside = published(source)
        assert _same(source.regions(), regions)
        expected = _full_state_dict(model)
        with FullyShardedDataParallel.summon_full_params(model, rank0_only=True, writeback=False):
            again = published(source)
            alone = published(source, trainer_group=None) if dist.get_rank() == 0 else {}
        dist.barrier()
        if dist.get_rank() == 0:
            for found in (inside, again, alone):
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], expected[name]) for name in expected)


def a_rank_of_fsdp1_alone_is_refused_before_anything_is_written() -> None:
    for kind in ("fsdp1", "fsdp1-flat"):
        source = ModuleSource(fsdp1(seeded("odd"), kind, 2))
        with tempfile.TemporaryDirectory() as directory:
            store = Path(directory) / "store"
            with Publisher(source, transport=f"file://{store}", trainer_group=None) as publisher:
                for _ in range(2):
                    with pytest.raises(
                        IncompatibleWeightsError, match=r"'up.weight' of shape \[7, 5\].*FSDP.*trainer_group='auto'"
                    ):
                        publisher.publish()
            assert not store.exists()


def fsdp1_without_its_wrapper_is_refused() -> None:
    for kind in ("fsdp1", "fsdp1-zero2"):
        model = fsdp1(seeded("odd-tied"), kind, 2)
        _refused(
            lambda model=model: ModuleSource(model.module), "is flattened by an FSDP1 wrapper", "not its `.module`"
        )
        model(torch.ones(2, 5))
        if kind == "fsdp1-zero2":
            _refused(lambda model=model: ModuleSource(model.module), "is not a parameter but computed", "between steps")
    model = fsdp1(seeded("odd-tied"), "fsdp1-flat", 2)
    _refused(lambda: ModuleSource(model.module), "'_flat_param' is flattened by an FSDP1 wrapper", "not its `.module`")
    _refused(lambda: ModuleEngine(model), "is flattened by FSDP1", "an engine needs a module with whole parameters")


def what_is_assigned_to_fsdp1s_parameters() -> None:
    """FSDP1 takes a new shard over at its next forward pass; a tensor of another shape it could not."""
    model = fsdp1(seeded("odd-tied"), "fsdp1", 2)
    source = ModuleSource(model)
    regions = source.regions()
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, 5.0)
    assert source.regions() is not regions
    assert _is_published(source, model)
    for parameter in model.parameters():
        parameter.data = torch.ones(2, 2)
    _refused(source.regions, "was replaced by a tensor of [2, 2]", "summon_full_params")


SCENES: list[Callable[[], None]] = [
    whole_parameters_after_a_forward_pass,
    a_partial_sum_is_refused,
    a_local_tensor_of_another_shape_is_refused,
    a_model_made_on_the_meta_device,
    each_rank_quantises_its_own_blocks,
    new_memory_and_new_dtypes,
    sharded_after_the_source_was_made,
]

FSDP1_SCENES: list[Callable[[], None]] = [
    fsdp1_shows_other_tensors_in_between,
    fsdp1_whole_parameters_inside_of_summon_full_params,
    a_rank_of_fsdp1_alone_is_refused_before_anything_is_written,
    fsdp1_without_its_wrapper_is_refused,
    what_is_assigned_to_fsdp1s_parameters,
]


# --- processes ---


PLAYS = {"dtensors": (CASES, SCENES), "fsdp1": (FSDP1_CASES, FSDP1_SCENES)}


def main(rank: int, directory: str, play: str) -> None:
    """One rank: all cases of four ranks, then, on the first two, those of two and the scenes."""
    cases_of, scenes = PLAYS[play]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for size in sorted(cases_of, reverse=True):
        if rank >= size:
            continue
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/store{size}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=DEADLINE_SECONDS),
        )
        for case in cases_of[size]:
            torch.save(report(case, size), report_path(Path(directory), size, case, rank))
        for scene in scenes if size == 2 else ():
            scene_path(Path(directory), scene, rank).write_text(_play(scene))
        dist.destroy_process_group()


def _play(scene: Callable[[], None]) -> str:
    try:
        scene()
    except Exception:
        return traceback.format_exc()
    return ""


def report_path(directory: Path, size: int, case: str, rank: int) -> Path:
    return directory / f"{size}.{case.replace('/', '.')}.{rank}.pt"


def scene_path(directory: Path, scene: Callable[[], None], rank: int) -> Path:
    return directory / f"{scene.__name__}.{rank}.txt"


def rig(directory: str, play: str) -> None:
    """Fork the ranks and wait for them. Exits with 1 if one fails."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=main, args=(rank, directory, play), daemon=True) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(DEADLINE_SECONDS)
    raise SystemExit(any(process.exitcode != 0 for process in ranks))
