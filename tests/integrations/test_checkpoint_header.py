"""The header of the checkpoint that an engine was started from: what its shards have, whatever the index says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weightcast.format.manifest import TensorSpec
from weightcast.integrations.plugin.checkpoint_header import reference


def shard(directory: Path, file: str, **tensors: tuple[int, ...]) -> None:
    save_file({name: torch.zeros(shape) for name, shape in tensors.items()}, directory / file)


def held(directory: Path) -> set[TensorSpec] | None:
    found = reference(str(directory), revision=None, cache_dir=None)
    return None if found is None else set(found)


@pytest.mark.parametrize("absent", [{}, {"b": "1.safetensors", "c": "2.safetensors"}])
def test_what_the_shards_have_counts_even_if_the_index_names_more(tmp_path: Path, absent: dict[str, str]) -> None:
    """Engines read the files that the index names, and all that is in these."""
    shard(tmp_path, "1.safetensors", a=(2, 3))
    shard(tmp_path, "2.safetensors", b=(4,))
    shard(tmp_path, "other.safetensors", d=(5,))
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"} | absent}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert held(tmp_path) == {TensorSpec("a", "float32", (2, 3)), TensorSpec("b", "float32", (4,))}


def test_a_tensor_of_two_files_is_known_once(tmp_path: Path) -> None:
    """As in a repository that has the same weights under two names of files."""
    shard(tmp_path, "model.safetensors", a=(2,))
    shard(tmp_path, "consolidated.safetensors", a=(2,), b=(3,))
    assert held(tmp_path) == {TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,))}
