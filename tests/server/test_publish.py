"""The whole way: Publisher, HTTP control, ipc transport, a generator under load; and the example as users run it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
from server.test_versions import assert_each_token_is_of_its_version
from server.tiny_qwen3 import make_model
from transformers import Qwen3ForCausalLM

from weightcast.control.server.app import EngineServer
from weightcast.engines.transformers import Completion, SamplingParams
from weightcast.sources.module import ModuleSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

ROOT = Path(__file__).parents[2]


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


@pytest.mark.cluster
def test_the_example_runs() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "module_engine.py")], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert len(ran.stdout.splitlines()) == 5
    assert ran.stderr == ""
