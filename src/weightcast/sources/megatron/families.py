"""The families' tables. A new family is a table: pick the parts that it shares with others, and add what it has alone.

Names of Megatron-core, in the local layer spec and in Transformer Engine's, against names of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightcast.sources.megatron.layouts import Columns, Gated, Rows, Vocabulary, Whole
from weightcast.sources.megatron.rules import Config, Family, Rule

_EMBEDDINGS = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Vocabulary("vocab", "hidden")),
)
_HEAD = (
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), Whole("hidden")),
    Rule(("output_layer.weight",), ("lm_head.weight",), Vocabulary("vocab", "hidden"), when=("untied",)),
)
_MODEL = _EMBEDDINGS + _HEAD

_NORMS = (
    Rule(
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("input_layernorm.weight",),
        Whole("hidden"),
    ),
    Rule(
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
        ("post_attention_layernorm.weight",),
        Whole("hidden"),
    ),
)

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = (
    Rule(
        ("self_attention.linear_qkv.weight",),
        tuple(f"{name}.weight" for name in _QKV),
        Rows(("query", "key", "key"), "hidden", blocks="groups"),
    ),
    Rule(
        ("self_attention.linear_qkv.bias",),
        tuple(f"{name}.bias" for name in _QKV),
        Rows(("query", "key", "key"), blocks="groups"),
        when=("qkv_bias",),
    ),
    Rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), Columns("hidden", "query")),
    Rule(("self_attention.linear_proj.bias",), ("self_attn.o_proj.bias",), Whole("hidden"), when=("proj_bias",)),
)

_QK_NORMS = (
    Rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",), Whole("head_dim")),
    Rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",), Whole("head_dim")),
)

# An engine may join these two, and then needs both in one call.
_DOWN = "self_attn.down_projections"
_LATENT_ATTENTION = (
    Rule(
        ("self_attention.linear_q_proj.weight",),
        ("self_attn.q_proj.weight",),
        Rows("latent_query", "hidden"),
        when=("no_q_rank",),
    ),
    Rule(
        ("self_attention.linear_q_down_proj.weight",),
        ("self_attn.q_a_proj.weight",),
        Rows("q_rank", "hidden", whole=True),
        when=("q_rank",),
        group=_DOWN,
    ),
    Rule(
        ("self_attention.linear_kv_down_proj.weight",),
        ("self_attn.kv_a_proj_with_mqa.weight",),
        Rows("latent_kv", "hidden", whole=True),
        group=_DOWN,
    ),
    Rule(
        ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj.layer_norm_weight"),
        ("self_attn.q_a_layernorm.weight",),
        Whole("q_rank"),
        when=("q_rank",),
    ),
    Rule(
        ("self_attention.linear_q_up_proj.weight",),
        ("self_attn.q_b_proj.weight",),
        Rows("latent_query", "q_rank"),
        when=("q_rank",),
    ),
    Rule(
        ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"),
        ("self_attn.kv_a_layernorm.weight",),
        Whole("kv_rank"),
    ),
    Rule(
        ("self_attention.linear_kv_up_proj.weight",),
        ("self_attn.kv_b_proj.weight",),
        Rows("latent_key_value", "kv_rank"),
    ),
    Rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), Columns("hidden", "latent_out")),
)

_MLP = (
    Rule(
        ("mlp.linear_fc1.weight",),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        Gated(("ffn", "ffn"), "hidden"),
        when=("dense",),
    ),
    Rule(
        ("mlp.linear_fc1.bias",),
        ("mlp.gate_proj.bias", "mlp.up_proj.bias"),
        Gated(("ffn", "ffn")),
        when=("dense", "mlp_bias"),
    ),
    Rule(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), Columns("hidden", "ffn"), when=("dense",)),
    Rule(("mlp.linear_fc2.bias",), ("mlp.down_proj.bias",), Whole("hidden"), when=("dense", "mlp_bias")),
)


def _router(name: str) -> tuple[Rule, ...]:
    return (Rule(("mlp.router.weight",), (name,), Whole("experts", "hidden"), when=("moe",)),)


_ROUTER_BIAS = (
    Rule(
        ("mlp.router.expert_bias",),
        ("mlp.gate.e_score_correction_bias",),
        Whole("experts"),
        when=("moe",),
        dtype="float32",
    ),
)


def _experts(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    return (
        Rule(
            ("mlp.experts.linear_fc1.weight{expert}", "mlp.experts.local_experts.{expert}.linear_fc1.weight"),
            (f"{prefix}.{{expert}}.{gate}.weight", f"{prefix}.{{expert}}.{up}.weight"),
            Gated(("moe_ffn", "moe_ffn"), "hidden"),
            when=("moe",),
            axis="expert",
            stacked=("mlp.experts.linear_fc1.weight",),
            transposed=("mlp.experts.weight1",),
        ),
        Rule(
            ("mlp.experts.linear_fc2.weight{expert}", "mlp.experts.local_experts.{expert}.linear_fc2.weight"),
            (f"{prefix}.{{expert}}.{down}.weight",),
            Columns("hidden", "moe_ffn"),
            when=("moe",),
            axis="expert",
            stacked=("mlp.experts.linear_fc2.weight",),
            transposed=("mlp.experts.weight2",),
        ),
    )


def _shared_experts(prefix: str) -> tuple[Rule, ...]:
    return (
        Rule(
            ("mlp.shared_experts.linear_fc1.weight",),
            (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"),
            Gated(("shared_ffn", "shared_ffn"), "hidden"),
            when=("moe", "shared_ffn"),
        ),
        Rule(
            ("mlp.shared_experts.linear_fc2.weight",),
            (f"{prefix}.down_proj.weight",),
            Columns("hidden", "shared_ffn"),
            when=("moe", "shared_ffn"),
        ),
    )


_SHARED_GATE = (
    Rule(
        ("mlp.shared_experts.gate_weight",),
        ("mlp.shared_expert_gate.weight",),
        Whole("one", "hidden"),
        when=("moe", "shared_ffn"),
    ),
)

_MTP = (
    Rule(("enorm.weight",), ("enorm.weight",), Whole("hidden")),
    Rule(("hnorm.weight",), ("hnorm.weight",), Whole("hidden")),
    Rule(("eh_proj.weight",), ("eh_proj.weight",), Rows("hidden", "twice_hidden", whole=True)),
    Rule(("final_layernorm.weight",), ("shared_head.norm.weight",), Whole("hidden")),
)

_GATED_EXPERTS = _experts("mlp.experts", "gate_proj", "up_proj", "down_proj")


def _every_layer(config: Config, layer: int) -> bool:
    return True


def _after_the_dense(config: Config, layer: int) -> bool:
    return layer >= config.get("first_k_dense_replace", 0) and layer % (config.get("moe_layer_freq") or 1) == 0


def _every_sparse_step(config: Config, layer: int) -> bool:
    is_step = (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0
    return is_step and layer not in (config.get("mlp_only_layers") or ())


_DENSE_LAYER = _NORMS + _ATTENTION + _MLP

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_MODEL, _DENSE_LAYER),
    "qwen2": Family(_MODEL, _DENSE_LAYER, sizes={"qkv_bias": 1, "proj_bias": 0}),
    "qwen3": Family(_MODEL, _DENSE_LAYER + _QK_NORMS),
    "qwen2_moe": Family(
        _MODEL,
        _DENSE_LAYER
        + _router("mlp.gate.weight")
        + _GATED_EXPERTS
        + _shared_experts("mlp.shared_expert")
        + _SHARED_GATE,
        sizes={"qkv_bias": "qkv_bias|1", "proj_bias": 0, "shared_ffn": "shared_expert_intermediate_size"},
        is_moe=_every_sparse_step,
    ),
    "qwen3_moe": Family(
        _MODEL,
        _DENSE_LAYER + _QK_NORMS + _router("mlp.gate.weight") + _GATED_EXPERTS,
        is_moe=_every_sparse_step,
    ),
    "mixtral": Family(
        _MODEL,
        _NORMS
        + _ATTENTION
        + _router("block_sparse_moe.gate.weight")
        + _experts("block_sparse_moe.experts", "w1", "w3", "w2"),
        sizes={"moe_ffn": "intermediate_size"},
        is_moe=_every_layer,
    ),
    "deepseek_v3": Family(
        _MODEL,
        _NORMS
        + _LATENT_ATTENTION
        + _MLP
        + _router("mlp.gate.weight")
        + _ROUTER_BIAS
        + _GATED_EXPERTS
        + _shared_experts("mlp.shared_experts"),
        mtp=_MTP,
        is_moe=_after_the_dense,
    ),
}
"""By the `model_type` of a configuration."""
