"""The demo's task: sort digits in ascending order, with a verifiable reward.

A prompt reads `sort 4 8 3 1 =`, the right answer `1 3 4 8 <end>`. Words are tokens. Everything is drawn from the
`random.Random` that is passed in: equal seeds give equal prompts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

PAD, END, SORT, EQUALS = "<pad>", "<end>", "sort", "="
WORDS = (PAD, END, SORT, EQUALS, *"0123456789")
"""The whole vocabulary; a word's index is its token id."""

IDS = {word: index for index, word in enumerate(WORDS)}
PAD_ID, END_ID = IDS[PAD], IDS[END]


class Puzzle(NamedTuple):
    """Digits to sort."""

    digits: tuple[int, ...]

    @property
    def prompt_ids(self) -> list[int]:
        return [IDS[SORT], *(IDS[str(digit)] for digit in self.digits), IDS[EQUALS]]

    @property
    def prompt(self) -> str:
        return text(self.prompt_ids)

    @property
    def answer_ids(self) -> list[int]:
        return answer_ids(sorted(self.digits))

    @property
    def num_answer_tokens(self) -> int:
        return len(self.digits) + 1


def draw(rng: random.Random, num_puzzles: int, num_digits: int) -> list[Puzzle]:
    return [Puzzle(tuple(rng.randrange(10) for _ in range(num_digits))) for _ in range(num_puzzles)]


def describe(num_digits: int) -> str:
    """The task in one line, for at most ten digits."""
    puzzle = Puzzle((4, 8, 3, 1, 7, 0, 9, 2, 6, 5)[:num_digits])
    answer = text(puzzle.answer_ids[:-1])
    return (
        f"the task: sort {num_digits} digits in ascending order, {puzzle.prompt!r} -> {answer!r}; "
        "the reward is half the share of right digits, and half for all of them"
    )


def answer_ids(digits: Sequence[int]) -> list[int]:
    return [*(IDS[str(digit)] for digit in digits), END_ID]


def demonstrate(puzzle: Puzzle, rng: random.Random) -> list[int]:
    """The answer of an unreliable teacher: right, in descending order, or unsorted.

    A model that imitates the teacher knows the form of an answer; which answer is right is left to the reward.
    """
    candidates = sorted(puzzle.digits), sorted(puzzle.digits, reverse=True), puzzle.digits
    return answer_ids(rng.choices(candidates, weights=(0.4, 0.3, 0.3))[0])


def reward(puzzle: Puzzle, token_ids: Sequence[int]) -> float:
    """0 for an answer of the wrong length; else half the share of right digits, plus 0.5 if all are right."""
    expected = puzzle.answer_ids
    if len(token_ids) != len(expected) or token_ids[-1] != END_ID:
        return 0.0
    share = sum(a == b for a, b in zip(token_ids[:-1], expected[:-1], strict=True)) / len(puzzle.digits)
    return 0.5 * share + 0.5 * (share == 1)


def text(token_ids: Sequence[int]) -> str:
    """Tokens as words, the special ones too."""
    return " ".join(WORDS[token] for token in token_ids)
