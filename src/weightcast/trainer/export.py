"""Writes a source as a checkpoint directory that stock loaders read: safetensors shards by size, and their index."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from weightcast.errors import IncompatibleWeightsError, UnsupportedError
from weightcast.format.manifest import TensorSpec
from weightcast.host.closing import on_failure
from weightcast.seams.source import Source
from weightcast.trainer.packer import joined, tiling

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def export(source: Source, directory: Path, *, max_shard_bytes: int = 5_000_000_000) -> list[str]:
    """Write every tensor under its first name, tied ones once; return the names of the files.

    The directory appears complete or not at all. Raises FileExistsError if it is there, ValueError if a tensor is not
    whole on this rank, UnsupportedError for a dtype that the format does not have. Memory: what is held in several
    regions, of one shard at a time.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} is there already: name another directory, or remove it first")
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}")
    temporary.mkdir()
    with on_failure(lambda: shutil.rmtree(temporary, ignore_errors=True)):
        names = _write(source, temporary, max_shard_bytes)
        os.rename(temporary, directory)
    return names


def _write(source: Source, directory: Path, max_shard_bytes: int) -> list[str]:
    try:
        held = tiling(source.specs(), source.regions())
    except IncompatibleWeightsError as exc:
        raise ValueError(f"not every tensor is whole on this rank: export from a store ({exc})") from exc
    shards = list(_shards(source.specs(), max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {spec.name: joined(spec, held.get(spec.name, ())) for spec in shard}
        try:
            save_file(tensors, str(directory / name), metadata={"format": "pt"})
        except (SafetensorError, KeyError, ValueError) as exc:
            dtypes = ", ".join(sorted({spec.dtype for spec in shard}))
            raise UnsupportedError(f"{name} can't be written as safetensors (of {dtypes}): {exc}") from exc
        weight_map |= dict.fromkeys(tensors, name)
    names = sorted(set(weight_map.values()))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(s.num_bytes for s in source.specs())}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        names.append(INDEX_FILE)
    return names


def _shards(specs: Sequence[TensorSpec], max_bytes: int) -> Iterator[list[TensorSpec]]:
    """In order; a tensor that is larger has a shard of its own."""
    shard: list[TensorSpec] = []
    for spec in specs:
        if shard and sum(s.num_bytes for s in shard) + spec.num_bytes > max_bytes:
            yield shard
            shard = []
        shard.append(spec)
    yield shard
