"""Many publishes under load: every token is of a version that was published, and of that version's weights."""

from __future__ import annotations

import random
import threading
from multiprocessing.connection import Connection
from typing import Any

import httpx
import pytest
import torch
from server.tiny_qwen3 import make_model

import weightcast
from faults.actors import Actor, footprint

pytestmark = pytest.mark.cluster

NUM_SAMPLED = 60
TOLERANCE = 1e-2  # batches of other sizes add up in another order; versions are whole nats apart


def set_weights(model: torch.nn.Module, version: int) -> None:
    """The weights of a version, as a function of it."""
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def text_engine_main(pipe: Connection) -> None:
    from weightcast.engines.gate import Gate
    from weightcast.engines.module import ModuleEngine
    from weightcast.engines.transformers import TextGenerator

    torch.set_num_threads(1)
    model, gate = make_model(), Gate()
    with weightcast.EngineServer(
        ModuleEngine(model), gate=gate, generator=TextGenerator(model, None, gate=gate)
    ) as server:
        pipe.send(("url", server.url))
        while pipe.recv()[0] != "end":
            pipe.send(("footprint", footprint()))


class Client(threading.Thread):
    """Asks one engine for completions until told to stop."""

    def __init__(self, url: str, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.url, self.random, self.stop_asking = url, random.Random(seed), stop
        self.answers: list[dict[str, Any]] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as http:
                while not self.stop_asking.is_set():
                    self.answers.append(self.ask(http))
        except BaseException as exc:
            self.error = exc

    def ask(self, http: httpx.Client) -> dict[str, Any]:
        prompt = [self.random.randrange(1, 100) for _ in range(self.random.randrange(2, 12))]
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 1.0, "logprobs": 0, "seed": 7}
        reply = http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        return choice | {"prompt": prompt}


def assert_of_its_versions(answer: dict[str, Any], model: torch.nn.Module, run: str) -> None:
    """Every span's log-probabilities are those of that version's weights, for the same tokens."""
    tokens, logprobs = answer["token_ids"], answer["logprobs"]["token_logprobs"]
    spans = answer["weight_versions"]
    assert [s["start"] for s in spans] == [0, *(s["end"] for s in spans[:-1])]
    assert spans[-1]["end"] == len(tokens) == len(logprobs)
    prompt = answer["prompt"]
    for span in spans:
        assert span["run"] == run
        set_weights(model, int(span["version"]))
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        own = torch.log_softmax(logits.float(), -1)[range(len(tokens)), tokens]
        for position in range(span["start"], span["end"]):
            assert abs(own[position].item() - logprobs[position]) < TOLERANCE, (span, position)


@pytest.mark.parametrize("num_publishes", [80, pytest.param(200, marks=pytest.mark.full)])
def test_publishes_under_load(num_publishes: int) -> None:
    engines = [Actor(text_engine_main), Actor(text_engine_main)]
    stop = threading.Event()
    urls = [engine.hear("url") for engine in engines]
    clients = [Client(url, seed, stop) for seed, url in enumerate(urls * 2)]
    trainer = make_model()
    try:
        with weightcast.Publisher(weightcast.ModuleSource(trainer), engines=urls) as publisher:
            set_weights(trainer, 0)
            publisher.publish(0)
            for client in clients:
                client.start()
            for version in range(1, num_publishes + 1):
                set_weights(trainer, version)
                publisher.publish(version)
                if version == num_publishes // 4:
                    before = [engine.footprint() for engine in engines]
            after = [engine.footprint() for engine in engines]
            stop.set()
            for client in clients:
                client.join(60)
            run = publisher.run
    finally:
        stop.set()
        for engine in engines:
            engine.close()
    assert [client.error for client in clients] == [None] * len(clients)
    answers = [answer for client in clients for answer in client.answers]
    assert len({span["version"] for answer in answers for span in answer["weight_versions"]}) > num_publishes // 4
    crossing = [answer for answer in answers if len(answer["weight_versions"]) > 1]
    assert crossing, "no completion lived through an update"
    chosen = random.Random(0).sample(answers, min(NUM_SAMPLED, len(answers))) + crossing[:20]
    for answer in chosen:
        assert_of_its_versions(answer, trainer, run)
    for old, new in zip(before, after, strict=True):
        assert new["fds"] <= old["fds"] + 4, (old, new)
        assert new["rss_bytes"] <= old["rss_bytes"] + (16 << 20), (old, new)
