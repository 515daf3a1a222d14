"""The demo's model and tokenizer: a small Qwen3 with random weights, and a word-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from weightcast.demo import task

MAX_POSITIONS = 64


def make_model(*, seed: int, hidden_size: int, num_layers: int) -> Qwen3ForCausalLM:
    """A new model in bf16, as engines serve it, in evaluation mode (it has no dropout). Equal seeds, equal weights."""
    config = Qwen3Config(
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
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        # Not `.to(torch.bfloat16)`: that would round the rotary frequencies too, which engines keep in fp32.
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    assert isinstance(model, Qwen3ForCausalLM)
    torch.nn.Module.eval(model)
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
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


def logprobs(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability of each of `targets` [rows, answer], which are the last of `tokens` [rows, prompt + answer].

    Targets below 0 stand for padding; their values mean nothing.
    """
    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=targets.shape[1]).logits.float()
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found
