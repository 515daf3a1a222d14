"""The whole way: Publisher, HTTP control, ipc transport, a generator under load; and the example as users run it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import torch
from server.test_versions import assert_each_token_is_of_its_version
from server.tiny_qwen3 import make_model
from transformers import Qwen3ForCausalLM

from weightcast.control.server.app import EngineServer
from weightcast.engines.module import ModuleEngine
from weightcast.engines.transformers import Completion, SamplingParams
from weightcast.errors import ClosedError, EngineTornError
from weightcast.format.manifest import WeightVersion
from weightcast.host.deadline import Deadline
from weightcast.sources.module import ModuleSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

ROOT = Path(__file__).parents[2]


class InterruptedHalfWay(Exception):
    pass


def interrupt(done_bytes: int, total_bytes: int) -> None:
    if 2 * done_bytes > total_bytes:
        raise InterruptedHalfWay


@pytest.mark.parametrize("is_healed", [True, False])
def test_the_documented_loop_outlives_a_torn_update_and_ends_with_the_server(is_healed: bool) -> None:
    served: list[WeightVersion | None] = []
    trained = torch.nn.Linear(256, 256)
    server = EngineServer(ModuleEngine(torch.nn.Linear(256, 256))).start()

    def loop() -> None:
        with contextlib.suppress(ClosedError):
            while True:
                with server.step() as version:
                    served.append(version)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        options = PublishOptions(install="streaming", bucket_size_bytes=16384)
        with Publisher(ModuleSource(trained), engines=[server.url], options=options) as publisher:
            publisher.publish()
            with pytest.raises(InterruptedHalfWay):
                publisher.publish(on_progress=interrupt)
            assert any(server.gate.torn for _ in Deadline(30.0).polls(0.001, 0.1))
            with pytest.raises(EngineTornError), server.step(timeout_seconds=0):
                pass
            if is_healed:
                healed = publisher.publish().version
                assert any(served[-1] and served[-1].number == healed for _ in Deadline(30.0).polls(0.001, 0.1))
    finally:
        server.close()
        thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(ClosedError):
        server.step()


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_publishes_under_load(server: EngineServer, model: Qwen3ForCausalLM, install: str) -> None:
    models: dict[int | None, Qwen3ForCausalLM] = {None: make_model(0), **{n: make_model(n) for n in range(1, 5)}}
    generator = server.generator
    assert generator is not None
    stop = threading.Event()
    done: list[Completion] = []

    def load() -> None:
        while not stop.is_set():
            sampling = SamplingParams(n=2, max_tokens=40, logprobs=0, ignore_eos=True)
            done.extend(generator.generate([[5, 9], [3, 4, 5, 6]], sampling))

    client = threading.Thread(target=load)
    client.start()
    try:
        source = make_model(0)
        with Publisher(
            ModuleSource(source), engines=[server.url], options=PublishOptions(install=install)
        ) as publisher:  # type: ignore[arg-type]
            for number in range(1, 5):
                source.load_state_dict(make_model(number).state_dict())
                assert publisher.publish(version=number).version == number
                run = publisher.run
                last = generator.generate([[7, 8]], SamplingParams(max_tokens=4, logprobs=0, ignore_eos=True))
                assert [(s.run, s.version) for s in last[0].weight_versions] == [(run, number)]
                done.extend(last)
            assert not server.gate.is_paused
            http_digests = httpx.get(f"{server.url}/weight_digests").json()
            assert http_digests["weight_version"] == "4"
    finally:
        stop.set()
        client.join(30)
    assert {span.version for c in done for span in c.weight_versions} >= {1, 2, 3, 4}
    for completion in done:
        assert_each_token_is_of_its_version(completion, models)
    metrics = httpx.get(f"{server.url}/metrics").text
    for stage in ("offer", "receive", "seal", "install", "update"):
        assert f'weightcast_update_seconds_count{{stage="{stage}"}} 4.0' in metrics
    assert "weightcast_update_failures_total{" not in metrics
    assert "weightcast_pause_seconds_count 4.0" in metrics


@pytest.mark.cluster
def test_the_example_runs() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "module_engine.py")], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 5
    assert ran.stderr == ""
