"""LoRA adapters published into real vLLM servers: their answers are those of a server started cold with the adapter."""

from __future__ import annotations

import concurrent.futures
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engines.process import footprint
from real_engines.setups import on
from warm_python import WarmPython

from real_vllm.adapters import (
    NUM_TOKENS,
    AdapterOf,
    answer,
    assert_a_killed_trainer_leaves_a_whole_version,
    assert_broken_updates_are_refused,
    assert_costs_the_adapter_alone,
    killed_trainers,
    named,
    publish_model,
    publishing,
    refusal,
)
from real_vllm.cold import assert_serves
from real_vllm.conftest import Checkpoints
from real_vllm.oracle import PROMPT, Answer
from real_vllm.servers import Server, Setup, completion
from weightcast import PublishError

LORA = Setup(max_adapters=8)
LORA_TWO = Setup("llama-tied", tp=2, max_adapters=8)
LORA_REPLICAS = Setup(dp=2, max_adapters=8)
LORA_BIASES = Setup("qwen2", dtype=torch.bfloat16, max_adapters=8)


@on(LORA, full=[LORA_TWO, LORA_BIASES])
def test_answers_are_those_of_a_cold_start(server: Server, cold_answers: Any) -> None:
    expected, setup = cold_answers(server.setup), server.setup
    alone = answer(server, "tiny")
    num_pauses = server.metrics().get("weightcast_pause_seconds_count", 0)
    with publishing(server, AdapterOf(setup.family, 0)) as (publisher, source):
        for seed in range(3):
            source.use(AdapterOf(setup.family, seed))
            report = publisher.publish()
            assert report.engines[server.url].pause_seconds == 0 < report.engines[server.url].install_seconds
            assert_costs_the_adapter_alone(report, source)
            assert answer(server, "policy") == expected[seed]
            assert answer(server, f"policy@{report.version}") == expected[seed]
            assert answer(server, "tiny") == alone
        last = report.version
        assert named(server) == {"policy", f"policy@{last}", f"policy@{last - 1}"}
        info = server.get("/weight_info")
        assert [(v["number"], v["is_current"]) for v in info["adapters"]] == [(last - 1, False), (last, True)]
        assert not info["paused"]
        assert server.metrics().get("weightcast_pause_seconds_count", 0) == num_pauses
        assert answer(server, f"policy@{last - 1}") == expected[1]
    assert len({str(each) for each in expected}) == 3


@on(LORA, full=[LORA_TWO, LORA_BIASES])
def test_a_publish_of_the_model_is_that_of_a_cold_start_and_takes_the_adapters_names(server: Server) -> None:
    adapter = AdapterOf(server.setup.family, 0)
    with publishing(server, adapter) as (publisher, _):
        publisher.publish()
    before = answer(server, "policy")
    server.call("test_fail_load", 9, -1)
    with pytest.raises(PublishError):
        publish_model(server, 1, undo=True)
    assert answer(server, "policy") == before, "the model was put back, so its adapters go on"
    try:
        report = publish_model(server, 1, verify="installed")
        assert_serves(server, 1)
        assert named(server) == set()
        assert server.get("/weight_info")["adapters"] == []
        refused = server.post("/v1/completions", completion(PROMPT, 2) | {"model": "policy"})
        assert refused.status_code == 404
        with publishing(server, adapter, base=(report.run, report.version)) as (publisher, _):
            publisher.publish()
        adapted = answer(server, "policy")
        assert adapted != before
        said = refusal(server, adapter, base=("0" * 32, 1))
        assert "is for version 1 of run " in said
        assert f"of the model, and this engine serves version {report.version} of {report.run}" in said
        assert answer(server, "policy") == adapted
    finally:
        publish_model(server, 0, verify="installed")
    assert_serves(server, 0)


@on(LORA)
def test_broken_updates_are_refused_by_name_and_the_old_one_serves(server: Server) -> None:
    adapter = AdapterOf(server.setup.family, 0)
    with publishing(server, adapter) as (publisher, _):
        publisher.publish()
    before = answer(server, "policy")
    assert_broken_updates_are_refused(server, answer)
    assert "has a model or adapter 'tiny' already: publish under another name" in refusal(server, adapter, name="tiny")
    with publishing(server, AdapterOf(server.setup.family, 1)) as (publisher, _):
        publisher.publish()
    assert answer(server, "policy") != before


@on(LORA, full=[LORA_TWO])
def test_a_version_that_one_rank_can_not_add_is_on_none(server: Server) -> None:
    last, family = server.setup.tp - 1, server.setup.family
    publish_model(server, 0)
    with publishing(server, AdapterOf(family, 0)) as (publisher, source):
        version = publisher.publish().version
        before = answer(server, "policy")
        server.call("test_fail_adapter", last)
        source.use(AdapterOf(family, 1))
        with pytest.raises(PublishError, match="this rank was told to fail"):
            publisher.publish()
        assert [len(ids) for ids in server.call("test_adapters")] == [1] * server.setup.tp
        assert named(server) == {"policy", f"policy@{version}"}
        assert answer(server, "policy") == before
        assert not server.get("/weight_info")["torn"]
        assert publisher.publish().version == version + 2
        assert answer(server, "policy") != before


@pytest.mark.full
@on(LORA_REPLICAS)
def test_several_api_servers_are_refused_by_name(server: Server) -> None:
    said = refusal(server, AdapterOf(server.setup.family, 0))
    assert "several API servers, which can't agree on the version" in said
    publish_model(server, 1)
    assert_serves(server, 1)
    publish_model(server, 0)


@pytest.mark.parametrize("num_versions", [25, pytest.param(200, marks=pytest.mark.full)])
@on(LORA)
def test_each_running_request_keeps_its_version_through_a_stream_of_them(
    server: Server, cold_answers: Any, num_versions: int
) -> None:
    """Requests run all the time, by name and by alias; versions come and go; no answer mixes two."""
    expected = cold_answers(server.setup)
    by_version: dict[str, Answer] = {}
    over, wrong, seen = threading.Event(), list[str](), set[str]()

    def ask(number: int) -> None:
        while not over.is_set():
            # Each its own prompt or the common one, which the prefix cache has.
            reply = server.post("/v1/completions", completion(PROMPT, NUM_TOKENS) | {"model": "policy"})
            if reply.status_code != 200:
                wrong.append(reply.text)
                return
            body = reply.json()
            choice = body["choices"][0]
            got = Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])
            seen.add(body["model"])
            if by_version[body["model"]].tokens != got.tokens:
                wrong.append(f"{body['model']}: {got}, expected {by_version[body['model']]}")

    with publishing(server, AdapterOf(server.setup.family, 0)) as (publisher, source):
        first = publisher.publish().version
        by_version[f"policy@{first}"] = expected[0]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask, number) for number in range(3)]
            try:
                for step in range(1, num_versions):
                    by_version[f"policy@{first + step}"] = expected[step % 3]
                    source.use(AdapterOf(server.setup.family, step % 3))
                    assert publisher.publish().version == first + step
                    if step % 40 == 0:
                        print(f"version {step}: the server's memory is {footprint(server).rss_bytes >> 20} MiB")
            finally:
                over.set()
            for each in asking:
                each.result(60)
        by_version[f"policy@{first + num_versions}"] = expected[0]
        publisher.publish()
        assert len(server.call("test_adapters")[0]) == 3, "two that can be named, one that the next offer unloads"
    assert not wrong
    assert len(seen) > 3
    assert server.is_healthy()


@on(LORA)
def test_versions_that_fill_the_engine_are_refused_until_some_have_lost_their_names(server: Server) -> None:
    adapter = AdapterOf(server.setup.family, 0)
    publish_model(server, 0)
    with publishing(server, adapter, keep=6) as (publisher, _):
        for _ in range(9):
            publisher.publish()
    assert len(server.call("test_adapters")[0]) == 8, "seven that can be named, one that the next offer unloads"
    with publishing(server, adapter, name="other") as (publisher, _):
        publisher.publish()
    names = named(server)
    assert "takes at most 8: publish with a smaller keep" in refusal(server, adapter, name="third")
    assert named(server) == names
    publish_model(server, 0)
    with publishing(server, adapter) as (publisher, _):
        publisher.publish()
    assert len(server.call("test_adapters")[0]) == 1


@on(LORA)
def test_a_reload_by_vllm_itself_takes_the_names_but_ends_no_running_request(server: Server) -> None:
    publish_model(server, 0)
    with publishing(server, AdapterOf(server.setup.family, 0)) as (publisher, _):
        version = publisher.publish().version
    expected = answer(server, "policy", num_tokens=40)
    server.call("test_slow_down", 0.02)
    try:
        tokens: list[int] = []
        for choice in server._choices("/v1/completions", completion(PROMPT, 40) | {"model": f"policy@{version}"}):
            if not tokens:
                reply = server.post("/collective_rpc", {"method": "reload_weights"})
                assert reply.status_code == 200, reply.text
            tokens += choice["token_ids"] or []
    finally:
        server.call("test_slow_down", 0.0)
    assert tokens == expected.tokens, "the reload is of the same weights"
    assert server.post("/v1/completions", completion(PROMPT, 2) | {"model": "policy"}).status_code == 404
    assert named(server) == set()
    publish_model(server, 0)
    assert_serves(server, 0)


@pytest.mark.parametrize("phase", ["offered", "packed", "received", "installed"])
@on(LORA, full=[LORA_TWO])
def test_a_trainer_that_is_killed_leaves_a_whole_version(
    server: Server, phase: str, cold_answers: Any, python: WarmPython
) -> None:
    assert_a_killed_trainer_leaves_a_whole_version(server, phase, cold_answers(server.setup), answer, python)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 13))])
@on(LORA, full=[LORA_TWO])
def test_trainers_killed_at_random_leave_whole_versions(
    server: Server, seed: int, cold_answers: Any, python: WarmPython, tmp_path: Path
) -> None:
    for _ in killed_trainers(server, seed, cold_answers(server.setup), answer, python, tmp_path):
        pass


@pytest.mark.full
def test_adapters_from_paths_keep_their_room(checkpoint: Checkpoints, tmp_path: Path) -> None:
    setup = Setup(max_adapters=4)
    paths = {"other": AdapterOf(setup.family, 5).save(tmp_path / "other")}
    with Server(setup, checkpoint(setup.family, 0, setup.dtype), adapters=paths) as server:
        before = answer(server, "other")
        with publishing(server, AdapterOf(setup.family, 0), keep=3) as (publisher, _):
            for _ in range(3):
                publisher.publish()
            with pytest.raises(PublishError, match="4 published adapters, beside 1 that were loaded from paths"):
                publisher.publish()
        assert answer(server, "other") == before
        assert "a model or adapter 'other' already" in refusal(server, AdapterOf(setup.family, 0), name="other")
        assert named(server) == {"other", "policy", "policy@0", "policy@1", "policy@2"}
        assert server.is_healthy()
