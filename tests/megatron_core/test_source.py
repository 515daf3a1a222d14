"""MegatronSource on modules that have a GPTModel's names, without Megatron: what it refuses, keeps and loads."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from core.direct import DirectEngine, RecordingEngine
from publishers import publisher_of
from torch import nn

from megatron_core import models, shards
from megatron_core.test_mapping import QWEN3
from weightcast.sources.joined import JoinedSource
from weightcast.sources.megatron.mapping import Parallel
from weightcast.sources.megatron.source import MegatronSource
from weightcast.sources.tensors import TensorSource

JOB = shards.Job(stages=((0, 1),), padded=32)


class Layers(nn.ModuleList):
    """Of a decoder; a layer knows its number, from 1."""


def make(**fields: Any) -> tuple[Any, shards.Tensors, Any]:
    """A configuration, its checkpoint, and a model that holds it as Megatron would."""
    hf_config = models.config("qwen3", **QWEN3, **fields)
    hf = {n: t.float() for n, t in models.values(models.checkpoint_specs(hf_config)).items()}
    tensors = shards.Sharder(hf, hf_config, JOB).tensors(next(shards.ranks(JOB)))
    model: Any = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = Layers([nn.Module(), nn.Module()])
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        parent: Any = model
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent._modules[part]
        parent.register_parameter(leaf, nn.Parameter(tensor.clone()))
    for number, layer in enumerate(model.decoder.layers, start=1):
        layer.layer_number = number
    model.share_embeddings_and_output_weights = bool(hf_config.tie_word_embeddings)
    model.config = SimpleNamespace(
        params_dtype=torch.float32,
        num_layers=2,
        hidden_size=QWEN3["hidden_size"],
        num_attention_heads=QWEN3["num_attention_heads"],
        num_query_groups=QWEN3["num_key_value_heads"],
        kv_channels=QWEN3["head_dim"],
    )
    return hf_config, hf, model


def source_of(model: Any, hf_config: Any, **options: Any) -> MegatronSource:
    return MegatronSource(model, hf_config, parallel=Parallel(), **options)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_a_configuration_may_be_a_dict_or_a_file(tmp_path: Path) -> None:
    hf_config, _, model = make()
    fields = {**hf_config.to_dict(), "model_type": "qwen3"}
    (tmp_path / "config.json").write_text(json.dumps(fields, default=str))
    expected = source_of(model, hf_config).specs()
    for given in (fields, tmp_path, str(tmp_path / "config.json")):
        assert source_of(Wrapper(Wrapper(model)), given).specs() == expected


def test_regions_are_kept_until_a_parameter_is_replaced() -> None:
    hf_config, _, model = make()
    source = source_of([model], hf_config)
    regions = source.regions()
    assert source.specs() is source.specs()
    with torch.no_grad():
        model.output_layer.weight.mul_(2)
    assert source.regions() is regions
    model.output_layer.weight.data = model.output_layer.weight.data.clone()
    assert source.regions() is not regions
    assert source.regions()["lm_head.weight"][0][1].data_ptr() == model.output_layer.weight.data_ptr()


def test_tied_weights_have_one_record_with_both_names() -> None:
    hf_config, _, model = make(tie_word_embeddings=True)
    specs = {spec.name: spec.aliases for spec in source_of(model, hf_config).specs()}
    assert specs["model.embed_tokens.weight"] == ("lm_head.weight",)
    assert "lm_head.weight" not in specs


def test_dtype_is_what_is_published() -> None:
    hf_config, _, model = make()
    assert {spec.dtype for spec in source_of(model, hf_config, dtype=torch.bfloat16).specs()} == {"bfloat16"}
    with pytest.raises(ValueError, match=r"dtype is torch\.int8; it must be"):
        source_of(model, hf_config, dtype=torch.int8)


def test_one_rank_alone_publishes_all_query_groups() -> None:
    """Each of q, k and v lies in as many regions as there are query groups."""
    hf_config, hf, model = make()
    source = source_of(model, hf_config)
    assert len(source.regions()["model.layers.0.self_attn.q_proj.weight"]) == QWEN3["num_key_value_heads"] > 1
    engine = DirectEngine("engine", RecordingEngine())
    options: Any = {"transport": "memory://", "bucket_size_bytes": 4096, "trainer_group": None}
    with contextlib.closing(engine), publisher_of(source, engines=[engine], **options) as publisher:
        publisher.publish()
        held = engine.engine.held
        assert held.keys() == hf.keys()
        assert all(torch.equal(held[name], tensor) for name, tensor in hf.items())


def test_loading_restores_what_was_published() -> None:
    hf_config, hf, model = make()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    source = source_of(model, hf_config)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(-1)
    source.load(hf.items())
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name]), name


def test_loading_names_what_is_unknown_or_missing() -> None:
    hf_config, hf, model = make()
    source = source_of(model, hf_config)
    with pytest.raises(
        ValueError, match=r"no rule of this family has the checkpoint's tensor 'odd\.weight': leave it out"
    ):
        source.load([("odd.weight", torch.zeros(2))])
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has the shape \[2\]; by hf_config it must be \[24\]"):
        source.load([("model.norm.weight", torch.zeros(2))])
    del hf["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        ValueError, match=r"the given tensors lack 1 tensor of this rank: model\.layers\.1\.mlp\.up_proj"
    ):
        source.load(hf.items())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_query_groups", 4, "num_query_groups is 4, hf_config says 2"),
        ("num_layers", 3, "num_layers is 3, hf_config says 2"),
        ("gated_linear_unit", False, "gated_linear_unit is False"),
    ],
)
def test_another_model_than_the_configuration_s_is_refused(field: str, value: Any, message: str) -> None:
    hf_config, _, model = make()
    setattr(model.config, field, value)
    with pytest.raises(ValueError, match=f"the Megatron model differs from hf_config: {message}"):
        source_of(model, hf_config)


def test_tying_must_be_the_same_on_both_sides() -> None:
    hf_config, _, model = make()
    model.share_embeddings_and_output_weights = True
    with pytest.raises(ValueError, match=r"output_weights=True, but hf_config has tie_word_embeddings=False"):
        source_of(model, hf_config)


def test_an_unknown_family_is_named() -> None:
    hf_config, _, model = make()
    with pytest.raises(ValueError, match=r"no table for the model type 'gemma9'; known: llama, .*deepseek_v3"):
        source_of(model, hf_config, family="gemma9")
    with pytest.raises(ValueError, match="model_chunks is empty"):
        source_of([], hf_config)
    with pytest.raises(ValueError, match="Linear is not a Megatron-core GPTModel"):
        source_of(nn.Linear(2, 2), hf_config)


def test_parameters_that_are_still_to_be_gathered_are_refused() -> None:
    hf_config, _, model = make()
    chunk: Any = Wrapper(model)
    chunk.ddp_config = SimpleNamespace(overlap_param_gather=True)
    chunk.remove_forward_pre_hook_handles = {model: object()}
    source = source_of(chunk, hf_config)
    with pytest.raises(ValueError, match=r"call disable_forward_pre_hook\(\) on each model chunk before publish"):
        source.regions()
    chunk.remove_forward_pre_hook_handles.clear()
    chunk.bucket_groups = [SimpleNamespace(param_gather_dispatched=each) for each in (True, False)]
    with pytest.raises(ValueError, match=r"call start_param_sync\(force_sync=True\) on each model chunk"):
        source.regions()
    chunk.bucket_groups[1].param_gather_dispatched = True
    assert source.regions()


def test_weights_without_memory_are_named() -> None:
    hf_config, _, model = make()
    source = source_of(model, hf_config)
    source.regions()
    model.output_layer.weight.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'output_layer\.weight' has no memory, because"):
            source.regions()


def test_two_parameters_for_one_tensor_are_an_error() -> None:
    hf_config, _, model = make()
    layer = model.decoder.layers[0]
    layer.register_module("input_layernorm", nn.Module())
    layer.input_layernorm.weight = nn.Parameter(torch.zeros(24))
    with pytest.raises(ValueError, match=r"both map to 'model\.layers\.0\.input_layernorm\.weight' of the checkpoint"):
        source_of(model, hf_config).regions()


def test_norms_with_another_centre_than_the_checkpoint_s_are_refused() -> None:
    hf_config, _, model = make()
    model.config.layernorm_zero_centered_gamma = True
    with pytest.raises(ValueError, match="layernorm_zero_centered_gamma is True, the checkpoints of this family"):
        source_of(model, hf_config)


@pytest.mark.parametrize("model_type", ["gemma2", "nemotron_h"])
def test_families_without_a_table_are_refused_by_name(model_type: str) -> None:
    hf_config, _, model = make()
    config = {**hf_config.to_dict(), "model_type": model_type}
    with pytest.raises(ValueError, match=f"no table for the model type '{model_type}'; known: llama, "):
        source_of(model, config)


def test_a_language_part_is_published_with_a_vision_tower_that_is_not_trained() -> None:
    _, _, model = make()
    outer = nn.Module()
    outer.language_model, outer.vision_model = model, nn.Linear(2, 2)
    hf_config = models.vision_config("qwen3_vl", dict(QWEN3), tied=False)
    every = {spec.name: spec.shape for spec in models.vision_specs(hf_config)}
    tower = TensorSource({name: torch.rand(shape) for name, shape in every.items() if "visual" in name})
    engine = DirectEngine("engine", RecordingEngine())
    options: Any = {"transport": "memory://", "bucket_size_bytes": 4096, "trainer_group": None}
    joined = JoinedSource(source_of(outer, hf_config), tower)
    with contextlib.closing(engine), publisher_of(joined, engines=[engine], **options) as publisher:
        publisher.publish()
        held = engine.engine.held
        assert {name: tuple(tensor.shape) for name, tensor in held.items()} == every
        assert torch.equal(held["model.language_model.norm.weight"], model.decoder.final_layernorm.weight)


def test_a_missing_megatron_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_config, _, model = make()
    monkeypatch.setitem(sys.modules, "megatron", None)
    with pytest.raises(ValueError, match=r"can't be imported .*: pip install 'megatron-core==0\.16\.\*', or pass"):
        MegatronSource(model, hf_config)


@pytest.mark.parametrize(("version", "is_named"), [("0.16.2", False), ("0.17.0", True)])
def test_a_megatron_that_was_not_tested_is_named_with_the_one_that_was(
    version: str, is_named: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hf_config, _, model = make()
    megatron, core = ModuleType("megatron"), ModuleType("megatron.core")
    megatron.core, core.__version__ = core, version  # type: ignore[attr-defined]
    core.parallel_state = SimpleNamespace(model_parallel_is_initialized=lambda: False)  # type: ignore[attr-defined]
    for module in (megatron, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ValueError, match="call initialize_model_parallel first"):
        MegatronSource(model, hf_config)
    assert (f"found Megatron-core {version}" in caplog.text) is is_named
