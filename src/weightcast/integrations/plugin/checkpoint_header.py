"""The header of the checkpoint that an engine was started from: the names, shapes and dtypes that its model has.

Only safetensors files on this host are read, and of them only the headers; nothing is downloaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import TensorSpec

INDEX_FILE = "model.safetensors.index.json"
logger = logging.getLogger(__name__)


def reference(model: str, *, revision: str | None, cache_dir: str | None) -> list[TensorSpec] | None:
    """Every tensor of checkpoint `model`, a directory or a repository; None, with a warning, if it can't be known."""
    try:
        specs = {spec.name: spec for file in _files(_folder(model, revision, cache_dir)) for spec in _read(file)}
    except (OSError, ValueError, ImportError, SafetensorError) as exc:
        logger.warning(
            "the checkpoint %r has no header to hold offers against (%s): only what the engine's loader notices is "
            "refused",
            model,
            exc,
        )
        return None
    return list(specs.values())


def _folder(model: str, revision: str | None, cache_dir: str | None) -> Path:
    """Where the checkpoint lies: a directory, or the snapshot of a repository in the local cache of the hub."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model,
            revision=revision,
            cache_dir=cache_dir,
            allow_patterns=["*.safetensors", INDEX_FILE],
            local_files_only=True,
        )
    )


def _files(folder: Path) -> list[Path]:
    """The files that engines read: those of the index, or all. Raises OSError, ValueError."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"{index} has no weight_map") from exc
        return [folder / name for name in sorted(names)]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no .safetensors files")
    return files


def _read(file: Path) -> Iterator[TensorSpec]:
    opened: Any
    with safe_open(str(file), framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118  (not a mapping)
            tensor = opened.get_tensor(name)  # a view of the mapped file: no value is read
            if tensor.dtype not in DTYPE_NAMES:
                raise ValueError(f"{name!r} in {file} is {tensor.dtype}, which can't travel")
            yield TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
