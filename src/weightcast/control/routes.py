"""One table of the weight routes that all servers mount, with their size limits, authentication and error replies.

Invariants: with a token set, every weight route requires it; without one, requests of a browser's page are refused; a
call that could block runs in a thread, never on the event loop. Bodies are decoded as typed records, and are not read
beyond their limit. Every error's text is sent to the client, with an `ErrorRecord` for library errors, from which the
client rebuilds the exception; tracebacks are not sent.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Protocol, TypeAlias, cast, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

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
    UpdateAbortedError,
    to_record,
)
from weightcast.format.manifest import MAX_BYTES, MAX_MESSAGE_BYTES, TensorSpec, decode, decoder
from weightcast.format.messages import (
    DtypesQuestion,
    HeldWeights,
    InitInfo,
    PauseMode,
    Seal,
    TensorDtypes,
    UpdateInfo,
    WeightInfo,
)

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
"""HTTP status by class of error: the first row that matches. Any other error, such as InstallError, is 500."""

Handler = Callable[[Request], Awaitable[Response]]


class InitBody(msgspec.Struct, frozen=True):
    init_info: InitInfo


class UpdateBody(msgspec.Struct, frozen=True):
    update_info: UpdateInfo


class FinishBody(msgspec.Struct, frozen=True):
    weight_version: str
    seal: Seal | None = None


class QuarantineBody(msgspec.Struct, frozen=True):
    reason: Annotated[str, msgspec.Meta(max_length=4096)]


def natural_number(what: str, text: str) -> int:
    """Return the number in `text`, in decimal digits. Raises ManifestError if it is not one."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        raise ManifestError(f"{what} is {text[:40]!r}; it must be a number in decimal digits", fault="type")
    return int(text)


def pause_mode(request: Request, default: PauseMode) -> PauseMode:
    """Return the query's `mode`. Raises ValueError for an unknown one."""
    mode = request.query_params.get("mode", default)
    if mode not in get_args(PauseMode):
        raise ValueError(f"mode is {mode[:40]!r}; it must be one of {', '.join(get_args(PauseMode))}")
    return cast(PauseMode, mode)


def status_of(error: BaseException) -> int:
    """Return the HTTP status for an error of a weight route."""
    if isinstance(error, ManifestError) and error.fault == "too_large":
        return 413
    return next((status for classes, status in _STATUS if isinstance(error, classes)), 500)


def reply(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON reply. `body`: anything that msgspec can encode."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_reply(error: BaseException, status: int | None = None) -> Response:
    """Return a weight route's reply for an error, with a record from which the client rebuilds it."""
    status = status or status_of(error)
    if status == 500:
        logger.error("a weight route failed", exc_info=error)
    body = {"message": str(error), "type": type(error).__name__, "code": status, "record": to_record(error)}
    # The rest of a refused body is still arriving: close the connection instead of reading it.
    return reply({"error": body}, status, {"connection": "close"} if status == 413 else None)


def refusal(message: str, kind: str, status: int) -> Response:
    """Return a reply for an error without a library exception: authentication, unknown route."""
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return reply({"error": {"message": message, "type": kind, "code": status}}, status, headers)


async def read_body(request: Request, max_bytes: int, on_part: Callable[[], object] | None = None) -> bytes:
    """Return the whole body. `on_part` is called after each part of it has come.

    Raises ManifestError (`too_large`) as soon as the body, or its declared length, is too long.
    """
    message = f"the body is larger than {max_bytes} bytes, the limit of this route"
    if int(request.headers.get("content-length") or 0) > max_bytes:
        raise ManifestError(message, fault="too_large")
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > max_bytes:
            raise ManifestError(message, fault="too_large")
        if on_part is not None:
            on_part()
        body += chunk
    return bytes(body)


class InstallAnswer(msgspec.Struct, frozen=True):
    """Result of an install. `pause_seconds`: time for which the engine was paused."""

    weight_version: str
    run: str
    pause_seconds: float
    message: str = "installed"


class ServedEngine(Protocol):
    """The engine behind the routes, called from one event loop. Its errors are WeightcastErrors.

    `default_pause`: mode of a pause that names none. `run`: that of the caller, or empty.
    """

    default_pause: PauseMode

    async def init(self, info: InitInfo) -> None: ...

    async def update(self, info: UpdateInfo) -> None: ...

    async def finish(self, number: int, mode: PauseMode, run: str, seal: Seal | None = None) -> InstallAnswer:
        """Install the sealed version, after its `seal` if that comes with the request.

        The install is finished also if the caller is gone.
        """
        ...

    async def pause(self, mode: PauseMode, run: str, *, clear_cache: bool) -> None: ...

    async def resume(self, run: str) -> None:
        """Resume generation. Raises EngineTornError if the engine must not serve."""

    async def shutdown(self) -> None: ...

    async def info(self) -> WeightInfo: ...

    async def is_paused(self) -> bool: ...

    async def world_size(self, *, with_data_parallel: bool) -> int: ...

    async def held(self, names: Sequence[str], start: int, limit_bytes: int) -> HeldWeights: ...

    async def dtypes(self, specs: list[TensorSpec]) -> dict[str, str]: ...

    async def quarantine(self, reason: str) -> None: ...


Answer: TypeAlias = Callable[..., Awaitable[Any]]
"""Answers a request to a weight route, of the engine, the request and its body, if the route takes one."""


def _is_on(request: Request, option: str) -> bool:
    """Return whether an option of the query is true, which is the default."""
    return request.query_params.get(option, "true").lower() not in ("false", "0", "no", "off")


async def _started(engine: ServedEngine, request: Request) -> None:
    """Do nothing: the offer starts an update, but vLLM's clients call this route before it."""


async def _finish(engine: ServedEngine, request: Request, body: FinishBody) -> InstallAnswer:
    number, mode = natural_number("weight_version", body.weight_version), pause_mode(request, "keep")
    return await engine.finish(number, mode, request.query_params.get("run", ""), body.seal)


async def _pause(engine: ServedEngine, request: Request) -> dict[str, str]:
    mode = pause_mode(request, engine.default_pause)
    await engine.pause(mode, request.query_params.get("run", ""), clear_cache=_is_on(request, "clear_cache"))
    return {"status": "paused"}


async def _resume(engine: ServedEngine, request: Request) -> Any:
    try:
        await engine.resume(request.query_params.get("run", ""))
    except EngineTornError as exc:
        return error_reply(exc, 409)  # not 503, which would mean that the same request may succeed later
    return {"status": "resumed"}


async def _ready(engine: ServedEngine, request: Request) -> Any:
    """Answer 503 unless the engine serves a version, at most `max_behind` numbers behind the last that it knows of."""
    info = await engine.info()
    reason = info.stale_reason(natural_number("max_behind", request.query_params.get("max_behind", "1")))
    return refusal(reason, "not_ready", 503) if reason else {"weight_version": info.weight_version, "run": info.run}


async def _digests(engine: ServedEngine, request: Request) -> HeldWeights:
    query = request.query_params
    start = natural_number("start", query.get("start", "0"))
    limit_bytes = natural_number("limit_bytes", query.get("limit_bytes", str(MAX_BYTES)))
    return await engine.held(query.getlist("names"), start, limit_bytes)


async def _dtypes(engine: ServedEngine, request: Request, body: DtypesQuestion) -> TensorDtypes:
    return TensorDtypes(await engine.dtypes(body.tensors))


async def _is_paused(engine: ServedEngine, request: Request) -> dict[str, bool]:
    return {"is_paused": await engine.is_paused()}


async def _world_size(engine: ServedEngine, request: Request) -> dict[str, int]:
    return {"world_size": await engine.world_size(with_data_parallel=_is_on(request, "include_dp"))}


WEIGHT_ROUTES: tuple[tuple[str, str, Any, Answer], ...] = (
    ("POST", "/init_weight_transfer_engine", InitBody, lambda engine, _, body: engine.init(body.init_info)),
    ("POST", "/start_weight_update", None, _started),
    ("POST", "/update_weights", UpdateBody, lambda engine, _, body: engine.update(body.update_info)),
    ("POST", "/finish_weight_update", FinishBody, _finish),
    ("POST", "/shutdown_weight_transfer_engine", None, lambda engine, _: engine.shutdown()),
    ("POST", "/pause", None, _pause),
    ("POST", "/resume", None, _resume),
    ("GET", "/weight_info", None, lambda engine, _: engine.info()),
    ("GET", "/weight_ready", None, _ready),
    ("GET", "/is_paused", None, _is_paused),
    ("GET", "/get_world_size", None, _world_size),
    ("GET", "/weight_digests", None, _digests),
    ("POST", "/weight_dtypes", DtypesQuestion, _dtypes),
    ("POST", "/quarantine", QuarantineBody, lambda engine, _, body: engine.quarantine(body.reason)),
)
"""The control protocol: method, path, record of the body, function that is called."""
_LARGE_BODIES = (UpdateBody, DtypesQuestion)
"""Bodies that may have the size of a message; large ones are decoded in a thread."""


def guarded(
    kind: Any,
    answer: Answer,
    find: Callable[[], object],
    *,
    token: str | None,
    on_error: Callable[[Exception], None],
) -> Handler:
    """Return a route's handler: it refuses callers without the token, and replies with the answer or its error.

    `kind`: record of the body; None for a route without one. `find` returns the engine, or raises ClosedError without
    one. Errors become replies here and not in the application's exception handlers: in a plugin the application is the
    server's, and Starlette raises an unexpected error again after its handler, so that uvicorn closes the connection.
    """
    expected = None if token is None else f"Bearer {token}".encode()
    if kind is not None:
        decoder(kind)

    async def handle(request: Request) -> Response:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if expected is not None and not hmac.compare_digest(given, expected):
            return refusal("this weight route needs the server's token: `Authorization: Bearer ...`", "auth", 401)
        if expected is None and "origin" in request.headers:
            return refusal("weight routes do not answer pages in a browser; set a token to allow it", "origin", 403)
        try:
            body = []
            if kind is not None:
                data = await read_body(request, MAX_MESSAGE_BYTES if kind in _LARGE_BODIES else MAX_SMALL_BODY_BYTES)
                is_small = len(data) <= MAX_SMALL_BODY_BYTES
                body.append(decode(data, kind) if is_small else await asyncio.to_thread(decode, data, kind))
            result = await answer(find(), request, *body)
            return result if isinstance(result, Response) else reply({"message": "done"} if result is None else result)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as exc:
            on_error(exc)
            return error_reply(exc)

    return handle
