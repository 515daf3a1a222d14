"""Checks that an engine serves exactly the trainer's model, against transformers and not any code of weightcast.

The trainer's model continues each prompt with `generate`, alone and unpadded; the engine must choose the same tokens
with the same log-probabilities. The same comparison with the weights of the warm start must fail: a check that passes
with both could not tell one version from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import Qwen3ForCausalLM

from weightcast.demo import policy, task
from weightcast.demo.events import Checked
from weightcast.demo.rollouts import Answer
from weightcast.demo.task import Puzzle

TOLERANCE = 1 / 64
"""Of a log-probability: the spacing of bf16 logits between 2 and 4. The same computation on the same machine gives
equal values; rotary frequencies rounded to bf16, for example, are found at this tolerance."""

_LARGEST = 9999.0


@torch.inference_mode()
def check(
    engine: str,
    ask: Callable[[Puzzle], Answer],
    model: Qwen3ForCausalLM,
    control: Qwen3ForCausalLM,
    puzzles: Sequence[Puzzle],
    version: int,
) -> Checked:
    """Compare an engine's greedy answers with `model`, which is `version`, and with `control`, another version."""
    problems, difference, control_difference, num_tokens = [], 0.0, 0.0, 0
    for puzzle in puzzles:
        expected, answer = generate(model, puzzle, version), ask(puzzle)
        num_tokens += len(answer.token_ids)
        problems += differences(puzzle, expected, answer)
        if answer.token_ids == expected.token_ids:
            difference = max(difference, _distance(expected.logprobs, answer.logprobs))
        tokens, targets = torch.tensor([[*puzzle.prompt_ids, *answer.token_ids]]), torch.tensor([answer.token_ids])
        control_logprobs = policy.logprobs(control, tokens, targets)[0].tolist()
        control_difference = max(control_difference, _distance(control_logprobs, answer.logprobs))
    if control_difference <= TOLERANCE:
        problems.append(f"the first version differs by {control_difference:.4f} only: nothing is proven")
    return Checked(
        engine=engine,
        version=version,
        num_prompts=len(puzzles),
        num_tokens=num_tokens,
        max_difference=difference,
        control_difference=control_difference,
        tolerance=TOLERANCE,
        problems=tuple(problems),
    )


def generate(model: Qwen3ForCausalLM, puzzle: Puzzle, version: int) -> Answer:
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
    logprobs = torch.cat(output.logits).float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return Answer(tuple(tokens.tolist()), tuple(logprobs.tolist()), (version,) * len(tokens))


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
    """The largest difference. A NaN counts as _LARGEST: `max` would ignore it, and JSON can't hold it."""
    return max(min(abs(x - y), _LARGEST) if x == x and y == y else _LARGEST for x, y in zip(a, b, strict=True))
