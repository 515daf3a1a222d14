"""Export a source to a checkpoint directory that stock loaders read: safetensors shards by size, and their index."""

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
    """Write every tensor under its first name, tied tensors once; return the names of the files.

    `config_from`: a model directory whose configuration and tokenizer files are copied unchanged. The directory appears
    complete or not at all. Raises FileExistsError if the directory exists, FileNotFoundError if `config_from` has no
    config.json, ValueError if this rank does not have all of a tensor or the source has no tensors, UnsupportedError
    for a dtype that safetensors lacks. Extra memory: copies of one shard's tensors, if they are cast or in several
    regions.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists already: name another directory, or remove this one first")
    if config_from is not None and not (config_from / "config.json").is_file():
        raise FileNotFoundError(f"{config_from} has no config.json: give the directory that save_pretrained wrote")
    specs = source.specs()
    arguments.require_tensors(specs)
    arguments.require_alone(source)
    if casts_to_engines(source):
        raise ValueError(
            "the source has dtype='engine', which casts to the engines' dtypes, but an export has no engine: give the "
            "source a dtype such as dtype=torch.bfloat16"
        )
    try:
        held = _parts(source)
    except IncompatibleWeightsError as exc:
        raise ValueError(
            f"this rank does not have all of every tensor ({exc}): publish to a store (file:///DIR) from all ranks, "
            "and export that with `weightcast export`"
        ) from exc
    shards = list(_shards(specs, max_shard_bytes))
    weight_map: dict[str, str] = {}
    unfinished = UnfinishedDirectory(directory)
    with on_failure(unfinished.discard):
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_tensors(unfinished.path / name, {spec.name: _joined(spec, held.get(spec.name, ())) for spec in shard})
            weight_map |= {spec.name: name for spec in shard}
        names = sorted(set(weight_map.values()))
        if len(shards) > 1:
            write_index(unfinished.path, weight_map, sum(spec.num_bytes for spec in specs))
            names.append(INDEX_FILE)
        if config_from is not None:
            names += copy_configuration(config_from, unfinished.path)
        unfinished.finish()
    return names


def joined_tensors(source: Source) -> dict[str, torch.Tensor]:
    """Return every tensor, joined from its regions, under each of its names; no two share memory.

    Raises IncompatibleWeightsError if this rank does not have all of a tensor. Extra memory: tensors in several regions
    or with several names.
    """
    parts, tensors = _parts(source), dict[str, torch.Tensor]()
    for spec in source.specs():
        tensors[spec.name] = _joined(spec, parts.get(spec.name, ()))
        tensors |= {alias: tensors[spec.name].clone() for alias in spec.aliases}
    return tensors


def _parts(source: Source) -> dict[str, list[Held]]:
    """Return by tensor the regions that tile it. Raises IncompatibleWeightsError if some are missing."""
    specs, parts = source.specs(), dict[str, list[Held]]()
    for part in tiling(specs, source.regions()):
        parts.setdefault(specs[part.tensor].name, []).append((part.region, part.data))
    return parts


@torch.no_grad()
def _joined(spec: TensorSpec, parts: Sequence[Held]) -> torch.Tensor:
    """Return one contiguous tensor of the spec's dtype, joined from its parts; not a copy if none is needed."""
    dtype = TORCH_DTYPES[spec.dtype]
    if len(parts) == 1:
        return parts[0][1].reshape(spec.shape).to(dtype).contiguous()
    tensor = torch.empty(spec.shape, dtype=dtype)
    for region, part in parts:
        split_like(narrow(tensor, region), part).copy_(part)
    return tensor


def _shards(specs: Sequence[TensorSpec], max_bytes: int) -> Iterator[list[TensorSpec]]:
    """Yield the specs of each shard, in order. A tensor larger than `max_bytes` has a shard of its own."""
    shard, shard_bytes = list[TensorSpec](), 0
    for spec in specs:
        num_bytes = spec.num_bytes
        if shard and shard_bytes + num_bytes > max_bytes:
            yield shard
            shard, shard_bytes = [], 0
        shard.append(spec)
        shard_bytes += num_bytes
    yield shard
