"""A store behind `weightcast serve-store` in a process of its own, and copies of it by commands in processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from store.object_server import Proxy, Request, Spoil, Target
from store.store_kit import Holder, number_in, url

from weightcast.control.server.connections import HttpServer
from weightcast.control.server.listening import listen
from weightcast.control.server.store import StoreServer
from weightcast.serving.follower import Follower
from weightcast.store.address import StoreAddress
from weightcast.store.reading import store_status
from weightcast.store.records import Stored

PATIENCE_SECONDS = 120.0
"""Limit for processes that import torch, on a machine that is busy."""


class StoreProcess:
    """`weightcast serve-store` on a free port. `restart` serves the same store at the same port."""

    def __init__(self, directory: Path, *options: str, served: str = "") -> None:
        """`served`: the URL of the store, if it has options."""
        self.directory, self._options, self._served = directory, options, served or url(directory)
        self._start(0)

    def _start(self, port: int) -> None:
        command = ["serve-store", self._served, "--port", str(port), *self._options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weightcast.cli", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        self.port = int(self.url.rpartition(":")[2])

    def restart(self) -> None:
        self.close()
        self._start(self.port)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_SECONDS)

    def close(self) -> str:
        """End it by SIGTERM, which must be its end with status 0 unless it was killed; return its stderr."""
        was_killed = self.process.poll() is not None
        self.process.terminate()
        errors = self.process.communicate(timeout=PATIENCE_SECONDS)[1]
        assert was_killed or self.process.returncode == 0, errors
        return errors


class StoreThread:
    """The same server in this process, which starts faster."""

    def __init__(self, directory: Path, served: str = "", **tls: Path) -> None:
        """`tls`: the `certificate` and `key` of `HttpServer`."""
        self.directory = directory
        self.store = StoreServer(StoreAddress.parse(served or url(directory)), allow_push=True, deadline_seconds=2.0)
        self._server = HttpServer(self.store.app, **tls)
        self._socket = listen("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self.url = f"store+http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.store.close()
        self._socket.close()


class Wire:
    """A store's server, and a proxy before it. `url`: the store through the proxy, which spoils what a test says."""

    def __init__(self, server: Target) -> None:
        self.proxy = Proxy(server)

    @property
    def url(self) -> str:
        return f"store+http://127.0.0.1:{self.proxy.server_port}"

    @contextlib.contextmanager
    def spoilt(
        self, method: str, part: str, how: Spoil, *, first: int = 0, last: float = float("inf")
    ) -> Iterator[None]:
        """Spoil the requests with this part in their path that are from `first` up to `last`, counted from 0."""
        num_seen = 0

        def spoil(request: Request) -> bool:
            nonlocal num_seen
            if request.command != method or part not in request.path:
                return False
            number, num_seen = num_seen, num_seen + 1
            return first <= number <= last and how(request)

        self.proxy.spoil = spoil
        try:
            yield
        finally:
            self.proxy.spoil = lambda request: False

    def close(self) -> None:
        self.proxy.close()


def cut(request: Request) -> bool:
    """Close the connection without an answer."""
    request.cut()
    return True


def cut_at(num_bytes: int) -> Spoil:
    """Close it after so many bytes of the answer's body."""

    def answer(request: Request) -> bool:
        request.reply(*request.forward(), most=num_bytes)
        return True

    return answer


def damaged(request: Request) -> bool:
    """Change the last byte of the answer."""
    status, headers, body = request.forward()
    request.reply(status, headers, body[:-1] + bytes([body[-1] ^ 1]))
    return True


def copying(command: str, source: str, target: str, environment: Mapping[str, str] = {}) -> subprocess.Popen[str]:
    """`weightcast pull` or `push` in a process that is under way."""
    words = [command, source, target, "--deadline", "5", "--json"]
    return subprocess.Popen(
        [sys.executable, "-m", "weightcast.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, object] | None, str]:
    """Return the status, the object on stdout, and stderr of a command."""
    out, errors = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, json.loads(out) if out.strip() else None, errors


def newest(store: str) -> Stored:
    return store_status(StoreAddress.parse(store)).newest


def number_served(store: str) -> int:
    """Install the newest version of a store; the version that all its values are of."""
    with Follower(store, engine := Holder()) as follower:
        followed = follower.poll()
    assert followed is not None
    assert number_in(engine.held) == followed.version
    return followed.version
