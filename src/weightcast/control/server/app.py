"""An engine behind HTTP: the weight routes, health, metrics and, given a generator, OpenAI completions.

Invariants: the socket is bound before anything is served, and to loopback unless a token guards the weight routes;
nothing of the server outlives `close`: no thread, no socket; health answers whatever an update does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightcast.control.routes import guarded, refusal, reply, weight_handlers
from weightcast.control.server.metrics import ServerMetrics
from weightcast.control.server.worker_engine import WorkerEngine
from weightcast.engines.gate import Gate
from weightcast.errors import ClosedError, WeightcastError
from weightcast.format.manifest import WeightVersion
from weightcast.host.deadline import GRACE_SECONDS, POLL_SECONDS, Deadline
from weightcast.host.descriptors import AcceptLog, shortage
from weightcast.seams.engine import Engine
from weightcast.serving.worker import Worker

if TYPE_CHECKING:
    from weightcast.engines.transformers import TextGenerator

logger = logging.getLogger(__name__)

_NUM_THREADS = 8
_QUEUE_LENGTH = 1024


class EngineServer:
    """Serves `engine`, which takes weights, and `generator`, which answers completions: one model in one process.

    Both step through one `gate`: the generator's if there is one, else a new one; code that runs the model by itself
    wraps each use in `with server.step():`. `port=0` asks the OS for one (`url`, `port`). A `host` that other machines
    can reach needs a `token`, or ValueError is raised; weight routes then want it as a bearer token. The server owns
    what it was given: `close` closes worker and generator too.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        gate: Gate | None = None,
        generator: TextGenerator | None = None,
        model_name: str = "weightcast",
        worker: Worker | None = None,
    ) -> None:
        _check_port(port)
        _check_exposure(host, token)
        gates = [] if gate is None else [gate]
        gates += [owner.gate for owner in (generator, worker) if owner is not None]
        if any(other is not gates[0] for other in gates):
            raise ValueError("generator, worker and server step through different gates; give all of them one Gate")
        self.gate = gates[0] if gates else Gate()
        self.generator = generator
        self._host, self._port = host, port
        self._metrics = ServerMetrics(self.gate)
        self.worker = worker or Worker(engine, gate=self.gate, metrics=self._metrics)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="weightcast-control")
        self._uvicorn = self._make_server(token, model_name)
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def port(self) -> int:
        if self._socket is None:
            raise ClosedError("the server has no port: it was not started, or is closed")
        return self._port

    @property
    def url(self) -> str:
        """URL of this server. Raises ClosedError before `start` and after `close`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def step(self, *, timeout_seconds: float | None = None) -> contextlib.AbstractContextManager[WeightVersion | None]:
        """`Gate.step`: use the model inside, and no install happens meanwhile.

        Waits while the engine is paused or torn. Raises ClosedError once the server is closed, also in that wait; after
        `timeout_seconds` EngineTornError or PeerTimeoutError. After either of these step again: an update may come.
        """
        if self._is_closed:
            raise ClosedError("the server was closed: no update comes any more")
        return self.gate.step(timeout_seconds=timeout_seconds)

    def start(self) -> EngineServer:
        """Bind and serve in the background; returns once requests are answered. Raises WeightcastError if it can't."""
        if self._is_closed or self._thread is not None:
            raise ClosedError("an EngineServer is started once; make a new one")
        try:
            family, address = _resolve(self._host, self._port)[0]
            both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            self._socket = socket.create_server(address, family=family, backlog=128, dualstack_ipv6=both)
            # Accepted connections inherit it; asyncio leaves it out here, and an answer's body would wait for an
            # acknowledgement of its header.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as exc:
            what = f"can't listen on {self._host}:{self._port}: {exc}"
            raise WeightcastError(f"{what}; name an address of this host, and a free port or 0 for any") from exc
        self._port = self._socket.getsockname()[1]
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._serve(self._socket),), name="weightcast-server", daemon=True
        )
        self._thread.start()
        deadline = Deadline(6 * GRACE_SECONDS)
        while not self._uvicorn.started and self._thread.is_alive() and not deadline.has_passed:
            self._thread.join(POLL_SECONDS)
        if not self._uvicorn.started:
            self.close()
            raise WeightcastError(f"the server on {self._host}:{self._port} did not start; see its log")
        # asyncio has made the queue as short as what it accepts at once.
        self._socket.listen(_QUEUE_LENGTH)
        return self

    async def _serve(self, listening: socket.socket) -> None:
        accept_log = AcceptLog(logger, "an HTTP connection")

        def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            error = context.get("exception")
            if shortage(error):
                accept_log.failed(error)
            else:
                loop.default_exception_handler(context)

        asyncio.get_running_loop().set_exception_handler(on_error)
        await self._uvicorn.serve(sockets=[listening])

    def close(self) -> None:
        """Stop serving: requests under way are answered with an error. Idempotent; waits for an install under way."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.generator is not None:
            self.generator.close()
        self.worker.close()
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join(6 * GRACE_SECONDS)
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def run(self, *, announce: Callable[[], None] | None = None) -> None:
        """Serve until SIGTERM or SIGINT, then close. Blocks; for the main thread. Starts the server if need be.

        `announce` is called once requests are answered and signals end the server.
        """
        # The handler appends and nothing else: a lock could be held by the very thread that the signal interrupts.
        signals: list[int] = []
        numbers = (signal.SIGTERM, signal.SIGINT)
        former = [signal.signal(number, lambda got, _: signals.append(got)) for number in numbers]
        try:
            thread = self._thread or self.start()._thread
            if announce is not None:
                announce()
            while thread is not None and thread.is_alive() and not signals:
                thread.join(POLL_SECONDS)
        finally:
            self.close()
            for number, handler in zip(numbers, former, strict=True):
                signal.signal(number, handler)

    def __enter__(self) -> EngineServer:
        return self.start() if self._thread is None else self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_server(self, token: str | None, model_name: str) -> uvicorn.Server:
        """uvicorn on a socket of ours, silent. In a thread that is not the main one it leaves signal handlers alone."""
        engine = WorkerEngine(self.worker, self._pool)
        handlers = [*weight_handlers(lambda: engine), ("GET", "/weight_specs", engine.specs)]
        routes = [
            *(
                Route(path, guarded(handler, token=token, on_error=self._metrics.request_failed), methods=[method])
                for method, path, handler in handlers
            ),
            Route("/health", self._health),
            Route("/metrics", self._metrics.show),
        ]
        if self.generator is not None:
            from weightcast.control.server.completions import completion_routes

            routes += completion_routes(self.generator, self._metrics, model_name=model_name)
        # Imports uvicorn's protocol, which a process that only names EngineServer does not need.
        from weightcast.control.server.connections import KEEP_ALIVE_SECONDS, LimitedConnection, backlog

        config = uvicorn.Config(
            Starlette(routes=routes, exception_handlers={HTTPException: _http_error}),
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            http=LimitedConnection,
            backlog=backlog(),
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=5,
        )
        return uvicorn.Server(config)

    async def _health(self, request: Request) -> Response:
        if self.gate.torn:
            return refusal(f"the engine holds no whole version: {self.gate.torn}", "EngineTornError", 503)
        if self.generator is not None and not self.generator.is_alive:
            return refusal("the generator has ended", "ClosedError", 503)
        return reply({"status": "ok"})


async def _http_error(request: Request, error: Exception) -> Response:
    """A path or a method that no route has. The other errors are answered by their routes."""
    assert isinstance(error, HTTPException)
    return reply({"detail": error.detail}, error.status_code, dict(error.headers or {}))


def _check_port(port: object) -> None:
    if not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"port is {port!r}; it must be a number from 0 to 65535, 0 for any that is free")


def _check_exposure(host: str, token: Any) -> None:
    """Raises ValueError for a token that no header can carry, and for a reachable host without a token."""
    if token is not None:
        if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("a token must be text, printable ASCII without spaces, and not empty")
        return
    try:
        addresses = [str(address[0]).partition("%")[0] for _, address in _resolve(host, 0)]
    except OSError as exc:
        raise ValueError(f"{host!r} is not an address of this machine: {exc}") from exc
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise ValueError(
            f"{host} can be reached from other machines, which could then replace the weights: "
            "pass token= (`--token-file`), or bind to 127.0.0.1"
        )


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[Any, ...]]]:
    found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, address) for family, _, _, _, address in found]
