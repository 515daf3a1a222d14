"""LoRA adapters published into real SGLang servers: they answer as a server that was started with the adapter."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_engines.process import REQUEST_SECONDS, footprint
from real_engines.setups import on
from real_vllm.adapters import (
    AdapterOf,
    Source,
    assert_a_killed_trainer_leaves_a_whole_version,
    assert_broken_updates_are_refused,
    assert_costs_the_adapter_alone,
    killed_trainers,
    publish_model,
    publishing,
    refusal,
    with_head,
)
from real_vllm.oracle import PROMPT, Answer, joined
from warm_python import WarmPython

from real_sglang.adapters import NUM_STREAMED, NUM_TOKENS, Cold, answer, named, num_loaded, uneven
from real_sglang.faults import Break
from real_sglang.oracle import LOOSE
from real_sglang.servers import ONE, Server, Setup
from weightcast import Publisher, PublishError, PublishOptions
from weightcast.format.adapters import LoraConfig, tensor_name
from weightcast.trainer.options import Adapter

LORA = Setup(max_lora_rank=16)
LORA_TWO = Setup("llama-tied", tp=2, max_lora_rank=16)
LORA_BIASES = Setup("qwen2", dtype=torch.bfloat16, max_lora_rank=16)
LORA_EXPERTS = Setup("qwen3-moe", max_lora_rank=16)


@on(LORA, full=[LORA_TWO, LORA_BIASES])
def test_answers_are_those_of_a_cold_start(server: Server, cold_with: Callable[..., Cold]) -> None:
    family, cold = server.setup.family, cold_with(server.setup)
    num_pauses = server.metrics().get("weightcast_pause_seconds_count", 0)
    with publishing(server, AdapterOf(family, 0)) as (publisher, source):
        for seed in range(3):
            source.use(AdapterOf(family, seed))
            report = publisher.publish()
            assert report.engines[server.url].pause_seconds == 0 < report.engines[server.url].install_seconds
            assert_costs_the_adapter_alone(report, source)
            version = report.version
            assert answer(server, "policy") == cold.adapted[seed]
            assert answer(server, f"policy@{version}") == cold.adapted[seed]
            assert answer(server) == cold.alone
        assert named(server) == {f"policy@{version}", f"policy@{version - 1}"}
        assert answer(server, f"policy@{version - 1}") == cold.adapted[1]
        info = server.get("/weight_info")
        assert [(v["number"], v["is_current"]) for v in info["adapters"]] == [(version - 1, False), (version, True)]
        assert not info["paused"]
        assert server.metrics().get("weightcast_pause_seconds_count", 0) == num_pauses
    assert len({str(each) for each in (cold.alone, *cold.adapted)}) == 4


@on(LORA)
def test_a_request_finds_a_version_by_each_of_sglangs_routes(server: Server) -> None:
    with publishing(server, AdapterOf(server.setup.family, 0)) as (publisher, _):
        label = f"policy@{publisher.publish().version}"
    both = server.post(
        "/generate",
        {
            "input_ids": [PROMPT, PROMPT],
            "lora_path": ["policy", None],
            "sampling_params": {"max_new_tokens": 4, "temperature": 0},
        },
    )
    adapted, alone = (each["output_ids"] for each in both.json())
    assert (adapted, alone) == (answer(server, "policy").tokens[:4], answer(server).tokens[:4])
    texts = []
    for model in (f"tiny:{label}", "tiny:policy", "tiny"):
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        texts.append(server.post("/v1/completions", body).json()["choices"][0]["text"])
    assert texts[0] == texts[1] != texts[2]
    refused = server.generate(PROMPT, 4, lora_path="policy@99999")
    assert (refused.status_code, "never been loaded" in refused.text) == (400, True)


@on(LORA, full=[LORA_TWO, LORA_BIASES])
def test_a_publish_of_the_model_is_that_of_a_cold_start_and_takes_the_adapters_names(
    server: Server, cold_with: Callable[..., Cold]
) -> None:
    adapter, first, second = AdapterOf(server.setup.family, 0), cold_with(server.setup), cold_with(server.setup, 1)
    publish_model(server, 0)
    with publishing(server, adapter) as (publisher, _):
        publisher.publish()
    with server.failing(Break(after=2)), pytest.raises(PublishError):
        publish_model(server, 1, undo=True)
    assert answer(server, "policy") == first.adapted[0], "the model was put back, so its adapters go on"
    assert answer(server) == first.alone
    try:
        for seed, cold in ((1, second), (0, first), (1, second)):
            report = publish_model(server, seed, verify="installed")
            assert (server.checksums(), answer(server)) == (cold.checksums, cold.alone)
            assert named(server) == set()
            assert server.get("/weight_info")["adapters"] == []
            assert server.generate(PROMPT, 4, lora_path="policy").status_code == 400
            with publishing(server, adapter, base=(report.run, report.version)) as (publisher, _):
                publisher.publish()
            assert answer(server, "policy") == cold.adapted[0]
        assert "is for version 1 of run " in refusal(server, adapter, base=("0" * 32, 1))
        assert answer(server, "policy") == second.adapted[0]
    finally:
        publish_model(server, 0)


@on(LORA)
def test_broken_updates_are_refused_by_name_and_the_old_one_serves(server: Server) -> None:
    family = server.setup.family
    adapter = AdapterOf(family, 0)
    with publishing(server, adapter) as (publisher, _):
        publisher.publish()
    before = answer(server, "policy")
    more = {"unknown module 'lm_head'": with_head(adapter)} | uneven(adapter)
    assert_broken_updates_are_refused(server, answer, more=more)
    with publishing(server, AdapterOf(family, 1)) as (publisher, _):
        publisher.publish()
    assert answer(server, "policy") != before


@on(ONE)
def test_an_engine_without_lora_says_how_to_start_it(server: Server) -> None:
    said = refusal(server, AdapterOf(server.setup.family, 0))
    assert "start it with LoRA and weightcast's plugin (vLLM, SGLang and weightcast serve: --enable-lora)" in said


@pytest.mark.full
@on(LORA_EXPERTS)
def test_a_mixture_of_experts_with_lora_is_refused_by_name(server: Server) -> None:
    with pytest.raises(PublishError, match="a mixture of experts with LoRA"):
        publish_model(server, 1)


@on(LORA)
def test_some_layers_of_those_that_sglang_has_in_one(server: Server) -> None:
    """As if the others had zeros; and the scaling is the settings', once."""

    def adapted(modules: tuple[str, ...], zeros: tuple[str, ...] = (), **settings: Any) -> Answer:
        layer, generator = "model.layers.1", torch.Generator().manual_seed(5)
        shapes = {"self_attn.q_proj": (256, 128), "self_attn.v_proj": (128, 128), "self_attn.k_proj": (128, 128)}
        shapes |= {"mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128)}
        tensors = {}
        for module, (outputs, inputs) in shapes.items():
            a, b = torch.randn(4, inputs, generator=generator), torch.randn(outputs, 4, generator=generator)
            if module in modules:
                tensors[tensor_name(f"{layer}.{module}", "A")] = a * 0.2
                tensors[tensor_name(f"{layer}.{module}", "B")] = b * 0.2
            if module in zeros:
                tensors[tensor_name(f"{layer}.{module}", "A")] = torch.zeros(a.shape)
                tensors[tensor_name(f"{layer}.{module}", "B")] = torch.zeros(b.shape)
        config = LoraConfig(4, settings.pop("alpha", 16), tuple(f"{layer}.{m}" for m in (*modules, *zeros)), **settings)
        options = PublishOptions(target=Adapter("some"))
        with Publisher(Source(tensors, config), engines=[server.url], options=options) as publisher:
            publisher.publish()
        return answer(server, "some")

    queries = adapted(("self_attn.q_proj",))
    assert queries == adapted(("self_attn.q_proj",), ("self_attn.k_proj", "self_attn.v_proj"))
    assert queries == adapted(("self_attn.q_proj",), alpha=8, use_rslora=True)
    assert queries != adapted(("self_attn.q_proj",), alpha=8)
    values = adapted(("self_attn.v_proj",))
    assert values == adapted(("self_attn.v_proj",), ("self_attn.q_proj",))
    assert values != answer(server)
    ups = adapted(("mlp.up_proj",))
    assert ups == adapted(("mlp.up_proj",), ("mlp.gate_proj",))
    assert ups != answer(server)


@on(LORA, full=[LORA_TWO])
def test_a_version_that_one_rank_can_not_add_is_on_none(server: Server) -> None:
    last, family = server.setup.tp - 1, server.setup.family
    publish_model(server, 0)
    with publishing(server, AdapterOf(family, 0)) as (publisher, source):
        version, before, num_before = publisher.publish().version, answer(server, "policy"), num_loaded(server)
        source.use(AdapterOf(family, 1))
        with server.failing(Break(rank=last, adapter=True)), pytest.raises(PublishError, match="the test's fault"):
            publisher.publish()
        assert num_loaded(server) == num_before
        assert named(server) == {f"policy@{version}"}
        assert answer(server, "policy") == before
        assert not server.get("/weight_info")["torn"]
        assert publisher.publish().version == version + 2
        assert answer(server, "policy") != before


@on(LORA)
def test_a_running_request_keeps_its_version_which_is_unloaded_when_it_has_ended(
    server: Server, cold_with: Callable[..., Cold]
) -> None:
    family, cold = server.setup.family, cold_with(server.setup)
    publish_model(server, 0)
    with publishing(server, AdapterOf(family, 0), keep=0) as (publisher, source):
        first = publisher.publish().version
        num_before, parts = num_loaded(server), []
        for number, part in enumerate(server.stream(PROMPT, NUM_STREAMED, lora_path="policy")):
            parts.append(part.answer)
            if number < 3:
                source.use(AdapterOf(family, 1 + number % 2))
                newest = publisher.publish().version
        assert joined(parts) == cold.streamed
        assert newest == first + 3
        assert named(server) == {f"policy@{newest}"}
        for _ in range(2):
            publisher.publish()
        assert num_loaded(server) == num_before + 1, "the one that can be named, and one that the next offer unloads"


@on(LORA)
def test_a_version_is_unloaded_once_its_abandoned_requests_have_left_the_engine(server: Server) -> None:
    family = server.setup.family
    publish_model(server, 0)
    with publishing(server, AdapterOf(family, 0), keep=0) as (publisher, source):
        publisher.publish()
        num_before = num_loaded(server)
        for seed in range(6):
            stream = server.stream(PROMPT, NUM_STREAMED, lora_path="policy")
            next(stream)
            stream.close()
            source.use(AdapterOf(family, seed % 3))
            publisher.publish()
        for _ in range(20):
            publisher.publish()
            if num_loaded(server) == num_before + 1:
                break
            answer(server, "policy")
        assert num_loaded(server) == num_before + 1, "the one that can be named, and one that the next offer unloads"
    assert server.is_healthy()


@pytest.mark.parametrize("num_versions", [16, pytest.param(200, marks=pytest.mark.full)])
@on(LORA)
def test_no_answer_mixes_versions_in_a_stream_of_them(
    server: Server, cold_with: Callable[..., Cold], num_versions: int
) -> None:
    """Requests run all the time and share the prefix cache, by name and by alias; versions come and go."""
    expected, over, wrong = cold_with(server.setup).adapted, threading.Event(), list[str]()
    numbers = list[int]()

    def is_of(got: Answer, number: int) -> bool:
        other = expected[number % 3]
        apart = max(abs(a - b) for a, b in zip(got.logprobs, other.logprobs, strict=True))
        return got.tokens == other.tokens and apart < LOOSE

    def ask(by_alias: bool) -> None:
        while not over.is_set():
            earliest = numbers[-1]
            name = "policy" if by_alias else f"policy@{earliest}"
            reply = server.generate(PROMPT, NUM_TOKENS, lora_path=name, extra_key="shared")
            if reply.status_code == 400 and not by_alias and numbers[-1] > earliest:
                continue  # It lost its name meanwhile.
            if reply.status_code != 200:
                wrong.append(reply.text)
                return
            meta, tokens = reply.json()["meta_info"], reply.json()["output_ids"]
            got = Answer(list(tokens), [entry[0] for entry in meta["output_token_logprobs"]])
            latest = numbers[-1] + 1 if by_alias else earliest
            if not any(is_of(got, number) for number in range(earliest, latest + 1)):
                wrong.append(f"{name}, versions {earliest} to {latest}: {got}")

    with publishing(server, AdapterOf(server.setup.family, 0)) as (publisher, source):
        base = 3 * (1 + max([0, *(v["number"] for v in server.get("/weight_info")["adapters"])]) // 3 + 1)
        numbers.append(publisher.publish(base).version)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            asking = [pool.submit(ask, by_alias) for by_alias in (True, False, True, False)]
            try:
                for number in range(base + 1, base + num_versions):
                    source.use(AdapterOf(server.setup.family, number % 3))
                    numbers.append(publisher.publish(number).version)
                    if (number - base) % 40 == 0:
                        print(f"version {number}: the server's memory is {footprint(server).rss_bytes >> 20} MiB")
            finally:
                over.set()
            for each in asking:
                each.result(REQUEST_SECONDS)
    assert not wrong, wrong
    assert server.is_healthy()


@on(LORA)
def test_adapters_that_sglang_loads_by_itself_stay_beside(server: Server, tmp_path: Path) -> None:
    adapter, family = AdapterOf(server.setup.family, 0), server.setup.family
    path = AdapterOf(family, 2).save(tmp_path / "other")
    loaded = server.post("/load_lora_adapter", {"lora_name": "other", "lora_path": str(path)})
    assert loaded.json()["success"], loaded.text
    before = answer(server, "other")
    assert "this server has an adapter 'other' already" in refusal(server, adapter, name="other")
    with publishing(server, adapter) as (publisher, _):
        version = publisher.publish().version
        assert {"other", f"policy@{version}"} <= named(server)
        unloaded = server.post("/unload_lora_adapter", {"lora_name": f"policy@{version}"})
        assert unloaded.json()["success"], unloaded.text
        assert server.generate(PROMPT, 4, lora_path="policy").status_code == 400
        for _ in range(3):
            publisher.publish()
    publish_model(server, 0)
    assert named(server) == {"other"}
    assert answer(server, "other") == before
    assert server.post("/unload_lora_adapter", {"lora_name": "other"}).json()["success"]


@on(LORA)
def test_a_reload_by_sglang_itself_takes_the_names(server: Server) -> None:
    publish_model(server, 0)
    with publishing(server, AdapterOf(server.setup.family, 0)) as (publisher, _):
        publisher.publish()
    expected = answer(server)
    reply = server.post("/update_weights_from_disk", {"model_path": str(server.folder)})
    assert reply.status_code == 200, reply.text
    assert server.generate(PROMPT, 4, lora_path="policy").status_code == 400
    assert named(server) == set()
    assert answer(server) == expected
    publish_model(server, 0)


@pytest.mark.parametrize("phase", ["offered", "packed", "received", "installed"])
@on(LORA, full=[LORA_TWO])
def test_a_trainer_that_is_killed_leaves_a_whole_version(
    server: Server, phase: str, cold_with: Callable[..., Cold], python: WarmPython
) -> None:
    assert_a_killed_trainer_leaves_a_whole_version(server, phase, cold_with(server.setup).adapted, answer, python)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 13))])
@on(LORA, full=[LORA_TWO])
def test_trainers_killed_at_random_leave_whole_versions(
    server: Server, seed: int, cold_with: Callable[..., Cold], python: WarmPython, tmp_path: Path
) -> None:
    for _ in killed_trainers(server, seed, cold_with(server.setup).adapted, answer, python, tmp_path):
        pass
    assert num_loaded(server) <= 4 * server.setup.tp, "two that can be named, and those of the last trainer's end"
