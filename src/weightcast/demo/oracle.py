"""Does an engine serve exactly the trainer's model? Asked of transformers itself, not of any code of weightcast.

The trainer's model continues each prompt with `generate`, alone and unpadded; every engine must choose the same tokens
with the same log-probabilities. The same comparison with the weights that the run began with must fail: else it could
not tell one version from another, and would prove nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from transformers import Qwen3ForCausalLM

from weightcast.demo import task
from weightcast.demo.events import Checked
from weightcast.demo.grpo import Answer
from weightcast.demo.task import Puzzle

TOLERANCE = 1 / 64
"""Of a log-probability: the spacing of bf16 logits between 2 and 4. The same computation on the same machine gives
equal values; rotary frequencies rounded to bf16, say, are found at this tolerance."""

_CAP = 9999.0

Ask = Callable[[Puzzle], Answer]


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """Greedy tokens and the log-probability of each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


def snapshot(model: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """A copy of all weights."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def with_weights(model: Qwen3ForCausalLM, weights: Mapping[str, torch.Tensor]) -> Qwen3ForCausalLM:
    """Another model of the same form, with these weights."""
    other = copy.deepcopy(model)
    other.load_state_dict(weights)
    return other


@torch.inference_mode()
def continue_greedily(model: Qwen3ForCausalLM, puzzle: Puzzle) -> Continuation:
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
    logprobs = torch.cat(output.logits).float().log_softmax(-1)
    return Continuation(tuple(tokens.tolist()), tuple(logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).tolist()))


@torch.inference_mode()
def score(model: Qwen3ForCausalLM, puzzle: Puzzle, token_ids: Sequence[int]) -> list[float]:
    """The log-probabilities that `model` gives to these tokens after the prompt."""
    tokens = torch.tensor([[*puzzle.prompt_ids, *token_ids]])
    logits = model(input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=len(token_ids)).logits[0].float()
    chosen = torch.tensor(token_ids).unsqueeze(-1)
    return list(logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).tolist())


def check(
    engine: str, ask: Ask, model: Qwen3ForCausalLM, control: Qwen3ForCausalLM, puzzles: Sequence[Puzzle], version: int
) -> Checked:
    """Compare one engine with `model`, which is `version`, and with `control`, which is not."""
    problems, largest, control_largest, num_tokens = [], 0.0, 0.0, 0
    for puzzle in puzzles:
        expected, answer = continue_greedily(model, puzzle), ask(puzzle)
        num_tokens += len(answer.token_ids)
        problems += differences(puzzle, expected, answer, version)
        if answer.token_ids == expected.token_ids:
            largest = max(largest, _distance(expected.logprobs, answer.logprobs))
        control_largest = max(control_largest, _distance(score(control, puzzle, answer.token_ids), answer.logprobs))
    if control_largest <= TOLERANCE:
        problems.append(f"the first version differs by {control_largest:.4f} only: nothing is proven")
    return Checked(
        engine=engine,
        version=version,
        num_prompts=len(puzzles),
        num_tokens=num_tokens,
        max_difference=largest,
        control_difference=control_largest,
        tolerance=TOLERANCE,
        problems=tuple(problems),
    )


def differences(puzzle: Puzzle, expected: Continuation, answer: Answer, version: int) -> list[str]:
    """In which ways an answer is not the model's own; empty if it is."""
    problems = []
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
    # Capped, and so for a NaN, which no comparison would find and JSON can't hold.
    return max(min(abs(x - y), _CAP) if x == x and y == y else _CAP for x, y in zip(a, b, strict=True))
