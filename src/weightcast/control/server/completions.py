"""OpenAI's POST /v1/completions and GET /v1/models over a TextGenerator.

Invariants: the rows of a client that goes away are cancelled; an answer names the weight versions that made it; errors
have OpenAI's shape. Tokenizing runs in a thread, generation in the generator's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from weightcast.control.replies import logger, read_body, reply, status_of
from weightcast.control.server.metrics import ServerMetrics
from weightcast.control.server.openai import AnswerFormat, CompletionBody
from weightcast.engines.transformers import Completion, Delta, QueueFullError, TextGenerator
from weightcast.engines.transformers import Request as Generation
from weightcast.errors import ClosedError
from weightcast.format.manifest import decode

MAX_BODY_BYTES = 16 << 20
_MAX_CACHED_TOKENS = 1 << 16
_ERROR_TYPES = {429: "rate_limit_error", 500: "internal_server_error", 503: "service_unavailable"}
_ERROR_HEADERS = {413: {"connection": "close"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}


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
        # Errors become replies here: after a handler of the application has answered an unforeseen error, such as one
        # of the model, Starlette raises it again, and uvicorn logs it and closes the connection.
        try:
            body: CompletionBody = decode(await read_body(request, MAX_BODY_BYTES), CompletionBody)
            body.check(self._model_name)
            if body.stream:
                return await self._stream(body)
            return await self._answer(request, body)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as exc:
            error = _error_body(exc)
            return reply(error, error["error"]["code"], _ERROR_HEADERS.get(error["error"]["code"]))

    async def _submit(self, body: CompletionBody, on_delta: Callable[[Delta], None] | None = None) -> Generation:
        sampling = body.sampling()
        prompts = await asyncio.to_thread(body.prompts, self._generator.encode)
        return self._generator.submit(prompts, sampling, on_delta=on_delta)

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
        answers = AnswerFormat(self._model_name, self._token_text)
        return reply(answers.answer(completions, generation.sampling.n, generation.weight_version))

    async def _stream(self, body: CompletionBody) -> Response:
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(delta: Delta | None) -> None:
            """Called in the generator's thread."""
            with contextlib.suppress(RuntimeError):  # The loop has ended, and the reader with it.
                loop.call_soon_threadsafe(deltas.put_nowait, delta)

        generation = await self._submit(body, put)
        generation.future.add_done_callback(lambda _: put(None))
        return StreamingResponse(self._events(generation, deltas), media_type="text/event-stream")

    async def _events(self, generation: Generation, deltas: asyncio.Queue[Delta | None]) -> AsyncIterator[bytes]:
        answers = AnswerFormat(self._model_name, self._token_text)
        num_tokens: dict[int, int] = defaultdict(int)
        num_chars: dict[int, int] = defaultdict(int)
        try:
            while (delta := await deltas.get()) is not None:
                yield _event(answers.chunk(delta, num_tokens[delta.index], num_chars[delta.index]))
                num_tokens[delta.index] += len(delta.token_ids)
                num_chars[delta.index] += len(delta.text)
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
    """An error in OpenAI's shape. Where it differs from a weight route's: a server that closes is 503, not 409."""
    own = ((QueueFullError, 429), (ClosedError, 503), (LookupError, 404))
    status = next((status for kind, status in own if isinstance(error, kind)), status_of(error))
    message = str(error)
    if status == 500:
        logger.error("a completion failed", exc_info=error)
        message = f"{type(error).__name__}: {message}"
    kind = _ERROR_TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
