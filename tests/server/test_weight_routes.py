"""The weight routes over a real socket: who may call them, what they refuse, and that health answers meanwhile."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from server.tiny_qwen3 import RUN, version
from transformers import Qwen3ForCausalLM

from weightcast.control.client import HttpEngine
from weightcast.control.server import connections
from weightcast.control.server.app import EngineServer
from weightcast.engines.gate import Gate
from weightcast.engines.module import ModuleEngine
from weightcast.errors import (
    ClosedError,
    ControlError,
    EngineTornError,
    ErrorRecord,
    ManifestError,
    UnsupportedError,
    WeightcastError,
    from_record,
)
from weightcast.format.messages import Abort, InitInfo, Offer, Seal
from weightcast.format.plan import plan
from weightcast.format.tensor_digest import tensor_digest
from weightcast.host.deadline import Deadline

ROUTES = [
    ("POST", "/init_weight_transfer_engine"),
    ("POST", "/start_weight_update"),
    ("POST", "/update_weights"),
    ("POST", "/finish_weight_update"),
    ("POST", "/shutdown_weight_transfer_engine"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("GET", "/is_paused"),
    ("GET", "/get_world_size"),
    ("GET", "/weight_info"),
    ("GET", "/weight_ready"),
    ("GET", "/weight_specs"),
    ("GET", "/weight_digests"),
    ("POST", "/quarantine"),
]


@pytest.fixture
def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


@pytest.fixture
def plain(leaves_nothing: None, module: torch.nn.Module) -> Iterator[EngineServer]:
    with EngineServer(ModuleEngine(module)) as server:
        yield server


@pytest.fixture
def ask(plain: EngineServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=plain.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def engine(plain: EngineServer) -> Iterator[HttpEngine]:
    client = HttpEngine(plain.url)
    yield client
    client.close()


def error_of(answer: httpx.Response) -> WeightcastError:
    record = answer.json()["error"]["record"]
    return from_record(ErrorRecord(**record))


def test_what_an_engine_says_of_itself(engine: HttpEngine, ask: httpx.Client, module: torch.nn.Module) -> None:
    info = engine.info()
    assert (info.weight_version, info.run, info.world_size, info.paused, info.torn) == ("default", "", 1, False, "")
    assert {"undo", "streaming", "inspect", "lease"} <= set(info.abilities)
    assert {s.name: (s.shape, s.dtype) for s in engine.specs()} == {
        name: (tuple(p.shape), "float32") for name, p in module.named_parameters()
    }
    assert ask.get("/get_world_size").json() == {"world_size": 1}
    assert ask.get("/is_paused").json() == {"is_paused": False}
    assert ask.post("/start_weight_update").status_code == 200


def test_digests_are_those_of_the_live_tensors(
    engine: HttpEngine, ask: httpx.Client, plain: EngineServer, module: torch.nn.Module
) -> None:
    expected = {name: tensor_digest(p.detach()) for name, p in module.named_parameters()}
    assert engine.digests() == expected
    plain.gate.set_version(version(3))
    some = ask.get("/weight_digests?names=0.weight&names=1.bias").json()
    assert (some["run"], some["weight_version"]) == (RUN, "3")
    assert some["digests"] == {name: expected[name] for name in ("0.weight", "1.bias")}
    assert [spec["name"] for spec in some["tensors"]] == ["0.weight", "1.bias"]
    one = ask.get("/weight_digests?start=1&limit_bytes=0").json()
    assert (list(one["digests"]), one["next"]) == ([list(expected)[1]], 2)
    with pytest.raises(WeightcastError, match=r"no tensor 2\.weight"):
        raise error_of(ask.get("/weight_digests?names=2.weight"))
    plain.gate.tear("half of version 4")
    with pytest.raises(EngineTornError, match="half of version 4"):
        raise error_of(ask.get("/weight_digests"))


def test_an_engine_in_quarantine_waits_for_a_complete_update(
    engine: HttpEngine, ask: httpx.Client, plain: EngineServer
) -> None:
    plain.gate.set_version(version(3))
    engine.quarantine("a bit has changed")
    assert "a bit has changed" in engine.info().torn
    with pytest.raises(EngineTornError, match="a bit has changed"), plain.gate.step(timeout_seconds=0):
        pass
    for body in ({}, {"reason": 7}, {"reason": "x" * 5000}, []):
        assert ask.post("/quarantine", json=body).status_code == 400
    for query in ("start=-1", "start=x", "limit_bytes=1e9", "start=" + "9" * 30):
        assert ask.get(f"/weight_digests?{query}").status_code == 400


def test_digests_wait_for_an_install_and_health_does_not(plain: EngineServer, ask: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as threads:
        with plain.gate.exclusive():
            digests = threads.submit(lambda: httpx.get(f"{plain.url}/weight_digests", timeout=60))
            for _ in range(20):
                assert ask.get("/health").status_code == 200
                assert ask.get("/weight_info").status_code == 200
            assert not digests.done()
        assert digests.result(30).status_code == 200


def test_health_answers_while_a_pause_waits_for_a_step(plain: EngineServer, ask: httpx.Client) -> None:
    with ThreadPoolExecutor(1) as threads:
        with plain.step():
            paused = threads.submit(lambda: httpx.post(f"{plain.url}/pause?mode=wait", timeout=60))
            while not plain.gate.is_paused:
                assert ask.get("/health").status_code == 200
            assert not paused.done()
            assert ask.get("/health").status_code == 200
        assert paused.result(30).status_code == 200
    assert ask.get("/is_paused").json() == {"is_paused": True}
    assert ask.post("/resume").status_code == 200
    assert ask.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights", b""),
        ("/update_weights", b"{"),
        ("/update_weights", b"[" * 100000),
        ("/update_weights", b'{"update_info": {}}'),
        ("/update_weights", b'{"update_info": {"kind": "eval", "run": "0"}}'),
        ("/update_weights", b'{"update_info": [{"kind": "seal"}]}'),
        ("/init_weight_transfer_engine", b'{"init_info": {"run": "../../etc"}}'),
        ("/finish_weight_update", b""),
        ("/finish_weight_update", b'{"weight_version": 7}'),
        ("/finish_weight_update", b'{"weight_version": "-7"}'),
        ("/finish_weight_update", b'{"weight_version": "\xc2\xb2"}'),
        ("/finish_weight_update", b'{"weight_version": "99999999999999999999"}'),
    ],
)
def test_a_malformed_body_is_400_and_a_manifest_error(ask: httpx.Client, path: str, body: bytes) -> None:
    answer = ask.post(path, content=body)
    assert answer.status_code == 400
    assert isinstance(error_of(answer), ManifestError)
    assert ask.get("/health").status_code == 200


def test_a_body_over_the_cap_is_refused_before_it_is_read(plain: EngineServer, ask: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", plain.port), timeout=60) as client:
        client.sendall(b"POST /update_weights HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n{")
        assert client.recv(65536).startswith(b"HTTP/1.1 413")
    undeclared = ask.post("/finish_weight_update", content=(b" " * (1 << 16) for _ in range(17)))
    assert undeclared.status_code == 413
    assert ask.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "detail"),
    [("GET", "/nowhere", 404, "Not Found"), ("GET", "/pause", 405, "Method Not Allowed")],
)
def test_an_unknown_route_is_answered_in_json(
    ask: httpx.Client, method: str, path: str, status: int, detail: str
) -> None:
    answer = ask.request(method, path)
    assert (answer.status_code, answer.json()) == (status, {"detail": detail})


def test_a_call_without_a_hold_comes_back_as_the_error_it_was(engine: HttpEngine) -> None:
    manifest = plan(engine.specs(), 1 << 20)
    for call in (
        lambda: engine.finish(1),
        lambda: engine.update(Offer(RUN, 1, manifest.digest(), manifest.text)),
        lambda: engine.update(Seal(RUN, 1, 1, "0" * 32)),
        lambda: engine.update(Abort(RUN, 1, "why not")),
        lambda: engine.pause(RUN),
    ):
        with pytest.raises(ClosedError, match="no publisher holds this engine"):
            call()
    engine.resume(RUN)
    engine.shutdown()


def test_an_unknown_transport_is_409_and_unsupported(ask: httpx.Client, engine: HttpEngine) -> None:
    info = InitInfo(RUN, "e", "carrier-pigeon://", "link", "0" * 64, 5.0)
    with pytest.raises(UnsupportedError, match="carrier-pigeon"):
        engine.init(info)
    assert ask.post("/pause?mode=stop").status_code == 400


def test_metrics_tell_versions_failures_and_completions(http: httpx.Client, server: EngineServer) -> None:
    http.post("/update_weights", content=b"{")
    http.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True})
    server.gate.set_version(version(12))
    server.worker.pause("keep")
    lines = http.get("/metrics").text.splitlines()
    assert "weightcast_engine_version 12.0" in lines
    assert "weightcast_paused 1.0" in lines
    assert "weightcast_torn 0.0" in lines
    assert 'weightcast_weight_request_failures_total{kind="ManifestError"} 1.0' in lines
    assert 'weightcast_completions_total{finish_reason="length"} 1.0' in lines
    assert 'weightcast_tokens_total{kind="prompt"} 2.0' in lines
    assert 'weightcast_tokens_total{kind="generated"} 3.0' in lines
    assert "weightcast_waiting_completions 0.0" in lines
    server.gate.resume()


# --- who may call ---


@pytest.fixture
def guarded(leaves_nothing: None, module: torch.nn.Module) -> Iterator[EngineServer]:
    with EngineServer(ModuleEngine(module), host="0.0.0.0", token="a-secret") as server:
        yield server


@pytest.mark.parametrize("given", [b"", b"Bearer wrong", b"a-secret", b"bearer a-secret", b"Bearer a-secretx", b"\xe9"])
def test_every_weight_route_wants_the_token(guarded: EngineServer, given: bytes) -> None:
    headers = {"authorization": given} if given else {}
    with httpx.Client(base_url=guarded.url, headers=headers, trust_env=False) as client:
        for method, path in ROUTES:
            answer = client.request(method, path)
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "auth"), path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert client.get("/health").status_code == 200
        assert client.get("/metrics").status_code == 200
    assert not guarded.gate.is_paused


def test_the_token_opens_them(guarded: EngineServer) -> None:
    engine = HttpEngine(guarded.url, token="a-secret")
    assert engine.info().weight_version == "default"
    assert len(engine.specs()) == 4
    engine.close()
    stranger = HttpEngine(guarded.url)
    with pytest.raises(ControlError, match="token"):
        stranger.info()
    stranger.close()


def test_a_page_in_a_browser_is_refused(ask: httpx.Client) -> None:
    for method, path in ROUTES:
        assert ask.request(method, path, headers={"origin": "https://example.org"}).status_code == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::"])
def test_no_open_host_without_a_token(module: torch.nn.Module, host: str) -> None:
    with pytest.raises(ValueError, match="other machines"):
        EngineServer(ModuleEngine(module), host=host)


@pytest.mark.parametrize("token", ["", "two words", "new\nline", "\xe9"])
def test_no_token_that_a_header_can_not_carry(module: torch.nn.Module, token: str) -> None:
    with pytest.raises(ValueError, match="printable"):
        EngineServer(ModuleEngine(module), token=token)


# --- life ---


def test_start_and_close(leaves_nothing: None, module: torch.nn.Module) -> None:
    server = EngineServer(ModuleEngine(module))
    with pytest.raises(ClosedError, match="not started"):
        _ = server.url
    with server, EngineServer(ModuleEngine(module)) as other:
        assert server.port != other.port
        with pytest.raises(ClosedError, match="can be started only once"):
            server.start()
        with pytest.raises(WeightcastError, match=f"can't listen on 127.0.0.1:{server.port}"):
            EngineServer(ModuleEngine(module), port=server.port).start()
        url = server.url
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    EngineServer(ModuleEngine(module)).close()


def test_one_gate_for_all(model: Qwen3ForCausalLM, generator: object, module: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="different gates"):
        EngineServer(ModuleEngine(module), gate=Gate(), generator=generator)  # type: ignore[arg-type]


_SERVE = """
import sys, torch
from weightcast.control.server.app import EngineServer
from weightcast.engines.module import ModuleEngine
server = EngineServer(ModuleEngine(torch.nn.Linear(2, 2))).start()
print(server.url, flush=True)
server.run()
print("closed", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_cleanly_at_a_signal(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", _SERVE], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert httpx.get(f"{url}/health").status_code == 200
            os.kill(process.pid, number)
            assert process.stdout.readline().strip() == "closed"
            assert process.wait(60) == 0
        finally:
            if process.poll() is None:
                process.kill()


HALF_SENT = {
    "nothing": b"",
    "header": b"GET /health HTTP/1.1\r\nX: ",
    "body": b"POST /update_weights HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{",
    "a second header": b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health",
}


@pytest.mark.parametrize("kind", HALF_SENT)
def test_a_request_that_does_not_come_whole_ends_its_connection(
    module: torch.nn.Module, kind: str, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineServer(ModuleEngine(module)) as server:
        with monkeypatch.context() as patched, socket.create_connection(("127.0.0.1", server.port)) as client:
            for name in ("GRACE_SECONDS", "KEEP_ALIVE_SECONDS"):
                patched.setattr(connections, name, 0.2)
            client.settimeout(60)
            client.sendall(HALF_SENT[kind])
            with contextlib.suppress(ConnectionResetError):
                while client.recv(1 << 16):
                    pass
        assert httpx.get(f"{server.url}/weight_info").status_code == 200


def test_a_body_may_take_longer_in_all_if_its_parts_come(
    module: torch.nn.Module, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    init = connections.LimitedConnection.__init__

    def record(self: connections.LimitedConnection, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    def due(above: float) -> float:
        for _ in Deadline(60).polls(max_pause_seconds=0.01):
            if made and above < made[0].due_at < math.inf:
                return made[0].due_at
        raise AssertionError(f"the connection is due at {made[0].due_at}, expected later than {above}")

    made: list[connections.LimitedConnection] = []
    monkeypatch.setattr(connections.LimitedConnection, "__init__", record)
    head = HALF_SENT["body"].removesuffix(b"{")
    with EngineServer(ModuleEngine(module)) as server, socket.create_connection(("127.0.0.1", server.port)) as client:
        due_at = due(0.0)
        for part in (head, *[b" "] * 5):
            client.sendall(part)
            due_at = due(due_at)
        client.sendall(b" " * 95)
        client.settimeout(60)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 400")


def test_a_call_that_takes_longer_than_a_request_may_is_answered(
    module: torch.nn.Module, leaves_nothing: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GRACE_SECONDS", "KEEP_ALIVE_SECONDS"):
        monkeypatch.setattr(connections, name, 2.0)
    with EngineServer(ModuleEngine(module)) as server:
        with ThreadPoolExecutor(1) as pool, server.step():
            call = pool.submit(httpx.post, f"{server.url}/pause?mode=wait", timeout=60)  # until the step is over
            with socket.create_connection(("127.0.0.1", server.port)) as idle:
                idle.settimeout(60)
                with contextlib.suppress(ConnectionResetError):
                    assert idle.recv(1) == b""  # as long as the other one may take as well
            assert not call.done()
        assert call.result().json() == {"status": "paused"}


_SERVER_OF_256 = """
import resource, sys, torch
from weightcast import EngineServer, ModuleEngine
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
with EngineServer(ModuleEngine(torch.nn.Linear(2, 2))) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


def test_half_sent_requests_keep_no_publisher_out_of_a_server_with_few_descriptors(leaves_nothing: None) -> None:
    program = [sys.executable, "-c", _SERVER_OF_256]
    with contextlib.ExitStack() as stack:
        pipe = subprocess.PIPE
        process = stack.enter_context(subprocess.Popen(program, stdin=pipe, stdout=pipe, stderr=pipe, text=True))
        assert process.stdin is not None
        assert process.stdout is not None
        stack.callback(process.stdin.close)
        url = process.stdout.readline().strip()
        held = HttpEngine(url)
        stack.callback(held.close)
        assert held.info().world_size == 1
        for _ in range(400):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60))
            with contextlib.suppress(ConnectionError):
                client.sendall(HALF_SENT["header"])
        assert held.info().world_size == 1
        another = HttpEngine(url)
        stack.callback(another.close)
        assert another.info().world_size == 1
        _, log = process.communicate(timeout=60)
        assert len(log.splitlines()) <= 2, log
