"""HTTP servers of the package, with limits on connections and on the time for sending a request.

Invariant: a connection that has not sent its request completely never keeps a new one out: if there are too many, those
that have not sent a request are closed first. A connection whose request is being answered is not closed. With TLS this
holds after the handshake, which has a limit of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from weightcast.host.deadline import GRACE_SECONDS
from weightcast.host.descriptors import AcceptLog, shortage

logger = logging.getLogger(__name__)

_Message = MutableMapping[str, Any]

KEEP_ALIVE_SECONDS = 75
"""Longest wait for more of a request's body, and for the next request.

Longer than HTTP clients keep an idle connection, so that the client closes it first: a server that closes first can
lose a request that the client has just sent.
"""
_SWEEP_SECONDS = 0.5
"""Interval at which connections are closed whose request is late."""
_MAX_BACKLOG = 128
_QUEUE_LENGTH = 1024


def most_connections() -> int:
    """Return the limit on connections: half of the file descriptors that this process may have."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class HttpServer(uvicorn.Server):
    """A uvicorn server of `app` with these limits and without logs, to be given a socket of `listening.listen`.

    Outside the main thread it sets no signals. `certificate` and `key`: files in PEM format, for TLS; raises ValueError
    if they can't be used.
    """

    def __init__(self, app: Starlette, *, certificate: Path | None = None, key: Path | None = None) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="warning",
            access_log=False,
            loop="asyncio",
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            http=LimitedConnection,
            # What asyncio accepts at once before it handles the first.
            backlog=min(_MAX_BACKLOG, most_connections() // 2),
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=5,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        try:
            config.load()
        except OSError as exc:  # also ssl.SSLError
            raise ValueError(f"the certificate {certificate} can't be used for TLS: {exc}") from exc
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Do what uvicorn does, which does not limit the time of a TLS handshake."""
        loop, accept_log = asyncio.get_running_loop(), AcceptLog(logger, "an HTTP connection")

        def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if shortage(error):
                accept_log.failed(error)
            else:
                loop.default_exception_handler(context)

        def close_late() -> None:
            for each in list(self.server_state.connections):
                if isinstance(each, LimitedConnection) and each.due_at <= loop.time():
                    each.transport.abort()
            loop.call_later(_SWEEP_SECONDS, close_late)

        loop.set_exception_handler(on_error)
        close_late()
        self.servers = []
        for listening in sockets or ():
            server = await loop.create_server(
                lambda: LimitedConnection(self.config, self.server_state, self.lifespan.state),
                sock=listening,
                backlog=self.config.backlog,
                ssl=self.config.ssl,
                ssl_handshake_timeout=None if self.config.ssl is None else 2 * GRACE_SECONDS,
            )
            self.servers.append(server)
            # asyncio has set the listen queue to the number of connections that it accepts at once.
            listening.listen(_QUEUE_LENGTH)
        self.started = True


class LimitedConnection(H11Protocol):
    """A uvicorn connection that the server closes if a header, or the next part of a body, takes too long."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._serve = self.app
        self.app = self._answer
        self.due_at = math.inf
        """Time of the event loop by which the request, or its rest, must have come; infinite if none is awaited."""
        self._num_requests = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.due_at = self.loop.time() + 2 * GRACE_SECONDS
        if len(self.connections) > most_connections():
            limited = [each for each in self.connections if isinstance(each, LimitedConnection)]
            others = [each for each in limited if each.due_at < math.inf and each is not self]
            # Connections without a request first, then the oldest first.
            first = min(others, key=lambda each: (min(each._num_requests, 1), each.due_at), default=self)
            first.transport.abort()

    async def _answer(
        self,
        scope: Any,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        async def receive_body() -> _Message:
            message: _Message = await receive()
            self.due_at = self.loop.time() + KEEP_ALIVE_SECONDS if message.get("more_body") else math.inf
            return message

        headers = dict(scope["headers"])
        self._num_requests += 1
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self.due_at = self.loop.time() + KEEP_ALIVE_SECONDS if has_body else math.inf
        try:
            await self._serve(scope, receive_body, send)
        finally:
            self.due_at = self.loop.time() + KEEP_ALIVE_SECONDS + 2 * GRACE_SECONDS
