"""GRPO: the advantage of an answer is its reward against the others of its group; no value model.

The importance ratio compares the trainer's log-probabilities with those that the engine reported when it sampled, so
an answer that an older version gave (or two versions, one after the other) is weighted as what it is. The ratio is
clipped from above more loosely than from below (DAPO), which keeps rare good answers from being cut off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from weightcast.demo import task
from weightcast.demo.task import Puzzle

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ADVANTAGE_EPSILON = 1e-3
IGNORED = -100


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer: its tokens, the engine's log-probability of each, and the version each came from."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The answers to one puzzle."""

    puzzle: Puzzle
    answers: tuple[Answer, ...]

    @property
    def rewards(self) -> list[float]:
        return [task.reward(self.puzzle, answer.token_ids) for answer in self.answers]


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` [answers, prompt + answer], `targets` and `old_logprobs` [answers, answer], `advantages` [answers].

    Targets after an answer's end are IGNORED; all puzzles of a batch have the same length.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards in units of their group's standard deviation, around its mean; zeros if all are equal."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (deviation + ADVANTAGE_EPSILON) for r in rewards]


def collate(groups: Sequence[Group]) -> Batch:
    rows, targets, old, scores = [], [], [], []
    for group in groups:
        width = group.puzzle.num_answer_tokens
        for answer, score in zip(group.answers, advantages(group.rewards), strict=True):
            missing = width - len(answer.token_ids)
            rows.append([*group.puzzle.prompt_ids, *answer.token_ids, *[task.PAD_ID] * missing])
            targets.append([*answer.token_ids, *[IGNORED] * missing])
            old.append([*answer.logprobs, *[0.0] * missing])
            scores.append(score)
    return Batch(torch.tensor(rows), torch.tensor(targets), torch.tensor(old), torch.tensor(scores))


def num_tokens(batch: Batch) -> int:
    """Of all answers together."""
    return int((batch.targets != IGNORED).sum())


def loss(model: torch.nn.Module, batch: Batch, *, num_tokens: float) -> torch.Tensor:
    """The clipped policy gradient, a sum over all tokens of all answers, divided by `num_tokens`.

    With the batch's own number it is their mean (DAPO: long answers count by their length).
    """
    mask = batch.targets != IGNORED
    width = batch.targets.shape[1]
    logits = model(input_ids=batch.tokens[:, :-1], use_cache=False, logits_to_keep=width).logits.float()
    chosen = batch.targets.clamp(min=0).unsqueeze(-1)
    logprobs = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    ratio = (logprobs - batch.old_logprobs).exp()
    score = batch.advantages.unsqueeze(-1)
    gain = torch.minimum(ratio * score, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * score)
    return -(gain * mask).sum() / num_tokens
