"""The endpoint plugin's routes on real servers: an install is one request; the token; what a torn engine answers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import signal
import threading
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from real_engines.setups import on
from stopping import send_signal

from real_vllm.cold import assert_answered, assert_serves
from real_vllm.oracle import NUM_STREAMED, PROMPT, Answer, joined
from real_vllm.servers import MOE_REPLICAS, ONE, REPLICAS, TWO, Part, Server, Setup, completion
from real_vllm.test_acceptance import Stream
from real_vllm.trainer import trainer
from weightcast import HttpEngine, PublishOptions
from weightcast.errors import ControlError, EngineTornError, InstallError, PeerTimeoutError, RefusedError

TOKEN = "sesame-open"
GUARDED = Setup(tp=2, token=TOKEN)
POSTS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
POSTS += ("shutdown_weight_transfer_engine", "pause", "resume")
GETS = ("weight_info", "is_paused", "get_world_size")


class FrontEnds:
    """A connection to each API server of a vLLM: all listen on one port."""

    def __init__(self, server: Server) -> None:
        self._connections: dict[int, http.client.HTTPConnection] = {}
        for _ in range(server.setup.dp):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            with contextlib.ExitStack() as stack:
                # Those that have a connection accept none while they are stopped.
                for pid in self._connections:
                    send_signal(pid, signal.SIGSTOP)
                    stack.callback(os.kill, pid, signal.SIGCONT)
                # A request, so that one of the others has accepted it.
                connection.request("GET", "/health")
                connection.getresponse().read()
            self._connections[_served_by(server, connection)] = connection
        assert len(self._connections) == server.setup.dp, self._connections

    def __enter__(self) -> FrontEnds:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for connection in self._connections.values():
            connection.close()

    def each(self, method: str, path: str, body: Any = None) -> list[tuple[int, str]]:
        """The answer of each: status and content."""
        answers = []
        for connection in self._connections.values():
            connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            reply = connection.getresponse()
            answers.append((reply.status, reply.read().decode()))
        return answers


def _served_by(server: Server, connection: http.client.HTTPConnection) -> int:
    """The process at the other end of a connection."""
    port = connection.sock.getsockname()[1]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    inode = next(r[9] for r in rows if r[1].endswith(f":{server.port:04X}") and r[2].endswith(f":{port:04X}"))
    return next(pid for pid in server.pids() if f"socket:[{inode}]" in _open_files(pid))


def _open_files(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(path))
    return found


@on(ONE, TWO, REPLICAS, full=[MOE_REPLICAS])
def test_every_api_server_knows_that_the_engine_is_torn(server: Server) -> None:
    """The install went through one of them: no other may answer, wait or resume, and any of them can heal it."""
    with trainer(server.setup, server.url) as it, FrontEnds(server) as front_ends:
        version = it.publish(0).version
        server.call("test_fail_load", 17, -1)
        error = it.failure(1)
        assert isinstance(error, InstallError)
        assert error.torn
        for _ in range(2):
            answers = front_ends.each("POST", "/v1/completions", completion(PROMPT, 4))
            assert {status for status, _ in answers} == {503}, answers
            answers = front_ends.each("POST", "/resume")
            assert {status for status, _ in answers} == {409}, answers
            infos = [json.loads(text) for _, text in front_ends.each("GET", "/weight_info")]
            assert all(info["torn"] and info["paused"] for info in infos), infos
            assert {info["weight_version"] for info in infos} == {str(version)}
            assert {status for status, _ in front_ends.each("GET", "/weight_ready?max_behind=99")} == {503}
        assert server.is_healthy()
        it.publish(1)
        assert {status for status, _ in front_ends.each("GET", "/weight_ready?max_behind=0")} == {200}
        infos = [json.loads(text) for _, text in front_ends.each("GET", "/weight_info")]
        assert not any(info["torn"] or info["paused"] for info in infos), infos
        answers = front_ends.each("POST", "/v1/completions", completion(PROMPT, 4))
        assert {status for status, _ in answers} == {200}, answers
        assert_serves(server, 1)


@on(ONE, REPLICAS, full=[TWO, MOE_REPLICAS])
def test_no_wake_up_sets_a_torn_engine_going(server: Server) -> None:
    """By vLLM's own route of its development mode, a request that the pause froze would go on over torn weights."""
    with trainer(server.setup, server.url) as it, FrontEnds(server) as front_ends:
        it.publish(0)
        server.call("test_fail_load", 17, -1)
        frozen = Stream(server.stream(PROMPT, NUM_STREAMED))
        error = it.failure(1, on_progress=frozen)
        assert isinstance(error, InstallError)
        assert error.torn
        num_before = frozen.num_parts()
        for query in ("", "?tags=scheduling", "?tags=weights", "?tags=kv_cache", "?tags=weights&tags=kv_cache"):
            for status, text in front_ends.each("POST", f"/wake_up{query}"):
                assert status == 409, (query, text)
                assert "publish a complete" in json.loads(text)["error"]["message"]
        assert server.is_paused()
        assert frozen.num_parts() == num_before
        it.publish(1)
        assert len(joined(frozen.awaited()).tokens) == NUM_STREAMED
        answers = front_ends.each("POST", "/wake_up")
        assert {status for status, _ in answers} == {200}, answers
        assert_serves(server, 1)


@on(ONE, REPLICAS, full=[MOE_REPLICAS])
def test_a_server_that_sleeps_is_updated_between_two_wakes(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        for seed in (1, 0):
            assert server.post("/sleep?level=1").status_code == 200
            assert server.post("/wake_up?tags=weights").json()["status"] == "sleeping"
            version = it.publish(seed).version
            assert server.get("/is_sleeping")["is_sleeping"], "the publish has woken an engine without a KV cache"
            assert server.post("/wake_up?tags=kv_cache").json()["status"] == "awake"
            assert server.version() == str(version)
            assert_serves(server, seed)


@on(ONE, full=[TWO])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/collective_rpc", {"method": "reload_weights"}), ("/weight_checker", {"action": "reset"})],
    ids=["reload", "reset"],
)
def test_weights_that_vllm_changes_by_itself_are_of_no_version(server: Server, path: str, body: dict[str, str]) -> None:
    with trainer(server.setup, server.url) as it:
        version = str(it.publish(1).version)
        assert list(server.generate(PROMPT, 4))[-1].spans == [(version, 0, 4)]
        assert server.post(path, body).status_code == 200
        assert list(server.generate(PROMPT, 4))[-1].spans == [("default", 0, 4)]
        info = server.get("/weight_info")
        assert (info["weight_version"], info["run"], info["torn"]) == ("default", "", "")
        assert it.publisher.sync(server.url).ok
        assert (server.version(), server.get("/weight_info")["run"]) == (version, it.publisher.run)
        assert_serves(server, 1)
        it.publish(0)
        assert_serves(server, 0)


@on(ONE, TWO)
def test_weights_that_are_gone_are_not_served(server: Server) -> None:
    """A sleep of level 2 drops them."""
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        assert server.post("/sleep?level=2").status_code == 200
        assert "sleep" in server.get("/weight_info")["torn"]
        assert server.post("/wake_up").status_code == 409
        assert server.post("/resume").status_code == 409
        version = it.publish(1).version
        assert server.post("/wake_up").json()["status"] == "awake"
        assert server.version() == str(version)
        assert_serves(server, 1)


@on(ONE)
def test_what_vllm_reloads_by_itself_is_no_version_of_ours(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(1)
        assert server.post("/sleep?level=2").status_code == 200
        assert server.post("/collective_rpc", {"method": "reload_weights"}).status_code == 200
        assert server.post("/wake_up").json()["status"] == "awake"
        info = server.get("/weight_info")
        assert (info["run"], info["torn"]) == ("", "")
        assert_serves(server, 0)
        it.publish(1)
        assert_serves(server, 1)


@on(ONE, full=[MOE_REPLICAS])
@pytest.mark.parametrize("route", ["/resume", pytest.param("/wake_up?tags=scheduling", marks=pytest.mark.full)])
def test_whoever_resumes_does_not_break_into_an_install(server: Server, route: str) -> None:
    """A pause that another request ended too soon would show as tokens from the old version's caches."""
    stop = threading.Event()

    def resume() -> int:
        number = 0
        with FrontEnds(server) as front_ends:
            while not stop.is_set():
                answers = [*front_ends.each("POST", route), *front_ends.each("GET", "/weight_info")]
                assert {status for status, _ in answers} == {200}, answers
                number += 1
        return number

    with trainer(server.setup, server.url) as it, concurrent.futures.ThreadPoolExecutor(2) as threads:
        resuming = threads.submit(resume)
        try:
            for _ in range(3):
                old = it.publish(0).version
                stream = threads.submit(lambda: list(server.generate(PROMPT, 400)))
                new = it.publish(1).version
                parts = stream.result(120)
                assert_each_token_is_of_its_version(server, {str(old): 0, str(new): 1}, parts)
        finally:
            stop.set()
        assert resuming.result(120) > 0
        assert not server.is_paused()


def assert_each_token_is_of_its_version(server: Server, seeds: Mapping[str, int], parts: list[Part]) -> None:
    """`seeds`: the weights of each version."""
    answer, spans = joined(part.answer for part in parts), parts[-1].spans
    for version, start, end in spans:
        part = Answer(answer.tokens[start:end], answer.logprobs[start:end])
        assert_answered(server, seeds[version], [*PROMPT, *answer.tokens[:start]], part)


@on(ONE, TWO, REPLICAS, full=[MOE_REPLICAS])
def test_the_report_says_how_long_the_engine_stood_still(server: Server) -> None:
    """Not how long its request took, which also waits for the step that was under way."""
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        report = it.publish(1)
        (result,) = report.engines.values()
        print(f"{server}: {result}, {report.seconds}")
        assert 0 < result.install_seconds <= result.pause_seconds <= report.seconds.total - report.seconds.offer


@on(ONE, TWO, REPLICAS, full=[MOE_REPLICAS])
def test_the_server_says_what_it_is(server: Server) -> None:
    engine = HttpEngine(server.url)
    info = engine.info()
    world_size = server.setup.tp * server.setup.dp
    assert info.world_size == world_size
    # What it holds it can prove once a version was offered, by whichever test came before.
    assert set(info.abilities) - {"prove"} == {"install", "streaming", "undo", "dtypes"}
    assert not info.torn
    assert server.get("/get_world_size") == {"world_size": world_size}
    assert server.get("/get_world_size?include_dp=false") == {"world_size": server.setup.tp}
    assert server.get("/is_paused") == {"is_paused": False}
    engine.close()


@on(ONE)
def test_a_pause_of_the_users_own_stays(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        assert server.post("/pause?mode=keep").json() == {"status": "paused"}
        it.publish(1)
        assert server.is_paused()
        assert server.post("/resume").json() == {"status": "resumed"}
        assert_serves(server, 1)


@on(ONE)
def test_the_mode_of_a_pause_must_be_one_that_there_is(server: Server) -> None:
    for route in ("/pause?mode=forever", "/finish_weight_update?mode=forever"):
        reply = server.post(route, {"weight_version": "7"})
        assert reply.status_code == 400
        assert "keep, wait, abort" in reply.json()["error"]["message"]
    assert not server.is_paused()


@on(TWO)
def test_a_torn_engine_is_not_resumed_and_says_so(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        server.call("test_fail_load", 17, 1)
        error = it.failure(1)
        assert isinstance(error, InstallError)
        assert error.torn
        resumed = server.post("/resume")
        assert resumed.status_code == 409
        assert "complete update" in resumed.json()["error"]["message"]
        engine = HttpEngine(server.url)
        with pytest.raises(EngineTornError):
            engine.resume(it.publisher.run)
        assert engine.info().torn
        engine.close()
        refused = server.complete(PROMPT, 4)
        assert refused.status_code == 503
        assert "no whole version" in refused.json()["error"]["message"]
        assert server.get("/v1/models")["data"], "only generation is refused"
        assert server.post("/tokenize", {"model": "tiny", "prompt": "w5 w6"}).status_code == 200
        assert server.is_healthy()
        it.publish(1)
        assert_serves(server, 1)


@on(ONE, TWO)
def test_an_install_goes_on_without_its_client(server: Server) -> None:
    class GoneInMidFinish(HttpEngine):
        """Sends the request to finish, and closes the connection once the install has begun."""

        def finish(self, version: int) -> None:
            connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=60)
            body = msgspec.json.encode({"weight_version": str(version), "seal": self._seal})
            connection.request("POST", "/finish_weight_update", body, {"content-type": "application/json"})
            while not server.is_paused() and server.version() != str(version):
                pass
            connection.close()
            raise PeerTimeoutError("the test's client went away", peer=self.name)

    with trainer(server.setup, server.url) as it:
        it.publish(0)
    with contextlib.closing(GoneInMidFinish(server.url)) as engine, trainer(server.setup, engine) as it:
        # The client asks what became of it: the answer waits for the install.
        assert it.publish(1).ok
        assert not server.is_paused()
        assert_serves(server, 1)


@on(ONE)
def test_a_pause_that_waits_lets_requests_end(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        running = Stream(server.stream(PROMPT, NUM_STREAMED))
        running(1, 1)
        with contextlib.closing(HttpEngine(server.url, pause="wait")) as engine:
            engine.pause(it.publisher.run)
            assert len(joined(running.awaited()).tokens) == NUM_STREAMED, "the pause waited for it"
            engine.resume(it.publisher.run)
        assert_serves(server, 0)


@on(full=[GUARDED])
def test_without_the_token_no_weight_route_answers(server: Server) -> None:
    http = httpx.Client(base_url=server.url, trust_env=False, timeout=30)
    for headers in ({}, {"authorization": "Bearer other"}, {"authorization": TOKEN}):
        replies = [http.post(f"/{path}", headers=headers) for path in POSTS]
        replies += [http.get(f"/{path}", headers=headers) for path in GETS]
        assert {reply.status_code for reply in replies} == {401}
    http.close()
    with trainer(server.setup, server.url, token=None) as it:
        error = it.failure(1)
        assert isinstance(error, ControlError)
        assert "token" in str(error)
    with trainer(server.setup, server.url) as it:
        it.publish(1)
        assert_serves(server, 1)


@on(full=[GUARDED])
def test_an_init_past_the_routes_needs_the_token_too(server: Server) -> None:
    info = {"run": "a" * 32, "engine": "e", "transport": "ipc://x", "link": "unix:@x", "secret": "0" * 64}
    for token in ("", "other"):
        call = {"call": "init", "info": info | {"lease_seconds": 5.0, "token": token}}
        for reply in server.call("weightcast", call):
            assert reply["error"]["kind"] == RefusedError.__name__
            assert "WEIGHTCAST_TOKEN" in reply["error"]["message"]
            assert not reply["info"]["holder"]


@on(ONE)
def test_pages_in_a_browser_are_refused(server: Server) -> None:
    reply = httpx.get(f"{server.url}/weight_info", headers={"origin": "http://example.org"}, trust_env=False)
    assert reply.status_code == 403


@on(ONE, TWO)
def test_no_weight_call_waits_for_the_publisher(server: Server) -> None:
    """The publisher stands still at each step of the transfer; each call was answered long before its deadline."""
    seconds: dict[str, float] = {}

    class Timed(HttpEngine):
        def _timed(self, name: str, call: object, *args: object) -> None:
            start = time.perf_counter()
            call(*args)  # type: ignore[operator]
            seconds[name] = max(seconds.get(name, 0.0), time.perf_counter() - start)

        def init(self, info: object) -> None:  # type: ignore[override]
            self._timed("init", super().init, info)

        def update(self, info: object) -> None:  # type: ignore[override]
            self._timed(type(info).__name__, super().update, info)

    engine = Timed(server.url)
    with trainer(server.setup, engine) as it:
        for seed in (1, 0):
            it.publish(seed)
    engine.close()
    assert max(seconds.values()) < PublishOptions().deadline_seconds / 2, seconds
