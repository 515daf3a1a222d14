"""The jobs that are trained for real: which model, cut how. Nothing here needs Megatron."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from megatron_core import models

VOCAB = 1000
SEQUENCE = 16
TOKENS = torch.randint(0, VOCAB, (2, SEQUENCE + 1), generator=torch.Generator().manual_seed(7))
_DENSE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, **_EXPERTS,
}  # fmt: skip
_GLM = {
    "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}, **_EXPERTS,
}  # fmt: skip
_NEXT = {
    "num_experts": 4, "shared_expert_intermediate_size": 80, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 12, "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25}, **_EXPERTS,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 80},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT,
    "deepseek_v2": {**_LATENT, "norm_topk_prob": False},
    "glm4_moe": _GLM,
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128, "pad_token_id": 0},
    "qwen3_next": _NEXT,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """`size`: processes. `te`: names of Transformer Engine. `optimizer`: torch's, or one of Megatron's with its DDP.

    `cp`: ranks are laid out so, but each computes whole sequences: attention over parts needs Transformer Engine.
    `grouped`: Megatron-core's GroupedMLP, which 0.19 no longer has. `fused_down`: its FusedMLASelfAttention, of 0.19.
    """

    size: int
    model: str = "qwen3"
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    te: bool = False
    tied: bool = False
    grouped: bool = False
    fused_down: bool = False
    dtype: str = "float32"
    optimizer: Literal["torch", "megatron", "distributed"] = "torch"
    uneven: bool = False
    padding: int = 128
    mtp: int = 0
    fields: tuple[tuple[str, Any], ...] = ()

    @property
    def has_bridge(self) -> bool:
        """Whether mbridge exports such a model: names of Transformer Engine only."""
        return self.te and self.model not in ("qwen3_next", "gpt_oss")

    @property
    def padded(self) -> int:
        multiple = self.padding * self.tp
        return -(-VOCAB // multiple) * multiple

    @property
    def hf_config(self) -> Any:
        fields = {**_DENSE, "tie_word_embeddings": self.tied}
        if self.model not in ("llama", "qwen3", "qwen3_moe", "glm4_moe", "qwen3_next", "gpt_oss"):
            del fields["head_dim"]
        return models.config(self.model, **fields | _FAMILIES[self.model] | dict(self.fields))


_ALL_DENSE = ("first_k_dense_replace", 4)

CASES: dict[str, Case] = {
    "tp2": Case(2, tp=2),
    "tp2-te": Case(2, tp=2, te=True),
    "llama-tp2": Case(2, "llama", tp=2),
    "qwen2-tp2-tied": Case(2, "qwen2", tp=2, tied=True),
    "pp2-tied": Case(2, pp=2, tied=True),
    "pp2-uneven-te": Case(2, pp=2, uneven=True, te=True),
    "vpp2-te": Case(2, pp=2, vpp=2, te=True),
    "no-padding": Case(2, tp=2, padding=4),
    "more-ranks-than-groups": Case(4, tp=4, te=True),
    "tp2-pp2-te": Case(4, tp=2, pp=2, te=True),
    "tp2-pp2-tied": Case(4, tp=2, pp=2, tied=True),
    "tp2-dp2": Case(4, tp=2),
    "tp2-cp2": Case(4, tp=2, cp=2),
    "ep2-cp2": Case(4, "qwen3_moe", ep=2, cp=2),
    "ep2-sequential": Case(2, "qwen3_moe", ep=2),
    "ep2-grouped-bf16": Case(2, "qwen3_moe", ep=2, grouped=True, dtype="bfloat16"),
    "ep2-te": Case(2, "qwen3_moe", ep=2, te=True),
    "tp2-ep2-te": Case(2, "qwen3_moe", tp=2, ep=2, te=True),
    "tp2-ep2-etp2-te": Case(4, "qwen3_moe", tp=2, ep=2, etp=2, te=True),
    "pp2-ep2-te": Case(4, "qwen3_moe", pp=2, ep=2, te=True),
    "qwen2-moe-ep2": Case(2, "qwen2_moe", ep=2),
    "mixtral-ep2": Case(2, "mixtral", ep=2),
    "deepseek-tp2": Case(2, "deepseek_v3", tp=2, fields=(_ALL_DENSE,)),
    "deepseek-tp2-no-query-rank": Case(2, "deepseek_v3", tp=2, fields=(_ALL_DENSE, ("q_lora_rank", None))),
    "deepseek-tp2-fused-down": Case(2, "deepseek_v3", tp=2, fused_down=True, fields=(_ALL_DENSE,)),
    "deepseek-ep2": Case(2, "deepseek_v3", ep=2),
    "deepseek-ep2-te": Case(2, "deepseek_v3", ep=2, te=True),
    "deepseek-pp2-ep2-te": Case(4, "deepseek_v3", pp=2, ep=2, te=True),
    "deepseek-tp2-ep2-te": Case(2, "deepseek_v3", tp=2, ep=2, te=True),
    "deepseek-ep2-bf16": Case(2, "deepseek_v3", ep=2, dtype="bfloat16", optimizer="megatron"),
    "deepseek-mtp": Case(2, "deepseek_v3", ep=2, mtp=1),
    "deepseek-v2-ep2": Case(2, "deepseek_v2", ep=2),
    "glm4-moe-ep2": Case(2, "glm4_moe", ep=2),
    "glm4-moe-tp2-ep2-te": Case(2, "glm4_moe", tp=2, ep=2, te=True),
    "gpt-oss-ep2": Case(2, "gpt_oss", ep=2),
    "gpt-oss-tp2-ep2-te": Case(2, "gpt_oss", tp=2, ep=2, te=True),
    "qwen3-next-ep2-te": Case(2, "qwen3_next", ep=2, te=True),
    "qwen3-next-tp2-ep2-te": Case(2, "qwen3_next", tp=2, ep=2, te=True),
    "bf16-distributed-optimizer": Case(4, tp=2, te=True, dtype="bfloat16", optimizer="distributed"),
    "bf16-pp2-distributed-optimizer": Case(4, tp=2, pp=2, te=True, dtype="bfloat16", optimizer="distributed"),
    "bf16-megatron-optimizer": Case(2, te=True, tied=True, dtype="bfloat16", optimizer="megatron"),
}

DIAGONAL = (
    "tp2-te", "qwen2-tp2-tied", "pp2-uneven-te", "vpp2-te", "no-padding", "more-ranks-than-groups", "tp2-pp2-te",
    "ep2-cp2", "ep2-grouped-bf16", "tp2-ep2-etp2-te", "pp2-ep2-te", "qwen2-moe-ep2", "mixtral-ep2",
    "deepseek-tp2-fused-down", "deepseek-pp2-ep2-te", "deepseek-mtp", "deepseek-v2-ep2", "glm4-moe-tp2-ep2-te",
    "gpt-oss-tp2-ep2-te", "qwen3-next-tp2-ep2-te", "bf16-pp2-distributed-optimizer",
)  # fmt: skip
"""Each family and each way of cutting at least once; the others run with --full only."""
