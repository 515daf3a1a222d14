"""The control protocol's routes in the HTTP server of an engine that is not weightcast's own.

Invariants: an install is one request, which goes on to its end also without its client; while the engine is torn,
requests for generation are answered with 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from weightcast.control.routes import (
    MAX_SMALL_BODY_BYTES,
    FinishBody,
    Handler,
    InitBody,
    UpdateBody,
    error_reply,
    pause_mode,
    read_body,
    refusal,
    reply,
    version_number,
)
from weightcast.control.worker_rpc import Init, Leave, RankCall, UpdateCall
from weightcast.errors import EngineTornError, PeerTimeoutError
from weightcast.format.manifest import MAX_MESSAGE_BYTES, decode
from weightcast.format.messages import PauseMode, WeightInfo

T = TypeVar("T")
logger = logging.getLogger(__name__)

_INSTALL_SECONDS = 300.0


class InstallAnswer(NamedTuple):
    """An install's outcome. `pause_seconds`: how long the engine stood still for it."""

    weight_version: str
    run: str
    pause_seconds: float


class ServedEngine(Protocol):
    """All ranks behind one server. Every wait has a deadline; errors are WeightcastErrors."""

    async def call(self, call: RankCall) -> None: ...

    async def info(self) -> WeightInfo: ...

    async def install(self, number: int, mode: PauseMode, run: str = "") -> InstallAnswer: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def is_paused(self) -> bool: ...

    def world_size(self, *, with_data_parallel: bool) -> int: ...


class EngineRoutes:
    """`find` gives the engine, or raises ClosedError where there is none. `default_pause`: the mode of /pause."""

    def __init__(self, find: Callable[[], ServedEngine], *, default_pause: PauseMode = "keep") -> None:
        self._find = find
        self._default_pause = default_pause
        self._tasks: set[asyncio.Task[Any]] = set()

    def handlers(self) -> Iterator[tuple[str, str, Handler]]:
        """Method, path and what answers there."""
        posts: dict[str, Handler] = {
            "/init_weight_transfer_engine": self._init,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/shutdown_weight_transfer_engine": self._shutdown,
            "/pause": self._pause,
            "/resume": self._resume,
        }
        gets: dict[str, Handler] = {
            "/weight_info": self._info,
            "/is_paused": self._is_paused,
            "/get_world_size": self._world_size,
        }
        for method, handlers in (("POST", posts), ("GET", gets)):
            for path, handler in handlers.items():
                yield method, path, handler

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
        done = await self._lasting(install, f"the install of version {number}")
        return reply({"message": "installed", **done._asdict()})

    async def _pause(self, request: Request) -> Response:
        await self._find().pause(pause_mode(request, self._default_pause))
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

    async def _is_paused(self, request: Request) -> Response:
        return reply({"is_paused": await self._find().is_paused()})

    async def _world_size(self, request: Request) -> Response:
        with_data_parallel = request.query_params.get("include_dp", "true").lower() not in ("false", "0", "no", "off")
        return reply({"world_size": self._find().world_size(with_data_parallel=with_data_parallel)})

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


def log(error: Exception) -> None:
    """What a weight route answers with an error."""
    logger.info("a weight route answers with %s: %s", type(error).__name__, error)


class TornGuard:
    """Answers POST requests to paths that begin as `generation` with 503 while the engine is torn."""

    def __init__(self, app: ASGIApp, why_torn: Callable[[], Awaitable[str]], generation: Sequence[str]) -> None:
        self._app = app
        self._why_torn = why_torn
        self._generation = tuple(generation)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if self._generates(scope):
            torn = await self._why_torn()
            if torn:
                app = refusal(f"the engine holds no whole version: {torn}", "EngineTornError", 503)
        await app(scope, receive, send)

    def _generates(self, scope: Scope) -> bool:
        if scope["type"] != "http" or scope["method"] != "POST":
            return False
        return bool(scope["path"].removeprefix(scope.get("root_path", "")).startswith(self._generation))
