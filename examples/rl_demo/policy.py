"""The demo's model and tokenizer, a small Qwen3 with one token for each word; and whether an engine serves that model.

For this check the model continues each prompt with transformers' `generate`, alone and unpadded; the engine must choose
the same tokens with the same log-probabilities. The same comparison with the weights of the warm start must fail: a
check that passes with both could not tell one version from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rl_demo import task
from rl_demo.messages import Checked
from rl_demo.rollouts import Answer, Rollouts
from rl_demo.task import Puzzle

MAX_POSITIONS = 64
TOLERANCE = 1 / 64
"""Of a log-probability: the spacing of bf16 logits between 2 and 4. The same computation on the same machine gives
equal values; rotary frequencies rounded to bf16, for example, are found at this tolerance."""


def make_model(seed: int, hidden_size: int, num_layers: int) -> Qwen3ForCausalLM:
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
    Module.eval(model)
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


def logprobs(model: Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability of each of `targets` [rows, answer], which are the last of `tokens` [rows, prompt + answer].

    Targets below 0 stand for padding; their values mean nothing.
    """
    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=targets.shape[1]).logits.float()
    found: torch.Tensor = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found


@torch.inference_mode()
def check(
    url: str, rollouts: Rollouts, model: Module, control: Module, puzzles: Sequence[Puzzle], version: int
) -> Checked:
    """Compare an engine's greedy answers with `model`, which is `version`, and with `control`, another version."""
    problems, difference, control_difference, num_tokens = [], 0.0, 0.0, 0
    for puzzle in puzzles:
        expected, answer = generate(model, puzzle, version), rollouts.greedy(url, puzzle)
        num_tokens += len(answer.token_ids)
        problems += differences(puzzle, expected, answer)
        if answer.token_ids == expected.token_ids:
            difference = max(difference, _distance(expected.logprobs, answer.logprobs))
        tokens, targets = torch.tensor([[*puzzle.prompt_ids, *answer.token_ids]]), torch.tensor([answer.token_ids])
        control_logprobs = logprobs(control, tokens, targets)[0].tolist()
        control_difference = max(control_difference, _distance(control_logprobs, answer.logprobs))
    if control_difference <= TOLERANCE:
        problems.append(f"the first version differs by {control_difference:.4f} only: nothing is proven")
    counts = len(puzzles), num_tokens
    return Checked(url, version, *counts, difference, control_difference, TOLERANCE, tuple(problems))


def generate(model: Module, puzzle: Puzzle, version: int) -> Answer:
    """The model's own greedy answer."""
    prompt = torch.tensor([puzzle.prompt_ids])
    # transformers types `generate` for a mixin, not for the models that have it.
    output: Any = cast("Any", model).generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=puzzle.num_answer_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=task.PAD_ID,
    )
    tokens = output.sequences[0, prompt.shape[1] :]
    chosen = torch.cat(output.logits).float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return Answer(tuple(tokens.tolist()), tuple(chosen.tolist()), (version,) * len(tokens))


def differences(puzzle: Puzzle, expected: Answer, answer: Answer) -> list[str]:
    """How an engine's answer differs from the expected one; empty if they are equal."""
    problems = []
    [version] = set(expected.versions)
    if set(answer.versions) != {version}:
        problems.append(f"{puzzle.prompt!r} was answered by versions {sorted(set(answer.versions))}, not {version}")
    if answer.token_ids != expected.token_ids:
        problems.append(
            f"{puzzle.prompt!r} was answered with {task.text(answer.token_ids)!r}, "
            f"the trainer's model says {task.text(expected.token_ids)!r}"
        )
    elif (distance := _distance(expected.logprobs, answer.logprobs)) > TOLERANCE:
        problems.append(f"a log-probability of the answer to {puzzle.prompt!r} differs by {distance:.4f}")
    return problems


def _distance(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference; 9999 for one that is not finite, which JSON can't hold."""
    return (torch.tensor(a) - torch.tensor(b)).abs().nan_to_num(9999.0, 9999.0).max().item()
