"""Requests to a generator and its answers: parameters, a row for each completion, finished records.

Invariants: a completion's spans are contiguous and cover exactly its output tokens; a request is done when its future
is, and nothing is appended to the rows of a done request.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

from weightcast.format.manifest import WeightVersion

FinishReason = Literal["stop", "length", "abort"]
MAX_TOP_LOGPROBS = 20
MAX_COMPLETIONS = 4096


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that is used here."""

    eos_token_id: int | list[int] | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Any, **options: Any) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt, in OpenAI's words. Raises ValueError for values out of range.

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
        top, seed = self.logprobs or 0, self.seed or 0
        for name, is_valid, valid in (
            ("n", 1 <= self.n <= MAX_COMPLETIONS, f"1 to {MAX_COMPLETIONS}"),
            ("temperature", 0 <= self.temperature <= 100, "0 to 100"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("logprobs", 0 <= top <= MAX_TOP_LOGPROBS, f"0 to {MAX_TOP_LOGPROBS}"),
            ("seed", -(1 << 63) <= seed < 1 << 63, "a 64-bit integer"),
            ("stop", all(self.stop), "strings that are not empty"),
        ):
            if not is_valid:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {valid}")


@dataclasses.dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start <= i < end` came from this version; before any update, run is empty and version None."""

    run: str
    version: int | None
    start: int
    end: int

    @classmethod
    def of(cls, version: WeightVersion | None, start: int, end: int) -> VersionSpan:
        return cls("", None, start, end) if version is None else cls(version.run, version.number, start, end)


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
    """One step's addition to a row: at most one token, the text that became final, and why the row ended, if so."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    weight_version: WeightVersion | None
    logprobs: tuple[TokenLogprobs, ...] | None


class Request:
    """Prompts with their rows, `sampling.n` for each prompt, in the order of the prompts.

    `future` gives the list of Completions; it fails with EngineTornError, ClosedError, or what the model raised.
    `on_delta` is called from the generator's thread. `weight_version` is the last one that made a token.
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
        self.tokenizer = tokenizer
        self.stop_token_ids = stop_token_ids
        self.on_delta = on_delta
        self.future: Future[list[Completion]] = Future()
        repeated = (prompt for prompt in prompts for prompt in [tuple(prompt)] * sampling.n)
        self.rows = [DecodeRow(self, index, prompt) for index, prompt in enumerate(repeated)]

    def cancel(self) -> None:
        """Give up: no step is made for it any more. Idempotent."""
        self.future.cancel()

    def fail(self, error: BaseException) -> None:
        """Answer with an error, unless the request is done."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)

    def answer_if_over(self) -> None:
        """Answer once every row has ended, unless the request is done."""
        is_over = all(row.finish_reason for row in self.rows) and not self.future.done()
        if is_over and self.future.set_running_or_notify_cancel():
            self.future.set_result([row.completion() for row in self.rows])


class DecodeRow:
    """One sequence while its tokens are generated. Only the generator's thread touches it.

    `text`: whole characters only, cut at the first stop string, and never taken back: a possible beginning of a stop
    string, or of a character, is added once more tokens decide. If nobody reads the text meanwhile, it is decoded only
    at the end.
    """

    def __init__(self, request: Request, index: int, prompt: tuple[int, ...]) -> None:
        self.request = request
        self.index = index
        self.prompt = prompt
        self.output: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        seed = request.sampling.seed
        # A stream of random numbers of its own, so that other rows never change what this one draws. Unsigned, since
        # Random gives a seed and its negative the same stream.
        self.random = random.Random(None if seed is None else (seed + index % request.sampling.n) % (1 << 64))
        self._versions: list[WeightVersion | None] = []  # of each output token
        self._logprobs: list[TokenLogprobs] = []

    def append(self, token: int, version: WeightVersion | None, logprobs: TokenLogprobs | None) -> None:
        """Take one more token, made under `version`; end the row if it was the last."""
        self.output.append(token)
        self.request.weight_version = version
        self._versions.append(version)
        added = () if logprobs is None else (logprobs,)
        self._logprobs += added
        if token in self.request.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.output) >= self.request.sampling.max_tokens:
            self.finish_reason = "length"
        self._report((token,), version, added)

    def abort(self, version: WeightVersion | None) -> None:
        """End here, with the tokens there are."""
        if self.finish_reason is None:
            self.finish_reason = "abort"
            self._report((), version, ())

    def _report(
        self, tokens: tuple[int, ...], version: WeightVersion | None, logprobs: tuple[TokenLogprobs, ...]
    ) -> None:
        request = self.request
        text = ""
        if request.tokenizer is not None and (self.finish_reason or request.sampling.stop or request.on_delta):
            text = self._new_text(request.tokenizer)
            self.text += text
        if request.on_delta is not None:
            listed = None if request.sampling.logprobs is None else logprobs
            request.on_delta(Delta(self.index, tokens, text, self.finish_reason, version, listed))

    def _new_text(self, tokenizer: Tokenizer) -> str:
        """Return the text that has become final. Ends the row at a stop string."""
        # A stop token has no text.
        tokens = (
            self.output[:-1] if self.output[-1:] and self.output[-1] in self.request.stop_token_ids else self.output
        )
        decoded = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        text, stops = self.text + decoded[len(self.text) :], self.request.sampling.stop
        if found := [at for stop in stops if (at := text.find(stop)) >= 0]:
            self.finish_reason = "stop"
            text = text[: min(found)]
        elif self.finish_reason is None:
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # The rest of a character is still to come.
            beginnings = (stop[:length] for stop in stops for length in range(len(stop) - 1, 0, -1))
            text = text[: len(text) - max((len(each) for each in beginnings if text.endswith(each)), default=0)]
        return text[len(self.text) :]

    def completion(self) -> Completion:
        """The finished record. The row has ended."""
        assert self.finish_reason is not None
        spans, start = [], 0
        for version, tokens in itertools.groupby(self._versions):
            end = start + len(list(tokens))
            spans.append(VersionSpan.of(version, start, end))
            start = end
        return Completion(
            index=self.index,
            prompt_token_ids=self.prompt,
            token_ids=tuple(self.output),
            text=self.text,
            finish_reason=self.finish_reason,
            weight_versions=tuple(spans),
            logprobs=None if self.request.sampling.logprobs is None else tuple(self._logprobs),
        )
