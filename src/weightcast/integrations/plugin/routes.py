"""Middleware in another project's HTTP server: a torn engine answers generation with 503."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast.control.routes import refusal
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
