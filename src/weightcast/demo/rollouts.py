"""Completions from the engines over HTTP, asked for in small requests that are spread over all of them.

Invariants: nothing waits without a deadline; an answer keeps the version and the log-probability of each token.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import httpx

from weightcast.demo.grpo import Answer, Group
from weightcast.demo.task import Puzzle
from weightcast.errors import ControlError, PeerDiedError, PeerTimeoutError

REQUESTS_PER_ENGINE = 2
TIMEOUT_SECONDS = 60.0
BEFORE_ANY_UPDATE = -1
"""The version of a token that an engine made with the weights it was started with."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """Answers that were asked for."""

    requests: Sequence[Future[list[Group]]]

    def result(self) -> list[Group]:
        """Wait for all of them. Raises PeerError, naming the engine, for the first that failed."""
        return [group for request in self.requests for group in request.result()]


class Rollouts:
    """Asks `urls` for answers, REQUESTS_PER_ENGINE requests at a time from each. Close it, or use it in a `with`."""

    def __init__(self, urls: Sequence[str], *, prompts_per_request: int, seed: int) -> None:
        self._prompts_per_request = prompts_per_request
        self._seeds = itertools.count(seed << 32, 1 << 12)
        self._http = httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False)
        self._pools = {
            url: ThreadPoolExecutor(REQUESTS_PER_ENGINE, thread_name_prefix=f"rollouts-{index}")
            for index, url in enumerate(urls)
        }

    def begin(self, puzzles: Sequence[Puzzle], num_answers: int) -> Pending:
        """Ask for `num_answers` samples at temperature 1 for each puzzle; returns at once."""
        size, engines = self._prompts_per_request, itertools.cycle(self._pools.items())
        requests = []
        for first in range(0, len(puzzles), size):
            url, pool = next(engines)
            chunk, seed = puzzles[first : first + size], next(self._seeds)
            requests.append(pool.submit(self._ask, url, chunk, num_answers, temperature=1.0, seed=seed))
        return Pending(requests)

    def greedy(self, url: str, puzzle: Puzzle) -> Answer:
        """One engine's greedy answer to one puzzle, in a request of its own. Raises PeerError."""
        [group] = self._ask(url, [puzzle], 1, temperature=0.0, seed=0)
        return group.answers[0]

    def close(self) -> None:
        """Drop what was not asked yet, wait for the rest. Idempotent."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self._http.close()

    def __enter__(self) -> Rollouts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(
        self, url: str, puzzles: Sequence[Puzzle], num_answers: int, *, temperature: float, seed: int
    ) -> list[Group]:
        body = {
            "prompt": [puzzle.prompt_ids for puzzle in puzzles],
            "n": num_answers,
            "max_tokens": max(puzzle.num_answer_tokens for puzzle in puzzles),
            "temperature": temperature,
            "logprobs": 0,
            "seed": seed,
        }
        answers = [_answer(choice) for choice in _post(self._http, url, body)["choices"]]
        return [
            Group(puzzle, tuple(answers[i * num_answers : (i + 1) * num_answers])) for i, puzzle in enumerate(puzzles)
        ]


def _post(http: httpx.Client, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    try:
        reply = http.post(f"{url}/v1/completions", json=body)
    except httpx.TimeoutException as exc:
        raise PeerTimeoutError(f"{url} did not complete within {TIMEOUT_SECONDS:.0f} s", peer=url) from exc
    except httpx.HTTPError as exc:
        raise PeerDiedError(f"{url} can't be reached for a completion: {exc}", peer=url) from exc
    if reply.status_code != 200:
        raise ControlError(f"{url} answered {reply.status_code} to a completion: {reply.text[:500]}", peer=url)
    return dict(reply.json())


def _answer(choice: Mapping[str, Any]) -> Answer:
    versions = [
        BEFORE_ANY_UPDATE if span["version"] == "default" else int(span["version"])
        for span in choice["weight_versions"]
        for _ in range(span["start"], span["end"])
    ]
    return Answer(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), tuple(versions))
