"""GET /weight_ready: a router sends requests to an engine once it serves one of the last versions, and only as long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from torch import nn

from weightcast import (
    EngineServer,
    HttpEngine,
    ModuleEngine,
    ModuleSource,
    Publisher,
    PublishError,
    PublishOptions,
    TensorSource,
)
from weightcast.engines.lora import LoraLayers
from weightcast.format.adapters import LoraConfig
from weightcast.trainer.options import Adapter

WEIGHT = {"weight": torch.ones(2, 3)}
WRONG = {"weight": torch.ones(5, 3)}


@pytest.fixture
def url() -> Iterator[str]:
    with EngineServer(ModuleEngine(nn.Linear(3, 2, bias=False)), port=0) as server:
        yield server.url


def ready(url: str, max_behind: object = None) -> tuple[int, str]:
    query = {} if max_behind is None else {"max_behind": str(max_behind)}
    reply = httpx.get(f"{url}/weight_ready", params=query, trust_env=False)
    body = reply.json()
    return reply.status_code, body["error"]["message"] if "error" in body else body["weight_version"]


def publish_in_vain(publisher: Publisher, source: TensorSource, version: int) -> None:
    """The engine refuses it."""
    source.replace(WRONG)
    with pytest.raises(PublishError):
        publisher.publish(version)
    source.replace(WEIGHT)


def test_an_engine_is_ready_with_one_of_the_last_versions(url: str) -> None:
    assert ready(url) == (503, "no publisher's version was installed yet")
    source = TensorSource(WEIGHT)
    with Publisher(source, engines=[url]) as publisher:
        publish_in_vain(publisher, source, 3)
        assert ready(url) == (503, "no publisher's version was installed yet")
        publisher.publish(4)
        assert ready(url, 0) == (200, "4")
        publish_in_vain(publisher, source, 5)
        assert ready(url) == (200, "4")
        assert ready(url, 0) == (503, "version 4 is served, 1 behind 5; at most 0 is allowed")
        publish_in_vain(publisher, source, 7)
        assert ready(url) == (503, "version 4 is served, 3 behind 7; at most 1 is allowed")
        assert ready(url, 3) == (200, "4")
        publisher.publish()
        assert ready(url, 0) == (200, "8")
    assert ready(url, 0) == (200, "8"), "a trainer that has ended leaves it ready"


def test_another_run_may_count_from_0(url: str) -> None:
    source = TensorSource(WEIGHT)
    with Publisher(source, engines=[url]) as publisher:
        publisher.publish(40)
    with Publisher(source, engines=[url]) as publisher:
        publish_in_vain(publisher, source, 0)
        assert ready(url, 0) == (503, "version 40 is served, 1 behind 0; at most 0 is allowed")
        assert ready(url) == (200, "40")
        publish_in_vain(publisher, source, 1)
        assert ready(url) == (503, "version 40 is served, 2 behind 1; at most 1 is allowed")
        publisher.publish(2)
        assert ready(url, 0) == (200, "2")


class AdapterSource(TensorSource):
    lora_config = LoraConfig(1, 2.0, ("linear",))


def test_versions_of_an_adapter_say_nothing_of_the_model() -> None:
    model, trained = nn.Sequential(), nn.Sequential()
    for each in (model, trained):
        each.add_module("linear", nn.Linear(3, 2, bias=False))
    parts = {"lora_A": torch.ones(1, 3), "lora_B": torch.ones(2, 1)}
    source = AdapterSource({f"base_model.model.linear.{name}.weight": tensor for name, tensor in parts.items()})
    options = PublishOptions(target=Adapter("policy"))
    with EngineServer(ModuleEngine(model, adapters=LoraLayers(model)), port=0) as server:
        with Publisher(ModuleSource(trained), engines=[server.url]) as publisher:
            publisher.publish(5)
        with Publisher(source, engines=[server.url], options=options) as adapters:
            for version in (3, 10, 20):
                adapters.publish(version)
                assert ready(server.url, 0) == (200, "5")
            assert adapters.sync(server.url).ok
            adapters.remove_engine(server.url)
        assert ready(server.url, 0) == (200, "5")
        with Publisher(ModuleSource(trained), engines=[server.url]) as publisher:
            publisher.publish(6)
            publisher.remove_engine(server.url)
        assert ready(server.url, 1000)[0] == 503
        with Publisher(source, engines=[server.url], options=options) as adapters:
            adapters.publish(30)
        assert ready(server.url, 1000)[0] == 503


def test_a_stranger_changes_nothing(url: str) -> None:
    with Publisher(TensorSource(WEIGHT), engines=[url]) as publisher:
        run = publisher.publish(3).run
        for message in (
            {"kind": "offer", "run": run, "version": 900, "manifest_digest": "0" * 64},
            {"kind": "seal", "run": run, "version": 3, "num_buckets": 1, "root": "0" * 32},
        ):
            reply = httpx.post(f"{url}/update_weights", json={"update_info": message}, trust_env=False)
            assert reply.status_code == 409, reply.text
            assert "lacks the secret" in reply.text
            assert ready(url, 0) == (200, "3")


def test_an_engine_without_which_its_run_goes_on_is_not_ready(url: str) -> None:
    """There may be any number of later versions. It is ready again with the next one that it is offered."""
    source, gone = TensorSource(WEIGHT), r"goes on without this engine.*version 1 is served"
    with Publisher(source, engines=[url]) as publisher:
        publisher.publish(1)
        publisher.remove_engine(url)
        status, message = ready(url, 1000)
        assert status == 503
        assert re.search(gone, message)
        publisher.add_engine(url)
        publish_in_vain(publisher, source, 9)
        assert ready(url) == (503, "version 1 is served, 8 behind 9; at most 1 is allowed")
        publisher.publish(10)
        assert ready(url, 0) == (200, "10")
    with Publisher(source, engines=[url]) as publisher:
        publisher.publish(11)
        publisher.remove_engine(url)
        assert ready(url)[0] == 503
    assert ready(url)[0] == 503, "that run has ended, but nobody knows with which version"
    with Publisher(source, engines=[url]) as publisher:
        publisher.publish(12)
        assert ready(url) == (200, "12")
    assert ready(url) == (200, "12")


@pytest.mark.parametrize("transport", ["ipc://", "file://{}/store"])
def test_a_sync_makes_a_dropped_engine_ready_again_if_it_serves_the_last_version(
    url: str, tmp_path: Path, transport: str
) -> None:
    source = TensorSource(WEIGHT)
    with (
        EngineServer(ModuleEngine(nn.Linear(3, 2, bias=False)), port=0) as other,
        Publisher(source, transport=transport.format(tmp_path), engines=[other.url, url]) as publisher,
    ):
        publisher.publish(4)
        publisher.remove_engine(url)
        assert ready(url, 1000)[0] == 503
        publisher.add_engine(url)
        assert publisher.sync(url).ok
        assert ready(url, 0) == (200, "4")
        publish_in_vain(publisher, source, 5)
        publisher.remove_engine(url)
        publisher.add_engine(url)
        assert ready(url, 1000)[0] == 503
        with pytest.raises(ValueError, match="version 5 was not sent completely"):
            publisher.sync()
        assert ready(url, 1000)[0] == 503


def test_a_sync_sends_a_dropped_engine_the_versions_that_it_has_missed(url: str) -> None:
    with (
        EngineServer(ModuleEngine(nn.Linear(3, 2, bias=False)), port=0) as other,
        Publisher(TensorSource(WEIGHT), engines=[other.url, url]) as publisher,
    ):
        publisher.publish(4)
        publisher.remove_engine(url)
        publisher.publish(5)
        assert publisher.sync().ok
        assert ready(url, 1000)[0] == 503, "it is not in the fleet"
        publisher.add_engine(url, sync=True)
        assert ready(url, 0) == (200, "5")


def test_a_torn_engine_is_not_ready(url: str) -> None:
    with Publisher(TensorSource(WEIGHT), engines=[url], options=PublishOptions()) as publisher:
        publisher.publish()
        engine = HttpEngine(url)
        engine.quarantine("somebody saw wrong tokens")
        engine.close()
        assert ready(url, 1000) == (503, "the engine is torn: somebody saw wrong tokens")
        publisher.publish()
        assert ready(url) == (200, "1")


def test_health_may_depend_on_the_version(url: str) -> None:
    source = TensorSource(WEIGHT)
    with EngineServer(ModuleEngine(nn.Linear(3, 2, bias=False)), port=0, health_max_behind=1, token="its") as gated:

        def health() -> tuple[int, str]:
            assert httpx.get(f"{url}/health", trust_env=False).is_success, "without the option"
            reply = httpx.get(f"{gated.url}/health", trust_env=False)
            return reply.status_code, "" if reply.is_success else reply.json()["error"]["message"]

        assert health() == (503, "no publisher's version was installed yet")
        with Publisher(source, engines=[gated.url], token="its") as publisher:
            publisher.publish(4)
            assert health() == (200, "")
            publish_in_vain(publisher, source, 5)
            assert health() == (200, "")
            publish_in_vain(publisher, source, 6)
            assert health() == (503, "version 4 is served, 2 behind 6; at most 1 is allowed")
            publisher.publish(7)
            assert health() == (200, "")
            publisher.remove_engine(gated.url)
            assert health()[0] == 503


@pytest.mark.parametrize("wrong", ["-1", "one", "", "1.5"])
def test_a_bound_that_is_no_number(url: str, wrong: str) -> None:
    status, message = ready(url, wrong)
    assert status == 400
    assert "max_behind" in message
