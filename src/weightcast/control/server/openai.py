"""OpenAI's completion records: what a body may ask, and how completions look in JSON.

Invariants: a field that would change the answer and can't be honoured is refused, never ignored; choices carry their
token ids and the spans of the versions that made them, beside OpenAI's own fields.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weightcast.engines.transformers import Completion, Delta, SamplingParams, TokenLogprobs, VersionSpan
from weightcast.format.manifest import WeightVersion

TokenText = Callable[[int], str]


class CompletionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """POST /v1/completions. Fields below `stream` are known but taken with their neutral values only."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    stream: bool = False
    user: str | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    def check(self, model_name: str) -> None:
        """Raises ValueError that names what is not supported."""
        asked = {
            "echo": self.echo,
            "suffix": bool(self.suffix),
            "best_of": self.best_of not in (None, self.n or 1),
            "presence_penalty": bool(self.presence_penalty),
            "frequency_penalty": bool(self.frequency_penalty),
            "logit_bias": bool(self.logit_bias),
        }
        unsupported = [name for name, is_asked in asked.items() if is_asked]
        if unsupported:
            raise ValueError(f"{', '.join(unsupported)} is not supported by this server; leave it out")
        if self.model not in (None, "", model_name):
            raise LookupError(f"no model {self.model!r} here; this server has {model_name!r}")

    def sampling(self) -> SamplingParams:
        """Raises ValueError for values that make no sense."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingParams(
            n=1 if self.n is None else self.n,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            seed=self.seed,
            stop=tuple(stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )

    def prompts(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """Token ids of each prompt: one text, several, one list of ids, or several. Raises ValueError for a mixture."""
        if isinstance(self.prompt, str):
            return [encode(self.prompt)]
        kinds = {type(item) for item in self.prompt}
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if kinds == {str}:
            return [encode(text) for text in self.prompt]  # type: ignore[arg-type]
        if kinds == {list}:
            return list(self.prompt)  # type: ignore[arg-type]
        raise ValueError("prompt must be a text, texts, token ids, or lists of token ids; it is empty or a mixture")


class AnswerFormat:
    """Formats all replies to one request."""

    def __init__(self, model_name: str, token_text: TokenText) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._token_text = token_text

    def answer(
        self, completions: Sequence[Completion], num_per_prompt: int, version: WeightVersion | None
    ) -> dict[str, Any]:
        """The whole reply. `version` is the last one that any choice was made under."""
        prompts = completions[::num_per_prompt]
        num_prompt_tokens = sum(len(c.prompt_token_ids) for c in prompts)
        num_tokens = sum(len(c.token_ids) for c in completions)
        return {
            **self._head,
            "choices": [self._choice(completion) for completion in completions],
            "usage": {
                "prompt_tokens": num_prompt_tokens,
                "completion_tokens": num_tokens,
                "total_tokens": num_prompt_tokens + num_tokens,
            },
            **_version_fields(version),
        }

    def _choice(self, done: Completion) -> dict[str, Any]:
        return {
            "index": done.index,
            "text": done.text,
            "finish_reason": done.finish_reason,
            "logprobs": self._logprobs(done.token_ids, done.logprobs, done.text, 0),
            "token_ids": done.token_ids,
            "prompt_token_ids": done.prompt_token_ids,
            "weight_versions": [_span(span) for span in done.weight_versions],
        }

    def chunk(self, delta: Delta, num_tokens_before: int, num_chars_before: int) -> dict[str, Any]:
        """One event of a stream; spans and text offsets count from the beginning of the choice."""
        version = delta.weight_version
        run, number = ("", None) if version is None else (version.run, version.number)
        end = num_tokens_before + len(delta.token_ids)
        spans = [_span(VersionSpan(run, number, num_tokens_before, end))] if delta.token_ids else []
        choice = {
            "index": delta.index,
            "text": delta.text,
            "finish_reason": delta.finish_reason,
            "logprobs": self._logprobs(delta.token_ids, delta.logprobs, delta.text, num_chars_before),
            "token_ids": delta.token_ids,
            "weight_versions": spans,
        }
        return {**self._head, "choices": [choice], **_version_fields(version)}

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, text: str, offset: int
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        texts = [self._token_text(token) for token in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [one.chosen for one in logprobs],
            "top_logprobs": [self._top(token, one) for token, one in zip(tokens, logprobs, strict=True)],
            "text_offset": _offsets(texts, text, offset),
        }

    def _top(self, chosen: int, found: TokenLogprobs) -> dict[str, float]:
        """By text; of tokens with one text (half a character each) the chosen one or the likeliest has it as its key,
        and the others `token_id:237`, so that none is lost."""
        logprobs = {**dict(found.top), chosen: found.chosen}
        by_text: dict[str, int] = {}
        for token in (chosen, *logprobs):
            by_text.setdefault(self._token_text(token), token)
        texts = {token: text for text, token in by_text.items()}
        return {texts.get(token, f"token_id:{token}"): logprob for token, logprob in logprobs.items()}


def _offsets(texts: Sequence[str], whole: str, offset: int) -> list[int]:
    """Where each token's text begins. A token that it shows otherwise (special, half a character) takes no room."""
    offsets, at = [], 0
    for text in texts:
        found = whole.find(text, at, at + len(text) + 1)  # Some tokenizers put a space between two tokens.
        offsets.append(offset + max(found, at))
        at = at if found < 0 else found + len(text)
    return offsets


def _span(span: VersionSpan) -> dict[str, Any]:
    return {"run": span.run, "version": _label(span.version), "start": span.start, "end": span.end}


def _version_fields(version: WeightVersion | None) -> dict[str, str]:
    run, number = ("", None) if version is None else (version.run, version.number)
    return {"weight_version": _label(number), "weight_run": run}


def _label(number: int | None) -> str:
    return "default" if number is None else str(number)
