"""A checkpoint as the ranks of a Megatron-core job hold it, written down from Megatron's side, without our tables.

Megatron's own rules: attention rows lie group by group, queries before key before value; a rank's fc1 is its gate rows
over its up rows; GroupedMLP keeps in, out matrices of all experts of a rank one after the other in one parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch

from megatron_core import models

Tensors = dict[str, torch.Tensor]
Experts = Literal["each", "sequential", "grouped", "stacked"]


@dataclasses.dataclass(frozen=True)
class Job:
    """`stages`: the layers of each. `te`: names of Transformer Engine. `padded`: rows of the embedding.

    `cut_down`: latent attention's down projections are cut, though Transformer Engine's are whole. `fused_down`: they
    are one parameter, as Megatron-core 0.19's `FusedMLASelfAttention` has them.
    """

    tp: int = 1
    stages: tuple[tuple[int, ...], ...] = ((0,),)
    ep: int = 1
    etp: int = 1
    te: bool = True
    experts: Experts = "each"
    padded: int = 0
    cut_down: bool = False
    fused_down: bool = False

    @property
    def stage_size(self) -> int:
        return math.lcm(self.tp, self.ep * self.etp)


@dataclasses.dataclass(frozen=True)
class Rank:
    stage: int
    tp: int
    ep: int
    etp: int


def ranks(job: Job) -> Iterator[Rank]:
    for stage in range(len(job.stages)):
        for place in range(job.stage_size):
            yield Rank(stage, place % job.tp, place // job.etp % job.ep, place % job.etp)


class Sharder:
    """Of one checkpoint, for any rank."""

    def __init__(self, hf: Tensors, config: Any, job: Job) -> None:
        self.hf, self.config, self.job = hf, config, job
        self.is_latent = config.model_type in models.LATENT
        fields = config.to_dict()
        self._num_experts = (
            fields.get("n_routed_experts") or fields.get("num_local_experts") or fields.get("num_experts")
        )

    def tensors(self, rank: Rank) -> Tensors:
        held: Tensors = {}
        layers = self.job.stages[rank.stage]
        is_first, is_last = rank.stage == 0, rank.stage == len(self.job.stages) - 1
        if is_first:
            held["embedding.word_embeddings.weight"] = self._vocabulary("model.embed_tokens.weight", rank)
        for index, layer in enumerate(layers):
            prefix = f"decoder.layers.{index}."
            held |= {prefix + name: tensor for name, tensor in self._layer(f"model.layers.{layer}.", rank).items()}
        if is_last:
            held["decoder.final_layernorm.weight"] = self.hf["model.norm.weight"]
            if not self.config.tie_word_embeddings:
                held["output_layer.weight"] = self._vocabulary("lm_head.weight", rank)
            elif not is_first:
                held["output_layer.weight"] = self._vocabulary("model.embed_tokens.weight", rank)
        return held

    def _vocabulary(self, name: str, rank: Rank) -> torch.Tensor:
        full = self.hf[name]
        padding = full.new_zeros((max(self.job.padded, full.shape[0]) - full.shape[0], full.shape[1]))
        return torch.cat([full, padding]).chunk(self.job.tp)[rank.tp]

    def _layer(self, prefix: str, rank: Rank) -> Tensors:
        routers = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight")
        is_moe = any(prefix + name in self.hf for name in routers)
        te, get = self.job.te, lambda name: self.hf[prefix + name]
        before = "self_attention.linear_qkv.layer_norm_weight" if te else "input_layernorm.weight"
        if self.is_latent:
            held, before = self._latent(prefix, rank), "input_layernorm.weight"
            if te and "self_attention.linear_qkv_down_proj.weight" in held:
                before = "self_attention.linear_qkv_down_proj.layer_norm_weight"
        elif prefix + "linear_attn.A_log" in self.hf:
            held = self._delta_net(prefix + "linear_attn.", rank)
            before = "self_attention.in_proj.layer_norm_weight" if te else before
        else:
            held = self._attention(prefix, rank)
        held[before] = get("input_layernorm.weight")
        for outer in ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight"):
            if prefix + outer in self.hf:
                held[outer] = get(outer)
        after = "mlp.linear_fc1.layer_norm_weight" if te and not is_moe else "pre_mlp_layernorm.weight"
        held[after] = get("post_attention_layernorm.weight")
        held |= self._moe(prefix, rank) if is_moe else self._dense(prefix + "mlp.", "mlp.", rank)
        return held

    def _attention(self, prefix: str, rank: Rank) -> Tensors:
        held: Tensors = {}
        groups, tp = self.config.num_key_value_heads, self.job.tp
        for kind in ("weight", "bias"):
            names = [f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv"]
            if names[0] in self.hf:
                q, k, v = (self.hf[name].chunk(groups) for name in names)
                if self.config.model_type == "qwen3_next":
                    q = tuple(_gates_below(each, self.config.head_dim) for each in q)
                full = torch.cat([block for group in zip(q, k, v, strict=True) for block in group])
                held[f"self_attention.linear_qkv.{kind}"] = full.chunk(tp)[rank.tp]
        if (sinks := self.hf.get(prefix + "self_attn.sinks")) is not None:
            held["self_attention.core_attention.softmax_offset"] = sinks.chunk(tp)[rank.tp]
        held["self_attention.linear_proj.weight"] = self.hf[prefix + "self_attn.o_proj.weight"].chunk(tp, 1)[rank.tp]
        if prefix + "self_attn.o_proj.bias" in self.hf:
            held["self_attention.linear_proj.bias"] = self.hf[prefix + "self_attn.o_proj.bias"]
        for part in "qk":
            if f"{prefix}self_attn.{part}_norm.weight" in self.hf:
                held[f"self_attention.{part}_layernorm.weight"] = self.hf[f"{prefix}self_attn.{part}_norm.weight"]
        return held

    def _delta_net(self, prefix: str, rank: Rank) -> Tensors:
        """Megatron's `GatedDeltaNet`: each rank has its heads of query, key, value, gate, beta and alpha in turn."""
        hf, tp, config = self.hf, self.job.tp, self.config
        heads, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
        key, value = config.linear_key_head_dim, ratio * config.linear_value_head_dim
        by_head = hf[prefix + "in_proj_qkvz.weight"].unflatten(0, (heads, -1)).split([key, key, value, value], 1)
        by_head += hf[prefix + "in_proj_ba.weight"].unflatten(0, (heads, -1)).split([ratio, ratio], 1)
        conv = hf[prefix + "conv1d.weight"].split([heads * key, heads * key, heads * value])
        held = {
            "in_proj.weight": torch.cat([part.flatten(0, 1).chunk(tp)[rank.tp] for part in by_head]),
            "conv1d.weight": torch.cat([part.chunk(tp)[rank.tp] for part in conv]),
            "dt_bias": hf[prefix + "dt_bias"].chunk(tp)[rank.tp],
            "A_log": hf[prefix + "A_log"].chunk(tp)[rank.tp],
            "out_norm.weight": hf[prefix + "norm.weight"] - 1,
            "out_proj.weight": hf[prefix + "out_proj.weight"].chunk(tp, 1)[rank.tp],
        }
        return {f"self_attention.{name}": tensor for name, tensor in held.items()}

    def _latent(self, prefix: str, rank: Rank) -> Tensors:
        tp, te = self.job.tp, self.job.te

        def get(name: str) -> torch.Tensor:
            return self.hf[f"{prefix}self_attn.{name}.weight"]

        def down(full: torch.Tensor) -> torch.Tensor:
            return full if te and not self.job.cut_down else full.chunk(tp)[rank.tp]

        def norm(part: str) -> str:
            return f"linear_{part}_up_proj.layer_norm_weight" if te else f"{part}_layernorm.weight"

        held = {
            "linear_kv_down_proj.weight": down(get("kv_a_proj_with_mqa")),
            norm("kv"): get("kv_a_layernorm"),
            "linear_kv_up_proj.weight": get("kv_b_proj").chunk(tp)[rank.tp],
            "linear_proj.weight": get("o_proj").chunk(tp, 1)[rank.tp],
        }
        if self.config.q_lora_rank is None:
            held["linear_q_proj.weight"] = get("q_proj").chunk(tp)[rank.tp]
        else:
            held["linear_q_down_proj.weight"] = down(get("q_a_proj"))
            held[norm("q")] = get("q_a_layernorm")
            held["linear_q_up_proj.weight"] = get("q_b_proj").chunk(tp)[rank.tp]
            if self.job.fused_down:
                parts = [held.pop(f"linear_{part}_down_proj.weight") for part in ("q", "kv")]
                held["linear_qkv_down_proj.weight"] = torch.cat(parts)
        return {f"self_attention.{name}": tensor for name, tensor in held.items()}

    def _dense(self, source: str, target: str, rank: Rank) -> Tensors:
        held: Tensors = {}
        if f"{source}gate_up_proj.weight" in self.hf:
            gate, up = self.hf[f"{source}gate_up_proj.weight"].chunk(2)
            held[f"{target}linear_fc1.weight"] = _gated(gate, up, rank.tp, self.job.tp)
        for kind in ("weight", "bias"):
            if f"{source}gate_proj.{kind}" in self.hf:
                gate, up = self.hf[f"{source}gate_proj.{kind}"], self.hf[f"{source}up_proj.{kind}"]
                held[f"{target}linear_fc1.{kind}"] = _gated(gate, up, rank.tp, self.job.tp)
        held[f"{target}linear_fc2.weight"] = self.hf[f"{source}down_proj.weight"].chunk(self.job.tp, 1)[rank.tp]
        if f"{source}down_proj.bias" in self.hf:
            held[f"{target}linear_fc2.bias"] = self.hf[f"{source}down_proj.bias"]
        return held

    def _moe(self, prefix: str, rank: Rank) -> Tensors:
        get = self.hf.get
        router = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight")
        held = {"mlp.router.weight": next(self.hf[prefix + name] for name in router if prefix + name in self.hf)}
        if (bias := get(prefix + "mlp.router.bias")) is not None:
            held["mlp.router.bias"] = bias
        if (bias := get(prefix + "mlp.gate.e_score_correction_bias")) is not None:
            held["mlp.router.expert_bias"] = bias
        for shared in ("shared_expert", "shared_experts"):
            if f"{prefix}mlp.{shared}.gate_proj.weight" in self.hf:
                held |= self._dense(f"{prefix}mlp.{shared}.", "mlp.shared_experts.", rank)
        if (gate := get(prefix + "mlp.shared_expert_gate.weight")) is not None:
            held["mlp.shared_experts.gate_weight"] = gate
        return held | self._experts(prefix, rank)

    def _experts(self, prefix: str, rank: Rank) -> Tensors:
        folder = prefix + "block_sparse_moe." if self.config.model_type == "mixtral" else prefix + "mlp."
        names = ("w1", "w3", "w2") if self.config.model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        count = self._num_experts // self.job.ep
        fc1, fc2, biases = [], [], {}
        for expert in range(rank.ep * count, (rank.ep + 1) * count):
            if (stack := self.hf.get(folder + "experts.gate_up_proj")) is not None:
                # gpt_oss: in, out; gate and up in turn, column by column.
                gate, up = stack[expert, :, ::2].t(), stack[expert, :, 1::2].t()
                down = self.hf[folder + "experts.down_proj"][expert].t()
                bias, number = self.hf[folder + "experts.gate_up_proj_bias"][expert], expert - rank.ep * count
                own = _gated(bias[::2], bias[1::2], rank.etp, self.job.etp)
                biases |= _bias_names(self.job.experts, number, own, self.hf[folder + "experts.down_proj_bias"][expert])
            else:
                gate, up, down = (self.hf[f"{folder}experts.{expert}.{name}.weight"] for name in names)
            fc1.append(_gated(gate, up, rank.etp, self.job.etp))
            fc2.append(down.chunk(self.job.etp, 1)[rank.etp])
        return _named(fc1, fc2, self.job.experts) | biases


def _bias_names(experts: Experts, number: int, fc1: torch.Tensor, fc2: torch.Tensor) -> Tensors:
    before, after = (f"local_experts.{number}.", "") if experts == "sequential" else ("", f"{number}")
    names = (f"mlp.experts.{before}{name}.bias{after}" for name in ("linear_fc1", "linear_fc2"))
    return dict(zip(names, (fc1, fc2), strict=True))


def _named(fc1: Sequence[torch.Tensor], fc2: Sequence[torch.Tensor], experts: Experts) -> Tensors:
    pairs = (("linear_fc1", fc1), ("linear_fc2", fc2))
    if experts == "each":
        return {f"mlp.experts.{name}.weight{e}": tensor for name, held in pairs for e, tensor in enumerate(held)}
    if experts == "sequential":
        return {
            f"mlp.experts.local_experts.{e}.{n}.weight": tensor for n, held in pairs for e, tensor in enumerate(held)
        }
    if experts == "stacked":
        return {f"mlp.experts.{name}.weight": torch.stack(list(held)) for name, held in pairs}
    weight1 = torch.stack([tensor.t() for tensor in fc1]).reshape(fc1[0].shape[1], -1)
    weight2 = torch.stack([tensor.t() for tensor in fc2]).reshape(-1, fc2[0].shape[0])
    return {"mlp.experts.weight1": weight1, "mlp.experts.weight2": weight2}


def centred(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What can be compared bit for bit: a norm that the checkpoint has around one is rounded there."""
    return tensor + 1 if name.endswith("out_norm.weight") else tensor


def _gates_below(group: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A group's queries of all heads, then their output gates, in place of both head by head."""
    return group.unflatten(0, (-1, 2, head_dim)).transpose(0, 1).flatten(0, 2)


def _gated(gate: torch.Tensor, up: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    return torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
