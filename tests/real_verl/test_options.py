"""Options that are wrong: each is a sentence that says what to do."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

import verl
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.workers.config import CheckpointEngineConfig

import weightcast.integrations.verl
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
        ({"transport": "memory://"}, r"does not carry an update of verl's: leave it out, or set engine_kwargs"),
        ({"transport": "file:///tmp/store"}, r"does not carry an update of verl's: leave it out, or set engine_kwargs"),
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
