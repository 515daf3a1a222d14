"""The endpoint plugin's routes on real servers: an install is one request; the token; what a torn engine answers."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import time
import urllib.parse

import httpx
import pytest

from real_vllm.oracle import PROMPT, assert_serves
from real_vllm.servers import ONE, TWO, Server, Setup, on
from real_vllm.trainer import trainer
from weightcast import HttpEngine
from weightcast.errors import ControlError, EngineTornError, InstallError, PeerTimeoutError, RefusedError

TOKEN = "sesame-open"
GUARDED = Setup(tp=2, token=TOKEN)
POSTS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")
POSTS += ("shutdown_weight_transfer_engine", "pause", "resume")
GETS = ("weight_info", "is_paused", "get_world_size")


@on(ONE, TWO)
def test_the_server_says_what_it_is(server: Server) -> None:
    engine = HttpEngine(server.url)
    info = engine.info()
    assert info.world_size == server.setup.tp
    assert set(info.abilities) == {"install", "undo"}
    assert not info.torn
    assert server.get("/get_world_size") == {"world_size": server.setup.tp}
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
        assert_serves(server.ask, it.of(1), other=it.of(0))


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
        assert_serves(server.ask, it.of(1), other=it.of(0))


@on(ONE, TWO)
def test_an_install_goes_on_without_its_client(server: Server) -> None:
    class GoneInMidFinish(HttpEngine):
        """Sends the request to finish, and closes the connection once the install has begun."""

        def finish(self, version: int) -> None:
            connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=60)
            body = json.dumps({"weight_version": str(version)})
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
        assert_serves(server.ask, it.of(1), other=it.of(0))


@on(ONE)
def test_a_pause_that_waits_lets_requests_end(server: Server) -> None:
    with trainer(server.setup, server.url) as it:
        it.publish(0)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.ask, PROMPT, 400)
            engine = HttpEngine(server.url, pause="wait")
            engine.pause(it.publisher.run)
            assert running.result(60).tokens, "the pause waited for it"
            engine.resume(it.publisher.run)
            engine.close()
        assert_serves(server.ask, it.of(0), other=it.of(1))


@on(GUARDED)
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
        assert_serves(server.ask, it.of(1), other=it.of(0))


@on(GUARDED)
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
    assert max(seconds.values()) < 5.0, seconds
