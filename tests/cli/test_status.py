"""`weightcast status` of real engine servers: which version each serves, which is behind, torn, paused or gone."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from torch import nn

from weightcast import EngineServer, HttpEngine, ModuleEngine, Publisher, TensorSource, cli
from weightcast.cli import exits

WEIGHT = {"weight": torch.ones(2, 3)}


@contextlib.contextmanager
def serving(number: int, token: str | None = None) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        engines = [ModuleEngine(nn.Linear(3, 2, bias=False)) for _ in range(number)]
        yield [stack.enter_context(EngineServer(engine, port=0, token=token)).url for engine in engines]


def look(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict[str, Any]]:
    status = cli.main(["status", *argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def states(found: dict[str, Any]) -> list[tuple[str, int | None]]:
    return [(engine["state"], engine["behind"]) for engine in found["engines"]]


def test_who_is_behind(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(3) as urls:
        status, found = look(capsys, *urls, urls[0])
        assert (status, found["newest"], states(found)) == (exits.OK, None, [("serves", None)] * 3)
        assert [engine["engine"] for engine in found["engines"]] == urls, "each once"
        with Publisher(TensorSource(WEIGHT), engines=urls[:2]) as publisher:
            publisher.publish(5)
            status, found = look(capsys, *urls)
            assert (status, found["newest"]) == (exits.NEGATIVE, 5)
            assert states(found) == [("serves", 0), ("serves", 0), ("behind", None)]
            assert [engine["info"]["holder"] for engine in found["engines"]] == [publisher.run, publisher.run, ""]
            publisher.remove_engine(urls[1])
            publisher.publish(8)
            assert states(look(capsys, *urls)[1]) == [("serves", 0), ("behind", 3), ("behind", None)]
            publisher.remove_engine(urls[0])
            status, found = look(capsys, urls[0])
            assert (status, states(found)) == (exits.OK, [("serves", 0)])


def test_an_engine_that_does_not_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(4) as urls, contextlib.ExitStack() as stack:
        httpx.post(f"{urls[0]}/pause", trust_env=False).raise_for_status()
        torn = stack.enter_context(contextlib.closing(HttpEngine(urls[1])))
        torn.quarantine("a test [says] so")
        with serving(1) as (gone,):
            pass
        status, found = look(capsys, *urls, gone, "--deadline", "5")
        assert status == exits.NEGATIVE
        assert [state for state, _ in states(found)] == ["paused", "torn", "serves", "serves", "no answer"]
        assert found["engines"][4]["error"]["kind"] == "PeerDiedError"
        assert cli.main(["status", *urls, gone]) == exits.NEGATIVE
        text = capsys.readouterr().out
        assert "engines that serve: 2 of 5\n" in text
        assert f"{urls[1]} is torn: a test [says] so" in text
        assert f"{gone}: PeerDiedError: " in text


def test_a_token_and_a_wrong_url(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    with serving(1, token="s3cret") as (url,):
        assert cli.main(["status", url, "--token-file", str(file)]) == exits.OK
        assert cli.main(["status", url]) == exits.NEGATIVE
    assert cli.main(["status", "localhost:8000"]) == exits.USAGE


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_watching_goes_on_until_it_is_interrupted(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    def interrupted(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise KeyboardInterrupt

    with serving(1) as (url,):
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", interrupted)
            assert cli.main(["status", url, "--watch", "30", *options]) == exits.INTERRUPTED
        assert waits == [30, 30]
        captured = capsys.readouterr()
        assert captured.err.endswith("weightcast: interrupted\n")
        if options:
            assert [json.loads(line)["ok"] for line in captured.out.splitlines()] == [True, True]
        else:
            assert "engines that serve: 1 of 1" in captured.out
