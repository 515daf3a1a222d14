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
    """Every tensor of checkpoint `model`, a directory or a repository; None, with a warning, if it can't be known.

    Of a repository, the snapshot in the local cache of the hub is read.
    """
    specs: dict[str, TensorSpec] = {}
    try:
        folder = Path(model)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            wanted = ["*.safetensors", INDEX_FILE]
            snapshot = snapshot_download(
                model, revision=revision, cache_dir=cache_dir, allow_patterns=wanted, local_files_only=True
            )
            folder = Path(snapshot)
        # Engines read the files that an index names, or else all, and take every tensor of these.
        weight_map = read_index(folder)
        files = folder.glob("*.safetensors") if weight_map is None else {folder / name for name in weight_map.values()}
        for file in sorted(files):
            for name, tensor in read_tensors(file):
                specs[name] = TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if not specs:
            raise FileNotFoundError(f"{folder} has no .safetensors files with tensors")
    except (OSError, ValueError, ImportError) as exc:
        logger.warning(
            "the checkpoint %r has no header to hold offers against (%s): only what the engine's loader notices is "
            "refused",
            model,
            exc,
        )
        return None
    return list(specs.values())
