"""One rank of a real Megatron-core trainer: builds a case's model, trains it, runs it. Needs the patches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_core import models, patches, te_names
from megatron_core.cases import SEQUENCE, TOKENS, Case


def megatron_config(case: Case) -> TransformerConfig:
    hf = case.hf_config
    dtype = getattr(torch, case.dtype)
    fields: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "ffn_hidden_size": hf.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.rms_norm_eps,
        "qk_layernorm": case.model.startswith(("qwen3", "deepseek", "glm4")),
        "add_qkv_bias": case.model.startswith(("qwen2", "glm4")),
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.2,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "expert_model_parallel_size": case.ep,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "batch_p2p_comm": False,
        "sequence_parallel": "num_experts_per_tok" in hf.to_dict() and case.te and case.tp > 1,
        "mtp_num_layers": case.mtp or None,
    }
    if case.uneven:
        fields["num_layers_in_first_pipeline_stage"] = 1
    if "num_experts_per_tok" in hf.to_dict():
        fields |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": case.grouped,
            **({"moe_use_legacy_grouped_gemm": True} if case.grouped else {}),
            "expert_tensor_parallel_size": case.etp,
        }
    if "shared_expert_intermediate_size" in hf.to_dict():
        fields |= {
            "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }
    if case.model in ("deepseek_v3", "glm4_moe"):
        fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if case.model == "deepseek_v2":
        fields["moe_router_pre_softmax"] = True
    if "n_shared_experts" in hf.to_dict():
        fields |= {
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
            "moe_shared_expert_intermediate_size": hf.n_shared_experts * hf.moe_intermediate_size,
            "moe_layer_freq": [int(layer >= hf.first_k_dense_replace) for layer in range(hf.num_hidden_layers)],
        }
    if case.model == "gpt_oss":
        fields |= {
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "softmax_type": "learnable",
            "activation_func": quick_gelu,
            "activation_func_clamp_value": 7.0,
            "glu_linear_offset": 1.0,
        }
    if case.model == "qwen3_next":
        fields |= {
            "layernorm_zero_centered_gamma": True,
            "attention_output_gate": True,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(kind == "linear_attention") for kind in hf.layer_types],
            "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
            "linear_key_head_dim": hf.linear_key_head_dim,
            "linear_value_head_dim": hf.linear_value_head_dim,
            "linear_num_key_heads": hf.linear_num_key_heads,
            "linear_num_value_heads": hf.linear_num_value_heads,
            "deterministic_mode": True,
        }
    if case.model not in models.LATENT:
        head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
        return TransformerConfig(num_query_groups=hf.num_key_value_heads, kv_channels=head_dim, **fields)
    return MLATransformerConfig(
        multi_latent_attention=True,
        rope_type="rope",
        rotary_base=1000000.0,
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=hf.kv_lora_rank,
        qk_head_dim=hf.qk_nope_head_dim,
        qk_pos_emb_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        **fields,
    )


class Trainer:
    """This rank's chunks of the model, and its optimizer."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.config = megatron_config(case)
        patches.train_on_cpu()
        if case.tied and case.pp > 1:
            patches.share_embeddings()
        if case.grouped:
            patches.grouped_gemm()
        state.initialize_model_parallel(
            case.tp,
            case.pp,
            virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.etp,
            context_parallel_size=case.cp,
        )
        torch.manual_seed(1234 + 100 * state.get_pipeline_model_parallel_rank())
        self.models = [self._chunk(stage) for stage in range(case.vpp)]
        for model in self.models:
            _spread_out(model)
            if case.cp > 1:
                model.rotary_pos_emb.cp_group = None  # whole sequences on every rank
        self.chunks: list[torch.nn.Module] = list(self.models)
        if case.dtype == "bfloat16":
            self.chunks = [Float16Module(self.config, model) for model in self.models]
        self.optimizer = self._own_optimizer() if case.optimizer == "torch" else self._megatron_optimizer()

    def _chunk(self, stage: int) -> GPTModel:
        vp_stage = stage if self.case.vpp > 1 else None
        virtual = {} if vp_stage is None else {"vp_stage": vp_stage}
        # Delta nets replace layers of it below; from 0.19 on Megatron-core gives none for a config that names them.
        plain = copy.copy(self.config)
        plain.experimental_attention_variant = None
        spec = get_gpt_decoder_block_spec(
            plain, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage
        )
        if self.case.te:
            te_names.rename(spec)
            patches.fused_norms(te_names.LayerNormColumnParallelLinear)
        if self.case.fused_down:
            te_names.fuse_down_projections(spec)
        if self.case.model == "qwen3_next":
            patches.delta_net()
            offset = get_transformer_layer_offset(self.config, vp_stage)
            kinds = self.case.hf_config.layer_types[offset : offset + len(spec.layer_specs)]
            te_names.use_delta_nets(spec, [kind == "linear_attention" for kind in kinds])
        if self.case.model in models.LATENT:
            te_names.use_plain_attention(spec)
        mtp = get_gpt_mtp_block_spec(self.config, spec, False) if self.case.mtp else None
        return GPTModel(
            self.config,
            spec,
            self.case.padded,
            128,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=False, **virtual),
            post_process=state.is_pipeline_last_stage(ignore_virtual=False, **virtual),
            parallel_output=True,
            share_embeddings_and_output_weights=self.case.tied,
            position_embedding_type="rope",
            rotary_base=1000000,
            rotary_percent=self.case.hf_config.to_dict()["rope_parameters"].get("partial_rotary_factor", 1.0),
            mtp_block_spec=mtp,
            **virtual,
        )

    def _own_optimizer(self) -> Any:
        return torch.optim.AdamW([p for chunk in self.chunks for p in chunk.parameters()], lr=1e-2)

    def _megatron_optimizer(self) -> Any:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        patches.own_optimizers()
        is_distributed = self.case.optimizer == "distributed"
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
        self.chunks = [DistributedDataParallel(self.config, ddp_config, chunk) for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.broadcast_params()
        settings = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            bf16=self.case.dtype == "bfloat16",
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=is_distributed,
        )
        optimizer = get_megatron_optimizer(settings, self.chunks)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = optimizer.scale_loss
        return optimizer

    # --- steps ---

    def step(self) -> None:
        """Forward, backward and an optimizer step."""
        for chunk in self.chunks:
            if hasattr(chunk, "zero_grad_buffer"):
                chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(with_labels=True, forward_only=False)
        if self.case.optimizer == "torch":
            self._reduce()
        self.optimizer.step()
        for model in self.models:
            for name, buffer in model.named_buffers():
                if name.endswith("expert_bias"):
                    # As the update of the load balancing does, on all ranks alike.
                    buffer.add_(torch.linspace(-0.1, 0.1, buffer.numel()))

    def logits(self) -> torch.Tensor | None:
        """Of all positions, this tensor rank's part of the vocabulary; None before the last stage."""
        with torch.no_grad():
            outcomes = self._run(with_labels=False, forward_only=True)
        return outcomes[0]["logits"].float() if outcomes else None

    def greedy(self, num_prompt: int, num_new: int) -> list[int]:
        """What the model goes on with after the first row's prompt; the same on all ranks."""
        tokens = TOKENS[:, : SEQUENCE + 1].clone()
        for position in range(num_prompt, num_prompt + num_new):
            with torch.no_grad():
                outcomes = self._run(with_labels=False, forward_only=True, tokens=tokens)
            rank = state.get_tensor_model_parallel_rank()
            scores = torch.full((self.case.padded,), -torch.inf)
            if outcomes:
                part = outcomes[0]["logits"][0, position - 1].float()
                scores[rank * part.numel() : (rank + 1) * part.numel()] = part
            dist.all_reduce(scores, op=dist.ReduceOp.MAX)
            tokens[0, position] = scores[: self.case.hf_config.vocab_size].argmax()
        return [int(token) for token in tokens[0, num_prompt : num_prompt + num_new]]

    def _run(self, *, with_labels: bool, forward_only: bool, tokens: torch.Tensor = TOKENS) -> Any:
        def forward(batches: Iterator[torch.Tensor], model: Any) -> Any:
            tokens = next(batches)
            inputs, labels = tokens[:, :-1], tokens[:, 1:].contiguous()
            positions = torch.arange(SEQUENCE)[None].expand_as(inputs)
            mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), 1)
            out = model(inputs, positions, mask, labels=labels if with_labels else None)
            return out, _loss if with_labels else _keep

        chunks = self.chunks
        is_virtual = len(chunks) > 1
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[itertools.repeat(tokens) for _ in chunks] if is_virtual else itertools.repeat(tokens),
            model=chunks if is_virtual else chunks[0],
            num_microbatches=2 * self.case.pp if self.case.pp > 1 else 1,
            seq_length=SEQUENCE,
            micro_batch_size=TOKENS.shape[0],
            forward_only=forward_only,
        )

    def _reduce(self) -> None:
        """What `finalize_model_grads` does: tied weights and replicas stay equal."""
        is_end = state.is_pipeline_first_stage() or state.is_pipeline_last_stage()
        if self.case.tied and self.case.pp > 1 and is_end:
            weight = self.models[0].shared_embedding_or_output_weight()
            dist.all_reduce(weight.grad, group=state.get_embedding_group())
        for model in self.models:
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    continue
                if ".experts." in name:
                    dist.all_reduce(parameter.grad, group=state.get_expert_data_parallel_group())
                    continue
                dist.all_reduce(parameter.grad, group=state.get_data_parallel_group())
                if self.case.tp > 1 and not getattr(parameter, "tensor_model_parallel", False):
                    dist.all_reduce(parameter.grad, group=state.get_tensor_model_parallel_group())


def _spread_out(model: GPTModel) -> None:
    """Norms other than one and biases other than zero: else a wrong name would go unnoticed."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            generator = torch.Generator().manual_seed(len(name) + parameter.numel())
            parameter.data.add_(torch.rand(parameter.shape, generator=generator).to(parameter.dtype) * 0.2)


def _loss(out: torch.Tensor) -> Any:
    loss = out.float().mean()
    return loss, {"loss": loss.detach()}


def _keep(out: torch.Tensor) -> Any:
    return out.new_zeros(()), {"logits": out.detach().clone()}
