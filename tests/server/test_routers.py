"""sglang-router and vllm-router in front of two reference servers: what is stale gets no request."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from server.tiny_qwen3 import make_model, make_tokenizer

from weightcast import EngineServer, ModuleEngine, Publisher, PublishError, TensorSource
from weightcast.engines.gate import Gate
from weightcast.engines.transformers import TextGenerator
from weightcast.host.deadline import Deadline

SECONDS = 60.0
ASK = {"model": "tiny", "prompt": "w5 w9 w17", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def engine() -> Iterator[EngineServer]:
    model = make_model()
    generator = TextGenerator(model, make_tokenizer(), gate=Gate())
    with EngineServer(ModuleEngine(model), generator=generator, model_name="tiny", health_max_behind=1) as server:
        yield server


def num_answers(server: EngineServer) -> int:
    lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("weightcast_completions_total"))


@contextlib.contextmanager
def router(command: str, urls: list[str], log: Path) -> Iterator[httpx.Client]:
    words = ["launch"] if command == "sglang-router" else []
    with contextlib.ExitStack() as probes:
        sockets = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, metrics_port = (str(probe.getsockname()[1]) for probe in sockets)
    words += ["--host", "127.0.0.1", "--port", port, "--prometheus-port", metrics_port, "--policy", "round_robin"]
    words += ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--worker-urls", *urls]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [command, *words], stdout=output, stderr=output, env=os.environ | {"NO_PROXY": "127.0.0.1"}
        ) as process,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, trust_env=False) as client,
    ):
        try:
            yield client
        finally:
            process.terminate()


def wait_for(client: httpx.Client, expected: set[str], log: Path) -> None:
    """Until the router would send requests to these engines alone."""
    healthy: object = None
    for _ in Deadline(SECONDS).polls(0.05, 0.2):
        with contextlib.suppress(httpx.TransportError):
            healthy = {each["url"] for each in client.get("/workers").json()["workers"] if each["is_healthy"]}
            if healthy == expected:
                return
    raise AssertionError(f"{healthy} are healthy, and not {expected}:\n{log.read_text()[-4000:]}")


@pytest.mark.parametrize("command", ["sglang-router", "vllm-router"])
def test_what_is_stale_gets_no_request(command: str, tmp_path: Path) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"needs {command}, of the package of that name")
    trained = {name: tensor.clone() for name, tensor in make_model(1).state_dict().items()}
    source, log = TensorSource(trained), tmp_path / "log"
    with engine() as first, engine() as second, Publisher(source, engines=[first.url]) as publisher:
        engines = (first, second)

        def versions(num: int = 6) -> list[str]:
            replies = [client.post("/v1/completions", json=ASK) for _ in range(num)]
            assert {reply.status_code for reply in replies} == {200}, replies[0].text
            return [reply.json()["weight_version"] for reply in replies]

        publisher.publish(1)
        with router(command, [first.url, second.url], log) as client:
            wait_for(client, {first.url}, log)
            assert versions() == ["1"] * 6
            assert [num_answers(each) for each in engines] == [6, 0], "the second never had a version"

            publisher.add_engine(second.url, sync=True)
            wait_for(client, {first.url, second.url}, log)
            assert versions() == ["1"] * 6
            assert [num_answers(each) for each in engines] == [9, 3]
            with client.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as reply:
                assert reply.read().endswith(b"data: [DONE]\n\n")
            before = [num_answers(each) for each in engines]

            publisher.remove_engine(first.url)
            wait_for(client, {second.url}, log)
            publisher.publish(2)
            assert versions() == ["2"] * 6
            assert [num_answers(each) for each in engines] == [before[0], before[1] + 6], "the first was removed"

            source.replace({"wrong": torch.ones(1)})
            for version in (3, 4):
                with pytest.raises(PublishError):
                    publisher.publish(version)
            wait_for(client, set(), log)
            assert client.post("/v1/completions", json=ASK).status_code == 503
            assert [num_answers(each) for each in engines] == [before[0], before[1] + 6], "the second is 2 behind"
