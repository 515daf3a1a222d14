"""Middleware in another project's HTTP server: a torn engine answers generation with 503."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast.control.routes import refusal

logger = logging.getLogger(__name__)


def log(error: Exception) -> None:
    """Log an error reply of a weight route."""
    logger.info("a weight route replied with %s: %s", type(error).__name__, error)


class TornGuard:
    """Answers POST requests to paths with a prefix in `generation` with 503 while the engine is torn.

    `changing`: prefixes of paths at which the host changes the weights by itself; `doubt` is called before and after.
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
                app = refusal(f"the engine has no whole version: {torn}", "EngineTornError", 503)
        await app(scope, receive, send)
