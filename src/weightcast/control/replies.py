"""What every route shares: reading a body under a cap, answering in JSON, and errors as status and record.

Invariants: a body over its cap is never held in memory; every error's text reaches the client, with an `ErrorRecord`
where the client can rebuild the error from it; no traceback does.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from starlette.requests import Request
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

logger = logging.getLogger(__name__)

_STATUS: tuple[tuple[tuple[type[Exception], ...], int], ...] = (
    ((InsufficientMemoryError,), 507),
    ((RefusedError, IncompleteUpdateError, IntegrityError, UpdateAbortedError, ClosedError), 409),
    ((EngineTornError,), 503),
    ((PeerTimeoutError,), 504),
    ((PeerDiedError,), 502),
    ((ManifestError, ValueError), 400),
)
"""The first row that fits decides; any other error, such as InstallError, is 500."""


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
