"""A Publisher of adapters to vLLM servers without a backend of ours: their directories, and who may remove them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from server.stock_vllm import StockVllm

from weightcast import Publisher, PublishError, PublishOptions, TensorSource
from weightcast.format.adapters import LoraConfig, tensor_name
from weightcast.host.deadline import LOAD_SECONDS
from weightcast.integrations.stock_adapters import FOLDER
from weightcast.trainer.options import Adapter, PublishEvent

pytestmark = pytest.mark.usefixtures("leaves_nothing")
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")
SHAPES = {MODULES[0]: (16, 8), MODULES[1]: (8, 32)}
GAUGE = "vllm:lora_requests_info"


class Adapters(TensorSource):
    """An adapter that is filled with one value."""

    def __init__(self, **settings: Any) -> None:
        self.lora_config_now = LoraConfig(4, 16.0, MODULES, **settings)
        super().__init__(self.filled(0.0))

    @property
    def lora_config(self) -> LoraConfig:
        return self.lora_config_now

    def filled(self, value: float) -> dict[str, torch.Tensor]:
        tensors = {}
        for module, (outputs, inputs) in SHAPES.items():
            tensors[tensor_name(module, "A")] = torch.full((4, inputs), value)
            tensors[tensor_name(module, "B")] = torch.full((outputs, 4), value)
        return tensors


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[StockVllm]:
    with serving(tmp_path) as served:
        yield served


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[StockVllm]:
    model = {f"{module}.weight": torch.zeros(shape) for module, shape in SHAPES.items()}
    model |= {
        "model.embed_tokens.weight": torch.zeros(8, 8),
        "visual.layers.0.self_attn.q_proj.weight": torch.ones(16, 8),
    }
    served = StockVllm(backend=None)
    served.model, served.lora = str(directory), {"max_lora_rank": 16, "max_loras": 4, "target_modules": None}
    save_file(model, directory / "model.safetensors")
    with served.serve():
        yield served


@contextlib.contextmanager
def publishing(
    store: Path,
    *servers: StockVllm,
    source: TensorSource | None = None,
    on_event: Callable[[PublishEvent], None] | None = None,
    **target: Any,
) -> Iterator[tuple[Publisher, Adapters]]:
    source = source or Adapters()
    options = PublishOptions(target=Adapter("policy", **target), on_event=on_event)
    engines = [server.url for server in servers]
    with Publisher(source, transport=f"file://{store}/store", engines=engines, options=options) as publisher:
        yield publisher, source  # type: ignore[misc]


def refusal(store: Path, *servers: StockVllm, source: TensorSource | None = None) -> str:
    with publishing(store, *servers, source=source) as (publisher, _), pytest.raises(PublishError) as e:
        publisher.publish()
    return str(e.value)


def written(store: Path) -> set[str]:
    return {path.name.rpartition("-")[0] for path in (store / "store" / FOLDER).glob("*/*/*")}


def test_each_version_has_a_name_and_a_directory_of_pefts_form(vllm: StockVllm, tmp_path: Path) -> None:
    source = Adapters(use_rslora=True, rank_pattern={MODULES[1]: 4}, alpha_pattern={MODULES[0]: 2.0})
    with publishing(tmp_path, vllm, source=source) as (publisher, _):
        for number in range(4):
            source.replace(source.filled(float(number)))
            assert publisher.publish().ok
            assert set(vllm.adapters) == {f"policy@{n}" for n in (number - 1, number) if n >= 0}
            path = Path(vllm.adapters[f"policy@{number}"])
            assert path.name == f"policy@{number}-{publisher.run}"
            assert {float(t.min()) for t in load_file(path / "adapter_model.safetensors").values()} == {float(number)}
        settings = json.loads((path / "adapter_config.json").read_text())
        assert settings == {
            "peft_type": "LORA", "r": 4, "lora_alpha": 16.0, "target_modules": list(MODULES), "use_rslora": True,
            "rank_pattern": {r"model\.layers\.0\.mlp\.down_proj": 4},
            "alpha_pattern": {r"model\.layers\.0\.self_attn\.q_proj": 2.0},
        }  # fmt: skip
        assert written(tmp_path) == {"policy@1", "policy@2", "policy@3"}
        [state] = publisher.engines
        assert state.version == 3
        with pytest.raises(ValueError, match=r"rollback\(\) is for models"):
            publisher.rollback()


def test_servers_share_files_and_each_has_directories_of_its_own(vllm: StockVllm, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with serving(tmp_path / "other") as other:
        with publishing(tmp_path, vllm, other) as (publisher, _):
            publisher.publish()
            [file, its_file] = [Path(s.adapters["policy@0"], "adapter_model.safetensors") for s in (vllm, other)]
            assert file != its_file
            assert os.path.samefile(file, its_file)
        with publishing(tmp_path, vllm, keep=0) as (publisher, _):
            for _ in range(3):
                publisher.publish()
        assert set(vllm.adapters) == {"policy@3"}
        assert its_file.exists(), "the other server names it"


def test_a_directory_stays_while_a_request_may_need_it(vllm: StockVllm, tmp_path: Path) -> None:
    def sample(running: str, seconds: float) -> str:
        labels = f'max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters=""'
        return f"{GAUGE}{{{labels}}} {seconds}\n"

    help_ = vllm.metrics
    with publishing(tmp_path, vllm, keep=0) as (publisher, _):
        publisher.publish()
        vllm.metrics = help_ + sample("", 1.7e9) + sample("policy@0,theirs", 1.8e9)
        for _ in range(3):
            publisher.publish()
        assert written(tmp_path) == {"policy@0", "policy@2", "policy@3"}
        vllm.metrics += sample("theirs", 1.9e9)
        publisher.publish()
        assert written(tmp_path) == {"policy@3", "policy@4"}
    vllm.adapters.clear()  # as after a restart
    with publishing(tmp_path, vllm) as (publisher, _):
        publisher.publish()
        assert written(tmp_path) == {"policy@3", "policy@4", "policy@5"}, "as far as one can tell, it is loading these"
        publisher.publish()
        assert written(tmp_path) == {"policy@5", "policy@6"}


def test_a_directory_stays_while_the_server_may_load_it(vllm: StockVllm, tmp_path: Path) -> None:
    with publishing(tmp_path, vllm) as (publisher, _):
        publisher.publish()
        vllm.loading = []
        for number in (1, 2):
            with pytest.raises(PublishError, match=f"answered 504: .*; the server may still load policy@{number}"):
                publisher.publish()
        for load in vllm.loading:
            vllm.load_adapter(load)
        vllm.loading = None
        assert publisher.publish().version == 3
        assert set(vllm.adapters) == {"policy@2", "policy@3"}
        assert all(Path(path).is_dir() for path in vllm.adapters.values())


def test_a_directory_that_was_never_loaded_is_removed(vllm: StockVllm, tmp_path: Path) -> None:
    with publishing(tmp_path, vllm, keep=0) as (publisher, _):
        for number in (0, 1):
            vllm.loading = []
            with pytest.raises(PublishError, match="answered 504"):
                publisher.publish()
            [load], vllm.loading = vllm.loading, None
            assert written(tmp_path) == {f"policy@{number}"}
            os.utime(load["lora_path"], (0, 0))
        publisher.publish()
        assert written(tmp_path) == {"policy@2"}


def test_a_version_that_is_published_again_is_loading_again(vllm: StockVllm, tmp_path: Path) -> None:
    with publishing(tmp_path, vllm) as (publisher, _):
        vllm.loading = []
        with pytest.raises(PublishError, match="answered 504"):
            publisher.publish()
        path, began_at = Path(vllm.loading[0]["lora_path"]), time.time() - LOAD_SECONDS / 2
        os.utime(path, (began_at, began_at))
        with pytest.raises(PublishError, match="answered 504"):
            publisher.sync()
        assert [Path(load["lora_path"]) for load in vllm.loading] == [path] * 2
        assert path.stat().st_mtime > began_at


def test_refusals_say_what_to_do(vllm: StockVllm, tmp_path: Path) -> None:
    vllm.lora = None
    assert "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in refusal(tmp_path, vllm)
    vllm.lora = {"max_lora_rank": 16, "target_modules": ["q_proj"]}
    assert f"unknown module {MODULES[1]!r}" in refusal(tmp_path, vllm)
    vllm.lora = {"max_lora_rank": 2}
    assert "has rank 4, above 2: start the engine with a larger --max-lora-rank" in refusal(tmp_path, vllm)
    vllm.lora, vllm.parallel = {"max_lora_rank": 16}, {"data_parallel_size": 2}
    assert "start a server for each replica, with --api-server-count 1" in refusal(tmp_path, vllm)
    vllm.parallel = {"_api_process_count": 2}
    assert "2 API servers, of which only one would learn an adapter's name" in refusal(tmp_path, vllm)
    vllm.parallel, known = {}, vllm.metrics
    vllm.metrics = ""
    assert "start it without --disable-log-stats" in refusal(tmp_path, vllm)
    vllm.metrics, vllm.model = known, "/nowhere"
    assert "give this host the checkpoint under the same path" in refusal(tmp_path, vllm)
    vllm.model = str(tmp_path)
    assert vllm.adapters == {}
    assert not written(tmp_path)
    with publishing(tmp_path, vllm) as (publisher, _):
        publisher.publish()
        vllm.lora = {"max_lora_rank": 32}
        with pytest.raises(PublishError, match="was restarted with another configuration: publish again"):
            publisher.publish()
        assert publisher.publish().ok


def test_layers_that_vllm_would_ignore_are_refused_by_name(vllm: StockVllm, tmp_path: Path) -> None:
    source, module = Adapters(), "visual.layers.0.self_attn.q_proj"
    source.lora_config_now = LoraConfig(4, 16.0, (*MODULES, module))
    source.replace(
        source.filled(1.0) | {tensor_name(module, "A"): torch.ones(4, 8), tensor_name(module, "B"): torch.ones(16, 4)}
    )
    assert f"unknown module {module!r}" in refusal(tmp_path, vllm, source=source)


def test_a_failed_load_on_a_server_of_several_ranks_asks_for_a_restart(vllm: StockVllm, tmp_path: Path) -> None:
    vllm.parallel = {"tensor_parallel_size": 2}
    with publishing(tmp_path, vllm) as (publisher, _):
        publisher.publish()
        vllm.fails_to_load = True
        with pytest.raises(PublishError, match=r"no room.*the replies of its 2 ranks may be out of step: restart it"):
            publisher.publish()
        assert (set(vllm.adapters), written(tmp_path)) == ({"policy@0"}, {"policy@0"})


def test_a_name_that_another_run_has_taken_is_refused_and_stays(vllm: StockVllm, tmp_path: Path) -> None:
    def overtake(event: PublishEvent) -> None:
        if event.phase == "received" and not vllm.adapters:
            assert first.publish().version == 0

    with (
        publishing(tmp_path / "a", vllm) as (first, _),
        publishing(tmp_path / "b", vllm, on_event=overtake) as (second, _),
    ):
        with pytest.raises(PublishError, match=r"another run or client has loaded .* close the other publisher") as e:
            second.publish()
        [path] = vllm.adapters.values()
        assert path in str(e.value)
        assert Path(path).name == f"policy@0-{first.run}"
        assert (written(tmp_path / "a"), written(tmp_path / "b")) == ({"policy@0"}, set())
        assert second.publish().version == 1
        assert set(vllm.adapters) == {"policy@0", "policy@1"}


def test_a_version_that_an_earlier_request_has_loaded_is_installed(vllm: StockVllm, tmp_path: Path) -> None:
    def end_load(event: PublishEvent) -> None:
        if event.phase == "received" and vllm.loading:
            vllm.load_adapter(vllm.loading.pop())

    with publishing(tmp_path, vllm, on_event=end_load) as (publisher, _):
        vllm.loading = []
        with pytest.raises(PublishError, match="answered 504"):
            publisher.publish()
        assert publisher.sync().ok
        [path] = vllm.adapters.values()
        assert Path(path, "adapter_model.safetensors").is_file()


def test_a_directory_that_can_not_be_written_fails_the_publish_alone(vllm: StockVllm, tmp_path: Path) -> None:
    with publishing(tmp_path, vllm) as (publisher, _):
        publisher.publish()
        folder = tmp_path / "store" / FOLDER / "vllm"
        folder.rename(tmp_path / "hidden")
        folder.write_text("a file")
        with pytest.raises(PublishError, match="Not a directory"):
            publisher.publish()
        assert set(vllm.adapters) == {"policy@0"}
        folder.unlink()
        (tmp_path / "hidden").rename(folder)
        assert publisher.publish().ok
