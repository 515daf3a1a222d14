"""What is asked of a generator and what it answers: parameters, one row per completion, and the finished records.

Invariants: a row's spans are contiguous and cover exactly its output tokens; a request is done when its future is,
and nothing is appended to the rows of a done request.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

import torch

from weightcast.engines.transformers.text import TextCursor, Tokenizer
from weightcast.format.manifest import WeightVersion

FinishReason = Literal["stop", "length", "abort"]
MAX_TOP_LOGPROBS = 20
MAX_COMPLETIONS = 4096
_UNIFORMS_PER_DRAW = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt, in OpenAI's words. Raises ValueError for anything that makes no sense.

    `temperature` 0 is greedy. `logprobs` is None for none, or how many of the likeliest tokens to report beside the
    chosen one. Completion i of a prompt is drawn with `seed + i`. `ignore_eos` ends at `max_tokens` or a stop only.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 16
    logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require("n", 1 <= self.n <= MAX_COMPLETIONS, self.n, f"1 to {MAX_COMPLETIONS}")
        _require("temperature", 0 <= self.temperature <= 100, self.temperature, "0 to 100")
        _require("top_p", 0 < self.top_p <= 1, self.top_p, "above 0 and at most 1")
        _require("max_tokens", self.max_tokens >= 1, self.max_tokens, "at least 1")
        _require("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS, self.logprobs, "0 to 20")
        _require("seed", self.seed is None or -(1 << 63) <= self.seed < 1 << 63, self.seed, "a 64-bit integer")
        _require("stop", all(self.stop), self.stop, "strings that are not empty")


def _require(name: str, holds: bool, value: object, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value}; it must be {wanted}")


@dataclasses.dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start <= i < end` came from this version; before any update, run is empty and version None."""

    run: str
    version: int | None
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """log-softmax in fp32 of the raw logits (no temperature, no top_p): of the chosen token, and of the likeliest."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """A finished continuation. `token_ids` includes the token that stopped it, `text` neither it nor a stop string."""

    index: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    weight_versions: tuple[VersionSpan, ...]
    logprobs: tuple[TokenLogprobs, ...] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to a row: at most one token, the text that became final, and how the row ended, if it did."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    weight_version: WeightVersion | None
    logprobs: tuple[TokenLogprobs, ...] | None


class Request:
    """Prompts with their rows, `sampling.n` for each prompt, in the order of the prompts.

    `future` gives the list of Completions. Cancel it to give the rows back; it fails with EngineTornError or
    ClosedError. `on_delta` is called from the generator's thread. `weight_version` is the last one that made a token.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        tokenizer: Tokenizer | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        on_delta: Callable[[Delta], None] | None = None,
        weight_version: WeightVersion | None = None,
    ) -> None:
        self.weight_version = weight_version
        self.sampling = sampling
        self.stop_token_ids = stop_token_ids
        self.on_delta = on_delta
        self.future: Future[list[Completion]] = Future()
        self.rows = [
            DecodeRow(self, index, prompt, TextCursor(tokenizer, sampling.stop, live=on_delta is not None))
            for index, prompt in enumerate(p for prompt in prompts for p in [tuple(prompt)] * sampling.n)
        ]
        self._num_unfinished = len(self.rows)

    def cancel(self) -> None:
        """Give up: the rows leave the batch before its next step. Idempotent."""
        self.future.cancel()

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless it was answered before."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def row_finished(self) -> None:
        """Answer once the last row has ended."""
        self._num_unfinished -= 1
        if self._num_unfinished == 0 and not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_result([row.completion() for row in self.rows])


class DecodeRow:
    """One sequence in the making. Only the generator's thread touches it."""

    def __init__(self, request: Request, index: int, prompt: tuple[int, ...], text: TextCursor) -> None:
        self.request = request
        self.index = index
        self.prompt = prompt
        self.output: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._text = text
        self._spans: list[VersionSpan] = []
        self._logprobs: list[TokenLogprobs] | None = None if request.sampling.logprobs is None else []
        self._uniforms: list[float] = []
        self._random: torch.Generator | None = None

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.request.future.done()

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self) -> list[int]:
        return [*self.prompt, *self.output]

    def uniform(self) -> float:
        """The row's next number from [0, 1): of its own stream, so that other rows never change what it draws."""
        if not self._uniforms:
            drawn = torch.rand(_UNIFORMS_PER_DRAW, generator=self._generator(), dtype=torch.float64)
            self._uniforms = drawn.flip(0).tolist()
        return self._uniforms.pop()

    def _generator(self) -> torch.Generator:
        if self._random is None:
            seed, each = self.request.sampling.seed, self.index % self.request.sampling.n
            self._random = torch.Generator()
            self._random.manual_seed(random.getrandbits(63) if seed is None else (seed + each) % (1 << 63))
        return self._random

    def append(self, token: int, version: WeightVersion | None, logprobs: TokenLogprobs | None) -> None:
        """Take one more token, made under `version`; end the row if it was the last."""
        self.output.append(token)
        self.request.weight_version = version
        self._extend_spans(version)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)
        is_stop = token in self.request.stop_token_ids
        ended = self._text.push(self.output, is_stop=is_stop)
        if is_stop or ended:
            self.finish_reason = "stop"
        elif len(self.output) >= self.request.sampling.max_tokens:
            self.finish_reason = "length"
        self._report((token,), version, logprobs)

    def abort(self, version: WeightVersion | None) -> None:
        """End here, with what there is."""
        if not self.is_over:
            self.finish_reason = "abort"
            self._report((), version, None)

    def _report(self, tokens: tuple[int, ...], version: WeightVersion | None, logprobs: TokenLogprobs | None) -> None:
        if self.finish_reason is not None:
            self._text.finish(self.output)
        if self.request.on_delta is not None:
            text = self._text.flush(final=self.finish_reason is not None)
            listed = None if self._logprobs is None else (() if logprobs is None else (logprobs,))
            self.request.on_delta(Delta(self.index, tokens, text, self.finish_reason, version, listed))
        if self.finish_reason is not None:
            self.request.row_finished()

    def _extend_spans(self, version: WeightVersion | None) -> None:
        run, number = ("", None) if version is None else (version.run, version.number)
        end = len(self.output)
        last = self._spans[-1] if self._spans else None
        if last is not None and (last.run, last.version) == (run, number):
            self._spans[-1] = VersionSpan(run, number, last.start, end)
        else:
            self._spans.append(VersionSpan(run, number, end - 1, end))

    def completion(self) -> Completion:
        return Completion(
            index=self.index,
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.output),
            text=self._text.text(self.output),
            finish_reason=self.finish_reason or "abort",
            weight_versions=tuple(self._spans),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )
