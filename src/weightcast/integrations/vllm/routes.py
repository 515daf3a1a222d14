"""The endpoint plugin of vLLM's API server: the weight routes of the control protocol, in place of vLLM's own.

Invariants: with a token set, every weight route requires it; without one, requests of a browser's page are refused;
while the engine is torn, every API server answers generation with 503. vLLM's VLLM_SERVER_DEV_MODE is not needed, and
would open routes without a token; its /wake_up does not start a torn engine.
"""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast.control.routes import WEIGHT_ROUTES, error_reply, guarded, reply
from weightcast.errors import ClosedError, EngineTornError, WeightcastError
from weightcast.integrations.plugin import TOKEN_VARIABLE
from weightcast.integrations.plugin.routes import guard_serving, log, path_of
from weightcast.integrations.plugin.server_mutex import ServerMutex
from weightcast.integrations.vllm.engine import VllmEngine
from weightcast.integrations.vllm.served_adapters import ServedAdapters

_GENERATION = (
    *("/v1/", "/v2/", "/inference/", "/invocations", "/cohere/", "/generative_scoring"),
    *("/pooling", "/classify", "/score", "/rerank"),
)
_HEALTH = ("/health",)
"""Not /ping, which asks whether the server lives."""
_CHANGING = ("/collective_rpc", "/weight_checker", "/sleep")


class WeightcastRoutes:
    """Endpoint plugin that vLLM calls to add routes."""

    name = "weightcast"
    required_tasks = None

    def __init__(self) -> None:
        self._engine: VllmEngine | None = None
        self._adapters: ServedAdapters | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes, which replace vLLM's own with the same path and method."""
        token = os.environ.get(TOKEN_VARIABLE) or None
        for method, path, kind, answer in WEIGHT_ROUTES:
            handler = guarded(kind, answer, self._require_engine, token=token, on_error=log)
            app.add_api_route(path, handler, methods=[method])
        app.add_api_route("/v1/models", self._models, methods=["GET"])
        app.add_middleware(wake_guard, find=self._require_engine)
        guard_serving(
            app,
            lambda: self._engine,
            generation=_GENERATION,
            changing=_CHANGING,
            health=_HEALTH,
            running=lambda: contextlib.nullcontext() if self._adapters is None else self._adapters.request(),
        )

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Take over the engine. `engine_client`: None in vLLM's render server, whose weight routes then raise."""
        self._state = state
        if engine_client is None:
            return
        num_servers = getattr(args, "api_server_count", None) or 1
        # Several API servers are child processes of one parent.
        mutex = ServerMutex.of_several(num_servers, launcher=os.getppid()) if num_servers > 1 else ServerMutex.of_one()
        self._adapters = ServedAdapters(state) if num_servers == 1 else None
        self._engine = VllmEngine(engine_client, mutex, adapters=self._adapters)

    async def _models(self) -> Response:
        """Handle GET /v1/models as vLLM does, with each published adapter under the names that requests can have."""
        if self._adapters is None:
            listed = await self._state.openai_serving_models.show_available_models()
        else:
            listed = await self._adapters.listed()
        return reply(listed.model_dump())

    def _require_engine(self) -> VllmEngine:
        if self._engine is None:
            raise ClosedError("this server has no engine: send the request to the server that generates")
        return self._engine


def wake_guard(app: ASGIApp, find: Callable[[], VllmEngine]) -> ASGIApp:
    """Return a middleware for vLLM's own /wake_up: refused for a torn engine, and delayed during an install."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) != "/wake_up":
            await app(scope, receive, send)
            return
        try:
            async with find().waking(Request(scope).query_params.getlist("tags")):
                await app(scope, receive, send)
        except WeightcastError as exc:
            log(exc)
            answer = error_reply(exc, 409 if isinstance(exc, EngineTornError) else None)
            await answer(scope, receive, send)

    return guarded
