"""Configurations of every family, tiny and as published, and the names and shapes that transformers gives them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from weightcast.checkpoint.live import checkpoint_tensors
from weightcast.format.manifest import TensorSpec

_LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
    "q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip

LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")

TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "mixtral": {"num_local_experts": 4},
    "deepseek_v3": _LATENT,
    "deepseek_v2": _LATENT,
    "kimi_k2": _LATENT,
    "glm4": {"pad_token_id": 0},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"num_local_experts": 4},
    "qwen3_next": {
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
    },
}
"""By model type: what it has besides the sizes that all have."""

_MOONLIGHT = {
    "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "n_shared_experts": 2,
    "n_routed_experts": 64, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6,
}  # fmt: skip
_DEEPSEEK_V3 = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
}  # fmt: skip
_QWEN3_30B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip
_QWEN3_235B = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
    "num_experts_per_tok": 8,
}  # fmt: skip

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Moonlight-16B-A3B": ("deepseek_v3", _MOONLIGHT),
    "Qwen3-30B-A3B": ("qwen3_moe", _QWEN3_30B),
    "Qwen3-235B-A22B": ("qwen3_moe", _QWEN3_235B),
    "DeepSeek-V3": ("deepseek_v3", _DEEPSEEK_V3),
}


def config(model_type: str, **fields: Any) -> Any:
    """transformers has no class for kimi_k2, whose configuration is DeepSeek-V3's but for its name."""
    if model_type != "kimi_k2":
        return transformers.AutoConfig.for_model(model_type, **fields)
    found = transformers.AutoConfig.for_model("deepseek_v3", **fields)
    found.model_type = model_type
    return found


def checkpoint_specs(hf_config: Any) -> tuple[TensorSpec, ...]:
    """What `save_pretrained` would write, from the model itself on the meta device."""
    if hf_config.model_type == "kimi_k2":
        hf_config = copy.copy(hf_config)
        hf_config.model_type = "deepseek_v3"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(hf_config)
    return checkpoint_tensors(model)[0]


def vision_config(model_type: str, text: dict[str, Any], *, tied: bool) -> Any:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    vision |= {"intermediate_size": 16}
    text = {**text, "tie_word_embeddings": tied, "pad_token_id": 0}
    return config(model_type, text_config=text, vision_config=vision, tie_word_embeddings=tied)


def vision_specs(hf_config: Any) -> tuple[TensorSpec, ...]:
    """What `save_pretrained` would write of a model with a vision tower."""
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(hf_config)
    return checkpoint_tensors(model)[0]


def values(specs: tuple[TensorSpec, ...]) -> dict[str, torch.Tensor]:
    """A checkpoint in which every element has another value."""
    tensors, start = {}, 1
    for spec in specs:
        numel = torch.Size(spec.shape).numel()
        tensors[spec.name] = torch.arange(start, start + numel, dtype=torch.float64).reshape(spec.shape)
        start += numel
    return tensors
