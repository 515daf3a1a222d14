"""HttpEngine finds out which kind of server answers, and what goes wrong on the way is an error of its class."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
import torch
from server.stock_vllm import StockVllm

import weightcast
from weightcast.control.client import HttpEngine
from weightcast.control.server.app import EngineServer
from weightcast.engines.module import ModuleEngine
from weightcast.errors import (
    ClosedError,
    ControlError,
    EngineTornError,
    ErrorRecord,
    PeerDiedError,
    PeerTimeoutError,
    PublishError,
    StaleVersionError,
    UnsupportedError,
    WeightcastError,
)
from weightcast.format.messages import InitInfo
from weightcast.links.watchdog import Watchdog
from weightcast.seams.client import ServesTraffic
from weightcast.testing.transport_kit import PATIENCE_SECONDS
from weightcast.trainer.fleet import Fleet, FleetMember

pytestmark = pytest.mark.usefixtures("leaves_nothing")

CERTIFICATE = Path(__file__).parents[1] / "integrations" / "api_server.pem"
"""Of 127.0.0.1, signed by itself, with its key."""

Serve = Callable[[bytes], HttpEngine]


@pytest.fixture
def raw() -> Iterator[Serve]:
    """A server that answers every request with the same bytes, then ends the connection."""
    clients: list[HttpEngine] = []
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(PATIENCE_SECONDS)

    def answer_all(answer: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                if not connection.recv(65536):
                    continue
                connection.sendall(answer)

    threads = ThreadPoolExecutor(1)

    def serve(answer: bytes) -> HttpEngine:
        threads.submit(answer_all, answer)
        clients.append(HttpEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=PATIENCE_SECONDS))
        return clients[-1]

    yield serve
    for client in clients:
        client.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    threads.shutdown()


def reply(status: str, body: object) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content


# --- which kind of server ---


def test_the_reference_server_is_spoken_to_as_it_is() -> None:
    with EngineServer(ModuleEngine(torch.nn.Linear(2, 2))) as server:
        engine = HttpEngine(server.url)
        assert engine.connect() is engine
        assert engine.info().weight_version == "default"
        engine.close()


@pytest.mark.parametrize("is_dev", [False, True])
def test_a_vllm_without_weightcasts_routes_is_told_how_to_load_them(is_dev: bool) -> None:
    """With vLLM's development routes it says that it has our backend; its ranks are asked nothing."""
    vllm = StockVllm(backend="weightcast", is_dev=is_dev)
    with vllm.serve(), contextlib.closing(HttpEngine(vllm.url)) as engine:
        lacks = r"vLLM 0\.32\.0 without weightcast's routes.*VLLM_PLUGINS=weightcast.*--weight-transfer-config"
        with pytest.raises(ControlError, match=lacks) as got:
            engine.connect()
        assert got.value.peer == vllm.url
        assert vllm.log == []


@pytest.mark.parametrize("backend", [None, "nccl"])
def test_a_vllm_without_our_backend_takes_versions_from_a_store_only(backend: str | None) -> None:
    """Rank calls, which would raise on all its ranks and put its replies out of step, are never sent."""
    vllm = StockVllm(backend=backend)
    source = weightcast.ModuleSource(torch.nn.Linear(2, 2))
    with vllm.serve(), weightcast.Publisher(source, engines=[vllm.url]) as publisher:
        with pytest.raises(
            PublishError, match=r"file:///dir.*pip install PATH_TO_WEIGHTCAST.*--weight-transfer-config"
        ) as caught:
            publisher.publish()
        (cause,) = caught.value.failures.values()
        assert isinstance(cause, UnsupportedError)
        assert f"backend {'none' if backend is None else repr(backend)}" in str(cause)
        assert vllm.log == []


@pytest.mark.parametrize(
    "answer",
    [
        reply("404 Not Found", {"detail": "Not Found"}),
        reply("200 OK", b"<html>hello</html>"),
        reply("200 OK", {"weight_version": 7}),
        reply("405 Method Not Allowed", b""),
    ],
    ids=["404", "a page", "another form", "405"],
)
def test_a_stranger_is_no_engine_server(raw: Serve, answer: bytes) -> None:
    with pytest.raises(ControlError, match="not an engine server"):
        raw(answer).connect()


def test_a_server_in_trouble_is_not_taken_for_a_stranger(raw: Serve) -> None:
    with pytest.raises(ControlError, match="answered 500: out of order"):
        raw(reply("500 Oops", {"error": {"message": "out of order"}})).connect()


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"])
def test_a_server_that_is_starting_is_not_there_yet(raw: Serve, status: str) -> None:
    with pytest.raises(
        PeerDiedError, match=f"answered {status[:3]}: loading.*; start the server first, or wait for it"
    ):
        raw(reply(status, {"error": {"message": "loading"}})).connect()


def test_what_a_server_says_itself_with_such_a_status_is_kept(raw: Serve) -> None:
    record = ErrorRecord(kind="EngineTornError", message="half of a version")
    body = {"error": {"message": "x", "record": {"kind": record.kind, "message": record.message}}}
    with pytest.raises(EngineTornError, match="half of a version"):
        raw(reply("503 Service Unavailable", body)).connect()


def test_a_server_without_tls_is_not_waited_for() -> None:
    with EngineServer(ModuleEngine(torch.nn.Linear(2, 2))) as server:
        engine = HttpEngine(server.url.replace("http://", "https://"))
        with pytest.raises(ControlError, match="did not answer with TLS"):
            engine.connect()
        engine.close()


def test_a_certificate_of_an_unknown_authority_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            with contextlib.closing(HttpEngine(f"https://127.0.0.1:{server.server_address[1]}")) as engine:
                with pytest.raises(ControlError, match=r"is not accepted: self-signed certificate;.* in SSL_CERT_FILE"):
                    engine.connect()
                monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
                with pytest.raises(ControlError, match="answered 501"):
                    engine.connect()
        finally:
            server.shutdown()
            serving.join()


# --- errors ---


def test_a_record_in_the_reply_comes_back_as_its_class(raw: Serve) -> None:
    record = ErrorRecord(kind="StaleVersionError", message="too old", problems=("one",))
    body = {"error": {"message": "x", "record": {"kind": record.kind, "message": "too old", "problems": ["one"]}}}
    with pytest.raises(StaleVersionError, match="too old") as caught:
        raw(reply("409 Conflict", body)).finish(1)
    assert caught.value.problems == ("one",)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ({"error": {"message": "Worker failed with error 'no record'"}}, "Worker failed with error 'no record'"),
        ({"error": "Failed to pause generation: x"}, "Failed to pause generation: x"),
        ({"error": {"message": "a weightcast-error: {broken"}}, "a weightcast-error: {broken"),
        ({"error": {"message": "m", "record": {"kind": 7}}}, '"kind": 7'),
        ({"detail": "why"}, '"detail": "why"'),
        (b"[" * 100_000, "[[["),
        (b"\xff\xfe", "\ufffd"),
    ],
)
def test_any_other_text_is_kept(raw: Serve, body: object, kept: str) -> None:
    with pytest.raises(ControlError) as caught:
        raw(reply("500 Oops", body)).finish(1)
    assert kept in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_nobody_there_died_and_nobody_answering_is_late(raw: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        late = HttpEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.2)
        with pytest.raises(PeerTimeoutError, match="gave no answer in time"):
            late.connect()
        late.close()
    with pytest.raises(PeerDiedError, match="can't be reached"):
        late_again(late.name)
    with pytest.raises(PeerDiedError):
        raw(b"").connect()


def late_again(url: str) -> None:
    engine = HttpEngine(url, timeout_seconds=PATIENCE_SECONDS)
    try:
        engine.connect()
    finally:
        engine.close()


class ClosesLater(BaseHTTPRequestHandler):
    """As vLLM after an error: it says nothing of closing the connection, and closes it when the next request comes."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status = 500 if self.path == "/weight_specs" else 200
        content = b'{"error": {"message": "out of order"}}' if status == 500 else b'{"weight_version": "7"}'
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.raw_requestline = self.rfile.readline(65537)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_server_that_closes_a_connection_after_an_error_lives() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ClosesLater) as server, ThreadPoolExecutor(1) as threads:
        serving = threads.submit(server.serve_forever)
        engine = HttpEngine(f"http://127.0.0.1:{server.server_port}", timeout_seconds=PATIENCE_SECONDS)
        try:
            for _ in range(2):
                with pytest.raises(ControlError, match="out of order"):
                    engine.specs()
                assert engine.info().weight_version == "7"
                assert engine.info().weight_version == "7", "nor is one lost that nothing went wrong on"
        finally:
            engine.close()
            server.shutdown()
        serving.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("abilities", [(), ("lease",), ("install", "undo")])
def test_who_pauses_an_engine_is_known_once_the_client_has_connected(raw: Serve, abilities: tuple[str, ...]) -> None:
    engine = raw(reply("200 OK", {"weight_version": "7", "protocol": 2, "abilities": abilities}))
    assert engine.connect() is engine
    assert isinstance(engine, ServesTraffic), "also one that pauses itself is paused for what is streamed"
    assert (engine.paused_seconds is None) is ("install" not in abilities)
    assert bool(engine.recovery_requests("a" * 32)) is ("lease" not in abilities)


def test_a_publisher_closes_its_connections_to_an_engine_that_pauses_by_itself() -> None:
    with EngineServer(ModuleEngine(torch.nn.Linear(2, 2))) as server:
        member = FleetMember(HttpEngine(server.url), "run", Watchdog(), 60.0, owned=True)
        info = server.worker.info
        server.worker.info = lambda: msgspec.structs.replace(info(), abilities=("install",))  # type: ignore[method-assign]
        client = member.client = member.client.connect()
        assert client.paused_seconds is not None
        assert client.info().weight_version == "default"
        fleet = Fleet()
        fleet.add(member)
        fleet.close()
        with pytest.raises(ClosedError):
            client.info()


@pytest.fixture
def pausing(raw: Serve) -> Serve:
    """A client of a server that pauses itself for an install, and answers that in this way."""

    def serve(answer: bytes) -> HttpEngine:
        client = raw(answer)
        client.paused_seconds = 0.0  # as `connect` found
        return client

    return serve


def test_an_engine_that_pauses_by_itself_says_for_how_long(pausing: Serve) -> None:
    client = pausing(reply("200 OK", {"message": "installed", "pause_seconds": 86400}))
    client.finish(1)
    assert client.paused_seconds == 86400


def test_where_it_does_not_say_it_is_the_whole_request(pausing: Serve) -> None:
    client = pausing(reply("200 OK", {"message": "installed", "weight_version": "1"}))
    client.finish(1)
    assert client.paused_seconds is not None
    assert 0 < client.paused_seconds < 86400


def test_where_the_answer_is_lost_it_is_the_whole_request(pausing: Serve) -> None:
    client = pausing(reply("500 Oops", {"message": "gone"}))
    with pytest.raises(ControlError):
        client.finish(1)
    assert client.paused_seconds


def test_an_answer_that_never_ends_is_cut_at_the_deadline() -> None:
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
                while not stop.wait(0.05):
                    try:
                        connection.sendall(b" ")
                    except OSError:
                        return

        threads.submit(drip)
        engine = HttpEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=2.0)
        start = time.monotonic()
        with pytest.raises(PeerTimeoutError, match="did not complete its answer"):
            engine.connect()
        assert time.monotonic() - start < PATIENCE_SECONDS
        stop.set()
        engine.close()


# --- the token ---


def test_the_token_goes_with_the_request_and_into_the_init_but_into_no_text() -> None:
    vllm = StockVllm(backend=None)
    with vllm.serve():
        for token in ("a-secret", "another", None):
            with contextlib.closing(HttpEngine(vllm.url, token=token)) as engine:
                client = engine.connect()
                assert "a-secret" not in repr(client) + repr(engine)
        assert set(vllm.headers) == {"Bearer a-secret", "Bearer another", ""}
    with EngineServer(ModuleEngine(torch.nn.Linear(2, 2)), token="a-secret") as server:
        for token in ("another", None):
            with contextlib.closing(HttpEngine(server.url, token=token)) as engine:
                with pytest.raises(WeightcastError, match="token") as caught:
                    engine.connect()
                assert "a-secret" not in str(caught.value)
    assert "a-secret" not in repr(InitInfo("0" * 32, "e", "ipc://x", "unix:@y", "0" * 64, 5, token="a-secret"))
