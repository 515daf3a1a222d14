"""GRPO: the advantage of an answer is its reward relative to the others of its group; no value model.

The importance ratio compares the trainer's log-probabilities with those that the engine reported when it sampled, so
an answer of an older version (or of two versions, one after the other) is weighted correctly. The ratio is clipped
from above more loosely than from below (DAPO), so that rare good answers are not cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import Module

from rl_demo import policy, task
from rl_demo.rollouts import AnswerGroup

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ADVANTAGE_EPSILON = 1e-3
IGNORED = -100


class Batch(NamedTuple):
    """`tokens` [answers, prompt + answer], `targets` and `old_logprobs` [answers, answer], `advantages` [answers].

    Targets after an answer's end are IGNORED; all puzzles of a batch have the same length.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    old_logprobs: torch.Tensor
    advantages: torch.Tensor

    @classmethod
    def empty(cls, num_answers: int, num_digits: int) -> Batch:
        """Uninitialised memory, with the shapes and dtypes of a collated batch."""
        tokens = torch.empty(num_answers, 2 * num_digits + 3, dtype=torch.int64)
        targets = torch.empty(num_answers, num_digits + 1, dtype=torch.int64)
        return cls(tokens, targets, torch.empty(targets.shape), torch.empty(num_answers))

    def shard(self, rank: int, num_ranks: int) -> Batch:
        """The answers that one data-parallel rank learns from."""
        return Batch(*(tensor[rank::num_ranks] for tensor in self))

    @property
    def num_tokens(self) -> int:
        """Of all answers together."""
        return int((self.targets != IGNORED).sum())


def advantages(rewards: Sequence[float]) -> list[float]:
    """Rewards in units of their group's standard deviation, around its mean; zeros if all are equal."""
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
    return [(r - mean) / (deviation + ADVANTAGE_EPSILON) for r in rewards]


def collate(groups: Sequence[AnswerGroup]) -> Batch:
    rows, targets, old_logprobs, scores = [], [], [], []
    for group in groups:
        scores += advantages(group.rewards)
        for answer in group.answers:
            num_missing = group.puzzle.num_answer_tokens - len(answer.token_ids)
            rows.append([*group.puzzle.prompt_ids, *answer.token_ids, *[task.PAD_ID] * num_missing])
            targets.append([*answer.token_ids, *[IGNORED] * num_missing])
            old_logprobs.append([*answer.logprobs, *[0.0] * num_missing])
    return Batch(torch.tensor(rows), torch.tensor(targets), torch.tensor(old_logprobs), torch.tensor(scores))


def loss(model: Module, batch: Batch, *, num_tokens: float) -> torch.Tensor:
    """The clipped policy gradient, a sum over all tokens of all answers, divided by `num_tokens`.

    With the batch's own number it is their mean (DAPO: long answers count by their length).
    """
    ratio = (policy.logprobs(model, batch.tokens, batch.targets) - batch.old_logprobs).exp()
    advantage = batch.advantages.unsqueeze(-1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
    return -(gain * (batch.targets != IGNORED)).sum() / num_tokens
