"""The header of the checkpoint that an engine was started from: the names, shapes and dtypes that its model has.

Only safetensors files on this host are read, and of them only the headers; nothing is downloaded.
"""

from __future__ import annotations

import logging
from pathlib import Path

from weightcast.checkpoint.files import INDEX_FILE, read_index, read_tensors
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import TensorSpec

logger = logging.getLogger(__name__)


def reference(model: str, *, revision: str | None, cache_dir: str | None) -> list[TensorSpec] | None:
    """Every tensor of checkpoint `model`, a directory or a repository; None, with a warning, if it can't be known."""
    try:
        tensors = [pair for file in _files(_folder(model, revision, cache_dir)) for pair in read_tensors(file)]
    except (OSError, ValueError, ImportError) as exc:
        logger.warning(
            "the checkpoint %r has no header to hold offers against (%s): only what the engine's loader notices is "
            "refused",
            model,
            exc,
        )
        return None
    specs = {name: TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors}
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
    weight_map = read_index(folder)
    if weight_map is not None:
        return [folder / name for name in sorted(set(weight_map.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no .safetensors files")
    return files
