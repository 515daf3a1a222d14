"""weightcast's routes in SGLang's HTTP server: the control protocol, beside all of SGLang's own.

Invariants: they ask for the keys that SGLang's own weight routes ask for, and with a token set for that; an install is
one request, which goes on to its end also without its client; while the engine is torn, generation is answered with
503, and SGLang's /continue_generation with 409.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from fastapi import FastAPI, HTTPException

from weightcast.control.routes import guarded
from weightcast.errors import EngineTornError
from weightcast.integrations.plugin.routes import EngineRoutes, TornGuard, log
from weightcast.integrations.sglang.engine import SglangEngine
from weightcast.integrations.sglang.scheduler import TOKEN_VARIABLE

_GENERATION = (
    *("/generate", "/v1/", "/encode", "/classify", "/decisions", "/invocations", "/vertex_generate"),
    *("/api/chat", "/api/generate", "/rerank", "/score", "/systemone"),
)


def attach(app: FastAPI, manager: Any) -> None:
    """Add the routes to a server that does not run yet. Raises UnsupportedError if this SGLang lacks what they need."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    engine = SglangEngine(manager)
    routes = EngineRoutes(lambda: engine)
    token = os.environ.get(TOKEN_VARIABLE) or None
    for method, path, handler in routes.handlers():
        endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(guarded(handler, token=token, on_error=log))
        app.add_api_route(path, endpoint, methods=[method])
    app.add_middleware(TornGuard, why_torn=engine.why_torn, generation=_GENERATION)
    manager.continue_generation = functools.partial(_continue, engine)


async def _continue(engine: SglangEngine, request: Any) -> None:
    """What SGLang's own /continue_generation runs."""
    try:
        await engine.resume()
    except EngineTornError as exc:
        raise HTTPException(409, str(exc)) from exc
