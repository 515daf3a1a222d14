"""Whether an engine's greedy answer makes sense, by transformers: a loose check, since each library rounds otherwise.

An answer is checked by one teacher-forced forward pass: each token must have the highest probability after the tokens
before it (by induction the greedy answer), and its log-probability must be the model's, both within `TOLERANCE`.
What an updated engine must answer exactly is what the same engine answers that was started cold: see `cold.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

PROMPT = (5, 6, 7, 8, 9, 10)
NUM_TOKENS = 12
LONG_PROMPT = tuple(range(10, 210))
"""Longer than a block of the prefix cache."""
NUM_STREAMED = 450
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.3}
"""In nats, far above what rounding does and far below `FAR`. bf16: both sides round every activation to 8 bits."""
SMALL = 64
"""Answers of more tokens, and of models of more layers, may be twice as far: rounding adds up."""
FAR = 1.0
"""Answers of another version are further away than this, in nats."""


class Answer(NamedTuple):
    """The tokens of one request and the log-probability of each."""

    tokens: list[int]
    logprobs: list[float]


def joined(parts: Iterable[Answer]) -> Answer:
    """The answer that came in parts."""
    tokens, logprobs = zip(*parts, strict=True)
    return Answer(list(itertools.chain(*tokens)), list(itertools.chain(*logprobs)))


Ask = Callable[[Sequence[int], int], Answer]
"""(prompt, number of tokens) to a greedy answer that no end-of-sequence token cuts short."""


class Deviation(NamedTuple):
    """How far an answer is from a model's own: tokens that it would not choose, and the worst log-probability."""

    num_other_tokens: int
    logprob: float


def tolerance(model: Any, answer: Answer) -> float:
    is_small = max(len(answer.tokens), model.config.num_hidden_layers) <= SMALL
    return TOLERANCE[model.dtype] * (1 if is_small else 2)


@torch.no_grad()
def deviation(model: Any, prompt: Sequence[int], answer: Answer) -> Deviation:
    logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0].float()
    rows = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    tokens = torch.tensor(answer.tokens)
    own = rows.gather(1, tokens[:, None])[:, 0]
    # Within the tolerance of a tie either token is the highest.
    is_other = rows.max(dim=-1).values - own > tolerance(model, answer)
    return Deviation(int(is_other.sum()), float((own - torch.tensor(answer.logprobs)).abs().max()))


def assert_is_of(model: Any, prompt: Sequence[int], answer: Answer) -> Deviation:
    """The answer is the model's, token by token. Returns how far it is from that."""
    found = deviation(model, prompt, answer)
    assert found.num_other_tokens == 0, f"{found}: {answer}"
    assert found.logprob <= tolerance(model, answer), f"{found}: {answer}"
    return found


def assert_other(model: Any, prompt: Sequence[int], answer: Answer) -> None:
    """The answer is not at all the model's."""
    found = deviation(model, prompt, answer)
    assert found.num_other_tokens, f"the other version would answer the same: {found}"
    assert found.logprob > FAR, f"the other version would answer the same: {found}"
