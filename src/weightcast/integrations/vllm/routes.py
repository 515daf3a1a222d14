"""The endpoint plugin of vLLM's API server: the weight routes of the control protocol, in place of vLLM's own.

Invariants: with a token set, no weight route answers without it, and without one, none answers a browser's page; an
install is one request, which goes on to its end also without its client; while the engine is torn, generation is
answered with 503. vLLM's VLLM_SERVER_DEV_MODE is not needed, and would open routes that no token guards.
"""

from __future__ import annotations

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.rl.online.metrics import weight_operation_metrics

from weightcast.control.rank_calls import Init, Leave, Update
from weightcast.control.server_replies import error_reply, read_body, refusal, reply
from weightcast.control.server_weights import (
    MAX_SMALL_BODY_BYTES,
    FinishBody,
    Handler,
    InitBody,
    UpdateBody,
    guarded,
    pause_mode,
    version_number,
)
from weightcast.errors import ClosedError, EngineTornError, PeerTimeoutError
from weightcast.integrations.vllm.engine import VllmEngine
from weightcast.manifest import MAX_MESSAGE_BYTES, decode

T = TypeVar("T")
logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "WEIGHTCAST_TOKEN"
_INSTALL_SECONDS = 300.0
_GENERATION = (
    *("/v1/", "/v2/", "/inference/", "/invocations", "/cohere/", "/generative_scoring"),
    *("/pooling", "/classify", "/score", "/rerank"),
)


class WeightcastRoutes:
    """What vLLM asks of an endpoint plugin."""

    name = "weightcast"
    required_tasks = None

    def __init__(self) -> None:
        self._engine: VllmEngine | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes; vLLM drops its own of the same path and method."""
        posts: dict[str, Handler] = {
            "/init_weight_transfer_engine": _recorded("init", self._init),
            "/start_weight_update": _recorded("start", self._start),
            "/update_weights": _recorded("update", self._update),
            "/finish_weight_update": _recorded("finish", self._finish),
            "/shutdown_weight_transfer_engine": _recorded("shutdown", self._shutdown),
            "/pause": self._pause,
            "/resume": self._resume,
        }
        gets: dict[str, Handler] = {
            "/weight_info": self._info,
            "/is_paused": self._is_paused,
            "/get_world_size": self._world_size,
        }
        token = os.environ.get(TOKEN_VARIABLE) or None
        for method, handlers in (("POST", posts), ("GET", gets)):
            for path, handler in handlers.items():
                app.add_api_route(path, guarded(handler, token=token, on_error=_log), methods=[method])
        app.add_middleware(_TornGuard, torn=lambda: "" if self._engine is None else self._engine.torn)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """`engine_client` is None for vLLM's render server, which has no engine: every route then says so."""
        self._engine = None if engine_client is None else VllmEngine(engine_client)

    def _require_engine(self) -> VllmEngine:
        if self._engine is None:
            raise ClosedError("this server has no engine")
        return self._engine

    # --- the routes ---

    async def _init(self, request: Request) -> Response:
        body: InitBody = decode(await read_body(request, MAX_SMALL_BODY_BYTES), InitBody)
        await self._require_engine().call(Init(body.init_info))
        return reply({"message": "the weight transfer is being initialised"})

    async def _start(self, request: Request) -> Response:
        # An offer starts an update here; vLLM's clients call this first.
        return reply({"message": "ready for an offer"})

    async def _update(self, request: Request) -> Response:
        content = await read_body(request, MAX_MESSAGE_BYTES)
        body: UpdateBody = await asyncio.to_thread(decode, content, UpdateBody)
        await self._require_engine().call(Update(body.update_info))
        return reply({"message": "taken"})

    async def _finish(self, request: Request) -> Response:
        body: FinishBody = decode(await read_body(request, MAX_SMALL_BODY_BYTES), FinishBody)
        number, mode = version_number(body.weight_version), pause_mode(request, "keep")
        info = await self._lasting(self._require_engine().install(number, mode), f"the install of version {number}")
        return reply({"message": "installed", "weight_version": info.weight_version, "run": info.run})

    async def _pause(self, request: Request) -> Response:
        clear_cache = request.query_params.get("clear_cache", "true").lower() not in ("false", "0", "no", "off")
        # vLLM's default, since this stands in place of its route.
        await self._require_engine().pause(pause_mode(request, "abort"), clear_cache=clear_cache)
        return reply({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        try:
            await self._require_engine().resume()
        except EngineTornError as exc:
            return error_reply(exc, 409)
        return reply({"status": "resumed"})

    async def _shutdown(self, request: Request) -> Response:
        await self._require_engine().call(Leave())
        return reply({"message": "no publisher holds this engine"})

    async def _info(self, request: Request) -> Response:
        return reply(await self._require_engine().info())

    async def _is_paused(self, request: Request) -> Response:
        return reply({"is_paused": await self._require_engine().is_paused()})

    async def _world_size(self, request: Request) -> Response:
        with_data_parallel = request.query_params.get("include_dp", "true").lower() not in ("false", "0", "no", "off")
        return reply({"world_size": self._require_engine().world_size(with_data_parallel=with_data_parallel)})

    async def _lasting(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Wait for `work`, which goes on by itself if its client goes away or waits no longer."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.wait_for(asyncio.shield(task), _INSTALL_SECONDS)
        except TimeoutError as exc:
            what = (
                f"{what} has not ended within {_INSTALL_SECONDS:g} s, and goes on: ask /weight_info what became of it"
            )
            raise PeerTimeoutError(what, peer="engine") from exc


def _recorded(operation: Any, handler: Handler) -> Handler:
    """In vLLM's metrics of weight transfers, as its own routes are."""

    async def recorded(request: Request) -> Response:
        with weight_operation_metrics().record(operation):
            return await handler(request)

    return recorded


def _log(error: Exception) -> None:
    logger.info("a weight route answers with %s: %s", type(error).__name__, error)


class _TornGuard:
    """Answers requests for generation with 503 while the engine is torn; everything else passes."""

    def __init__(self, app: ASGIApp, torn: Callable[[], str]) -> None:
        self._app = app
        self._torn = torn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and scope["method"] == "POST":
            torn = self._torn()
            if torn and scope["path"].removeprefix(scope.get("root_path", "")).startswith(_GENERATION):
                app = refusal(f"the engine holds no whole version: {torn}", "EngineTornError", 503)
        await app(scope, receive, send)
