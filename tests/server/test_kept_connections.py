"""Connections to an engine server are kept, and a request that met a closed one is sent again, once."""

from __future__ import annotations

import collections
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from forking import in_child
from ports import free_port

import weightcast
from weightcast.control import client as control_client
from weightcast.control.client import HttpEngine, HttpRoutes
from weightcast.errors import ControlError, PeerDiedError, PeerTimeoutError
from weightcast.testing.transport_kit import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Answer = Callable[[socket.socket, int], bool]
"""Answers request number n of a connection, from 0; whether to read another one."""


def reply(status: str = "200 OK", text: str = "7") -> bytes:
    content = json.dumps({"weight_version": text}).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


class ScriptedServer:
    """Counts what it accepts and reads; each connection has a thread of its own."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self.num_accepted = 0
        self.requests: list[bytes] = []
        self.num_ended = threading.Semaphore(0)
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", port or free_port()))
        self.port: int = self._listener.getsockname()[1]
        self.routes = HttpRoutes(f"http://127.0.0.1:{self.port}", token=None, timeout_seconds=PATIENCE_SECONDS)
        self._connections: list[socket.socket] = []
        self._threads = ThreadPoolExecutor(8)
        self._threads.submit(self._accept)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_accepted += 1
            self._connections.append(connection)
            self._threads.submit(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        number = 0
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(65536):
                self.requests.append(data.partition(b"\r\n")[0])
                if not self._answer(connection, number):
                    break
                number += 1
        self.num_ended.release()

    def get(self) -> str:
        return self.routes.get("/weight_info", control_client._AnyInfo).weight_version

    def stop(self) -> None:
        """End every connection, and listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._threads.shutdown()


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], ScriptedServer]]:
    with contextlib.ExitStack() as stack:

        def start(answer: Answer) -> ScriptedServer:
            server = ScriptedServer(answer)
            stack.callback(server.stop)
            stack.callback(server.routes.close)
            return server

        yield start


Serve = Callable[[Answer], ScriptedServer]


def well(connection: socket.socket, number: int) -> bool:
    connection.sendall(reply())
    return True


# --- how many there are ---


@pytest.mark.parametrize("num_engines", [1, 4])
def test_publishes_take_one_handshake_for_each_engine(num_engines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    accepted: collections.Counter[int] = collections.Counter()
    accept = socket.socket.accept

    def counting(listener: socket.socket) -> tuple[socket.socket, object]:
        got = accept(listener)
        accepted[listener.getsockname()[1]] += 1
        return got

    monkeypatch.setattr(socket.socket, "accept", counting)
    # However long the machine stands still between two requests.
    monkeypatch.setattr(control_client, "_MAX_IDLE_SECONDS", 60.0)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(weightcast.EngineServer(weightcast.ModuleEngine(torch.nn.Linear(4, 4))))
            for _ in range(num_engines)
        ]
        source, urls = weightcast.ModuleSource(torch.nn.Linear(4, 4)), [server.url for server in servers]
        with weightcast.Publisher(source, engines=urls) as publisher:
            for _ in range(3):
                assert publisher.publish().ok
            assert [accepted[server.port] for server in servers] == [1] * num_engines


def test_threads_that_ask_at_once_have_a_connection_each_and_both_are_kept(serve: Serve) -> None:
    both = threading.Barrier(2)

    def answer(connection: socket.socket, number: int) -> bool:
        both.wait(30)
        return well(connection, number)

    server = serve(answer)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            assert [each.result() for each in [threads.submit(server.get) for _ in range(2)]] == ["7", "7"]
    assert server.num_accepted == 2


def test_a_connection_that_was_idle_for_long_is_replaced(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(well)
    server.get()
    monkeypatch.setattr(control_client, "_MAX_IDLE_SECONDS", 0.0)
    assert server.get() == "7"
    assert server.num_accepted == 2
    assert server.num_ended.acquire(timeout=PATIENCE_SECONDS), "the first one was closed"


def test_closed_routes_have_no_connection_and_make_none(serve: Serve) -> None:
    server = serve(well)
    server.get()
    server.routes.close()
    assert server.num_ended.acquire(timeout=PATIENCE_SECONDS)
    with pytest.raises(weightcast.errors.ClosedError):
        server.get()
    assert server.num_accepted == 1


# --- servers that close them ---


def test_a_server_that_closes_each_connection_after_its_answer_is_asked_on(serve: Serve) -> None:
    server = serve(lambda connection, number: well(connection, number) and False)
    assert [server.get() for _ in range(4)] == ["7"] * 4
    assert server.num_accepted == 4
    assert len(server.requests) == 4, "none was sent twice, but to a closed connection"


@pytest.mark.parametrize("is_reset", [False, True], ids=["end", "reset"])
def test_a_connection_that_is_closed_while_the_request_is_on_its_way_is_replaced(serve: Serve, is_reset: bool) -> None:
    def answer(connection: socket.socket, number: int) -> bool:
        if number == 0:
            return well(connection, number)
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        return False

    server = serve(answer)
    assert [server.get() for _ in range(3)] == ["7"] * 3
    assert (server.num_accepted, len(server.requests)) == (3, 5)


def test_a_request_is_sent_again_once_only(serve: Serve) -> None:
    """A server that was restarted, say, and ends each connection: not a loop."""
    answers = iter([True])

    def answer(connection: socket.socket, number: int) -> bool:
        return next(answers, False) and well(connection, number)

    server = serve(answer)
    server.get()
    with pytest.raises(PeerDiedError, match="without an answer"):
        server.get()
    assert (server.num_accepted, len(server.requests)) == (2, 3)
    with pytest.raises(PeerDiedError, match="without an answer"):
        server.get()
    assert (server.num_accepted, len(server.requests)) == (3, 4), "a new connection is not tried twice"


@pytest.mark.parametrize("part", [b"H", b"HTTP/1.1 200 OK\r\ncontent-le", reply()[:-3], b"\0\r\n\r\n"])
def test_an_answer_that_has_begun_is_not_asked_for_again(serve: Serve, part: bytes) -> None:
    def answer(connection: socket.socket, number: int) -> bool:
        connection.sendall(reply() if number == 0 else part)
        return number == 0

    server = serve(answer)
    server.get()
    with pytest.raises(PeerDiedError):
        server.get()
    assert (server.num_accepted, len(server.requests)) == (1, 2)
    assert server.get() == "7", "the broken connection was not kept"


def test_a_server_that_answers_400_and_closes_has_answered(serve: Serve) -> None:
    def answer(connection: socket.socket, number: int) -> bool:
        connection.sendall(reply() if number == 0 else reply("400 Bad Request"))
        return number == 0

    server = serve(answer)
    server.get()
    with pytest.raises(ControlError, match="answered 400"):
        server.get()
    assert (server.num_accepted, len(server.requests)) == (1, 2)
    assert server.get() == "7"


def test_what_comes_after_an_answer_is_not_taken_for_the_next(serve: Serve) -> None:
    def answer(connection: socket.socket, number: int) -> bool:
        connection.sendall(reply() + reply(text="surplus"))
        return True

    server = serve(answer)
    assert [server.get() for _ in range(3)] == ["7"] * 3
    assert server.num_accepted == 3


def test_what_must_not_be_asked_twice_has_a_connection_of_its_own(serve: Serve) -> None:
    def answer(connection: socket.socket, number: int) -> bool:
        return not server.requests[-1].startswith(b"POST") and well(connection, number)

    server = serve(answer)
    server.get()
    with pytest.raises(PeerDiedError, match="without an answer"):
        server.routes.post("/once", {}, once=True)
    assert (server.num_accepted, len(server.requests)) == (2, 2)


def test_the_second_attempt_has_what_is_left_of_the_deadline(serve: Serve) -> None:
    release = threading.Event()

    def answer(connection: socket.socket, number: int) -> bool:
        if server.num_accepted == 1:
            return number == 0 and well(connection, number)
        release.wait(60)
        return False

    server = serve(answer)
    server.get()
    server.routes._timeout_seconds = 2.0
    start = time.monotonic()
    with pytest.raises(PeerTimeoutError, match="gave no answer in time"):
        server.get()
    assert time.monotonic() - start < PATIENCE_SECONDS
    release.set()
    assert server.num_accepted == 2


def test_a_header_that_drips_ends_at_the_deadline(serve: Serve) -> None:
    stop = threading.Event()

    def answer(connection: socket.socket, number: int) -> bool:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while not stop.wait(0.05):
            connection.sendall(b"a: b\r\n")
        return False

    server = serve(answer)
    server.routes._timeout_seconds = 2.0
    with pytest.raises(PeerTimeoutError, match="did not complete its answer"):
        server.get()
    stop.set()


# --- restarts and forks ---


def test_an_engine_that_was_restarted_on_its_port_is_asked_itself() -> None:
    first = ScriptedServer(well)
    assert first.get() == "7"
    first.stop()
    second = ScriptedServer(lambda connection, number: bool(connection.sendall(reply(text="8"))) or True, first.port)
    try:
        assert first.get() == "8"
    finally:
        first.routes.close()
        second.routes.close()
        second.stop()


def test_a_forked_child_has_connections_of_its_own() -> None:
    with weightcast.EngineServer(weightcast.ModuleEngine(torch.nn.Linear(2, 2))) as server:
        engine = HttpEngine(server.url)
        engine.info()
        ((ours, _),) = engine._routes._idle

        def ask() -> str:
            assert ours._socket.fileno() == -1, "the child has the parent's connection"
            return engine.info().weight_version

        assert in_child(ask) == "default"
        assert engine.info().weight_version == "default"
        assert engine._routes._idle[0][0] is ours, "the parent's connection serves on"
        engine.close()
