"""Middleware in another project's HTTP server: a torn engine answers generation with 503, a stale one health checks."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast.control.routes import natural_number, refusal
from weightcast.errors import WeightcastError
from weightcast.integrations.plugin import HEALTH_VARIABLE
from weightcast.integrations.plugin.engine import PluginEngine

logger = logging.getLogger(__name__)


def log(error: Exception) -> None:
    """Log an error reply of a weight route."""
    logger.info("a weight route replied with %s: %s", type(error).__name__, error)


def path_of(scope: Scope) -> str:
    """Return the path of a request, below the application's root."""
    path: str = scope.get("path", "")
    return path.removeprefix(scope.get("root_path", ""))


class TornGuard:
    """Answers POST requests to paths with a prefix in `generation` with 503 while the engine is torn.

    `find`: returns the engine, None if the server has none. `changing`: prefixes of paths at which the host changes the
    weights by itself; the engine is in doubt before and after. `running`: returns a context for each other request to a
    path in `generation`.
    """

    def __init__(
        self,
        app: ASGIApp,
        find: Callable[[], PluginEngine | None],
        generation: Sequence[str],
        changing: Sequence[str],
        running: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._app = app
        self._find = find
        self._generation = tuple(generation)
        self._changing = tuple(changing)
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, engine = path_of(scope), self._find()
        if engine is not None and path.startswith(self._changing):
            engine.doubt()
            try:
                await self._app(scope, receive, send)
            finally:
                engine.doubt()
            return
        if not path.startswith(self._generation):
            await self._app(scope, receive, send)
            return
        if engine is not None and scope.get("method") == "POST" and (torn := await engine.why_torn()):
            answer = refusal(f"the engine has no whole version: {torn}", "EngineTornError", 503)
            await answer(scope, receive, send)
            return
        with self._running():
            await self._app(scope, receive, send)


class HealthGate:
    """Answers requests to `paths`, the server's health routes, with 503 while the engine is stale.

    `find`: returns the engine, None if the server has none. `max_behind`: see `WeightInfo.stale_reason`.
    """

    def __init__(
        self, app: ASGIApp, find: Callable[[], PluginEngine | None], paths: Sequence[str], max_behind: int
    ) -> None:
        self._app = app
        self._find = find
        self._paths = tuple(paths)
        self._max_behind = max_behind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine = self._find()
        if engine is None or path_of(scope) not in self._paths:
            await self._app(scope, receive, send)
            return
        try:
            reason = await engine.stale_reason(self._max_behind)
        except WeightcastError as exc:
            reason = str(exc)
        if reason:
            await refusal(reason, "not_ready", 503)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def gate_health(app: Starlette, find: Callable[[], PluginEngine | None], paths: Sequence[str]) -> None:
    """Add a `HealthGate` if the environment has `HEALTH_VARIABLE`. Raises ManifestError if that is no number."""
    if value := os.environ.get(HEALTH_VARIABLE):
        max_behind = natural_number(HEALTH_VARIABLE, value)
        app.add_middleware(HealthGate, find=find, paths=paths, max_behind=max_behind)
