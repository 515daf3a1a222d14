"""The puzzles, their rewards, and the teacher who is often wrong."""

from __future__ import annotations

import random

import pytest
from rl_demo import task
from rl_demo.task import Puzzle, answer_ids, demonstrate, draw, reward


def test_a_prompt_is_its_tokens_in_words() -> None:
    puzzle = Puzzle((4, 8, 3))
    assert puzzle.prompt == "sort 4 8 3 ="
    assert task.text(puzzle.prompt_ids) == puzzle.prompt
    assert task.text(puzzle.answer_ids) == "3 4 8 <end>"
    assert puzzle.num_answer_tokens == 4


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (answer_ids([1, 2, 2, 9]), 1.0),
        (answer_ids([1, 2, 9, 2]), 0.25),
        (answer_ids([9, 2, 2, 1]), 0.25),
        (answer_ids([0, 0, 0, 0]), 0.0),
        (answer_ids([1, 2, 2]), 0.0),
        (answer_ids([1, 2, 2, 9])[:-1], 0.0),
        ([*answer_ids([1, 2, 2, 9])[:-1], task.IDS[task.EQUALS]], 0.0),
        ([*answer_ids([1, 2, 2, 9]), task.END_ID], 0.0),
        ([], 0.0),
    ],
)
def test_reward(answer: list[int], expected: float) -> None:
    assert reward(Puzzle((2, 9, 1, 2)), answer) == expected


def test_rewards_are_between_0_and_1_and_1_only_for_the_answer() -> None:
    rng = random.Random(0)
    for _ in range(200):
        puzzle, other = draw(rng, 2, 4)
        value = reward(puzzle, answer_ids(other.digits))
        assert 0 <= value <= 1
        assert (value == 1) == (answer_ids(other.digits) == puzzle.answer_ids)


def test_equal_seeds_draw_equal_puzzles() -> None:
    assert draw(random.Random(7), 3, 5) == draw(random.Random(7), 3, 5) != draw(random.Random(8), 3, 5)


def test_the_teacher_is_right_less_than_half_of_the_time_and_always_well_formed() -> None:
    rng = random.Random(0)
    puzzles = draw(rng, 2000, 5)
    answers = [demonstrate(puzzle, rng) for puzzle in puzzles]
    assert all(len(a) == p.num_answer_tokens and a[-1] == task.END_ID for p, a in zip(puzzles, answers, strict=True))
    num_right = sum(reward(p, a) == 1 for p, a in zip(puzzles, answers, strict=True))
    assert 0.35 < num_right / len(puzzles) < 0.48


def test_the_task_in_one_line() -> None:
    line = task.describe(4)
    assert "sort 4 digits" in line
    assert "'sort 4 8 3 1 =' -> '1 3 4 8'" in line
    assert "\n" not in line
