"""What an updated vLLM is held against: the same vLLM, started cold from the same weights, bit for bit.

Another library's arithmetic is no oracle: it adds in another order, and what that does to the result depends on the
CPU. Here both sides run the same code on the same machine, so tokens and log-probabilities must be equal.
transformers' model only checks, within a loose bound, that the answers make sense and that the weights of the other
seed would give others.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from real_vllm.models import model_of
from real_vllm.oracle import LONG_PROMPT, NUM_STREAMED, NUM_TOKENS, PROMPT, Answer, assert_is_of, assert_other
from real_vllm.servers import Server, Setup


class Request(NamedTuple):
    """A greedy request, asked alone. `is_cached`: the prefix cache holds its prompt, else the cache is empty."""

    prompt: tuple[int, ...]
    num_tokens: int
    dp_rank: int = 0
    is_cached: bool = False


def often_asked(setup: Setup) -> Iterator[Request]:
    """What is asked of each server that starts. A shorter answer is the start of a longer one."""
    for dp_rank in range(setup.dp):
        yield Request(PROMPT, NUM_STREAMED if setup.dp == 1 else NUM_TOKENS, dp_rank)
        for is_cached in (False, True):
            yield Request(LONG_PROMPT, NUM_TOKENS, dp_rank, is_cached)


class Cold:
    """Servers that started cold and took no update since, by setup and seed. Their answers are kept for the session.

    They know nothing of weightcast. Servers of one setup run at a time. `checkpoint(family, seed, dtype)` writes what
    they start from.
    """

    def __init__(self, checkpoint: Callable[[str, int, torch.dtype], Path]) -> None:
        self._checkpoint = checkpoint
        self._servers: dict[tuple[Setup, int], Server] = {}
        self._answers: dict[tuple[Setup, int], dict[Request, Answer]] = {}

    def prepare(self, setup: Setup, seed: int) -> None:
        """Start the server, which comes up while another does, if what is often asked of it is not known yet.

        Servers of several data-parallel engines take much memory: such a one is asked and ended before this returns.
        """
        if self.knows(setup, seed):
            return
        self._launch(setup, seed)
        if _oracle(setup).dp > 1:
            self.answer(setup, seed, Request(PROMPT, NUM_TOKENS))
            self.close()

    def _launch(self, setup: Setup, seed: int) -> None:
        key = _oracle(setup), seed
        if key in self._servers:
            return
        for other in [other for other in self._servers if other[0] != key[0]]:
            self._servers.pop(other).close()
        self._servers[key] = Server(key[0], self._checkpoint(setup.family, seed, setup.dtype))
        self._servers[key].launch()

    def knows(self, setup: Setup, seed: int) -> bool:
        """Whether what is often asked has been answered."""
        return (_oracle(setup), seed) in self._answers

    def note(self, server: Server, seed: int) -> None:
        """Keep what a server answers that has just started from the weights of that seed."""
        oracle = _oracle(server.setup)
        answers = self._answers.setdefault((oracle, seed), {})
        for request in often_asked(oracle):
            _ask(server, answers, request)

    def answer(self, setup: Setup, seed: int, request: Request) -> Answer:
        """What such a server answers."""
        key = _oracle(setup), seed
        if key[0].dp == 1:
            request = request._replace(dp_rank=0)
        for known, answer in self._answers.get(key, {}).items():
            if known.num_tokens >= request.num_tokens and known._replace(num_tokens=request.num_tokens) == request:
                return Answer(answer.tokens[: request.num_tokens], answer.logprobs[: request.num_tokens])
        self._launch(setup, seed)
        server = self._servers[key].__enter__()  # once it is up
        if key not in self._answers:
            self.note(server, seed)
        _ask(server, self._answers[key], request)
        return self._answers[key][request]

    def of_seeds(self, setup: Setup) -> list[Answer]:
        """The answers to `PROMPT` of seeds 0 and 1."""
        return [self.answer(setup, seed, Request(PROMPT, NUM_TOKENS)) for seed in (0, 1)]

    def close(self) -> None:
        """End its servers. Idempotent."""
        with contextlib.ExitStack() as stack:
            for server in self._servers.values():
                stack.callback(server.close)
        self._servers.clear()


def _oracle(setup: Setup) -> Setup:
    """The same without weightcast. Data-parallel engines of a dense model each compute what one alone does."""
    dp = setup.dp if setup.family.endswith("moe") else 1
    return dataclasses.replace(setup, backend=None, endpoints=False, token="", dp=dp)


def _ask(server: Server, answers: dict[Request, Answer], request: Request) -> None:
    server.post("/reset_prefix_cache").raise_for_status()
    if request.is_cached:
        server.ask(request.prompt, 1, dp_rank=request.dp_rank)
    answers[request] = server.ask(request.prompt, request.num_tokens, dp_rank=request.dp_rank)


def assert_serves(server: Server, seed: int, prompt: Sequence[int] = PROMPT, *, is_cached: bool = False) -> None:
    """Every data-parallel engine of the server answers as one that started cold from the weights of that seed."""
    for dp_rank, ask in enumerate(server.asks()):
        answer = ask(prompt, NUM_TOKENS)
        assert_answered(server, seed, prompt, answer, dp_rank=dp_rank, is_cached=is_cached)
        assert_other(model_of(server.setup.family, 1 - seed, server.setup.dtype), prompt, answer)


def assert_answered(
    server: Server, seed: int, prompt: Sequence[int], answer: Answer, *, dp_rank: int = 0, is_cached: bool = False
) -> None:
    """The server's answer is that of one that started cold from the weights of that seed."""
    setup = server.setup
    assert server.cold is not None, "the server was started without `cold`"
    expected = server.cold.answer(setup, seed, Request(tuple(prompt), len(answer.tokens), dp_rank, is_cached))
    assert answer == expected, f"seed {seed}, engine {dp_rank}"
    assert_is_of(model_of(setup.family, seed, setup.dtype), prompt, answer)
