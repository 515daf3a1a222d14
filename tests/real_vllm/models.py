"""Tiny models of several families, made from their configs with a tokenizer made here: real parts, no download.

The same family, seed and dtype always give the same weights. Weights are drawn wide, and norms and biases too, so that
two seeds answer differently and a tensor that was left out shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

VOCABULARY = 512
MAX_LENGTH = 512
EOS = 1
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "moe_layer_freq": 1,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": MAX_LENGTH // 2,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
"""The ranks are those that vLLM's kernels for CPUs are made for; SGLang's MLA on a CPU has no other way to rotate."""
_ROUTER_BIAS = {
    **_LATENT,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
}
_GLM_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_ERNIE_EXPERTS = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 64,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
}
"""These three have a bias for each expert, which only chooses among them; vLLM registers it with the router and with
the experts."""
_WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "initializer_range": 0.05}
_LARGE = {"intermediate_size": 1000, "num_hidden_layers": 182, "head_dim": 16, "initializer_range": 0.05}
_DEEP = {"intermediate_size": 292, "num_hidden_layers": 182, "head_dim": 16, "initializer_range": 0.05}

FAMILIES: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen3": lambda: transformers.Qwen3Config(**_SHAPE),
    "qwen3-padded": lambda: transformers.Qwen3Config(**_SHAPE | {"vocab_size": 500}),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**_SHAPE | _EXPERTS),
    "qwen2": lambda: transformers.Qwen2Config(**{k: v for k, v in _SHAPE.items() if k != "head_dim"}),
    "llama-tied": lambda: transformers.LlamaConfig(**_SHAPE | {"tie_word_embeddings": True}),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **{k: v for k, v in _SHAPE.items() if k != "head_dim"} | _LATENT
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **{k: v for k, v in _SHAPE.items() if k != "head_dim"} | _ROUTER_BIAS
    ),
    "glm4-moe": lambda: transformers.Glm4MoeConfig(**_SHAPE | _EXPERTS | _GLM_EXPERTS),
    "ernie-moe": lambda: transformers.Ernie4_5_MoeConfig(**_SHAPE | _ERNIE_EXPERTS),
    "qwen3-wide": lambda: transformers.Qwen3Config(**_SHAPE | _WIDE),
    "qwen3-deep": lambda: transformers.Qwen3Config(**_SHAPE | _DEEP),
    "qwen3-large": lambda: transformers.Qwen3Config(**_SHAPE | _LARGE),
}
"""By family. "padded": a vocabulary that vLLM pads. "wide": 115 MB; "deep": 100 MB in 2,005 tensors; "large":
298 MB in as many (all in fp32)."""


def make_model(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model, in evaluation mode. A new object each time: change it as you like."""
    config = FAMILIES[family]()
    config.dtype = dtype
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape).to(dtype))
    return model


@functools.cache
def model_of(family: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The same as `make_model`, kept for all tests: don't change it."""
    return make_model(family, seed, dtype)


def save(model: Any, folder: Path) -> Path:
    """Write a checkpoint that vLLM can be started from: config, one safetensors file, tokenizer."""
    model.save_pretrained(folder)
    make_tokenizer(model.config.vocab_size).save_pretrained(folder)
    return folder


def make_tokenizer(vocabulary: int = VOCABULARY) -> Any:
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, vocabulary))]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    # TRL takes a completion apart with it, and refuses a tokenizer that has none.
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "fields": {"content": {"close_pattern": "$", "content": "text"}},
    }
    return tokenizer
