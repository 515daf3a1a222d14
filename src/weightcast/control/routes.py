"""The weight routes of the reference server: vLLM's four-phase protocol and what weightcast adds to it.

Invariants: with a token set, no weight route answers without it; without one, none answers a browser's page; a call
that could block runs in a thread, never on the event loop. Bodies are decoded as typed records, under a cap.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from weightcast.control.replies import error_reply, read_body, refusal, reply
from weightcast.errors import EngineTornError, ManifestError, UnsupportedError
from weightcast.format.manifest import MAX_MESSAGE_BYTES, decode
from weightcast.format.messages import InitInfo, PauseMode, UpdateInfo
from weightcast.format.tensor_digest import tensor_digest
from weightcast.serving.worker import Worker

MAX_SMALL_BODY_BYTES = 1 << 20
_MAX_DIGITS = 19

Handler = Callable[[Request], Awaitable[Response]]


class InitBody(msgspec.Struct, frozen=True):
    init_info: InitInfo


class UpdateBody(msgspec.Struct, frozen=True):
    update_info: UpdateInfo


class FinishBody(msgspec.Struct, frozen=True):
    weight_version: str


def version_number(text: str) -> int:
    """The number in a `weight_version`. Raises ManifestError if it is none."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ManifestError(f"weight_version is {text[:40]!r}; it must be a number in decimal digits", fault="type")
    return int(text)


def pause_mode(request: Request, default: PauseMode) -> PauseMode:
    """The query's `mode`. Raises ValueError for an unknown one."""
    mode = request.query_params.get("mode", default)
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode is {mode[:40]!r}; it must be one of {', '.join(get_args(PauseMode))}")
    return cast(PauseMode, mode)


def guarded(handler: Handler, *, token: str | None, on_error: Callable[[Exception], None]) -> Handler:
    """A weight route: refuses callers without the token, and answers with the error that `handler` raises.

    Errors become replies here, not in handlers of the application, which for a plugin is the host's.
    """
    expected = None if token is None else f"Bearer {token}".encode()

    async def guarded(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if expected is not None and not hmac.compare_digest(given, expected):
            return refusal("this weight route needs the server's token: `Authorization: Bearer ...`", "auth", 401)
        if expected is None and "origin" in request.headers:
            return refusal("weight routes do not answer pages in a browser; set a token to allow it", "origin", 403)
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as exc:
            on_error(exc)
            return error_reply(exc)

    return guarded


class WeightRoutes:
    """One worker's routes. `pool` runs the calls that may block; without a `token` all local processes may call.

    `on_error` gets each error that a route answers with.
    """

    def __init__(
        self, worker: Worker, pool: ThreadPoolExecutor, *, token: str | None, on_error: Callable[[Exception], None]
    ) -> None:
        self._worker = worker
        self._pool = pool
        self._token = token
        self._on_error = on_error

    def routes(self) -> list[Route]:
        handlers: list[tuple[str, str, Handler]] = [
            ("POST", "/init_weight_transfer_engine", self._init),
            ("POST", "/start_weight_update", self._start),
            ("POST", "/update_weights", self._update),
            ("POST", "/finish_weight_update", self._finish),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("POST", "/shutdown_weight_transfer_engine", self._shutdown),
            ("GET", "/weight_info", self._info),
            ("GET", "/is_paused", self._is_paused),
            ("GET", "/get_world_size", self._world_size),
            ("GET", "/weight_specs", self._specs),
            ("GET", "/weight_digests", self._digests),
        ]
        return [
            Route(path, guarded(handler, token=self._token, on_error=self._on_error), methods=[method])
            for method, path, handler in handlers
        ]

    def _run(self, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._pool, call, *args)

    # --- vLLM's routes ---

    async def _init(self, request: Request) -> Response:
        body = await read_body(request, MAX_SMALL_BODY_BYTES)
        await self._run(self._worker.init, decode(body, InitBody).init_info)
        return reply({"message": "the weight transfer is being initialised"})

    async def _start(self, request: Request) -> Response:
        # An offer starts an update here; vLLM's clients call this first.
        return reply({"message": "ready for an offer"})

    async def _update(self, request: Request) -> Response:
        body = await read_body(request, MAX_MESSAGE_BYTES)
        await self._run(lambda: self._worker.update(decode(body, UpdateBody).update_info))
        return reply({"message": "taken"})

    async def _finish(self, request: Request) -> Response:
        body = await read_body(request, MAX_SMALL_BODY_BYTES)
        number, run = version_number(decode(body, FinishBody).weight_version), request.query_params.get("run", "")
        version = await self._run(self._worker.finish, number, run)
        return reply({"message": "installed", "weight_version": str(version.number), "run": version.run})

    async def _pause(self, request: Request) -> Response:
        await self._run(self._worker.pause, pause_mode(request, "keep"), request.query_params.get("run", ""))
        return reply({"message": "paused"})

    async def _resume(self, request: Request) -> Response:
        self._worker.resume(request.query_params.get("run", ""))
        return reply({"message": "resumed"})

    async def _shutdown(self, request: Request) -> Response:
        await self._run(self._worker.shutdown)
        return reply({"message": "no publisher holds this engine"})

    async def _is_paused(self, request: Request) -> Response:
        return reply({"is_paused": self._worker.gate.is_paused})

    async def _world_size(self, request: Request) -> Response:
        return reply({"world_size": self._worker.info().world_size})

    async def _info(self, request: Request) -> Response:
        return reply(self._worker.info())

    # --- weightcast's own routes ---

    async def _specs(self, request: Request) -> Response:
        specs = await self._run(self._worker.engine.specs)
        if specs is None:
            raise UnsupportedError(f"{type(self._worker.engine).__name__} can't say which tensors it takes")
        return reply({"tensors": list(specs)})

    async def _digests(self, request: Request) -> Response:
        return reply(await self._run(self._read_digests, set(request.query_params.getlist("names"))))

    def _read_digests(self, names: set[str]) -> dict[str, object]:
        """A digest of each tensor (or of those named), all of one version: generation waits meanwhile."""
        with self._worker.reading() as engine:
            if self._worker.gate.torn:
                raise EngineTornError(self._worker.gate.torn)
            info = self._worker.info()
            digests = {name: tensor_digest(tensor) for name, tensor in engine.tensors() if not names or name in names}
        unknown = sorted(names - digests.keys())
        if unknown:
            raise ValueError(f"this engine has no tensor {', '.join(unknown[:8])} ({len(unknown)} unknown names)")
        return {"run": info.run, "weight_version": info.weight_version, "digests": digests}
