"""What an updated SGLang must hold and answer: to the bit what one does that started cold from the same weights.

The cold one is started as the updated one was, without weightcast. Both compute a request alone and without anything
cached: in another batch, or from a cached prefix, the same weights give other roundings.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from real_vllm.oracle import NUM_TOKENS, PROMPT, Answer

from real_sglang.servers import Server, Setup

LOOSE = 1e-2
"""In nats: further from each other are no two computations of one version in float32, on whatever CPU and in whatever
batches; other versions are more than 1 away."""


def assert_serves(server: Server, seed: int, *, prompt: Sequence[int] = PROMPT, num_tokens: int = NUM_TOKENS) -> None:
    """The server has the weights of that seed on all ranks, and answers with them."""
    cold = server.cold(seed)
    assert server.checksums() == cold.checksums()
    assert server.ask(prompt, num_tokens) == cold.ask(prompt, num_tokens)


def assert_is_of(server: Server, seed: int, prompt: Sequence[int], answer: Answer) -> None:
    """So the server would answer with the weights of that seed."""
    assert answer == server.cold(seed).ask(prompt, len(answer.tokens))


def assert_went_on(server: Server, seed: int, prompt: Sequence[int], answer: Answer, start: int) -> None:
    """From `start` on the answer is what the server makes of those weights, the prompt and the answer so far.

    SGLang computes a request that goes on anew, with the probabilities of all tokens behind its prompt, in one matrix.
    """
    rest = Answer(answer.tokens[start:], answer.logprobs[start:])
    so_far = [*prompt, *answer.tokens[:start]]
    again = server.cold(seed).answer(so_far, len(rest.tokens), logprob_start_len=len(prompt))
    assert rest == again.answer


def assert_drops_caches(server: Server, publish: Callable[[int], Any], prompt: Sequence[int]) -> None:
    """Nothing that is computed with one version is used with the next."""
    publish(0)
    num_cached = [server.answer(prompt, 1, extra_key="shared").num_cached for _ in range(2)]
    assert num_cached[0] == 0 < num_cached[1], "the prompt is not cached at all"
    publish(1)
    answer = server.answer(prompt, NUM_TOKENS, extra_key="shared")
    assert answer.num_cached == 0
    assert_is_of(server, 1, prompt, answer.answer)


# --- cold servers ---


class ColdServers:
    """Those of a session, each started when it is first asked for; they end with this.

    `checkpoint(family, seed, dtype)` is the folder of a version.
    """

    def __init__(self, checkpoint: Callable[[str, int, torch.dtype], Path]) -> None:
        self._checkpoint = checkpoint
        self._running = contextlib.ExitStack()
        self._started = functools.cache(self._start)

    def of(self, setup: Setup, weights: int | Path) -> Server:
        """The cold server with the weights of a seed, or of a checkpoint's folder, for a server of `setup`."""
        return self._started(Setup(setup.family, setup.dtype, setup.tp, plugin=False), weights)

    def _start(self, setup: Setup, weights: int | Path) -> Server:
        folder = weights if isinstance(weights, Path) else self._checkpoint(setup.family, weights, setup.dtype)
        return self._running.enter_context(_ColdServer(setup, folder))

    def close(self) -> None:
        self._running.close()


class _ColdServer(Server):
    """What it was asked once it is not asked again."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        super().__init__(setup, folder)
        self._ask = functools.cache(super().ask)
        self.checksums = functools.cache(super().checksums)  # type: ignore[method-assign]

    def ask(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        return self._ask(tuple(prompt), num_tokens)

    def close(self) -> None:
        """End it at once: SGLang looks for a SIGTERM every 5 seconds only."""
        self.kill()
        super().close()
