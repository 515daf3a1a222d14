"""Where the header of the start-up checkpoint is found, and when there is none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weightcast.checkpoint.files import INDEX_FILE
from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin.checkpoint_header import reference

A, B, OLD = {"a": torch.zeros(2, 3)}, {"b": torch.zeros((), dtype=torch.bfloat16)}, {"old": torch.zeros(1)}
SPECS = [TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "bfloat16", ())]


def found(model: str | Path, download_dir: Path | None = None) -> list[TensorSpec] | None:
    """By what a vLLM's config says of where its model came from."""
    return reference(str(model), revision=None, cache_dir=download_dir and str(download_dir))


def test_all_files_of_a_directory(tmp_path: Path) -> None:
    save_file(A, tmp_path / "x-00001.safetensors")
    save_file(B, tmp_path / "x-00002.safetensors")
    assert found(tmp_path) == SPECS


def test_of_an_index_only_its_files(tmp_path: Path) -> None:
    save_file(A, tmp_path / "x-00001.safetensors")
    save_file(B, tmp_path / "x-00002.safetensors")
    save_file(OLD, tmp_path / "consolidated.safetensors")
    weight_map = {"a": "x-00001.safetensors", "b": "x-00002.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    assert found(tmp_path) == SPECS


def test_a_repository_in_the_hubs_cache(tmp_path: Path) -> None:
    """As huggingface_hub lays it out; nothing is downloaded."""
    repository = tmp_path / "models--some--model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    save_file(A | B, snapshot / "model.safetensors")
    specs = found("some/model", download_dir=tmp_path)
    assert specs is not None
    assert sorted(specs, key=lambda spec: spec.name) == SPECS


def no_files(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not for us")


def broken(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)


def no_weight_map(folder: Path) -> None:
    (folder / INDEX_FILE).write_text("[]")


def missing_shard(folder: Path) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))


@pytest.mark.parametrize("spoil", [no_files, broken, no_weight_map, missing_shard])
def test_none_that_can_be_read(tmp_path: Path, spoil: Any, caplog: pytest.LogCaptureFixture) -> None:
    spoil(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert found(tmp_path) is None
    assert str(tmp_path) in caplog.text


def test_a_repository_that_is_not_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert found("some/model", download_dir=tmp_path) is None
    assert "some/model" in caplog.text
