"""A tiny Qwen3 made from its config, with a word-level tokenizer made here: real parts, no download."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from weightcast.format.manifest import WeightVersion

VOCABULARY = 128
EOS = 1
RUN = "0" * 32


def make_model(seed: int = 0) -> Qwen3ForCausalLM:
    """Two layers, hidden 64. The head is sharpened, so that a greedy choice is never a near tie."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)
    model.generation_config.eos_token_id = EOS
    model.generation_config.pad_token_id = 0
    return model.eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCABULARY))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def version(number: int) -> WeightVersion:
    return WeightVersion(run=RUN, number=number)


@torch.no_grad()
def teacher_forced(model: Qwen3ForCausalLM, prompt: list[int], output: list[int]) -> torch.Tensor:
    """log-softmax in fp32 over the vocabulary at each output token: one forward pass, no cache, no padding."""
    logits = model(torch.tensor([[*prompt, *output]])).logits[0].float()
    return torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
