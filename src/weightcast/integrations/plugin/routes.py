"""The control protocol's routes in the HTTP server of an engine that is not weightcast's own.

Invariants: an install is one request, which goes on to its end also without its client; while the engine is torn,
requests for generation are answered with 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast.control.routes import (
    MAX_SMALL_BODY_BYTES,
    FinishBody,
    Handler,
    InitBody,
    QuarantineBody,
    UpdateBody,
    error_reply,
    held_range,
    pause_mode,
    read_body,
    refusal,
    reply,
    version_number,
)
from weightcast.control.worker_rpc import Init, Leave, UpdateCall
from weightcast.errors import EngineTornError, PeerTimeoutError
from weightcast.format.manifest import MAX_MESSAGE_BYTES, decode
from weightcast.format.messages import DtypesQuestion, TensorDtypes
from weightcast.integrations.plugin.engine import PluginEngine

logger = logging.getLogger(__name__)

_INSTALL_SECONDS = 300.0


class EngineRoutes:
    """`find` gives the engine, or raises ClosedError where there is none."""

    def __init__(self, find: Callable[[], PluginEngine]) -> None:
        self._find = find
        self._tasks: set[asyncio.Task[Any]] = set()

    def handlers(self) -> list[tuple[str, str, Handler]]:
        """Method, path and what answers there."""
        return [
            ("POST", "/init_weight_transfer_engine", self._init),
            ("POST", "/start_weight_update", self._start),
            ("POST", "/update_weights", self._update),
            ("POST", "/finish_weight_update", self._finish),
            ("POST", "/shutdown_weight_transfer_engine", self._shutdown),
            ("POST", "/pause", self._pause),
            ("POST", "/resume", self._resume),
            ("GET", "/weight_info", self._info),
            ("GET", "/weight_digests", self._digests),
            ("POST", "/weight_dtypes", self._dtypes),
            ("POST", "/quarantine", self._quarantine),
            ("GET", "/is_paused", self._is_paused),
            ("GET", "/get_world_size", self._world_size),
        ]

    async def _init(self, request: Request) -> Response:
        body: InitBody = decode(await read_body(request, MAX_SMALL_BODY_BYTES), InitBody)
        await self._find().call(Init(body.init_info))
        return reply({"message": "the weight transfer is being initialised"})

    async def _start(self, request: Request) -> Response:
        # An offer starts an update here; vLLM's clients call this first.
        return reply({"message": "ready for an offer"})

    async def _update(self, request: Request) -> Response:
        content = await read_body(request, MAX_MESSAGE_BYTES)
        body: UpdateBody = await asyncio.to_thread(decode, content, UpdateBody)
        await self._find().call(UpdateCall(body.update_info))
        return reply({"message": "taken"})

    async def _finish(self, request: Request) -> Response:
        body: FinishBody = decode(await read_body(request, MAX_SMALL_BODY_BYTES), FinishBody)
        number, mode = version_number(body.weight_version), pause_mode(request, "keep")
        install = self._find().install(number, mode, request.query_params.get("run", ""))
        # It goes on by itself if its client goes away or waits no longer.
        task = asyncio.create_task(install)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            done = await asyncio.wait_for(asyncio.shield(task), _INSTALL_SECONDS)
        except TimeoutError as exc:
            raise PeerTimeoutError(
                f"the install of version {number} has not ended within {_INSTALL_SECONDS:g} s, and goes on: ask "
                "/weight_info what became of it",
                peer="engine",
            ) from exc
        return reply({"message": "installed", **done._asdict()})

    async def _pause(self, request: Request) -> Response:
        await self._find().pause(pause_mode(request, "keep"))
        return reply({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        try:
            await self._find().resume()
        except EngineTornError as exc:
            return error_reply(exc, 409)
        return reply({"status": "resumed"})

    async def _shutdown(self, request: Request) -> Response:
        await self._find().call(Leave())
        return reply({"message": "no publisher holds this engine"})

    async def _info(self, request: Request) -> Response:
        return reply(await self._find().info())

    async def _digests(self, request: Request) -> Response:
        return reply(await self._find().held(request.query_params.getlist("names"), *held_range(request)))

    async def _dtypes(self, request: Request) -> Response:
        content = await read_body(request, MAX_MESSAGE_BYTES)
        question: DtypesQuestion = await asyncio.to_thread(decode, content, DtypesQuestion)
        return reply(TensorDtypes(await self._find().dtypes(question.tensors)))

    async def _quarantine(self, request: Request) -> Response:
        body: QuarantineBody = decode(await read_body(request, MAX_SMALL_BODY_BYTES), QuarantineBody)
        await self._find().quarantine(body.reason)
        return reply({"message": "this engine serves again once a complete update has come"})

    async def _is_paused(self, request: Request) -> Response:
        return reply({"is_paused": await self._find().is_paused()})

    async def _world_size(self, request: Request) -> Response:
        return reply({"world_size": self._find().world_size(with_data_parallel=is_on(request, "include_dp"))})


def is_on(request: Request, option: str) -> bool:
    """Whether an option of the query, which is on by default, is not switched off."""
    return request.query_params.get(option, "true").lower() not in ("false", "0", "no", "off")


def log(error: Exception) -> None:
    """What a weight route answers with an error."""
    logger.info("a weight route answers with %s: %s", type(error).__name__, error)


class TornGuard:
    """Answers POST requests to paths that begin as `generation` with 503 while the engine is torn.

    At paths that begin as `changing` the host changes the weights by itself: `doubt` is called before and after.
    """

    def __init__(
        self,
        app: ASGIApp,
        why_torn: Callable[[], Awaitable[str]],
        doubt: Callable[[], None],
        generation: Sequence[str],
        changing: Sequence[str],
    ) -> None:
        self._app = app
        self._why_torn = why_torn
        self._doubt = doubt
        self._generation = tuple(generation)
        self._changing = tuple(changing)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        path = scope["path"].removeprefix(scope.get("root_path", "")) if scope["type"] == "http" else ""
        if path.startswith(self._changing):
            self._doubt()
            try:
                await app(scope, receive, send)
            finally:
                self._doubt()
            return
        if path.startswith(self._generation) and scope["method"] == "POST":
            torn = await self._why_torn()
            if torn:
                app = refusal(f"the engine holds no whole version: {torn}", "EngineTornError", 503)
        await app(scope, receive, send)
