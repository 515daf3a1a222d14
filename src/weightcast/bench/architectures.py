"""The published configurations of the architectures that the bench knows. Data, and nothing else.

Each entry is what differs from the defaults of transformers' config class and bears on a tensor's name or shape.
`WIDTHS` are the fields that `--scale` divides; counts (layers, heads, experts) decide how many tensors there are and
stay.
"""

from __future__ import annotations

from collections.abc import Mapping

Field = int | bool | None

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Field]]] = {
    "qwen3-0.6b": (
        "qwen3",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3072,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-1.7b": (
        "qwen3",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 6144,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": (
        "llama",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "intermediate_size": 8192,
            "vocab_size": 128256,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3-next-80b-a3b": (
        "qwen3_next",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "full_attention_interval": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "intermediate_size": 5120,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "decoder_sparse_step": 1,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
    ),
    "moonlight-16b-a3b": (
        "deepseek_v3",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "intermediate_size": 11264,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "vocab_size": 163840,
            "tie_word_embeddings": False,
        },
    ),
}

WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
    "head_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
)
