"""LoRA adapters published into a stock vLLM that knows nothing of weightcast, by directories and its own routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from real_engines.setups import on
from warm_python import WarmPython

from real_vllm.adapters import (
    AdapterOf,
    answer,
    assert_broken_updates_are_refused,
    directories,
    killed_trainers,
    load_from_nowhere,
    named,
    publish_model,
    publishing,
    refusal,
    refusal_of_the_second,
    versions_of,
    with_head,
)
from real_vllm.conftest import Checkpoints
from real_vllm.oracle import PROMPT
from real_vllm.servers import PLAIN, Server, Setup, completion
from weightcast import PublishError
from weightcast.control.client import HttpRoutes
from weightcast.errors import PeerTimeoutError
from weightcast.format.adapters import tensor_name
from weightcast.integrations.stock_adapters import StockAdapters

STOCK_LORA = Setup(backend=None, endpoints=False, max_adapters=4)
STOCK_LORA_TWO = Setup("llama-tied", tp=2, backend=None, endpoints=False, max_adapters=4)


@on(STOCK_LORA, full=[STOCK_LORA_TWO])
def test_answers_are_those_of_a_cold_start(server: Server, memory_store: str, cold_answers: Any) -> None:
    """Also of versions that vLLM has evicted: seven, of which it keeps four."""
    expected, family = cold_answers(server.setup), server.setup.family
    alone = answer(server, "tiny")
    with publishing(server, AdapterOf(family, 0), memory_store, keep=6) as (publisher, source):
        for seed in (0, 1, 2, 0, 1, 2, 0):
            source.use(AdapterOf(family, seed))
            last = publisher.publish().version
            assert answer(server, f"policy@{last}") == expected[seed]
            assert answer(server, "tiny") == alone
        assert named(server) == {f"policy@{last - age}" for age in range(7)} == directories(memory_store, server)
        for age, seed in enumerate((0, 2, 1, 0, 2, 1, 0)):
            assert answer(server, f"policy@{last - age}") == expected[seed]
    with publishing(server, AdapterOf(family, 1), memory_store) as (publisher, source):
        assert publisher.publish().version == last + 1
        assert named(server) == {f"policy@{last + 1}", f"policy@{last}"}
        assert publisher.publish().version == last + 2
        assert directories(memory_store, server) == {f"policy@{last + n}" for n in (0, 1, 2)}
        assert not server.is_paused()
    assert answer(server, f"policy@{last + 2}") == expected[1]
    assert server.post("/v1/completions", completion(PROMPT, 2) | {"model": "policy"}).status_code == 404


@on(STOCK_LORA, full=[STOCK_LORA_TWO])
def test_broken_updates_are_refused_by_name_and_the_old_one_serves(
    server: Server, memory_store: str, tmp_path: Path
) -> None:
    family = server.setup.family
    adapter = AdapterOf(family, 0)
    with publishing(server, adapter, memory_store) as (publisher, _):
        publisher.publish()
        last = publisher.publish().version
    before, names = answer(server, f"policy@{last}"), named(server)
    assert_broken_updates_are_refused(
        server, answer, memory_store, name=f"policy@{last}", more={"unknown module 'lm_head'": with_head(adapter)}
    )
    assert "can't say of which run its model is" in refusal(server, adapter, memory_store, base=("0" * 32, 1))
    assert f"names policy@{last} of run " in refusal(server, adapter, memory_store, version=last)
    assert f"names policy@{last} of run " in refusal(server, adapter, memory_store, version=last - 1)
    path = AdapterOf(family, 2).save(tmp_path / "theirs")
    loaded = server.post("/v1/load_lora_adapter", {"lora_name": "theirs@7", "lora_path": str(path)})
    assert loaded.status_code == 200, loaded.text
    assert "has an adapter 'theirs@7' already" in refusal(server, adapter, memory_store, version=7, name="theirs")
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "theirs@7"}).status_code == 200
    with pytest.raises(PublishError, match=f"has the adapters .*policy@{last}, which were trained on the model"):
        publish_model(server, 1, f"{memory_store}/models")
    assert (answer(server, f"policy@{last}"), named(server)) == (before, names)
    with publishing(server, AdapterOf(family, 1), memory_store) as (publisher, _):
        assert answer(server, f"policy@{publisher.publish().version}") != before


@on(STOCK_LORA)
def test_settings_of_layers_and_rslora_are_those_of_a_cold_start(
    server: Server, memory_store: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    adapter = AdapterOf(server.setup.family, 3)
    module = "model.layers.1.mlp.down_proj"
    names = [tensor_name(module, half) for half in ("A", "B")]
    adapter.tensors |= {
        names[0]: adapter.tensors[names[0]][:4],
        names[1]: adapter.tensors[names[1]][:, :4].contiguous(),
    }
    adapter.config = msgspec.structs.replace(
        adapter.config, use_rslora=True, rank_pattern={module: 4}, alpha_pattern={module: 3.0}
    )
    with publishing(server, adapter, memory_store) as (publisher, _):
        got = answer(server, f"policy@{publisher.publish().version}")
    path = adapter.save(tmp_path / "cold")
    settings = {"use_rslora": True, "rank_pattern": {module: 4}, "alpha_pattern": {module: 3.0}}
    config = json.loads((path / "adapter_config.json").read_text()) | settings
    (path / "adapter_config.json").write_text(json.dumps(config))
    with Server(server.setup, checkpoint(server.setup.family), adapters={"cold": path}) as cold:
        assert answer(cold, "cold") == got
    assert len({str(answer(server, name)) for name in (*versions_of(server), "tiny")}) >= 2


@on(STOCK_LORA)
def test_a_version_that_the_server_can_not_read_is_reported_and_removed(
    server: Server, memory_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = server.setup.family
    with publishing(server, AdapterOf(family, 0), memory_store) as (publisher, source):
        last = publisher.publish().version
        before, names = answer(server, f"policy@{last}"), named(server)
        source.use(AdapterOf(family, 1))
        monkeypatch.setattr(StockAdapters, "load", load_from_nowhere)
        with pytest.raises(PublishError) as e:
            publisher.publish()
        monkeypatch.undo()
        for said in (
            f"could not load policy@{last + 1} from {memory_store.removeprefix('file://')}",
            "404",
            "check that it sees this path",
        ):
            assert said in str(e.value)
        assert (answer(server, f"policy@{last}"), named(server)) == (before, names)
        assert f"policy@{last + 1}" not in directories(memory_store, server)
        assert publisher.publish().version == last + 2
        assert answer(server, f"policy@{last + 2}") != before


@pytest.mark.full
def test_after_a_failed_load_on_several_ranks_the_other_versions_go_on_and_a_restart_is_due(
    checkpoint: Checkpoints, memory_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM leaves the replies of the other ranks unread, so that a later load gets the failure of this one."""
    setup = STOCK_LORA_TWO
    with Server(setup, checkpoint(setup.family, 0, setup.dtype)) as server:
        with publishing(server, AdapterOf(setup.family, 0), memory_store) as (publisher, _):
            label = f"policy@{publisher.publish().version}"
            before = answer(server, label)
            monkeypatch.setattr(StockAdapters, "load", load_from_nowhere)
            with pytest.raises(PublishError, match="replies of its 2 ranks may be out of step: restart it"):
                publisher.publish()
            monkeypatch.undo()
            assert answer(server, label) == before
            with pytest.raises(PublishError, match="could not load"):
                publisher.publish()
            assert (answer(server, label), named(server)) == (before, {label})
        assert server.is_healthy()


@on(STOCK_LORA)
def test_a_name_that_another_run_has_loaded_stays(server: Server, tmp_path: Path) -> None:
    said = refusal_of_the_second(server, server.setup.family, tmp_path, lambda label: answer(server, label))
    assert f"another run or client has loaded {tmp_path}/first/.adapters/vllm/" in said
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "twice@1"}).status_code == 200


@on(STOCK_LORA)
def test_after_a_lost_reply_the_server_is_asked(
    server: Server,
    memory_store: str,
    monkeypatch: pytest.MonkeyPatch,
    cold_answers: Any,
) -> None:
    expected, post = cold_answers(server.setup), HttpRoutes.post

    def lose(self: HttpRoutes, path: str, body: Any = None, *, once: bool = False) -> bytes:
        reply = post(self, path, body, once=once)
        if path.endswith("_lora_adapter"):
            raise PeerTimeoutError("the reply was lost", peer=self.name)
        return reply

    with publishing(server, AdapterOf(server.setup.family, 0), memory_store) as (publisher, source):
        last = publisher.publish().version
        with monkeypatch.context() as patch:
            patch.setattr(HttpRoutes, "post", lose)
            assert publisher.publish().ok
        assert answer(server, f"policy@{last + 1}") == expected[0]
        assert publisher.sync().ok, "it has the version already"
        source.use(AdapterOf(server.setup.family, 1))
        assert answer(server, f"policy@{publisher.publish().version}") == expected[1]
        assert named(server) == {f"policy@{last + 1}", f"policy@{last + 2}"}


@on(STOCK_LORA)
def test_a_running_request_keeps_its_version_and_its_directory(
    server: Server,
    memory_store: str,
    cold_answers: Any,
) -> None:
    cold_answers(server.setup)
    family = server.setup.family
    with publishing(server, AdapterOf(family, 0), memory_store, keep=0) as (publisher, source):
        first = publisher.publish().version
        label = f"policy@{first}"
        expected = answer(server, label, num_tokens=40)
        assert server.post("/reset_prefix_cache").status_code == 200
        server.call("test_slow_down", 0.02)
        try:
            tokens: list[int] = []
            for choice in server._choices("/v1/completions", completion(PROMPT, 40) | {"model": label}):
                if not tokens:
                    for seed in (1, 2, 1, 2, 1, 2):
                        source.use(AdapterOf(family, seed))
                        last = publisher.publish().version
                    assert named(server) == {f"policy@{last}"}
                    assert directories(memory_store, server) == {label, f"policy@{last - 1}", f"policy@{last}"}
                tokens += choice["token_ids"] or []
        finally:
            server.call("test_slow_down", 0.0)
        assert tokens == expected.tokens
        publisher.publish()
        assert label not in directories(memory_store, server)
    assert server.is_healthy()


@on(PLAIN)
def test_a_server_without_lora_says_how_to_start_it(server: Server, memory_store: str) -> None:
    said = refusal(server, AdapterOf(server.setup.family, 0), memory_store)
    assert "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in said
    said = refusal(server, AdapterOf(server.setup.family, 0))
    assert "loads versions from a directory, not from ipc://: publish with transport='file:///dir'" in said


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 13))])
@on(STOCK_LORA, full=[STOCK_LORA_TWO])
def test_trainers_killed_at_random_leave_whole_versions(
    server: Server, seed: int, memory_store: str, cold_answers: Any, python: WarmPython, tmp_path: Path
) -> None:
    for newest in killed_trainers(server, seed, cold_answers(server.setup), answer, python, tmp_path, memory_store):
        versions = versions_of(server)
        assert len(versions) <= 3, "the newest, one older, and one that was to be unloaded next"
        assert f"policy@{newest}" in versions
        assert versions.keys() <= directories(memory_store, server), "vLLM may read them again"
        assert len(directories(memory_store, server)) <= 5
    assert server.is_healthy()
