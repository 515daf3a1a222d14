"""Tables of the model families. To add a family, combine the parts that it shares with others and its own rules.

The rules map names of Megatron-core, of the local layer spec and of Transformer Engine's, to names of the checkpoints.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from weightcast.sources.megatron.layouts import (
    Alternating,
    Columns,
    DeltaNetInput,
    Gated,
    GatedQuery,
    Rows,
    ShardLayout,
    Vocabulary,
    Whole,
)
from weightcast.sources.megatron.rules import Config, Family, Rule


def _rule(names: str, hf: str, layout: ShardLayout, when: str = "", **options: Any) -> Rule:
    """Return a rule. Tuples of names are written as one text, with spaces between the names."""
    return Rule(tuple(names.split()), tuple(hf.split()), layout, tuple(when.split()), **options)


def _inside(part: str, hf_part: str, *rules: Rule) -> tuple[Rule, ...]:
    """Return the rules with Megatron's names inside `part` of a layer and the checkpoint's inside `hf_part`."""

    def within(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(f"{prefix}.{name}" for name in names)

    return tuple(
        dataclasses.replace(
            rule,
            names=within(part, rule.names),
            hf=within(hf_part, rule.hf),
            stacked=within(part, rule.stacked),
            transposed=within(part, rule.transposed),
        )
        for rule in rules
    )


_MODEL = (
    _rule("embedding.word_embeddings.weight", "model.embed_tokens.weight", Vocabulary("vocab", "hidden")),
    _rule("decoder.final_layernorm.weight", "model.norm.weight", Whole("hidden")),
    _rule("output_layer.weight", "lm_head.weight", Vocabulary("vocab", "hidden"), "untied"),
)

_NORMS = (
    _rule(
        "input_layernorm.weight self_attention.linear_qkv.layer_norm_weight "
        "self_attention.linear_qkv_down_proj.layer_norm_weight self_attention.in_proj.layer_norm_weight",
        "input_layernorm.weight",
        Whole("hidden"),
    ),
    _rule(
        "pre_mlp_layernorm.weight mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", Whole("hidden")
    ),
)

_QKV = ("query", "key", "key")
_ATTENTION = _inside(
    "self_attention",
    "self_attn",
    _rule("linear_qkv.weight", "q_proj.weight k_proj.weight v_proj.weight", Rows(_QKV, "hidden", blocks="groups")),
    _rule("linear_qkv.bias", "q_proj.bias k_proj.bias v_proj.bias", Rows(_QKV, blocks="groups"), "qkv_bias"),
    _rule("linear_proj.weight", "o_proj.weight", Columns("hidden", "query")),
    _rule("linear_proj.bias", "o_proj.bias", Whole("hidden"), "proj_bias"),
)

_QK_NORMS = _inside(
    "self_attention",
    "self_attn",
    _rule("q_layernorm.weight", "q_norm.weight", Whole("head_dim")),
    _rule("k_layernorm.weight", "k_norm.weight", Whole("head_dim")),
)

# Layer norms after attention and MLP: Megatron-core has none; the names are those of trainers that add them.
_OUTER_NORMS = (
    _rule("post_self_attn_layernorm.weight", "post_self_attn_layernorm.weight", Whole("hidden")),
    _rule("post_mlp_layernorm.weight", "post_mlp_layernorm.weight", Whole("hidden")),
)

_GATED_ATTENTION = _inside(
    "self_attention",
    "self_attn",
    _rule("linear_qkv.weight", "q_proj.weight k_proj.weight v_proj.weight", GatedQuery("hidden")),
    _rule("linear_proj.weight", "o_proj.weight", Columns("hidden", "query")),
)

_DELTA_NET = _inside(
    "self_attention",
    "linear_attn",
    _rule("in_proj.weight", "in_proj_qkvz.weight in_proj_ba.weight", DeltaNetInput("hidden")),
    _rule(
        "conv1d.weight",
        "conv1d.weight",
        Gated(("delta_key", "delta_key", "delta_value"), "one", "delta_kernel", joined=True),
    ),
    _rule("dt_bias", "dt_bias", Rows("delta_value_heads")),
    _rule("A_log", "A_log", Rows("delta_value_heads")),
    _rule("out_norm.weight", "norm.weight", Whole("delta_value_dim"), plus=1.0),
    _rule("out_proj.weight", "out_proj.weight", Columns("hidden", "delta_value")),
)

# An engine may fuse these two tensors, and then needs both in one call.
_DOWN = "self_attn.down_projections"
_LATENT_ATTENTION = _inside(
    "self_attention",
    "self_attn",
    _rule("linear_q_proj.weight", "q_proj.weight", Rows("latent_query", "hidden"), "no_q_rank"),
    _rule("linear_q_down_proj.weight", "q_a_proj.weight", Rows("q_rank", "hidden", whole=True), "q_rank", group=_DOWN),
    _rule(
        "linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", Rows("latent_kv", "hidden", whole=True), group=_DOWN
    ),
    _rule(
        "linear_qkv_down_proj.weight",
        "q_a_proj.weight kv_a_proj_with_mqa.weight",
        Gated(("q_rank", "latent_kv"), "hidden", whole=True),
        "q_rank",
        is_fused=True,
    ),
    _rule("q_layernorm.weight linear_q_up_proj.layer_norm_weight", "q_a_layernorm.weight", Whole("q_rank"), "q_rank"),
    _rule("linear_q_up_proj.weight", "q_b_proj.weight", Rows("latent_query", "q_rank"), "q_rank"),
    _rule("kv_layernorm.weight linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm.weight", Whole("kv_rank")),
    _rule("linear_kv_up_proj.weight", "kv_b_proj.weight", Rows("latent_key_value", "kv_rank")),
    _rule("linear_proj.weight", "o_proj.weight", Columns("hidden", "latent_out")),
)

_MLP = _inside(
    "mlp",
    "mlp",
    _rule("linear_fc1.weight", "gate_proj.weight up_proj.weight", Gated(("ffn", "ffn"), "hidden"), "dense"),
    _rule("linear_fc1.bias", "gate_proj.bias up_proj.bias", Gated(("ffn", "ffn")), "dense mlp_bias"),
    _rule("linear_fc2.weight", "down_proj.weight", Columns("hidden", "ffn"), "dense"),
    _rule("linear_fc2.bias", "down_proj.bias", Whole("hidden"), "dense mlp_bias"),
)


def _router(prefix: str) -> tuple[Rule, ...]:
    return (_rule("mlp.router.weight", f"{prefix}.gate.weight", Whole("experts", "hidden"), "moe"),)


_ROUTER_BIAS = _inside(
    "mlp",
    "mlp",
    _rule("router.expert_bias", "gate.e_score_correction_bias", Whole("experts"), "moe expert_bias", dtype="float32"),
)


def _experts(prefix: str, gate_up: str, down: str, fc1: ShardLayout) -> tuple[Rule, ...]:
    return _inside(
        "mlp.experts",
        prefix,
        _rule(
            "linear_fc1.weight{expert} local_experts.{expert}.linear_fc1.weight",
            gate_up,
            fc1,
            "moe",
            stacked=("linear_fc1.weight",),
            transposed=("weight1",),
        ),
        _rule(
            "linear_fc2.weight{expert} local_experts.{expert}.linear_fc2.weight",
            down,
            Columns("hidden", "moe_ffn"),
            "moe",
            stacked=("linear_fc2.weight",),
            transposed=("weight2",),
        ),
    )


def _shared_experts(prefix: str) -> tuple[Rule, ...]:
    fc1, when = Gated(("shared_ffn", "shared_ffn"), "hidden"), "moe shared_ffn"
    return _inside(
        "mlp.shared_experts",
        prefix,
        _rule("linear_fc1.weight", "gate_proj.weight up_proj.weight", fc1, when),
        _rule("linear_fc2.weight", "down_proj.weight", Columns("hidden", "shared_ffn"), when),
    )


_SHARED_GATE = (
    _rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", Whole("one", "hidden"), "moe shared_ffn"),
)

_MTP = (
    _rule("enorm.weight", "enorm.weight", Whole("hidden")),
    _rule("hnorm.weight", "hnorm.weight", Whole("hidden")),
    _rule("eh_proj.weight", "eh_proj.weight", Rows("hidden", "twice_hidden", whole=True)),
    _rule("final_layernorm.weight", "shared_head.norm.weight", Whole("hidden")),
)

_ROUTER = _router("mlp")
_GATED_FC1 = Gated(("moe_ffn", "moe_ffn"), "hidden")
_GATED_EXPERTS = _experts("mlp.experts.{expert}", "gate_proj.weight up_proj.weight", "down_proj.weight", _GATED_FC1)


def _after_the_dense(config: Config, layer: int) -> bool:
    return layer >= config.get("first_k_dense_replace", 0) and layer % (config.get("moe_layer_freq") or 1) == 0


def _every_sparse_step(config: Config, layer: int) -> bool:
    is_step = (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    return is_step and layer not in (config.get("mlp_only_layers") or ())


def _when(switch: str, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(dataclasses.replace(rule, when=(*rule.when, switch)) for rule in rules)


def _is_delta_net(config: Config, layer: int) -> bool:
    kinds = config.get("layer_types")
    if kinds:
        return bool(kinds[layer] == "linear_attention") if layer < len(kinds) else False
    return (layer + 1) % (config.get("full_attention_interval") or 4) != 0


_DENSE_LAYER = _NORMS + _ATTENTION + _MLP
_DEEPSEEK = Family(
    _MODEL,
    _NORMS + _LATENT_ATTENTION + _MLP + _ROUTER + _ROUTER_BIAS + _GATED_EXPERTS + _shared_experts("mlp.shared_experts"),
    mtp=_MTP,
    is_moe=_after_the_dense,
)


def _below(prefix: str, family: Family) -> Family:
    """Return the family for checkpoints whose decoder's names begin with `prefix` in place of `model.`."""

    def moved(rule: Rule) -> Rule:
        return dataclasses.replace(rule, hf=tuple(re.sub(r"^model\.", prefix, name) for name in rule.hf))

    layer_prefix = re.sub(r"^model\.", prefix, family.layer_prefix)
    return dataclasses.replace(family, model=tuple(map(moved, family.model)), layer_prefix=layer_prefix)


FAMILIES: dict[str, Family] = {
    "llama": Family(_MODEL, _DENSE_LAYER),
    "qwen2": Family(_MODEL, _DENSE_LAYER, sizes={"qkv_bias": 1, "proj_bias": 0}),
    "qwen3": Family(_MODEL, _DENSE_LAYER + _QK_NORMS),
    "qwen2_moe": Family(
        _MODEL,
        _DENSE_LAYER + _ROUTER + _GATED_EXPERTS + _shared_experts("mlp.shared_expert") + _SHARED_GATE,
        sizes={"qkv_bias": "qkv_bias|1", "proj_bias": 0, "shared_ffn": "shared_expert_intermediate_size"},
        is_moe=_every_sparse_step,
    ),
    "qwen3_moe": Family(_MODEL, _DENSE_LAYER + _QK_NORMS + _ROUTER + _GATED_EXPERTS, is_moe=_every_sparse_step),
    "mixtral": Family(
        _MODEL,
        _NORMS
        + _ATTENTION
        + _router("block_sparse_moe")
        + _experts("block_sparse_moe.experts.{expert}", "w1.weight w3.weight", "w2.weight", _GATED_FC1),
        sizes={"moe_ffn": "intermediate_size"},
        is_moe=lambda config, layer: True,
    ),
    "qwen3_next": Family(
        _MODEL,
        _NORMS
        + _when("softmax", _GATED_ATTENTION + _QK_NORMS)
        + _when("linear", _DELTA_NET)
        + _MLP
        + _ROUTER
        + _GATED_EXPERTS
        + _shared_experts("mlp.shared_expert")
        + _SHARED_GATE,
        sizes={"shared_ffn": "shared_expert_intermediate_size"},
        is_moe=_every_sparse_step,
        is_linear=_is_delta_net,
        zero_centered=True,
    ),
    "glm4": Family(
        _MODEL,
        _NORMS
        + _OUTER_NORMS
        + _ATTENTION
        + _inside(
            "mlp",
            "mlp",
            _rule("linear_fc1.weight", "gate_up_proj.weight", Gated(("ffn", "ffn"), "hidden", joined=True)),
            _rule("linear_fc2.weight", "down_proj.weight", Columns("hidden", "ffn")),
        ),
        sizes={"proj_bias": 0},
    ),
    "glm4_moe": Family(
        _MODEL,
        _DENSE_LAYER
        + _when("qk_norm", _QK_NORMS)
        + _ROUTER
        + _ROUTER_BIAS
        + _GATED_EXPERTS
        + _shared_experts("mlp.shared_experts"),
        mtp=_MTP,
        sizes={"proj_bias": 0, "qk_norm": "use_qk_norm|0", "expert_bias": 1},
        is_moe=_after_the_dense,
    ),
    "gpt_oss": Family(
        _MODEL,
        _NORMS
        + _ATTENTION
        + _inside("self_attention", "self_attn", _rule("core_attention.softmax_offset", "sinks", Rows("heads")))
        + _inside(
            "mlp.router",
            "mlp.router",
            _rule("weight", "weight", Whole("experts", "hidden")),
            _rule("bias", "bias", Whole("experts")),
        )
        + _experts("mlp.experts", "gate_up_proj", "down_proj", Alternating("moe_ffn", "hidden"))
        + _inside(
            "mlp.experts",
            "mlp.experts",
            _rule(
                "linear_fc1.bias{expert} local_experts.{expert}.linear_fc1.bias",
                "gate_up_proj_bias",
                Alternating("moe_ffn"),
            ),
            _rule("linear_fc2.bias{expert} local_experts.{expert}.linear_fc2.bias", "down_proj_bias", Whole("hidden")),
        ),
        sizes={"moe_ffn": "intermediate_size", "qkv_bias": "attention_bias|1", "proj_bias": "attention_bias|1"},
        is_moe=lambda config, layer: True,
    ),
    "deepseek_v2": dataclasses.replace(_DEEPSEEK, sizes={"expert_bias": 0}),
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
}
"""By the `model_type` of a configuration."""

FAMILIES |= {
    # Vision-language models: only the language part, which is a GPTModel; publish the vision tower from another source.
    "qwen2_5_vl": FAMILIES["qwen2"],
    "qwen3_vl": _below("model.language_model.", FAMILIES["qwen3"]),
    "qwen3_vl_moe": _below(
        "model.language_model.",
        Family(
            _MODEL,
            _DENSE_LAYER
            + _QK_NORMS
            + _ROUTER
            + _experts(
                "mlp.experts", "gate_up_proj", "down_proj", Gated(("moe_ffn", "moe_ffn"), "hidden", joined=True)
            ),
            is_moe=_every_sparse_step,
        ),
    ),
}
