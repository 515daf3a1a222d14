"""LoRA adapters published into a stock SGLang, by directories and its own routes."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from real_engines.process import REQUEST_SECONDS
from real_engines.setups import on
from real_vllm.adapters import (
    AdapterOf,
    assert_broken_updates_are_refused,
    directories,
    load_from_nowhere,
    publish_model,
    publishing,
    refusal,
    refusal_of_the_second,
)
from real_vllm.oracle import PROMPT, joined

from real_sglang.adapters import NUM_STREAMED, Cold, answer, named, uneven
from real_sglang.servers import STOCK, Server, Setup
from weightcast import PublishError
from weightcast.format.adapters import tensor_name
from weightcast.integrations.stock_adapters import StockAdapters

STOCK_LORA = Setup(plugin=False, max_lora_rank=16, options=("--max-loaded-loras", "4"))
STOCK_LORA_TWO = Setup("llama-tied", tp=2, plugin=False, max_lora_rank=16)


@on(STOCK_LORA, full=[STOCK_LORA_TWO])
def test_answers_are_those_of_a_cold_start(
    server: Server,
    memory_store: str,
    cold_with: Callable[..., Cold],
) -> None:
    family, cold = server.setup.family, cold_with(server.setup)
    with publishing(server, AdapterOf(family, 0), memory_store) as (publisher, source):
        for seed in (0, 1, 2):
            source.use(AdapterOf(family, seed))
            last = publisher.publish().version
            assert answer(server, f"policy@{last}") == cold.adapted[seed]
            assert answer(server) == cold.alone
        assert named(server) == {f"policy@{last}", f"policy@{last - 1}"}
        assert answer(server, f"policy@{last - 1}") == cold.adapted[1]
        assert directories(memory_store, server) == {f"policy@{last - age}" for age in range(3)}
    with publishing(server, AdapterOf(family, 1), memory_store, keep=0) as (publisher, source):
        assert publisher.publish().version == last + 1
        assert named(server) == {f"policy@{last + 1}"}
        assert answer(server, f"policy@{last + 1}") == cold.adapted[1]
    assert server.generate(PROMPT, 4, lora_path="policy").status_code == 400


@on(STOCK_LORA)
def test_forms_that_sglang_would_misread_are_written_as_it_reads_them(server: Server, memory_store: str) -> None:
    """It ignores rsLoRA, and drops or mixes up a layer whose siblings have no adapter."""

    def adapted(modules: tuple[str, ...], zeros: tuple[str, ...] = (), **settings: Any) -> Any:
        layer, generator = "model.layers.1.self_attn", torch.Generator().manual_seed(5)
        adapter = AdapterOf(server.setup.family, 0)
        adapter.tensors = {}
        for module, (outputs, inputs) in {"q_proj": (256, 128), "k_proj": (128, 128), "v_proj": (128, 128)}.items():
            a, b = torch.randn(4, inputs, generator=generator), torch.randn(outputs, 4, generator=generator)
            if module in (*modules, *zeros):
                scale = 0.0 if module in zeros else 0.2
                adapter.tensors[tensor_name(f"{layer}.{module}", "A")] = a * scale
                adapter.tensors[tensor_name(f"{layer}.{module}", "B")] = b * scale
        names = tuple(f"{layer}.{module}" for module in (*modules, *zeros))
        changes = {"r": 4, "lora_alpha": 16, "target_modules": names} | settings
        adapter.config = msgspec.structs.replace(adapter.config, **changes)
        with publishing(server, adapter, memory_store, name="some") as (publisher, _):
            return answer(server, f"some@{publisher.publish().version}")

    queries = adapted(("q_proj",))
    assert queries == adapted(("q_proj",), ("k_proj", "v_proj"))
    assert queries == adapted(("q_proj",), lora_alpha=8, use_rslora=True)
    assert queries != adapted(("q_proj",), lora_alpha=8)
    assert adapted(("v_proj",)) == adapted(("v_proj",), ("q_proj",)) != answer(server)
    for label in named(server):
        assert server.post("/unload_lora_adapter", {"lora_name": label}).json()["success"]


@on(STOCK_LORA, full=[STOCK_LORA_TWO])
def test_broken_updates_are_refused_by_name_and_the_old_one_serves(
    server: Server,
    memory_store: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = server.setup.family
    adapter = AdapterOf(family, 0)
    with publishing(server, adapter, memory_store) as (publisher, _):
        last = publisher.publish().version
    before, names = answer(server, f"policy@{last}"), named(server)
    assert_broken_updates_are_refused(server, answer, memory_store, name=f"policy@{last}", more=uneven(adapter))
    assert "can't say of which run its model is" in refusal(server, adapter, memory_store, base=("0" * 32, 1))
    assert f"names policy@{last} of run " in refusal(server, adapter, memory_store, version=last)
    with pytest.raises(PublishError, match=f"has the adapters .*policy@{last}, which were trained on the model"):
        publish_model(server, 1)
    with monkeypatch.context() as patch:
        patch.setattr(StockAdapters, "load", load_from_nowhere)
        assert f"could not load policy@{last + 1} from {memory_store.removeprefix('file://')}" in refusal(
            server, adapter, memory_store
        )
    assert f"policy@{last + 1}" not in directories(memory_store, server)
    assert (answer(server, f"policy@{last}"), named(server)) == (before, names)
    with publishing(server, AdapterOf(family, 1), memory_store) as (publisher, _):
        assert answer(server, f"policy@{publisher.publish().version}") != before


@on(STOCK_LORA)
def test_a_running_request_keeps_its_version_and_the_next_load_waits_for_it(
    server: Server,
    memory_store: str,
    cold_with: Callable[..., Cold],
) -> None:
    family, cold = server.setup.family, cold_with(server.setup)
    with (
        publishing(server, AdapterOf(family, 0), memory_store, keep=0) as (publisher, source),
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        label, parts = f"policy@{publisher.publish().version}", list[Any]()
        for part in server.stream(PROMPT, NUM_STREAMED, lora_path=label):
            if not parts:
                source.use(AdapterOf(family, 1))
                publishing_next = pool.submit(publisher.publish)
            parts.append(part.answer)
        assert joined(parts) == cold.streamed
        last = publishing_next.result(REQUEST_SECONDS).version
        assert named(server) == {f"policy@{last}"}
        assert answer(server, f"policy@{last}") == cold.adapted[1]


@on(STOCK_LORA, full=[STOCK_LORA_TWO])
def test_a_name_that_another_run_has_loaded_stays(server: Server, tmp_path: Path) -> None:
    said = refusal_of_the_second(server, server.setup.family, tmp_path, lambda label: answer(server, label))
    assert f"another run or client has loaded {tmp_path}/first/.adapters/sglang/" in said
    assert server.post("/unload_lora_adapter", {"lora_name": "twice@1"}).json()["success"]


@on(STOCK_LORA)
def test_a_server_that_would_drop_an_adapter_refuses_by_name(server: Server, memory_store: str) -> None:
    with publishing(server, AdapterOf(server.setup.family, 0), memory_store, keep=5) as (publisher, _):
        for _ in range(4 - len(named(server))):
            publisher.publish()
        names = named(server)
        assert len(names) == 4
        with pytest.raises(PublishError, match=r"has 4 adapters loaded .* and would drop one: publish with a smaller"):
            publisher.publish()
    assert named(server) == names
    with publishing(server, AdapterOf(server.setup.family, 0), memory_store, keep=0) as (publisher, _):
        publisher.publish()
    assert len(named(server)) == 1


@on(STOCK)
def test_a_server_without_lora_or_a_store_says_what_to_do(server: Server, memory_store: str) -> None:
    adapter = AdapterOf(server.setup.family, 0)
    assert "start it with --enable-lora, --max-lora-rank and --lora-target-modules" in refusal(
        server, adapter, memory_store
    )
    assert "loads adapters from a directory: publish with transport='file:///dir'" in refusal(server, adapter)
