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
            "suffix": self.suffix,
            "best_of": self.best_of not in (None, self.n or 1),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
        }
        unsupported = [name for name, value in asked.items() if value]
        if unsupported:
            raise ValueError(f"{', '.join(unsupported)} is not supported by this server; leave it out")
        if self.model not in (None, "", model_name):
            raise LookupError(f"no model {self.model!r} here; this server has {model_name!r}")

    def sampling(self) -> SamplingParams:
        """Raises ValueError for values out of range."""
        names = ("n", "temperature", "top_p", "max_tokens", "logprobs", "seed")
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(
            **given,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )

    def prompts(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """Token ids of each prompt: one text, several, one list of ids, or several. Raises ValueError for a mixture."""
        items: list[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        kinds = {type(item) for item in items}
        if len(kinds) != 1:
            raise ValueError("prompt must be a text, texts, token ids, or lists of token ids; it is empty or a mixture")
        if kinds == {str}:
            return [encode(text) for text in items]
        return [items] if kinds == {int} else items


class AnswerFormat:
    """Formats all replies to one request."""

    def __init__(self, model_name: str, token_text: Callable[[int], str]) -> None:
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
        num_prompt_tokens = sum(len(c.prompt_token_ids) for c in completions[::num_per_prompt])
        num_tokens = sum(len(c.token_ids) for c in completions)
        choices = [
            self._choice(done, done.weight_versions, 0) | {"prompt_token_ids": done.prompt_token_ids}
            for done in completions
        ]
        usage = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
        }
        return {**self._head, "choices": choices, "usage": usage, **_version_fields(version)}

    def chunk(self, delta: Delta, num_tokens_before: int, num_chars_before: int) -> dict[str, Any]:
        """One event of a stream; spans and text offsets count from the beginning of the choice."""
        span = VersionSpan.of(delta.weight_version, num_tokens_before, num_tokens_before + len(delta.token_ids))
        choice = self._choice(delta, (span,) if delta.token_ids else (), num_chars_before)
        return {**self._head, "choices": [choice], **_version_fields(delta.weight_version)}

    def _choice(self, made: Completion | Delta, spans: Sequence[VersionSpan], num_chars_before: int) -> dict[str, Any]:
        return {
            "index": made.index,
            "text": made.text,
            "finish_reason": made.finish_reason,
            "logprobs": self._logprobs(made.token_ids, made.logprobs, made.text, num_chars_before),
            "token_ids": made.token_ids,
            "weight_versions": [
                {"run": span.run, "version": _label(span.version), "start": span.start, "end": span.end}
                for span in spans
            ],
        }

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, text: str, offset: int
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        texts = [self._token_text(token) for token in tokens]
        offsets, at = [], 0  # A token that the text shows otherwise (special, half a character) takes no room.
        for piece in texts:
            found = text.find(piece, at, at + len(piece) + 1)  # Some tokenizers put a space between two tokens.
            offsets.append(offset + max(found, at))
            at = at if found < 0 else found + len(piece)
        return {
            "tokens": texts,
            "token_logprobs": [one.chosen for one in logprobs],
            "top_logprobs": [self._top(token, one) for token, one in zip(tokens, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, chosen: int, found: TokenLogprobs) -> dict[str, float]:
        """By text. Of tokens with one text (half a character each) the chosen one or the likeliest has it as its key,
        and the others `token_id:237`, so that none is lost."""
        logprobs = {**dict(found.top), chosen: found.chosen}
        owners: dict[str, int] = {}
        for token in (chosen, *logprobs):
            owners.setdefault(self._token_text(token), token)
        texts = {token: text for text, token in owners.items()}
        return {texts.get(token, f"token_id:{token}"): logprob for token, logprob in logprobs.items()}


def _version_fields(version: WeightVersion | None) -> dict[str, str]:
    if version is None:
        return {"weight_version": _label(None), "weight_run": ""}
    return {"weight_version": _label(version.number), "weight_run": version.run}


def _label(number: int | None) -> str:
    return "default" if number is None else str(number)
