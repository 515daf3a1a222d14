"""A plugin of the tests that lets SGLang speculate on a CPU without AMX: draft models that propose one token at a time.

SGLang has attention for speculation in its kernels for AMX only. Its attention in torch, which it has for all else,
computes the tokens that are verified as those of a prompt: each after the one before it, which a chain of them is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

_ATTENTION = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_GLM = "sglang.srt.models.glm4_moe.Glm4MoeForCausalLM"


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_ATTENTION}.forward_extend", _extend, HookType.AROUND)
    HookRegistry.register(f"{_DRAFTS}.create_draft_extend_backend", _backend, HookType.AROUND)
    HookRegistry.register(f"{_GLM}.set_embed_and_head", _share, HookType.AROUND)


def _extend(
    original: Callable[..., Any], backend: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, **named: Any
) -> Any:
    if batch.forward_mode.is_target_verify():
        num_tokens, batch = batch.spec_info.draft_token_num, copy.copy(batch)
        batch.extend_prefix_lens, batch.seq_lens = batch.seq_lens, batch.seq_lens + num_tokens
        batch.extend_seq_lens = torch.full_like(batch.seq_lens, num_tokens)
    return original(backend, q, k, v, layer, batch, **named)


def _backend(_: Callable[..., Any], factory: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(factory.draft_model_runner)


def _share(_: Callable[..., Any], model: Any, *shared: torch.Tensor) -> None:
    """GLM's own waits for a GPU after it has done the same."""
    from sglang.srt.models.llama import LlamaForCausalLM

    LlamaForCausalLM.set_embed_and_head(model, *shared)
