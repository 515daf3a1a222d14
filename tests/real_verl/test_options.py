"""Options that are wrong: each is a sentence that says what to do."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import verl
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.workers.config import CheckpointEngineConfig

import weightcast.integrations.verl
import weightcast.integrations.verl.manager as manager_module
from weightcast.integrations.verl.checkpoint_engine import WeightcastCheckpointEngine
from weightcast.integrations.verl.manager import WeightcastCheckpointManager

pytestmark = [pytest.mark.verl, pytest.mark.filterwarnings("ignore")]


def test_verl_finds_the_backend_by_itself() -> None:
    assert CheckpointEngineRegistry.get("weightcast") is WeightcastCheckpointEngine


def test_a_misspelt_backend_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"wheightcast not registered, registered backends: .*'weightcast'"):
        CheckpointEngineManager(CheckpointEngineConfig(backend="wheightcast"), None, [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_size": 0}, r"bucket size is 0 bytes: set .*update_weights_bucket_megabytes to at least 1"),
        ({"bucket_size": -(1 << 20)}, r"update_weights_bucket_megabytes to at least 1"),
        ({"transport": "carrier-pigeon://"}, r"no transport 'carrier-pigeon'; known here: file, gloo, ipc"),
        ({"transport": "gloo"}, r"not a transport URL"),
        ({"transport": "memory://"}, r"verl's updates do not support: leave it out, or set it to"),
        ({"transport": "file:///tmp/store"}, r"verl's updates do not support: leave it out, or set it to"),
        ({"install": "staggered"}, r"install is 'staggered'; it must be 'staged' or 'streaming'"),
        ({"deadline_seconds": 0}, r"deadline_seconds .*must be positive"),
        ({"deadline_seconds": "soon"}, r"deadline_seconds is 'soon'; it must be a number of seconds"),
        ({"dedline_seconds": 5}, r"weightcast has no 'dedline_seconds'; known: transport, install, deadline_seconds, "),
        ({"keep_connected": "no"}, r"keep_connected is 'no'; it must be true or false"),
        ({"host": 5}, r"host is 5; it must be an address"),
    ],
)
@pytest.mark.parametrize("is_master", [True, None])
def test_a_wrong_option_is_refused_where_the_engine_is_made(
    is_master: bool | None, options: dict[str, Any], words: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        CheckpointEngineRegistry.new("weightcast", is_master=is_master, **{"bucket_size": 1 << 20, **options})


def test_the_manager_refuses_a_backend_that_it_can_not_undo() -> None:
    with pytest.raises(
        ValueError, match=r"backend is 'nccl', .* set rollout.checkpoint_engine.backend to 'weightcast'"
    ):
        WeightcastCheckpointManager(SimpleNamespace(backend="nccl"), None, [])


def test_the_manager_reads_the_deadline_as_the_engines_do() -> None:
    config = CheckpointEngineConfig(backend="weightcast", engine_kwargs={"weightcast": {"deadline_seconds": "soon"}})
    with pytest.raises(TypeError, match="deadline_seconds is 'soon'; it must be a number of seconds"):
        WeightcastCheckpointManager(config, None, [])


def test_an_update_that_is_cancelled_on_its_way_leaves_replicas_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What became of their workers is not known then."""
    log: list[str] = []

    def logs(word: str) -> Any:
        async def call() -> None:
            log.append(word)

        return call

    calls = ("abort_all_requests", "release_kv_cache", "resume_kv_cache", "resume_generation")
    replica = SimpleNamespace(workers=[None], replica_rank=0, **{word: logs(word) for word in calls})

    async def update() -> WeightcastCheckpointManager:
        under_way = asyncio.Event()

        def refs(**kwargs: Any) -> list[Any]:
            under_way.set()
            return [asyncio.get_running_loop().create_future()]

        group = SimpleNamespace(world_size=1, update_weights=refs)
        monkeypatch.setattr(manager_module, "RayWorkerGroup", lambda **kwargs: group)
        monkeypatch.setattr(manager_module, "RayClassWithInitArgs", lambda **kwargs: None)
        manager = WeightcastCheckpointManager(CheckpointEngineConfig(backend="weightcast"), group, [replica])

        async def on_all(rollout: Any, method: str, *arguments: Any) -> list[Any]:
            log.append(method)
            return [{}, {"endpoint": ("http://worker", "token", "host")}]

        monkeypatch.setattr(manager, "_on_all", on_all)
        updating = asyncio.ensure_future(manager.update_weights(global_steps=1))
        await under_way.wait()
        await asyncio.sleep(0)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        return manager

    manager = asyncio.run(update())
    assert log == ["abort_all_requests", "release_kv_cache", "prepare", "init_process_group"]
    assert manager.torn_replicas == [replica]


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[CheckpointEngineRegistry]:
    """verl's, as it is before plugins are loaded."""
    monkeypatch.setattr(CheckpointEngineRegistry, "_registry", {})
    monkeypatch.setattr(CheckpointEngineRegistry, "_import_errors", {})
    return CheckpointEngineRegistry


def test_a_verl_that_was_not_tested_is_named_with_the_one_that_was(
    registry: type[CheckpointEngineRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verl, "__version__", "0.10.0")
    weightcast.integrations.verl._register()
    with pytest.raises(ValueError, match=r"tested with verl 0\.9, found 0\.10\.0: install 'verl==0\.9\.\*'"):
        registry.get("weightcast")


def test_a_missing_package_is_named_with_its_extra(
    registry: type[CheckpointEngineRegistry], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("weightcast.")]:
        if name.rpartition(".")[2] in ("checkpoint_engine", "transfer", "receiving", "app"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    weightcast.integrations.verl._register()
    with pytest.raises(ValueError, match=r"weightcast: .*uvicorn.*\[serve\]"):
        registry.get("weightcast")
