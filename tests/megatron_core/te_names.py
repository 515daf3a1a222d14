"""Layers with the parameter names of Transformer Engine's, computed by torch on CPUs.

linear_qkv.layer_norm_weight, linear_fc1.layer_norm_weight, experts.linear_fc1.weight0: the rest is Megatron's own.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import nn


class Norm(nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self.plus = eps, float(config.layernorm_zero_centered_gamma)
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight + self.plus, self.eps)


class LayerNormColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weight = self.layer_norm_weight + float(self.config.layernorm_zero_centered_gamma)
        normed = F.rms_norm(x, x.shape[-1:], weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


class GroupedLinear(nn.Module):
    """weight0, weight1, ...: one for each expert of the rank."""

    def __init__(self, num_experts: int, shape: tuple[int, int], config: Any, dim: int) -> None:
        super().__init__()
        for expert in range(num_experts):
            weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            config.init_method(weight.data)
            set_tensor_model_parallel_attributes(weight, True, dim, 1)
            weight.allreduce = config.expert_model_parallel_size == 1
            setattr(self, f"weight{expert}", weight)
            if config.add_bias_linear:
                bias = nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype))
                bias.allreduce = weight.allreduce
                setattr(self, f"bias{expert}", bias)

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = enumerate(torch.split(x, counts))
        return torch.cat([F.linear(c, getattr(self, f"weight{i}"), getattr(self, f"bias{i}", None)) for i, c in parts])


class GroupedExperts(nn.Module):
    def __init__(self, num_local_experts: int, config: Any, *args: Any, **_: Any) -> None:
        super().__init__()
        self.config = config
        width = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
        self.linear_fc1 = GroupedLinear(num_local_experts, (2 * width, config.hidden_size), config, 0)
        self.linear_fc2 = GroupedLinear(num_local_experts, (config.hidden_size, width), config, 1)

    def forward(self, x: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> Any:
        gate, up = self.linear_fc1(x, counts.tolist()).chunk(2, -1)
        if self.config.activation_func is F.silu:
            return self.linear_fc2((F.silu(gate) * up * probs.unsqueeze(-1)).to(x.dtype), counts.tolist()), None
        # As gpt_oss has it; the second bias is weighted like what it is added to.
        limit = self.config.activation_func_clamp_value
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + self.config.glu_linear_offset
        out = self.linear_fc2(self.config.activation_func(gate) * up, counts.tolist())
        return (out * probs.unsqueeze(-1)).to(x.dtype), None


class LatentCoreAttention(nn.Module):
    """Causal attention with values of another width than keys, which Megatron has for GPUs only."""

    def __init__(self, *args: Any, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def rename(block: TransformerBlockSubmodules) -> None:
    """Put these layers in the place of a local block spec's, where Transformer Engine's are called otherwise."""
    block.layer_norm = Norm
    for layer in block.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        if hasattr(attention, "linear_qkv"):
            parts.input_layernorm, attention.linear_qkv = IdentityOp, LayerNormColumnParallelLinear
            if attention.q_layernorm is not IdentityOp:
                attention.q_layernorm = attention.k_layernorm = Norm
        else:
            parts.input_layernorm = Norm
            attention.linear_q_up_proj = attention.linear_kv_up_proj = LayerNormColumnParallelLinear
            attention.q_layernorm = attention.kv_layernorm = IdentityOp
        # A partial of a builder from Megatron-core 0.18 on, a ModuleSpec before.
        is_partial = isinstance(parts.mlp, functools.partial)
        mlp = parts.mlp.keywords["submodules"] if is_partial else parts.mlp.submodules
        if isinstance(mlp, MLPSubmodules):
            parts.pre_mlp_layernorm, mlp.linear_fc1 = IdentityOp, LayerNormColumnParallelLinear
        else:
            parts.pre_mlp_layernorm = Norm
            mlp.experts = GroupedExperts if is_partial else ModuleSpec(module=GroupedExperts)


def use_delta_nets(block: TransformerBlockSubmodules, is_linear: list[bool]) -> None:
    """Gated delta nets in the layers of this block that have linear attention."""
    # One specification may stand for several layers.
    block.layer_specs = [copy.deepcopy(layer) for layer in block.layer_specs]
    for layer, linear in zip(block.layer_specs, is_linear, strict=True):
        if linear:
            parts = GatedDeltaNetSubmodules(LayerNormColumnParallelLinear, Norm, RowParallelLinear)
            layer.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, submodules=parts)


def fuse_down_projections(block: TransformerBlockSubmodules) -> None:
    """One parameter for both down projections of latent attention, in every layer of this block."""
    from megatron.core.transformer.multi_latent_attention import FusedMLASelfAttention

    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        attention.module, attention.submodules.linear_qkv_down_proj = FusedMLASelfAttention, ColumnParallelLinear


def use_plain_attention(block: TransformerBlockSubmodules) -> None:
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = LatentCoreAttention
