"""OpenAI's POST /v1/completions and GET /v1/models over a TextGenerator.

Invariants: a client that goes away gives its rows back; an answer names the weight versions that made it; errors have
OpenAI's shape. Tokenizing runs in a thread, generation in the generator's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from weightcast.control.replies import logger, read_body, reply
from weightcast.control.server.metrics import ServerMetrics
from weightcast.control.server.openai import AnswerFormat, CompletionBody
from weightcast.engines.transformers import Completion, Delta, QueueFullError, TextGenerator
from weightcast.engines.transformers import Request as Generation
from weightcast.errors import ClosedError, EngineTornError, ManifestError
from weightcast.format.manifest import decode

MAX_BODY_BYTES = 16 << 20
_MAX_CACHED_TOKENS = 1 << 16

_STATUS: tuple[tuple[type[Exception], int, str], ...] = (
    (QueueFullError, 429, "rate_limit_error"),
    (EngineTornError, 503, "service_unavailable"),
    (ClosedError, 503, "service_unavailable"),
    (ManifestError, 400, "invalid_request_error"),
    (ValueError, 400, "invalid_request_error"),
    (LookupError, 404, "invalid_request_error"),
)


def completion_routes(generator: TextGenerator, metrics: ServerMetrics, *, model_name: str) -> list[Route]:
    """The two OpenAI routes; they need no token."""
    completions = _Completions(generator, metrics, model_name)
    metrics.gauge("running_completions", "Completions that are being generated.", lambda: generator.num_running)
    metrics.gauge("waiting_completions", "Completions that wait for their turn.", lambda: generator.num_waiting)
    return [
        Route("/v1/completions", completions.create, methods=["POST"]),
        Route("/v1/models", completions.models, methods=["GET"]),
    ]


class _Completions:
    def __init__(self, generator: TextGenerator, metrics: ServerMetrics, model_name: str) -> None:
        self._generator = generator
        self._metrics = metrics
        self._model_name = model_name
        self._created = int(time.time())
        self._token_text = functools.lru_cache(_MAX_CACHED_TOKENS)(generator.token_text)

    async def models(self, request: Request) -> Response:
        model = {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "weightcast",
            "max_model_len": self._generator.max_model_len,
        }
        return reply({"object": "list", "data": [model]})

    async def create(self, request: Request) -> Response:
        try:
            body: CompletionBody = decode(await read_body(request, MAX_BODY_BYTES), CompletionBody)
            body.check(self._model_name)
            if body.stream:
                return await self._stream(body)
            return await self._answer(request, body)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as exc:
            return _error_reply(exc)

    async def _submit(self, body: CompletionBody, on_delta: Callable[[Delta], None] | None = None) -> Generation:
        sampling = body.sampling()
        prompts = await asyncio.to_thread(body.prompts, self._generator.encode)
        return self._generator.submit(prompts, sampling, on_delta=on_delta)

    def _format(self) -> AnswerFormat:
        return AnswerFormat(self._model_name, self._token_text)

    async def _answer(self, request: Request, body: CompletionBody) -> Response:
        generation = await self._submit(body)
        completions = await _until_gone(generation, request.receive)
        if completions is None:
            return Response(status_code=499)
        self._count(completions)
        return reply(self._format().answer(completions, generation.sampling.n, generation.weight_version))

    async def _stream(self, body: CompletionBody) -> Response:
        deltas = _Deltas()
        generation = await self._submit(body, deltas.put)
        generation.future.add_done_callback(deltas.end)
        return StreamingResponse(self._events(generation, deltas), media_type="text/event-stream")

    async def _events(self, generation: Generation, deltas: _Deltas) -> AsyncIterator[bytes]:
        answers = self._format()
        num_tokens: dict[int, int] = defaultdict(int)
        num_chars: dict[int, int] = defaultdict(int)
        try:
            while (delta := await deltas.get()) is not None:
                yield _event(answers.chunk(delta, num_tokens[delta.index], num_chars[delta.index]))
                num_tokens[delta.index] += len(delta.token_ids)
                num_chars[delta.index] += len(delta.text)
            self._count(generation.future.result(0))
        except (Exception, CancelledError) as exc:
            yield _event(_error_body(exc)[1])
        finally:
            generation.cancel()
        yield b"data: [DONE]\n\n"

    def _count(self, completions: Sequence[Completion]) -> None:
        for done in completions:
            self._metrics.completed(done.finish_reason, len(done.prompt_token_ids), len(done.token_ids))


class _Deltas:
    """Carries a stream's deltas from the generator's thread to the event loop it was made on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Delta | None] = asyncio.Queue()

    def put(self, delta: Delta | None) -> None:
        with contextlib.suppress(RuntimeError):  # The loop has ended, and the reader with it.
            self._loop.call_soon_threadsafe(self._queue.put_nowait, delta)

    def end(self, _: object) -> None:
        self.put(None)

    async def get(self) -> Delta | None:
        return await self._queue.get()


async def _until_gone(generation: Generation, receive: Receive) -> list[Completion] | None:
    """Wait for the completions; None, and the rows are given back, if the client goes away first."""
    answer = asyncio.wrap_future(generation.future)
    gone: asyncio.Future[None] = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((answer, gone), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        gone.cancel()
        generation.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(body: Any) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _error_body(error: BaseException) -> tuple[int, dict[str, Any]]:
    found = next((known for known in _STATUS if isinstance(error, known[0])), None)
    _, status, kind = found or (Exception, 500, "internal_server_error")
    if status == 500:
        logger.error("a completion failed", exc_info=error)
    message = str(error) if found else f"{type(error).__name__}: {error}"
    return status, {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _error_reply(error: BaseException) -> Response:
    status, body = _error_body(error)
    if isinstance(error, ManifestError) and error.fault == "too_large":
        status = body["error"]["code"] = 413
    headers = {413: {"connection": "close"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}
    return reply(body, status, headers.get(status))
