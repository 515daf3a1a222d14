"""A server of an object store in a process of its own (moto's), and a proxy before it that spoils what a test says."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

BUCKET = "weights"
_HEADERS = {"Authorization": "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, Signature=0"}
_START_SECONDS = 30.0


class Target(Protocol):
    """A server on this host."""

    port: int


class ObjectServer:
    """A server process on a free port of this host, with an empty bucket."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # A proxy of the machine is not for this host.
            env={**os.environ, "NO_PROXY": "127.0.0.1"},
        )
        assert self._process.stderr is not None
        said = (re.search(r"Running on http://127\.0\.0\.1:(\d+)", line) for line in self._process.stderr)
        self.port = int(next(found for found in said if found)[1])
        # Its log is read on, so that the pipe never fills up.
        self._reader = threading.Thread(target=self._process.stderr.read, daemon=True)
        self._reader.start()
        assert self.ask("PUT", f"/{BUCKET}").status == 200

    def ask(self, method: str, path: str, body: bytes = b"") -> http.client.HTTPResponse:
        """Make a request that is not signed, and return the answer, whose body was read."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_START_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path, body, _HEADERS)
            answer = connection.getresponse()
            answer.body = answer.read()  # type: ignore[attr-defined]
            return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait(_START_SECONDS)
        self._reader.join(_START_SECONDS)
        assert self._process.stderr is not None
        self._process.stderr.close()


Spoil = Callable[["Request"], bool]
"""Spoils a request, or returns False for one that is passed on."""


class Request(http.server.BaseHTTPRequestHandler):
    """A request that the proxy has got. A test's function gets it, and passes it on, or answers it itself."""

    protocol_version = "HTTP/1.1"
    server: Proxy
    body: bytes

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the client or the server is gone
            self.cut()

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.key))
        if not self.server.spoil(self):
            self.reply(*self.forward())

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    @property
    def key(self) -> str:
        """Name of the object below the bucket; of a list the query."""
        parts = urllib.parse.urlsplit(self.path)
        return urllib.parse.unquote(parts.path).removeprefix(f"/{BUCKET}/") or parts.query

    def forward(self, *, without: tuple[str, ...] = ()) -> tuple[int, list[tuple[str, str]], bytes]:
        """Pass the request on, without these headers; return status, headers and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target.port, timeout=_START_SECONDS)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in without}
        with contextlib.closing(connection):
            connection.request(self.command, self.path, self.body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes, *, most: int | None = None) -> None:
        """Answer; with `most` the connection is cut after so many bytes of the body."""
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:most])
        if most is not None:
            self.cut()

    def cut(self) -> None:
        """Close the connection."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *words: object) -> None: ...


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on to a server, unless `spoil` has dealt with one. `requests`: methods and keys, in order."""

    daemon_threads = True

    def __init__(self, target: Target) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.target = target
        self.spoil: Spoil = lambda request: False
        self.requests: list[tuple[str, str]] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None: ...

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


@contextlib.contextmanager
def environment() -> Iterator[None]:
    """Keys in the environment, as every tool for S3 takes them; the test server accepts any."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield
