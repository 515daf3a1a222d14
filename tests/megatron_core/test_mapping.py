"""The tables against checkpoints of every family and what Megatron ranks hold of them: both ways, bit for bit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import safetensors.torch
import torch
import transformers
from hypothesis import strategies as st

from megatron_core import models, shards
from megatron_core.shards import Job, Sharder, Tensors
from weightcast.errors import IncompatibleWeightsError
from weightcast.format.bucket import narrow, split_like
from weightcast.format.geometry import relative
from weightcast.format.manifest import TensorSpec
from weightcast.sources.megatron.families import FAMILIES
from weightcast.sources.megatron.layouts import Axis, Gated, Rows
from weightcast.sources.megatron.mapping import Parallel, ParameterRegion, TensorMapping, read_config
from weightcast.sources.megatron.rules import Family
from weightcast.trainer.group.assignment import assign
from weightcast.trainer.packer import HeldRegion, held_shards

EXPERTS: list[shards.Experts] = ["each", "sequential", "grouped", "stacked"]


def mapping(hf_config: Any, job: Job, rank: shards.Rank, family: Family | None = None) -> TensorMapping:
    place = Parallel(Axis(rank.tp, job.tp), Axis(rank.ep, job.ep), Axis(rank.etp, job.etp))
    return TensorMapping(family or FAMILIES[hf_config.model_type], read_config(hf_config), place, dtype="float64")


def placed(
    hf_config: Any, job: Job, rank: shards.Rank, tensors: Tensors, family: Family | None = None
) -> list[ParameterRegion]:
    found = mapping(hf_config, job, rank, family)
    return found.parameter_regions(tensors.items(), job.stages[rank.stage], is_first=rank.stage == 0)


def joined(hf_config: Any, job: Job, hf: Tensors, family: Family | None = None) -> Tensors:
    """What the ranks' regions make together; IncompatibleWeightsError unless they tile every tensor."""
    sharder, specs, held = Sharder(hf, hf_config, job), (), []
    for rank in shards.ranks(job):
        found = [each for each in placed(hf_config, job, rank, sharder.tensors(rank), family) if not each.is_copy]
        regions: dict[str, list[Any]] = {}
        for each in found:
            regions.setdefault(each.name, []).append((each.held[0], each.held[1] + each.plus))
        specs = mapping(hf_config, job, rank, family).specs
        held.append(held_shards(specs, regions))
    whole = {spec.name: torch.full(spec.shape, torch.nan, dtype=torch.float64) for spec in specs}
    for parts, chosen in zip(held, assign(specs, held, [0] * len(held)), strict=True):
        for each in chosen:
            data = narrow(parts[each.part].data, relative(each.region, parts[each.part].region))
            split_like(narrow(whole[specs[each.tensor].name], each.region), data).copy_(data)
    return whole


def require_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@st.composite
def cases(draw: st.DrawFn, model_type: str) -> tuple[Any, Job]:
    tp, ep, etp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    num_layers = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 4, 8] if tp > 1 else [1, 2, 3, 5]))
    heads = groups * draw(st.sampled_from([4 // min(groups, 4), 8 // min(groups, 4)]))
    fields = {
        "num_hidden_layers": num_layers,
        "hidden_size": heads * draw(st.sampled_from([2, 3, 5])),
        "intermediate_size": draw(st.sampled_from([8, 20, 24])),
        "num_attention_heads": heads,
        "num_key_value_heads": heads if model_type in models.LATENT else groups,
        "head_dim": draw(st.sampled_from([2, 6, 8])),
        "vocab_size": draw(st.integers(17, 40)),
        "tie_word_embeddings": draw(st.booleans()),
        **models.TINY[model_type],
    }
    if model_type in ("qwen2", "qwen2_moe", "mixtral"):
        fields["hidden_size"] = heads * fields.pop("head_dim")
    if model_type in ("llama", "qwen3", "qwen3_moe", "glm4", "glm4_moe"):
        fields["attention_bias"] = draw(st.booleans())
    if model_type == "llama":
        fields["mlp_bias"] = draw(st.booleans())
    if model_type == "glm4_moe":
        fields["use_qk_norm"] = draw(st.booleans())
    if model_type == "qwen3_next":
        kinds = st.sampled_from(["linear_attention", "full_attention"])
        fields["layer_types"] = draw(st.lists(kinds, min_size=num_layers, max_size=num_layers))
    if model_type in models.LATENT:
        fields["q_lora_rank"] = draw(st.sampled_from([None, 12]))
    if model_type.startswith("qwen") and model_type.endswith("moe"):
        fields["mlp_only_layers"] = draw(st.sampled_from([[], [0]]))
        fields["decoder_sparse_step"] = draw(st.sampled_from([1, 2]))
    cuts = sorted(draw(st.sets(st.integers(1, num_layers), max_size=2)) - {num_layers})
    stages = tuple(tuple(range(a, b)) for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True))
    padded = -(-fields["vocab_size"] // (8 * tp)) * 8 * tp
    job = Job(
        tp,
        stages,
        ep,
        etp,
        te=draw(st.booleans()),
        experts=draw(st.sampled_from(EXPERTS)),
        padded=padded,
        cut_down=draw(st.booleans()),
        fused_down=model_type in models.LATENT and draw(st.booleans()),
    )
    return models.config(model_type, **fields), job


@pytest.mark.parametrize("model_type", models.TINY)
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=25, suppress_health_check=list(hypothesis.HealthCheck))
def test_round_trip(model_type: str, data: st.DataObject) -> None:
    hf_config, job = data.draw(cases(model_type))
    hf = models.values(models.checkpoint_specs(hf_config))
    require_same(joined(hf_config, job, hf), hf)
    sharder = Sharder(hf, hf_config, job)
    for rank in shards.ranks(job):
        expected = sharder.tensors(rank)
        loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        for each in placed(hf_config, job, rank, loaded):
            region, view = each.held
            view.copy_(split_like(narrow(hf[each.name], region), view) - each.plus)
        require_same(loaded, expected)


# --- what is published, at full size ---------------------------------------------------------------

JOBS = {
    "Moonlight-16B-A3B": Job(tp=2, stages=(tuple(range(14)), tuple(range(14, 27))), ep=8),
    "Qwen3-30B-A3B": Job(tp=4, stages=(tuple(range(20)), tuple(range(20, 48))), ep=8, experts="grouped"),
    "Qwen3-235B-A22B": Job(tp=8, stages=tuple(tuple(range(k, min(k + 24, 94))) for k in range(0, 94, 24)), ep=16),
    "DeepSeek-V3": Job(tp=8, stages=tuple(tuple(range(k, min(k + 16, 61))) for k in range(0, 61, 16)), ep=32),
}


OFF_DIAGONAL = ("Qwen3-235B-A22B", "DeepSeek-V3")
"""The largest of each family: their names are those of the smaller one, in more layers and of more ranks."""


@pytest.mark.cluster
@pytest.mark.parametrize(
    "model",
    [pytest.param(m, marks=[pytest.mark.full] if m in OFF_DIAGONAL else []) for m in models.PUBLISHED],
)
def test_every_name_of_a_published_model_is_made_once(model: str) -> None:
    model_type, fields = models.PUBLISHED[model]
    hf_config, job = models.config(model_type, **fields), JOBS[model]
    expected = models.checkpoint_specs(hf_config)
    sharder = Sharder({s.name: torch.empty(s.shape, device="meta") for s in expected}, hf_config, job)
    specs: tuple[TensorSpec, ...] = ()
    held = []
    for rank in shards.ranks(job):
        regions: dict[str, list[Any]] = {}
        for each in placed(hf_config, job, rank, sharder.tensors(rank)):
            regions.setdefault(each.name, []).append(each.held)
        specs = specs or mapping(hf_config, job, rank).specs
        numbers = {spec.name: number for number, spec in enumerate(specs)}
        parts = [(numbers[name], region, view) for name, views in regions.items() for region, view in views]
        # Models of this size are on the meta device, where `held_shards` would refuse them.
        assert all(tuple(view.shape) == region.sizes for _, region, view in parts)
        held.append([HeldRegion(number, region) for number, region, _ in parts if region.numel])
    found = [name for spec in specs for name in spec.names]
    assert len(found) == len(set(found))
    assert {s.name: s.shape for s in specs} == {s.name: s.shape for s in expected}
    brought = assign(specs, held, [0] * len(held))
    assert sum(each.region.numel for chosen in brought for each in chosen) == sum(
        torch.Size(s.shape).numel() for s in expected
    )


# --- errors ------------------------------------------------------------------------------------------

QWEN3 = {
    "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 30,
}  # fmt: skip


def qwen3() -> tuple[Any, Tensors]:
    hf_config = models.config("qwen3", **QWEN3)
    return hf_config, models.values(models.checkpoint_specs(hf_config))


def with_rule(family: Family, name: str, **changes: Any) -> Family:
    rules = tuple(dataclasses.replace(r, **changes) if name in r.names else r for r in family.layer)
    assert rules != family.layer
    return dataclasses.replace(family, layer=rules)


WRONG = {
    "gate and up joined as they come": (
        "mlp.linear_fc1.weight",
        {"layout": Rows(("ffn", "ffn"), "hidden")},
    ),
    "up over gate": ("mlp.linear_fc1.weight", {"hf": ("mlp.up_proj.weight", "mlp.gate_proj.weight")}),
    "k and v swapped": (
        "self_attention.linear_qkv.weight",
        {"hf": ("self_attn.q_proj.weight", "self_attn.v_proj.weight", "self_attn.k_proj.weight")},
    ),
    "groups not interleaved": (
        "self_attention.linear_qkv.weight",
        {"layout": Rows(("query", "key", "key"), "hidden")},
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_noticed(wrong: str) -> None:
    hf_config, hf = qwen3()
    job, (name, changes) = Job(tp=2, stages=((0, 1),)), WRONG[wrong]
    require_same(joined(hf_config, job, hf), hf)
    found = joined(hf_config, job, hf, with_rule(FAMILIES["qwen3"], name, **changes))
    with pytest.raises(AssertionError, match=r"model\.layers\.0"):
        require_same(found, hf)


def test_a_parameter_without_a_rule_is_named() -> None:
    hf_config, hf = qwen3()
    job = Job(stages=((0, 1),))
    rank = next(shards.ranks(job))
    tensors = Sharder(hf, hf_config, job).tensors(rank) | {"decoder.layers.1.mlp.odd.weight": torch.zeros(3, 4)}
    with pytest.raises(ValueError, match=r"1 Megatron parameters have no rule.*layers\.1\.mlp\.odd\.weight' \[3, 4\]"):
        placed(hf_config, job, rank, tensors)


def test_the_bias_of_quantile_balancing_is_refused_by_name() -> None:
    hf_config = models.config("qwen3_moe", num_hidden_layers=1, **models.TINY["qwen3_moe"])
    bias = {"decoder.layers.0.mlp.router.qb_beta": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"qb_beta': it is the bias of quantile balancing.*load_balancing_type"):
        placed(hf_config, Job(), shards.Rank(0, 0, 0, 0), bias)


def test_a_tensor_that_no_rank_holds_is_named() -> None:
    hf_config, hf = qwen3()
    del hf["model.layers.1.self_attn.q_norm.weight"]
    with pytest.raises(IncompatibleWeightsError, match=r"model\.layers\.1\.self_attn\.q_norm\.weight.*none"):
        joined(hf_config, Job(stages=((0, 1),)), hf)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("decoder.layers.0.self_attention.linear_qkv.weight", (64, 24), r"\[64, 24\].*must be \[32, 24\]"),
        ("decoder.layers.0.mlp.linear_fc2.weight", (24, 16), r"\[24, 16\].*must be \[24, 8\]"),
        (
            "embedding.word_embeddings.weight",
            (14, 24),
            r"\[14, 24\]; 2 such shards must have at least the shape \[30, 24\] together",
        ),
        ("decoder.layers.2.input_layernorm.weight", (24,), "there are only 2 such layers"),
    ],
)
def test_shapes_that_are_not_the_configuration_s_are_named(name: str, tensor: Any, message: str) -> None:
    hf_config, _ = qwen3()
    job = Job(tp=2, stages=((0, 1),))
    with pytest.raises(ValueError, match=message):
        placed(hf_config, job, next(shards.ranks(job)), {name: torch.zeros(tensor)})


def test_experts_that_do_not_divide_are_an_error() -> None:
    hf_config = models.config("qwen3_moe", **QWEN3, num_experts=6, moe_intermediate_size=8)
    job = Job(stages=((0, 1),), ep=4)
    tensors = {"decoder.layers.0.mlp.experts.linear_fc2.weight0": torch.zeros(24, 8)}
    with pytest.raises(ValueError, match="a size of 6 can't be divided into 4 equal shards"):
        placed(hf_config, job, next(shards.ranks(job)), tensors)


def test_load_groups_name_what_is_loaded_together() -> None:
    fields = {**QWEN3, "num_key_value_heads": 4, **models.TINY["deepseek_v3"]}
    specs = mapping(models.config("deepseek_v3", **fields), Job(), shards.Rank(0, 0, 0, 0)).specs
    groups: dict[str, set[str]] = {}
    for spec in specs:
        if spec.group:
            groups.setdefault(spec.group, set()).add(spec.name.removeprefix("model.layers.1."))
    assert {"self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"} in groups.values()
    assert {"mlp.experts.3.gate_proj.weight", "mlp.experts.3.up_proj.weight"} in groups.values()


@pytest.mark.parametrize(
    ("model_type", "method", "has_bias"),
    [
        ("deepseek_v3", None, True),
        ("deepseek_v3", "noaux_tc", True),
        ("deepseek_v3", "greedy", False),
        ("deepseek_v2", None, False),
        ("kimi_k2", "noaux_tc", True),
    ],
)
def test_expert_biases_are_those_of_the_routing_method(model_type: str, method: str | None, has_bias: bool) -> None:
    fields = {**QWEN3, "num_key_value_heads": 4, **models.TINY["deepseek_v3"]}
    config = {**read_config(models.config("deepseek_v3", **fields)), "model_type": model_type}
    config |= {} if method is None else {"topk_method": method}
    specs = TensorMapping(FAMILIES[model_type], config, Parallel(), dtype="bfloat16").specs
    assert any(spec.name.endswith("e_score_correction_bias") for spec in specs) is has_bias


def test_linear_layers_are_found_with_and_without_a_list_of_them() -> None:
    """transformers' configurations list the kinds of layers, the published ones give an interval."""
    fields = {**QWEN3, **models.TINY["qwen3_next"], "num_hidden_layers": 8}
    config = dict(read_config(models.config("qwen3_next", **fields)))
    found = TensorMapping(FAMILIES["qwen3_next"], config, Parallel(), dtype="bfloat16").specs
    del config["layer_types"]
    again = TensorMapping(FAMILIES["qwen3_next"], config, Parallel(), dtype="bfloat16").specs
    assert found == again
    assert {s.name for s in found if "q_proj" in s.name} == {
        f"model.layers.{n}.self_attn.q_proj.weight" for n in (3, 7)
    }


@pytest.mark.parametrize(("model_type", "like"), [("qwen2_5_vl", "qwen2"), ("qwen3_vl", "qwen3")])
@pytest.mark.parametrize("tied", [True, False])
def test_the_language_part_of_a_vision_model_is_its_text_model(model_type: str, like: str, tied: bool) -> None:
    """Its names are those of transformers' own model, its regions those of the text model's table."""
    assert FAMILIES.keys() - models.TINY.keys() == {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"}, (
        "every other one goes round"
    )
    text = models.config(like, **{**QWEN3, "head_dim": 6}, tie_word_embeddings=tied)
    hf = models.values(models.checkpoint_specs(text))
    hf_config = models.vision_config(model_type, {**QWEN3, "head_dim": 6}, tied=tied)
    job = Job(tp=2, stages=((0,), (1,)), padded=32)
    sharder = Sharder(hf, text, job)
    names: dict[str, str] = {}
    for rank in shards.ranks(job):
        tensors = sharder.tensors(rank)
        renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        place = Parallel(Axis(rank.tp, job.tp))
        found = TensorMapping(FAMILIES[model_type], read_config(hf_config), place, dtype="float64")
        own = found.parameter_regions(renamed.items(), job.stages[rank.stage], is_first=rank.stage == 0)
        for ours, theirs in zip(own, placed(text, job, rank, tensors), strict=True):
            assert names.setdefault(theirs.name, ours.name) == ours.name
            assert (ours.held[0], ours.is_copy) == (theirs.held[0], theirs.is_copy)
            assert torch.equal(ours.held[1], theirs.held[1])
    language = {s.name: s.shape for s in models.vision_specs(hf_config) if "visual" not in s.name}
    assert {s.name: s.shape for s in found.specs} == language
    assert set(names.values()) == language.keys()


def test_experts_of_qwen3_vl_moe_are_stacks_of_those_of_its_text_model(tmp_path: Path) -> None:
    """Gate beside up, matrices as in, out, as in published checkpoints: transformers' own model loads them."""
    fields = {**QWEN3, **models.TINY["qwen3_moe"], "mlp_only_layers": [0]}
    text = models.config("qwen3_moe", **fields)
    hf = models.values(models.checkpoint_specs(text))
    expected = {name: tensor for name, tensor in hf.items() if ".experts." not in name}
    gates, ups, downs = (
        torch.stack([hf[f"model.layers.1.mlp.experts.{e}.{part}_proj.weight"].t() for e in range(4)])
        for part in ("gate", "up", "down")
    )
    expected["model.layers.1.mlp.experts.gate_up_proj"] = torch.cat([gates, ups], dim=2)
    expected["model.layers.1.mlp.experts.down_proj"] = downs
    expected = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in expected.items()}
    for experts in EXPERTS:
        job = Job(tp=2, stages=((0,), (1,)), ep=2, etp=2, experts=experts, padded=32)
        require_same(joined(text, job, hf, FAMILIES["qwen3_vl_moe"]), expected)
    hf_config = models.vision_config("qwen3_vl_moe", fields, tied=False)
    hf_config.save_pretrained(tmp_path)
    published = {name: tensor.float().contiguous() for name, tensor in expected.items()}
    safetensors.torch.save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not info["unexpected_keys"]
    assert not [name for name in info["missing_keys"] if "visual" not in name]
    for name, tensor in published.items():
        loaded = model.get_parameter(name)
        assert torch.equal(loaded.transpose(1, 2) if ".experts." in name else loaded, tensor)


def test_prediction_layers_come_after_the_model_s_own() -> None:
    fields = {**QWEN3, "num_key_value_heads": 4, **models.TINY["deepseek_v3"]}
    config = read_config(models.config("deepseek_v3", **fields))
    found = TensorMapping(FAMILIES["deepseek_v3"], config, Parallel(), dtype="bfloat16", num_mtp_layers=1)
    regions = found.parameter_regions(
        [
            ("mtp.layers.0.enorm.weight", torch.zeros(24)),
            ("mtp.layers.0.eh_proj.weight", torch.zeros(24, 48)),
            ("mtp.layers.0.final_layernorm.weight", torch.zeros(24)),
            ("mtp.layers.0.transformer_layer.self_attention.linear_proj.weight", torch.zeros(24, 40)),
            ("mtp.layers.0.mtp_model_layer.mlp.router.expert_bias", torch.zeros(4)),
            ("embedding.word_embeddings.weight", torch.zeros(30, 24)),
        ],
        layers=(),
        is_first=False,
    )
    names = {each.name.removeprefix("model.layers.2."): each.is_copy for each in regions}
    assert names == {
        "enorm.weight": False,
        "eh_proj.weight": False,
        "shared_head.norm.weight": False,
        "self_attn.o_proj.weight": False,
        "mlp.gate.e_score_correction_bias": False,
        "model.embed_tokens.weight": True,
    }
    dtypes = {spec.name: spec.dtype for spec in found.specs}
    assert dtypes["model.layers.2.mlp.gate.e_score_correction_bias"] == "float32"
    assert dtypes["model.layers.2.eh_proj.weight"] == "bfloat16"


def test_a_configuration_without_sizes_is_an_error() -> None:
    with pytest.raises(ValueError, match="hf_config lacks num_attention_heads, vocab_size"):
        TensorMapping(FAMILIES["llama"], {"num_hidden_layers": 1, "hidden_size": 8}, Parallel(), dtype="float32")


def test_gated_rows_of_each_rank_are_both_tensors() -> None:
    parts = list(Gated(("ffn", "ffn"), "hidden").parts({"ffn": 6, "hidden": 2}, Axis(1, 3), torch.zeros(4, 2)))
    assert [(part.number, part.region.offsets, part.region.sizes) for part in parts] == [
        (0, (2, 0), (2, 2)),
        (1, (2, 0), (2, 2)),
    ]
