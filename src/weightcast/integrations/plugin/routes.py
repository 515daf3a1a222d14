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


def guard_serving(
    app: Starlette,
    find: Callable[[], PluginEngine | None],
    *,
    generation: tuple[str, ...],
    changing: tuple[str, ...],
    health: Sequence[str],
    running: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Add a middleware that answers with 503: generation while the engine is torn, health checks while it is stale.

    `find`: returns the engine, None if the server has none. `generation`: prefixes of paths of requests (POST) that
    generate; `running` returns a context for each that is answered. `changing`: prefixes of paths at which the host
    changes the weights by itself; the engine is in doubt before and after. `health`: the paths of health checks, which
    are answered by the host alone unless the environment has `HEALTH_VARIABLE`. Raises ManifestError if that is not a
    number.
    """
    value = os.environ.get(HEALTH_VARIABLE)
    max_behind = natural_number(HEALTH_VARIABLE, value) if value else None

    def guard(app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            path, engine = path_of(scope), find()
            if engine is not None and path.startswith(changing):
                engine.doubt()
                try:
                    await app(scope, receive, send)
                finally:
                    engine.doubt()
            elif engine is not None and path in health and max_behind is not None:
                try:
                    reason = await engine.stale_reason(max_behind)
                except WeightcastError as exc:
                    reason = str(exc)
                await (refusal(reason, "not_ready", 503) if reason else app)(scope, receive, send)
            elif not path.startswith(generation):
                await app(scope, receive, send)
            elif engine is not None and scope.get("method") == "POST" and (torn := await engine.why_torn()):
                answer = refusal(f"the engine has no whole version: {torn}", "EngineTornError", 503)
                await answer(scope, receive, send)
            else:
                with running():
                    await app(scope, receive, send)

        return guarded

    app.add_middleware(guard)
