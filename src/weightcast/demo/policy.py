"""The demo's model and tokenizer: a small Qwen3 in bf16 with random weights, and a word-level tokenizer made here."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from weightcast.demo import task

MAX_POSITIONS = 64
ATTENTION_FOR_TRAINING = "eager"
"""On a CPU, torch's fused attention takes longer backwards in bf16 than all the rest of a small model together."""
ATTENTION_FOR_SERVING = "sdpa"
"""What transformers takes by itself, and so what the engines compute with."""


def config(*, hidden_size: int, num_layers: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(task.WORDS),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=task.END_ID,
        pad_token_id=task.PAD_ID,
        dtype="bfloat16",
    )


def make_model(*, seed: int, hidden_size: int = 128, num_layers: int = 2) -> Qwen3ForCausalLM:
    """A fresh model in bf16, in evaluation mode (it has no dropout); the seed alone decides its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # Not `.to(torch.bfloat16)`: that would round the rotary frequencies too, which engines keep in fp32.
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config(hidden_size=hidden_size, num_layers=num_layers), dtype=torch.bfloat16
        )
    assert isinstance(model, Qwen3ForCausalLM)
    torch.nn.Module.eval(model)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words are tokens, by the task's vocabulary."""
    inner = Tokenizer(WordLevel(task.IDS, unk_token=task.PAD))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=inner,
        pad_token=task.PAD,
        eos_token=task.END,
        padding_side="left",
        model_max_length=MAX_POSITIONS,
    )


def save(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write what an engine is started from: config, weights and tokenizer."""
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
