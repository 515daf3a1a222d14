"""HTTP server of an engine: the weight routes, health, metrics and, with a generator, OpenAI completions.

Invariants: the socket is bound to loopback unless a token guards the weight routes; no thread and no socket outlives
`close`; /health answers also during an update.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weightcast.control.routes import WEIGHT_ROUTES, guarded, refusal, reply
from weightcast.control.server.listening import check_exposure, listen, url_of
from weightcast.control.server.metrics import ServerMetrics
from weightcast.control.server.worker_engine import WorkerEngine
from weightcast.engines.gate import Gate
from weightcast.errors import ClosedError, WeightcastError
from weightcast.format.manifest import WeightVersion
from weightcast.host.deadline import GRACE_SECONDS, POLL_SECONDS, Deadline
from weightcast.seams.engine import Engine
from weightcast.serving.worker import Worker

if TYPE_CHECKING:
    from weightcast.engines.transformers import TextGenerator

_NUM_THREADS = 8


class EngineServer:
    """Serves `engine`, which is updated, and `generator`, which answers completions: one model in one process.

    Both use one `gate`: the generator's if there is one, else a new one. Other code that runs the model wraps each use
    in `with server.step():`. `port=0` chooses a free port (see `url`, `port`). A `host` that other machines can reach
    needs a `token`, otherwise ValueError is raised; with a token, weight routes require it as a bearer token.
    `health_max_behind`: GET /health is 503 while the engine has no version, or one that is more numbers behind the last
    that it was offered; None: it does not depend on the version. `close` also closes the worker and the generator.
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
        health_max_behind: int | None = None,
    ) -> None:
        _check_port(port)
        check_exposure(host, token)
        gates = [] if gate is None else [gate]
        gates += [owner.gate for owner in (generator, worker) if owner is not None]
        if any(other is not gates[0] for other in gates):
            raise ValueError("generator, worker and server have different gates: pass the same Gate to all of them")
        self.gate = gates[0] if gates else Gate()
        self.generator = generator
        self._host, self._port = host, port
        self._health_max_behind = health_max_behind
        self._metrics = ServerMetrics(self.gate)
        self.worker = worker or Worker(engine, gate=self.gate, metrics=self._metrics)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="weightcast-control")
        worker_engine = WorkerEngine(self.worker, self._pool, self._metrics)
        guard = functools.partial(
            guarded, find=lambda: worker_engine, token=token, on_error=self._metrics.request_failed
        )
        routes = [
            *(Route(path, guard(kind, answer), methods=[method]) for method, path, kind, answer in WEIGHT_ROUTES),
            Route("/weight_specs", guard(None, WorkerEngine.specs)),
            Route("/health", self._health),
            Route("/metrics", self._metrics.show),
        ]
        if generator is not None:
            from weightcast.control.server.completions import Completions

            completions = Completions(generator, self._metrics, model_name)
            routes += [Route("/v1/completions", completions.create, methods=["POST"])]
            routes += [Route("/v1/models", completions.models)]
        # Imported here, since it imports uvicorn's protocol, which is not needed to import EngineServer.
        from weightcast.control.server.connections import HttpServer

        self._uvicorn: uvicorn.Server = HttpServer(
            Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        )
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def port(self) -> int:
        """TCP port of this server. Raises ClosedError before `start` and after `close`."""
        if self._socket is None:
            raise ClosedError("the server has no port, because it was not started or was closed: call start() first")
        return self._port

    @property
    def url(self) -> str:
        """URL of this server. Raises ClosedError before `start` and after `close`."""
        return url_of(self._host, self.port)

    def step(self, *, timeout_seconds: float | None = None) -> contextlib.AbstractContextManager[WeightVersion | None]:
        """Run one use of the model, during which no install happens (see `Gate.step`).

        Waits while the engine is paused or torn. Raises ClosedError once the server is closed, also during that wait;
        after `timeout_seconds` EngineTornError or PeerTimeoutError, after which the call may be repeated.
        """
        if self._is_closed:
            raise ClosedError("the server was closed, so no update can come any more: make a new EngineServer")
        return self.gate.step(timeout_seconds=timeout_seconds)

    def start(self) -> EngineServer:
        """Bind and serve in the background; return once requests are answered. Raises WeightcastError on failure."""
        if self._is_closed or self._thread is not None:
            raise ClosedError("this EngineServer was started before, and can be started only once: make a new one")
        self._socket = listen(self._host, self._port)
        self._port = self._socket.getsockname()[1]
        self._thread = threading.Thread(
            target=self._uvicorn.run, args=([self._socket],), name="weightcast-server", daemon=True
        )
        self._thread.start()
        deadline = Deadline(6 * GRACE_SECONDS)
        while not self._uvicorn.started and self._thread.is_alive() and not deadline.has_passed:
            self._thread.join(POLL_SECONDS)
        if not self._uvicorn.started:
            self.close()
            raise WeightcastError(f"the server on {self._host}:{self._port} did not start: see the log")
        return self

    def close(self) -> None:
        """Stop serving. Running requests are answered with an error; an install in progress is finished. Idempotent."""
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
        """Serve until SIGTERM or SIGINT, then close. Blocks; call it in the main thread. Starts the server if needed.

        `announce` is called once requests are answered and the signal handlers are set.
        """
        # The handler only appends: it must take no lock, which the interrupted thread may hold.
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

    async def _health(self, request: Request) -> Response:
        if self.gate.torn:
            return refusal(f"the engine has no whole version: {self.gate.torn}", "EngineTornError", 503)
        if self.generator is not None and not self.generator.is_alive:
            return refusal("the generator's thread has ended: restart the server", "ClosedError", 503)
        bound = self._health_max_behind
        if bound is not None and (reason := self.worker.info().stale_reason(bound)):
            return refusal(reason, "not_ready", 503)
        return reply({"status": "ok"})


async def _http_error(request: Request, error: Exception) -> Response:
    """Reply to an unknown path or method. The routes reply to all other errors."""
    assert isinstance(error, HTTPException)
    return reply({"detail": error.detail}, error.status_code, dict(error.headers or {}))


def _check_port(port: object) -> None:
    if not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"port is {port!r}; it must be a number from 0 to 65535 (0: any free port)")
