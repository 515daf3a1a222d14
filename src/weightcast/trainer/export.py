"""Writes a source as a checkpoint directory that stock loaders read: safetensors shards by size, and their index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from weightcast.checkpoint.files import (
    INDEX_FILE,
    SINGLE_FILE,
    UnfinishedDirectory,
    copy_configuration,
    write_index,
    write_tensors,
)
from weightcast.errors import IncompatibleWeightsError
from weightcast.format.bucket import TORCH_DTYPES, narrow, split_like
from weightcast.format.manifest import TensorSpec
from weightcast.host.closing import on_failure
from weightcast.seams.source import Held, Source, casts_to_engines
from weightcast.trainer import arguments
from weightcast.trainer.packer import tiling


def export(
    source: Source, directory: Path, *, max_shard_bytes: int = 5_000_000_000, config_from: Path | None = None
) -> list[str]:
    """Write every tensor under its first name, tied ones once; return the names of the files.

    `config_from`: a model's directory, whose configuration and tokenizer are copied as they are. The directory appears
    complete or not at all. Raises FileExistsError if it is there, FileNotFoundError if `config_from` has no
    config.json, ValueError if a tensor is not whole on this rank or there is none, UnsupportedError for a dtype that
    the format does not have. Memory: what is held in several regions, or cast, of one shard at a time.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} is there already: name another directory, or remove it first")
    if config_from is not None and not (config_from / "config.json").is_file():
        raise FileNotFoundError(f"{config_from} has no config.json: give the directory that save_pretrained wrote")
    unfinished = UnfinishedDirectory(directory)
    with on_failure(unfinished.discard):
        names = _write(source, unfinished.path, max_shard_bytes)
        if config_from is not None:
            names += copy_configuration(config_from, unfinished.path)
        unfinished.finish()
    return names


def _write(source: Source, directory: Path, max_shard_bytes: int) -> list[str]:
    arguments.require_tensors(source.specs())
    arguments.require_alone(source)
    if casts_to_engines(source):
        raise ValueError(
            "dtype='engine' casts to what engines have, and a checkpoint has none: give the source a dtype"
        )
    specs, held = source.specs(), dict[str, list[Held]]()
    try:
        for part in tiling(specs, source.regions()):
            held.setdefault(specs[part.tensor].name, []).append((part.region, part.data))
    except IncompatibleWeightsError as exc:
        raise ValueError(f"not every tensor is whole on this rank: export from a store ({exc})") from exc
    shards = list(_shards(specs, max_shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(directory / name, {spec.name: _joined(spec, held.get(spec.name, ())) for spec in shard})
        weight_map |= {spec.name: name for spec in shard}
    names = sorted(set(weight_map.values()))
    if len(shards) > 1:
        write_index(directory, weight_map, sum(spec.num_bytes for spec in specs))
        names.append(INDEX_FILE)
    return names


@torch.no_grad()
def _joined(spec: TensorSpec, parts: Sequence[Held]) -> torch.Tensor:
    """A contiguous tensor of what lies in its parts, of the spec's dtype: its own memory if that is just so."""
    dtype = TORCH_DTYPES[spec.dtype]
    if len(parts) == 1:
        return parts[0][1].reshape(spec.shape).to(dtype).contiguous()
    tensor = torch.empty(spec.shape, dtype=dtype)
    for region, part in parts:
        split_like(narrow(tensor, region), part).copy_(part)
    return tensor


def _shards(specs: Sequence[TensorSpec], max_bytes: int) -> Iterator[list[TensorSpec]]:
    """In order; a tensor that is larger has a shard of its own."""
    shard: list[TensorSpec] = []
    for spec in specs:
        if shard and sum(s.num_bytes for s in shard) + spec.num_bytes > max_bytes:
            yield shard
            shard = []
        shard.append(spec)
    yield shard
