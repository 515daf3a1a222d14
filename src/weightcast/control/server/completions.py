"""OpenAI's POST /v1/completions and GET /v1/models over a TextGenerator.

Invariants: an unsupported field that would change the answer is refused, never ignored; choices have, besides OpenAI's
fields, their token ids and the spans of the versions that generated them; the rows of a client that disconnects are
cancelled; errors have OpenAI's form. Tokenizing runs in a thread pool, generation in the generator's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from weightcast.control.routes import logger, read_body, reply, status_of
from weightcast.control.server.metrics import ServerMetrics
from weightcast.engines.transformers import (
    Completion,
    Delta,
    QueueFullError,
    SamplingParams,
    TextGenerator,
    TokenLogprobs,
    VersionSpan,
)
from weightcast.engines.transformers import Request as Generation
from weightcast.errors import ClosedError
from weightcast.format.manifest import WeightVersion, decode

MAX_BODY_BYTES = 16 << 20
_MAX_CACHED_TOKENS = 1 << 16
_ERROR_TYPES = {429: "rate_limit_error", 500: "internal_server_error", 503: "service_unavailable"}
_ERROR_HEADERS = {413: {"connection": "close"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}


class CompletionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/completions. Fields after `stream` are accepted only with their neutral values."""

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
    no_stop_trim: bool = False
    return_hidden_states: bool = False
    skip_special_tokens: bool = True

    def check(self) -> None:
        """Raise ValueError for unsupported values."""
        asked = {
            "echo": self.echo,
            "suffix": self.suffix,
            "best_of": self.best_of not in (None, self.n or 1),
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "no_stop_trim": self.no_stop_trim,
            "return_hidden_states": self.return_hidden_states,
            "skip_special_tokens": not self.skip_special_tokens,
        }
        unsupported = [name for name, value in asked.items() if value]
        if unsupported:
            raise ValueError(f"{', '.join(unsupported)} is not supported by this server; leave it out")

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters. Raises ValueError for values out of range."""
        names = ("n", "temperature", "top_p", "max_tokens", "logprobs", "seed")
        given: dict[str, Any] = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return SamplingParams(
            **given,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )

    def prompts(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """Return each prompt's token ids, from a text, texts, token ids or lists of these.

        Raises ValueError for others.
        """
        items: list[Any] = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        kinds = {type(item) for item in items}
        if len(kinds) != 1:
            raise ValueError("prompt is empty or a mixture; it must be a text, texts, token ids, or lists of token ids")
        if kinds == {str}:
            return [encode(text) for text in items]
        return [items] if kinds == {int} else items


class AnswerFormat:
    """Formats the replies to one request, a single one or the events of a stream."""

    def __init__(self, model_name: str, token_text: Callable[[int], str]) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model_name,
        }
        self._token_text = token_text
        self._num_tokens: Counter[int] = Counter()  # so far, of each choice of a stream
        self._num_chars: Counter[int] = Counter()

    def answer(
        self, completions: Sequence[Completion], num_per_prompt: int, version: WeightVersion | None
    ) -> dict[str, Any]:
        """Return the whole reply. `version`: the last one that generated a token of any choice."""
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

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return one event of a stream. Spans and text offsets count from the beginning of the choice."""
        start, num_chars = self._num_tokens[delta.index], self._num_chars[delta.index]
        self._num_tokens[delta.index] += len(delta.token_ids)
        self._num_chars[delta.index] += len(delta.text)
        span = VersionSpan.of(delta.weight_version, start, start + len(delta.token_ids))
        choice = self._choice(delta, (span,) if delta.token_ids else (), num_chars)
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
        offsets, at = [], 0  # A token without text of its own (special, part of a character) has the next one's offset.
        for piece in texts:
            found = text.find(piece, at, at + len(piece) + 1)  # Some tokenizers insert a space between two tokens.
            offsets.append(offset + max(found, at))
            at = at if found < 0 else found + len(piece)
        return {
            "tokens": texts,
            "token_logprobs": [one.chosen for one in logprobs],
            "top_logprobs": [self._top(token, one) for token, one in zip(tokens, logprobs, strict=True)],
            "text_offset": offsets,
        }

    def _top(self, chosen: int, found: TokenLogprobs) -> dict[str, float]:
        """Return log-probabilities by token text. If several tokens have the same text (parts of characters), the
        chosen one or else the likeliest gets it as its key, and the others get keys such as `token_id:237`."""
        logprobs = {**dict(found.top), chosen: found.chosen}
        owners: dict[str, int] = {}
        for token in (chosen, *logprobs):
            owners.setdefault(self._token_text(token), token)
        texts = {token: text for text, token in owners.items()}
        return {texts.get(token, f"token_id:{token}"): logprob for token, logprob in logprobs.items()}


def _version_fields(version: WeightVersion | None) -> dict[str, str]:
    number, run = (None, "") if version is None else (version.number, version.run)
    return {"weight_version": _label(number), "weight_run": run}


def _label(number: int | None) -> str:
    return "default" if number is None else str(number)


class Completions:
    """The two OpenAI routes, which require no token."""

    def __init__(self, generator: TextGenerator, metrics: ServerMetrics, model_name: str) -> None:
        metrics.gauge("running_completions", "Completions that are being generated.", lambda: generator.num_running)
        metrics.gauge("waiting_completions", "Completions that wait in the queue.", lambda: generator.num_waiting)
        self._generator = generator
        self._metrics = metrics
        self._model_name = model_name
        self._created = int(time.time())
        self._token_text = functools.lru_cache(_MAX_CACHED_TOKENS)(generator.token_text)

    async def models(self, request: Request) -> Response:
        adapters = self._generator.adapters
        model = {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "weightcast",
            "max_model_len": self._generator.max_model_len,
        }
        names = [] if adapters is None else adapters.names()
        models = [model, *(model | {"id": name, "parent": self._model_name} for name in names)]
        return reply({"object": "list", "data": models})

    async def create(self, request: Request) -> Response:
        try:
            body: CompletionBody = decode(await read_body(request, MAX_BODY_BYTES), CompletionBody)
            body.check()
            return await (self._stream(body) if body.stream else self._answer(request, body))
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as exc:
            error = _error_body(exc)
            status = error["error"]["code"]
            return reply(error, status, _ERROR_HEADERS.get(status))

    async def _submit(self, body: CompletionBody, on_delta: Callable[[Delta], None] | None = None) -> Generation:
        sampling = body.sampling()
        prompts = await asyncio.to_thread(body.prompts, self._generator.encode)
        adapter = "" if body.model in (None, self._model_name) else body.model or ""
        if adapter and self._generator.adapters is None:
            raise LookupError(f"this server has no model {adapter!r}; it serves {self._model_name!r}")
        return self._generator.submit(prompts, sampling, on_delta=on_delta, adapter=adapter)

    async def _answer(self, request: Request, body: CompletionBody) -> Response:
        generation = await self._submit(body)
        answer = asyncio.wrap_future(generation.future)
        gone: asyncio.Future[None] = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return Response(status_code=499)
        finally:
            gone.cancel()
            generation.cancel()
        completions = self._count(answer.result())
        answers = AnswerFormat(generation.adapter or self._model_name, self._token_text)
        return reply(answers.answer(completions, generation.sampling.n, generation.weight_version))

    async def _stream(self, body: CompletionBody) -> Response:
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(delta: Delta | None) -> None:
            """Pass a delta from the generator's thread to the event loop."""
            with contextlib.suppress(RuntimeError):  # The loop has ended, so nobody reads the stream.
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        generation = await self._submit(body, put)
        generation.future.add_done_callback(lambda _: put(None))
        return StreamingResponse(self._events(generation, deltas), media_type="text/event-stream")

    async def _events(self, generation: Generation, deltas: asyncio.Queue[Delta | None]) -> AsyncIterator[bytes]:
        answers = AnswerFormat(generation.adapter or self._model_name, self._token_text)
        try:
            while (delta := await deltas.get()) is not None:
                yield _event(answers.chunk(delta))
            self._count(generation.future.result(0))
        except Exception as exc:
            yield _event(_error_body(exc))
        finally:
            generation.cancel()
        yield b"data: [DONE]\n\n"

    def _count(self, completions: list[Completion]) -> list[Completion]:
        for done in completions:
            self._metrics.completed(done.finish_reason, len(done.prompt_token_ids), len(done.token_ids))
        return completions


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _error_body(error: BaseException) -> dict[str, Any]:
    """Return an error in OpenAI's form.

    Unlike on weight routes, ClosedError (the server is closing) is 503, not 409.
    """
    own = ((QueueFullError, 429), (ClosedError, 503), (LookupError, 404))
    status = next((status for kind, status in own if isinstance(error, kind)), status_of(error))
    message = str(error)
    if status == 500:
        logger.error("a completion failed", exc_info=error)
        message = f"{type(error).__name__}: {message}"
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
