"""Rollouts: completions from the engines over HTTP, in small requests that are spread over all engines.

Invariants: every request has a deadline; an answer keeps the version and the log-probability of each of its tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import msgspec

from rl_demo import task
from rl_demo.task import Puzzle
from weightcast.control.client import HttpRoutes

REQUESTS_PER_ENGINE = 2
TIMEOUT_SECONDS = 60.0
BEFORE_ANY_UPDATE = -1
"""The version of a token that an engine sampled with the weights it was started with."""


class Answer(NamedTuple):
    """One sampled answer: its tokens, the engine's log-probability of each, and the version each came from."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]


class AnswerGroup(NamedTuple):
    """The answers to one puzzle."""

    puzzle: Puzzle
    answers: tuple[Answer, ...]

    @property
    def rewards(self) -> list[float]:
        return [task.reward(self.puzzle, answer.token_ids) for answer in self.answers]


class Rollouts:
    """Requests answers from the engines at `urls`, REQUESTS_PER_ENGINE requests at a time from each."""

    def __init__(self, urls: Sequence[str], *, prompts_per_request: int, seed: int) -> None:
        self._prompts_per_request = prompts_per_request
        self._seeds = itertools.count(seed << 32, 1 << 12)
        self._routes = {url: HttpRoutes(url, token=None, timeout_seconds=TIMEOUT_SECONDS) for url in urls}
        self._pools = {url: ThreadPoolExecutor(REQUESTS_PER_ENGINE) for url in urls}

    def request(self, puzzles: Sequence[Puzzle], num_answers: int) -> list[Future[list[AnswerGroup]]]:
        """Request `num_answers` samples at temperature 1 for each puzzle, without waiting for them: see `wait`."""
        requests, engines = [], itertools.cycle(self._pools.items())
        for first in range(0, len(puzzles), self._prompts_per_request):
            url, pool = next(engines)
            chunk = puzzles[first : first + self._prompts_per_request]
            requests.append(pool.submit(self._post, url, chunk, num_answers, 1.0, next(self._seeds)))
        return requests

    def greedy(self, url: str, puzzle: Puzzle) -> Answer:
        """One engine's greedy answer to one puzzle, in a request of its own. Raises PeerError."""
        return self._post(url, [puzzle], 1, 0.0, 0)[0].answers[0]

    def close(self) -> None:
        """Cancel the requests that were not sent yet, wait for the others. Idempotent."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)
        for routes in self._routes.values():
            routes.close()

    def _post(
        self, url: str, puzzles: Sequence[Puzzle], num_answers: int, temperature: float, seed: int
    ) -> list[AnswerGroup]:
        prompts, max_tokens = [puzzle.prompt_ids for puzzle in puzzles], puzzles[0].num_answer_tokens
        sampling = {"n": num_answers, "temperature": temperature, "logprobs": 0, "seed": seed}
        body = {"prompt": prompts, "max_tokens": max_tokens, **sampling}
        reply = msgspec.json.decode(self._routes[url].post("/v1/completions", body))
        answers = map(_answer, reply["choices"])
        return [AnswerGroup(puzzle, tuple(itertools.islice(answers, num_answers))) for puzzle in puzzles]


def wait(requests: Sequence[Future[list[AnswerGroup]]]) -> list[AnswerGroup]:
    """The answers, in the order of the puzzles. Raises PeerError, naming the engine, for the first that failed."""
    return [group for request in requests for group in request.result()]


def _answer(choice: Mapping[str, Any]) -> Answer:
    versions = [
        BEFORE_ANY_UPDATE if span["version"] == "default" else int(span["version"])
        for span in choice["weight_versions"]
        for _ in range(span["start"], span["end"])
    ]
    return Answer(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), tuple(versions))
