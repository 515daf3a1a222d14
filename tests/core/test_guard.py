"""The guard resumes paused engines when the publisher dies, and only those."""

from __future__ import annotations

import contextlib
import http.server
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import msgspec
import pytest
import torch

import weightcast
from weightcast.control.server.worker_engine import WorkerEngine
from weightcast.format.messages import WeightInfo
from weightcast.host.deadline import Deadline
from weightcast.links.watchdog import RecoveryRequest, Watchdog, requests_of, rescue

pytestmark = pytest.mark.usefixtures("leaves_nothing")


@pytest.fixture
def server():  # type: ignore[no-untyped-def]
    import torch

    with weightcast.EngineServer(weightcast.ModuleEngine(torch.nn.Linear(2, 2))) as server:
        yield server


def resume_of(server: weightcast.EngineServer) -> list[RecoveryRequest]:
    return [RecoveryRequest(f"{server.url}/resume", {"content-type": "application/json"})]


@pytest.mark.parametrize("forks", [False, True], ids=["", "a forked child lives on"])
def test_killed_publisher_is_replaced_by_its_guard(server: weightcast.EngineServer, forks: bool) -> None:
    server.gate.pause()
    program = textwrap.dedent(
        f"""
        import os, sys
        from weightcast.links.watchdog import Watchdog, RecoveryRequest
        guard = Watchdog()
        guard.keep("engine", [RecoveryRequest({server.url + "/resume"!r})])
        guard.keep("other", [RecoveryRequest({server.url + "/pause?mode=keep"!r})])
        guard.release("other")
        if not {forks} or os.fork():
            print(guard._process.pid, flush=True)
        sys.stdin.read()
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as publisher:
        assert publisher.stdout is not None
        guard_pid = int(publisher.stdout.readline())
        assert server.gate.is_paused
        publisher.send_signal(signal.SIGKILL)
        assert any(server.gate.is_open for _ in Deadline(60.0).polls(0.001, 0.05)), (
            "the guard did not resume the engine"
        )
    descriptor = None
    try:
        descriptor = os.pidfd_open(guard_pid)
    except ProcessLookupError:
        return
    import select

    try:
        assert select.select([descriptor], [], [], 60)[0], "the guard did not end"
    finally:
        os.close(descriptor)


def test_released_engine_stays_as_it_is(server: weightcast.EngineServer) -> None:
    guard = Watchdog()
    guard.keep("engine", resume_of(server))
    guard.release("engine")
    server.gate.pause()
    guard.close()
    assert server.gate.is_paused


def test_closing_a_guard_sends_its_requests(server: weightcast.EngineServer) -> None:
    server.gate.pause()
    guard = Watchdog()
    guard.keep("engine", resume_of(server))
    guard.close()
    guard.close()
    assert not server.gate.is_paused


def test_a_guard_that_does_not_end_is_killed() -> None:
    guard = Watchdog(0.1)
    guard.keep("engine", [])
    assert guard._process is not None
    pid = guard._process.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        guard.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_guard_that_was_killed_is_replaced_by_the_next_call(server: weightcast.EngineServer) -> None:
    server.gate.pause()
    guard = Watchdog()
    guard.keep("engine", resume_of(server))
    former = guard._process
    assert former is not None
    former.kill()
    former.wait(60)
    guard.keep("other", [])
    assert guard._process.pid != former.pid
    guard.close()
    assert not server.gate.is_paused


def test_a_guard_that_does_not_read_is_replaced() -> None:
    guard = Watchdog(0.5)
    guard.keep("engine", [])
    former = guard._process
    assert former is not None
    os.kill(former.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        guard.keep("other", [RecoveryRequest("http://127.0.0.1:9/resume", body="x" * (16 << 20))])
    former.wait(60)
    guard.release("other")
    assert guard._process.pid != former.pid
    guard.close()


def test_half_a_line_does_not_count() -> None:
    lines = [
        b'{"a": [["http://127.0.0.1:1/x", {}, ""]]}\n',
        b'{"b": [["http://127.0.0.1:2/x", {}, ""]]}\n',
        b'{"a": []}\n',
    ]
    first, second = (RecoveryRequest(f"http://127.0.0.1:{number}/x", {}, "") for number in (1, 2))
    assert requests_of([lines[0][:-2]]) == {}
    assert requests_of([lines[0], lines[1][:16]]) == {"a": [first]}
    assert requests_of([*lines, b'{"a": []}\n']) == {"a": [], "b": [second]}


def test_an_engine_that_is_gone_is_given_up() -> None:
    assert not rescue([RecoveryRequest("http://127.0.0.1:9/resume")], give_up_seconds=0.3)


def test_what_follows_a_long_reload_is_sent() -> None:
    """The reload alone takes longer than a request may, and has a limit of its own."""
    asked: list[str] = []

    class SlowReload(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if self.path == "/reload":
                time.sleep(0.6)
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), SlowReload) as slow:
        thread = threading.Thread(target=slow.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{slow.server_port}"
        reload = RecoveryRequest(f"{url}/reload", timeout_seconds=60)
        was_sent = rescue([reload, RecoveryRequest(f"{url}/resume", timeout_seconds=60)], give_up_seconds=0.5)
        slow.shutdown()
        thread.join()
    assert was_sent
    assert asked == ["/reload", "/resume"]


@pytest.mark.parametrize(
    "answer", [b"no answer of HTTP\r\n\r\n", b'HTTP/1.0 200 OK\r\nContent-Length: 17\r\n\r\n{"succe']
)
def test_garbage_and_half_an_answer_are_asked_for_again(answer: bytes) -> None:
    asked: list[str] = []

    class Garbled(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.wfile.write(answer if len(asked) == 1 else b'HTTP/1.0 200 OK\r\n\r\n{"success": true}')

        def log_message(self, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Garbled) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            reload = RecoveryRequest(f"{url}/reload", expected={"success": True})
            assert rescue([reload, RecoveryRequest(f"{url}/resume")], give_up_seconds=60)
        finally:
            server.shutdown()
            thread.join()
    assert asked == ["/reload", "/reload", "/resume"]


def test_a_refusal_is_an_answer(server: weightcast.EngineServer) -> None:
    assert rescue([RecoveryRequest(f"{server.url}/no-such-route")], give_up_seconds=60)


@pytest.mark.parametrize(
    ("path", "expected", "resumed"),
    [
        ("/start_weight_update", {"message": "torn"}, False),
        ("/start_weight_update", {"message": "done"}, True),
        ("/start_weight_update", {"more": None}, False),
        ("/no-such-route", {"message": "x"}, False),
    ],
)
def test_what_an_answer_forbids_is_not_sent(
    server: weightcast.EngineServer, path: str, expected: dict[str, object], resumed: bool
) -> None:
    server.gate.pause()
    assert rescue([RecoveryRequest(f"{server.url}{path}", expected=expected), *resume_of(server)], give_up_seconds=60)
    assert server.gate.is_paused is not resumed


def test_publisher_holds_the_guard_only_where_no_lease_ends_a_pause(
    server: weightcast.EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    async def info(engine: WorkerEngine) -> WeightInfo:
        """Of an engine whose routes know no lease, and that does not pause by itself."""
        return msgspec.structs.replace(server.worker.info(), abilities=())

    monkeypatch.setattr(WorkerEngine, "info", info)

    class Watching(weightcast.HttpEngine):
        def finish(self, version: int) -> None:
            seen.append(publisher._watchdog._process is not None)
            super().finish(version)

    source = weightcast.ModuleSource(torch.nn.Linear(2, 2))
    client = Watching(server.url)
    with weightcast.Publisher(source, engines=[client]) as publisher:
        publisher.publish()
        assert publisher._watchdog._kept == {}
    client.close()
    assert seen == [True]
