"""An engine behind HTTP: the weight routes, health, metrics and, given a generator, OpenAI completions.

Invariants: the socket is bound before anything is served, and to loopback unless a token guards the weight routes;
nothing of the server outlives `close`: no thread, no socket; health answers whatever an update does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightcast.control.replies import refusal, reply
from weightcast.control.routes import WeightRoutes
from weightcast.control.server.metrics import CONTENT_TYPE, ServerMetrics
from weightcast.engines.gate import Gate
from weightcast.errors import ClosedError, WeightcastError
from weightcast.format.manifest import WeightVersion
from weightcast.seams.engine import Engine
from weightcast.serving.worker import Worker

if TYPE_CHECKING:
    from weightcast.engines.transformers import TextGenerator

logger = logging.getLogger(__name__)

_NUM_THREADS = 8
_START_SECONDS = 15.0
_STOP_SECONDS = 30.0
# Longer than what HTTP clients keep an idle connection for, so that it is they who end it: a server that closes first
# can meet the next request halfway and lose it.
_KEEP_ALIVE_SECONDS = 75


class EngineServer:
    """Serves `engine` (what takes weights) and `generator` (what answers completions), one model in one process.

    `gate` is what both step through: the generator's if there is one, else one of its own; code that runs the model by
    itself wraps each use in `with server.step():`. `port=0` asks the OS for one (`url`, `port`). A `host` that other
    machines can reach needs a `token`, or ValueError is raised; weight routes then want it as a bearer token. The
    server owns what it was given: `close` closes worker and generator too.
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
        _check_exposure(host, token)
        self.gate = _one_gate(gate, generator, worker)
        self.generator = generator
        self._host, self._port = host, port
        self._metrics = ServerMetrics(self.gate)
        self.worker = worker or Worker(engine, gate=self.gate, observe=self._metrics.observe)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="weightcast-control")
        self._app = self._make_app(token, model_name)
        self._server: _Uvicorn | None = None
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
        """Where it serves; raises ClosedError before `start` and after `close`."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def step(self, *, timeout_seconds: float | None = None) -> contextlib.AbstractContextManager[WeightVersion | None]:
        """`Gate.step`: use the model inside, and no install happens meanwhile."""
        return self.gate.step(timeout_seconds=timeout_seconds)

    def start(self) -> EngineServer:
        """Bind and serve in the background; returns once requests are answered. Raises WeightcastError if it can't."""
        if self._is_closed or self._thread is not None:
            raise ClosedError("an EngineServer is started once; make a new one")
        self._socket = _bind(self._host, self._port)
        self._port = self._socket.getsockname()[1]
        self._server = _Uvicorn(self._app)
        self._thread = threading.Thread(
            target=self._server.serve_on, args=(self._socket,), name="weightcast-server", daemon=True
        )
        self._thread.start()
        if not self._server.settled.wait(_START_SECONDS) or not self._server.started:
            self.close()
            raise WeightcastError(f"the server on {self._host}:{self._port} did not start; see its log")
        return self

    def close(self) -> None:
        """Stop serving: requests under way are answered with an error. Idempotent; waits for an install under way."""
        if self._is_closed:
            return
        self._is_closed = True
        if self.generator is not None:
            self.generator.close()
        self.worker.close()
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(_STOP_SECONDS)
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT, then close. Blocks; for the main thread. Starts the server if need be."""
        reader, writer = socket.socketpair()
        # A byte to a socket, not an Event: its lock could be held by the very thread that the signal interrupts.
        with reader, writer, _on_signals(lambda: writer.send(b"x")):
            try:
                if self._thread is None:
                    self.start()
                assert self._server is not None
                self._server.on_end = lambda: writer.send(b"x")
                if not self._server.ended:
                    reader.recv(1)
            finally:
                if self._server is not None:
                    self._server.on_end = None
                self.close()

    def __enter__(self) -> EngineServer:
        return self.start() if self._thread is None else self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_app(self, token: str | None, model_name: str) -> FastAPI:
        app = FastAPI(title="weightcast", openapi_url=None, docs_url=None, redoc_url=None)
        routes = WeightRoutes(self.worker, self._pool, self._metrics, token=token).routes()
        app.router.routes.extend(routes)
        app.router.routes.append(Route("/health", self._health, methods=["GET"]))
        app.router.routes.append(Route("/metrics", self._render_metrics, methods=["GET"]))
        if self.generator is not None:
            from weightcast.control.server.completions import completion_routes

            app.router.routes.extend(completion_routes(self.generator, self._metrics, model_name=model_name))
        return app

    async def _health(self, request: Request) -> Response:
        if self.gate.torn:
            return refusal(f"the engine holds no whole version: {self.gate.torn}", "EngineTornError", 503)
        if self.generator is not None and not self.generator.is_alive:
            return refusal("the generator has ended", "ClosedError", 503)
        return reply({"status": "ok"})

    async def _render_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)


class _Uvicorn(uvicorn.Server):
    """uvicorn in a thread of ours, on a socket of ours, silent and without its signal handlers."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                loop="asyncio",
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=5,
            )
        )
        self.settled = threading.Event()
        self.ended = False
        self.on_end: Callable[[], object] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.settled.set()

    def serve_on(self, listener: socket.socket) -> None:
        try:
            self.run(sockets=[listener])
        finally:
            self.ended = True
            self.settled.set()
            if self.on_end is not None:
                self.on_end()


def _one_gate(gate: Gate | None, generator: TextGenerator | None, worker: Worker | None) -> Gate:
    owners = [owner for owner in (generator, worker) if owner is not None]
    gates = [*([] if gate is None else [gate]), *(owner.gate for owner in owners)]
    if any(g is not gates[0] for g in gates):
        raise ValueError("generator, worker and server step through different gates; give all of them one Gate")
    return gates[0] if gates else Gate()


def _check_exposure(host: str, token: str | None) -> None:
    if token is not None:
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("a token must be printable ASCII without spaces, and not empty")
        return
    if not all(ipaddress.ip_address(address).is_loopback for address in _addresses(host)):
        raise ValueError(
            f"{host} can be reached from other machines, which could then replace the weights: "
            "pass token= (`--token-file`), or bind to 127.0.0.1"
        )


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as exc:
        raise ValueError(f"{host!r} is not an address of this machine: {exc}") from exc
    return [str(info[4][0]).partition("%")[0] for info in found]


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise WeightcastError(f"can't listen on {host}:{port}: {exc}; choose a free port, or 0 for any") from exc
    return listener


@contextlib.contextmanager
def _on_signals(stop: Callable[[], object]) -> Iterator[None]:
    """Call `stop` on SIGTERM and SIGINT, instead of what they did before."""
    former = {number: signal.signal(number, lambda *_: stop()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
