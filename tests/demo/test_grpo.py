"""Advantages, batches, and the direction in which the loss pushes."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from rl_demo import grpo, task
from rl_demo.grpo import Batch
from rl_demo.rollouts import Answer, AnswerGroup
from rl_demo.task import Puzzle, answer_ids

PUZZLE = Puzzle((3, 1))
RIGHT, WRONG, SHORT = answer_ids([1, 3]), answer_ids([3, 1]), answer_ids([1])


def answer(tokens: list[int], logprob: float = -1.0) -> Answer:
    return Answer(tuple(tokens), (logprob,) * len(tokens), (0,) * len(tokens))


class Table(torch.nn.Module):
    """A policy whose logits at each place are free parameters, whatever comes before."""

    def __init__(self, num_places: int) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(num_places, len(task.WORDS)))

    def forward(self, input_ids: torch.Tensor, use_cache: bool, logits_to_keep: int) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[-logits_to_keep:].expand(len(input_ids), -1, -1))


def test_advantages_are_relative_to_the_group() -> None:
    assert grpo.advantages([1.0, 0.0]) == pytest.approx([1.0, -1.0], abs=0.01)
    assert grpo.advantages([0.5, 0.5, 0.5]) == [0.0, 0.0, 0.0]
    assert sum(grpo.advantages([0.1, 0.7, 0.9, 0.9])) == pytest.approx(0)


def test_a_batch_ignores_what_follows_an_early_end() -> None:
    batch = grpo.collate([AnswerGroup(PUZZLE, (answer(RIGHT), answer(SHORT)))])
    assert batch.tokens.tolist() == [[*PUZZLE.prompt_ids, *RIGHT], [*PUZZLE.prompt_ids, *SHORT, task.PAD_ID]]
    assert batch.targets.tolist() == [RIGHT, [*SHORT, grpo.IGNORED]]
    assert batch.old_logprobs.shape == (2, 3)


def test_an_empty_batch_has_the_form_of_a_collated_one() -> None:
    batch = grpo.collate([AnswerGroup(PUZZLE, (answer(RIGHT), answer(SHORT)))])
    for empty, tensor in zip(Batch.empty(2, 2), batch, strict=True):
        assert (empty.shape, empty.dtype) == (tensor.shape, tensor.dtype)


def test_the_loss_makes_better_answers_likelier() -> None:
    model, uniform = Table(3), -math.log(len(task.WORDS))
    batch = grpo.collate([AnswerGroup(PUZZLE, (answer(RIGHT, uniform), answer(WRONG, uniform)))])
    loss = grpo.loss(model, batch, num_tokens=batch.num_tokens)
    assert loss.item() == pytest.approx(0, abs=1e-6)
    loss.backward()
    assert model.logits.grad is not None
    push = -model.logits.grad
    assert push[0, RIGHT[0]] > 0 > push[0, WRONG[0]]
    assert push[1, RIGHT[1]] > 0 > push[1, WRONG[1]]
    assert push[2].abs().max() < 1e-6  # Both end alike.


def test_what_two_ranks_make_of_their_shares_is_on_average_what_one_makes_of_all() -> None:
    uniform = -math.log(len(task.WORDS))
    answers = answer(RIGHT, uniform), answer(SHORT, uniform), answer(WRONG, uniform)
    batch = grpo.collate([AnswerGroup(PUZZLE, answers)])

    def gradient(rank: int, num_ranks: int) -> torch.Tensor:
        model = Table(3)
        grpo.loss(model, batch.shard(rank, num_ranks), num_tokens=batch.num_tokens / num_ranks).backward()
        assert model.logits.grad is not None
        return model.logits.grad

    both = (gradient(0, 2) + gradient(1, 2)) / 2
    torch.testing.assert_close(both, gradient(0, 1))


@pytest.mark.parametrize(("moved", "is_pushed"), [(1.0, False), (-1.0, True)])
def test_a_policy_that_has_moved_far_enough_is_not_pushed_on(moved: float, is_pushed: bool) -> None:
    """`moved`: by how much the right answer's log-probabilities rose, and the wrong one's fell, since the rollouts."""
    model, uniform = Table(3), -math.log(len(task.WORDS))
    group = AnswerGroup(PUZZLE, (answer(RIGHT, uniform - moved), answer(WRONG, uniform + moved)))
    grpo.loss(model, grpo.collate([group]), num_tokens=6).backward()
    assert model.logits.grad is not None
    assert (float(model.logits.grad[:2].abs().max()) > 1e-3) == is_pushed
