"""What another project's server answers while the engine behind it is torn, stale or changed by its host."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from weightcast.errors import ManifestError, PeerTimeoutError
from weightcast.integrations.plugin import HEALTH_VARIABLE
from weightcast.integrations.plugin.routes import guard_serving


class Engine:
    """What a guard asks of an engine."""

    def __init__(self) -> None:
        self.torn, self.stale, self.num_doubts = "", "", 0
        self.asked: list[int] = []

    async def why_torn(self) -> str:
        return self.torn

    async def stale_reason(self, max_behind: int) -> str:
        self.asked.append(max_behind)
        if self.stale == "late":
            raise PeerTimeoutError("the engine is late", peer="engine")
        return self.stale

    def doubt(self) -> None:
        self.num_doubts += 1


def client_of(engine: Engine | None) -> TestClient:
    async def answer(request: Any) -> PlainTextResponse:
        return PlainTextResponse("host")

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    found: Any = engine
    guard_serving(app, lambda: found, generation=("/v1/",), changing=("/sleep",), health=("/health",))
    return TestClient(app)


def test_only_generation_is_refused_while_the_engine_is_torn() -> None:
    engine = Engine()
    client = client_of(engine)
    assert client.post("/v1/completions").text == "host"
    engine.torn = "half of version 3"
    refused = client.post("/v1/completions")
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "EngineTornError")
    assert "half of version 3" in refused.json()["error"]["message"]
    assert [client.get("/v1/models").text, client.post("/tokenize").text, client.get("/health").text] == ["host"] * 3


def test_the_engine_is_in_doubt_before_and_after_the_host_changes_it() -> None:
    engine = Engine()
    assert client_of(engine).post("/sleep").text == "host"
    assert engine.num_doubts == 2


def test_a_health_check_fails_while_the_engine_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEALTH_VARIABLE, "2")
    engine = Engine()
    client = client_of(engine)
    assert client.get("/health").text == "host"
    for engine.stale, reason in (("3 behind", "3 behind"), ("late", "the engine is late")):
        answer = client.get("/health")
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "not_ready")
        assert reason in answer.json()["error"]["message"]
    assert engine.asked == [2, 2, 2]


def test_a_server_without_an_engine_answers_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEALTH_VARIABLE, "2")
    client = client_of(None)
    assert [client.post("/v1/completions").text, client.get("/health").text, client.post("/sleep").text] == ["host"] * 3


def test_a_limit_that_is_no_number_is_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HEALTH_VARIABLE, "two")
    with pytest.raises(ManifestError, match=HEALTH_VARIABLE):
        client_of(None)
