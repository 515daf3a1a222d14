"""The demo's task: sort digits in ascending order, with a reward that a function can verify.

A prompt reads `sort 4 8 3 1 =`, the right answer `1 3 4 8 <end>`. Words are tokens. Everything is drawn from the
`random.Random` that is passed in: equal seeds give equal prompts.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

PAD, END, SORT, EQUALS = "<pad>", "<end>", "sort", "="
WORDS = (PAD, END, SORT, EQUALS, *"0123456789")
"""The whole vocabulary; a word's index is its token id."""

IDS = {word: index for index, word in enumerate(WORDS)}
PAD_ID, END_ID = IDS[PAD], IDS[END]

DEMONSTRATIONS_RIGHT = 0.4
DEMONSTRATIONS_DESCENDING = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class Puzzle:
    """Digits to sort."""

    digits: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return f"{SORT} {_join(self.digits)} {EQUALS}"

    @property
    def prompt_ids(self) -> list[int]:
        return [IDS[word] for word in self.prompt.split()]

    @property
    def answer_ids(self) -> list[int]:
        return answer_ids(sorted(self.digits))

    @property
    def num_answer_tokens(self) -> int:
        return len(self.digits) + 1


def draw(rng: random.Random, num_digits: int) -> Puzzle:
    return Puzzle(tuple(rng.randrange(10) for _ in range(num_digits)))


def demonstrate(puzzle: Puzzle, rng: random.Random) -> list[int]:
    """What an unreliable teacher answers: right, in descending order, or unsorted.

    A model that imitates it knows how to answer but not which answer is wanted: that is left for the reward to teach.
    """
    choice = rng.random()
    if choice < DEMONSTRATIONS_RIGHT:
        return puzzle.answer_ids
    if choice < DEMONSTRATIONS_RIGHT + DEMONSTRATIONS_DESCENDING:
        return answer_ids(sorted(puzzle.digits, reverse=True))
    return answer_ids(puzzle.digits)


def reward(puzzle: Puzzle, token_ids: Sequence[int]) -> float:
    """0 for an answer that has not the right length; else half the share of right digits, and 0.5 if all are right."""
    expected = puzzle.answer_ids
    if len(token_ids) != len(expected) or token_ids[-1] != END_ID:
        return 0.0
    num_right = sum(a == b for a, b in zip(token_ids[:-1], expected[:-1], strict=True))
    num_digits = len(puzzle.digits)
    return 0.5 * num_right / num_digits + 0.5 * (num_right == num_digits)


def text(token_ids: Sequence[int]) -> str:
    """Tokens as words, the special ones too."""
    return " ".join(WORDS[token] for token in token_ids)


def answer_ids(digits: Sequence[int]) -> list[int]:
    return [IDS[word] for word in (*_join(digits).split(), END)]


def _join(digits: Sequence[int]) -> str:
    return " ".join(map(str, digits))
