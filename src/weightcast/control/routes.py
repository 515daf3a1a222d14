"""The weight routes of the reference server, and what every route shares: bodies under a cap, errors as replies.

Invariants: with a token set, no weight route answers without it; without one, none answers a browser's page; a call
that could block runs in a thread, never on the event loop. Bodies are decoded as typed records, and never held in
memory beyond their cap. Every error's text reaches the client, with an `ErrorRecord` where the client can rebuild the
error from it; no traceback does.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, cast, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from weightcast.errors import (
    ClosedError,
    EngineTornError,
    IncompleteUpdateError,
    InsufficientMemoryError,
    IntegrityError,
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    RefusedError,
    UnsupportedError,
    UpdateAbortedError,
    to_record,
)
from weightcast.format.manifest import MAX_BYTES, MAX_MESSAGE_BYTES, decode
from weightcast.format.messages import DtypesQuestion, InitInfo, PauseMode, TensorDtypes, UpdateInfo
from weightcast.serving.worker import Worker

logger = logging.getLogger(__name__)

MAX_SMALL_BODY_BYTES = 1 << 20
_MAX_DIGITS = 19
_STATUS: tuple[tuple[tuple[type[Exception], ...], int], ...] = (
    ((InsufficientMemoryError,), 507),
    ((RefusedError, IncompleteUpdateError, IntegrityError, UpdateAbortedError, ClosedError), 409),
    ((EngineTornError,), 503),
    ((PeerTimeoutError,), 504),
    ((PeerDiedError,), 502),
    ((ManifestError, ValueError), 400),
)
"""The first row that fits decides; any other error, such as InstallError, is 500."""

Handler = Callable[[Request], Awaitable[Response]]


class InitBody(msgspec.Struct, frozen=True):
    init_info: InitInfo


class UpdateBody(msgspec.Struct, frozen=True):
    update_info: UpdateInfo


class FinishBody(msgspec.Struct, frozen=True):
    weight_version: str


class QuarantineBody(msgspec.Struct, frozen=True):
    reason: Annotated[str, msgspec.Meta(max_length=4096)]


def held_range(request: Request) -> tuple[int, int]:
    """The query's `start`, a tensor's number, and `limit_bytes`, of the tensors to read. Raises ManifestError."""
    start, limit = request.query_params.get("start", "0"), request.query_params.get("limit_bytes", str(MAX_BYTES))
    return natural_number("start", start), natural_number("limit_bytes", limit)


def version_number(text: str) -> int:
    """The number in a `weight_version`. Raises ManifestError if it is none."""
    return natural_number("weight_version", text)


def natural_number(what: str, text: str) -> int:
    """A number in decimal digits. Raises ManifestError if it is none."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ManifestError(f"{what} is {text[:40]!r}; it must be a number in decimal digits", fault="type")
    return int(text)


def pause_mode(request: Request, default: PauseMode) -> PauseMode:
    """The query's `mode`. Raises ValueError for an unknown one."""
    mode = request.query_params.get("mode", default)
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode is {mode[:40]!r}; it must be one of {', '.join(get_args(PauseMode))}")
    return cast(PauseMode, mode)


def status_of(error: BaseException) -> int:
    """The HTTP status of an error on a weight route."""
    if isinstance(error, ManifestError) and error.fault == "too_large":
        return 413
    return next((status for classes, status in _STATUS if isinstance(error, classes)), 500)


def reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON reply of anything that msgspec encodes."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_reply(error: BaseException, status: int | None = None) -> Response:
    """The reply of a weight route to an error; the client rebuilds it from the record."""
    status = status or status_of(error)
    if status == 500:
        logger.error("a weight route failed", exc_info=error)
    body = {"message": str(error), "type": type(error).__name__, "code": status, "record": to_record(error)}
    # After a refused body the rest of it is still on its way; the connection ends rather than read it.
    return reply({"error": body}, status, {"connection": "close"} if status == 413 else None)


def refusal(message: str, kind: str, status: int) -> Response:
    """An error that no library class stands for: authentication, unknown route."""
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return reply({"error": {"message": message, "type": kind, "code": status}}, status, headers)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises ManifestError (`too_large`) as soon as it is over the cap, declared or not."""
    message = f"the body is larger than the {max_bytes} bytes that this route takes"
    if int(request.headers.get("content-length") or 0) > max_bytes:
        raise ManifestError(message, fault="too_large")
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_bytes:
            raise ManifestError(message, fault="too_large")
        body += chunk
    return bytes(body)


def answering(
    handler: Handler,
    error_reply: Callable[[Exception], Response],
    refuse: Callable[[Request], Response | None] = lambda request: None,
) -> Handler:
    """A route that answers with what `refuse` returns, if it returns something, and with `error_reply` of an error.

    Errors become replies here, not in handlers of the application: for a plugin that is the host's, and after such a
    handler has answered an unforeseen error, Starlette raises it again, and uvicorn logs it and closes the connection.
    """

    async def answering(request: Request) -> Response:
        try:
            return refuse(request) or await handler(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as exc:
            return error_reply(exc)

    return answering


def guarded(handler: Handler, *, token: str | None, on_error: Callable[[Exception], None]) -> Handler:
    """A weight route: refuses callers without the token, and answers with the error that `handler` raises."""
    expected = None if token is None else f"Bearer {token}".encode()

    def refuse(request: Request) -> Response | None:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if expected is not None and not hmac.compare_digest(given, expected):
            return refusal("this weight route needs the server's token: `Authorization: Bearer ...`", "auth", 401)
        if expected is None and "origin" in request.headers:
            return refusal("weight routes do not answer pages in a browser; set a token to allow it", "origin", 403)
        return None

    def reply_to(error: Exception) -> Response:
        on_error(error)
        return error_reply(error)

    return answering(handler, reply_to, refuse)


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
            ("POST", "/weight_dtypes", self._dtypes),
            ("POST", "/quarantine", self._quarantine),
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
        self._worker.gate.resume(owner=request.query_params.get("run", ""))
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

    async def _dtypes(self, request: Request) -> Response:
        body = await read_body(request, MAX_MESSAGE_BYTES)
        return reply(await self._run(lambda: TensorDtypes(self._worker.dtypes(decode(body, DtypesQuestion).tensors))))

    async def _digests(self, request: Request) -> Response:
        names = set(request.query_params.getlist("names"))
        return reply(await self._run(self._worker.held, names, *held_range(request)))

    async def _quarantine(self, request: Request) -> Response:
        body = await read_body(request, MAX_SMALL_BODY_BYTES)
        self._worker.gate.tear(decode(body, QuarantineBody).reason)
        return reply({"message": "this engine serves again once a complete update has come"})
