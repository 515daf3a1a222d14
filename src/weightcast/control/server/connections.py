"""Limits on connections of the reference server: their number, and the time for sending a request.

Invariant: a connection that has not sent its request completely never keeps a new one out: if there are too many, those
that have not sent a request are closed first. A connection whose request is being answered is not closed.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from weightcast.host.deadline import GRACE_SECONDS

_Message = MutableMapping[str, Any]

KEEP_ALIVE_SECONDS = 75
"""Time for sending a request's body, and for the next request.

Longer than HTTP clients keep an idle connection, so that the client closes it first: a server that closes first can
lose a request that the client has just sent.
"""
_MAX_BACKLOG = 128


def most_connections() -> int:
    """Return the limit on connections: half of the file descriptors that this process may have."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def backlog() -> int:
    """Return the number of connections that asyncio accepts at once before it handles the first."""
    return min(_MAX_BACKLOG, most_connections() // 2)


class LimitedConnection(H11Protocol):
    """A uvicorn connection that is closed if a header or a body takes too long."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._serve = self.app
        self.app = self._answer
        self._owes_request = True
        self._num_requests = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(within_seconds=2 * GRACE_SECONDS)
        if len(self.connections) > most_connections():
            others = [each for each in self.connections if isinstance(each, LimitedConnection) and each._owes_request]
            first = min((each for each in others if each is not self), key=LimitedConnection._order, default=self)
            first.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(within_seconds=None)
        super().connection_lost(exc)

    def _order(self) -> tuple[int, float]:
        """Sort key for closing: connections without a request first, then the oldest first."""
        return min(self._num_requests, 1), 0.0 if self._timer is None else self._timer.when()

    def _expect(self, *, within_seconds: float | None) -> None:
        """Close the connection unless the request, or its rest, has come within this time. None: all has come."""
        self._owes_request = within_seconds is not None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if within_seconds is None else self.loop.call_later(within_seconds, self.transport.abort)

    async def _answer(
        self,
        scope: Any,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        async def receive_body() -> _Message:
            message: _Message = await receive()
            if not message.get("more_body"):
                self._expect(within_seconds=None)
            return message

        headers = dict(scope["headers"])
        self._num_requests += 1
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self._expect(within_seconds=KEEP_ALIVE_SECONDS if has_body else None)
        try:
            await self._serve(scope, receive_body, send)
        finally:
            if not self.transport.is_closing():
                self._expect(within_seconds=KEEP_ALIVE_SECONDS + 2 * GRACE_SECONDS)
