"""The headers of the checkpoint from which an engine was started: names, shapes and dtypes of its model.

Only headers of safetensors files on this host are read; nothing is downloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from weightcast.checkpoint.files import INDEX_FILE, read_index, read_tensors
from weightcast.errors import UnsupportedError
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import TensorSpec

logger = logging.getLogger(__name__)


def linear_shapes(
    checkpoint: Sequence[TensorSpec] | None, remedy: str, is_adaptable: Callable[[str], bool]
) -> dict[str, tuple[int, int]]:
    """Return by module the outputs and inputs of a checkpoint's linear layers for which `is_adaptable`.

    Raises UnsupportedError, with the remedy, if the checkpoint is unknown.
    """
    if checkpoint is None:
        raise UnsupportedError(
            "the headers of the checkpoint that the engine was started from can't be read, so an adapter's shapes "
            f"can't be checked: {remedy}"
        )
    weights = {spec.name.removesuffix(".weight"): spec.shape for spec in checkpoint if spec.name.endswith(".weight")}
    return {name: (shape[0], shape[1]) for name, shape in weights.items() if len(shape) == 2 and is_adaptable(name)}


def reference(model: str, *, revision: str | None, cache_dir: str | None) -> list[TensorSpec] | None:
    """Return every tensor of checkpoint `model`, a directory or a repository; None, with a warning, if it can't be
    read.

    For a repository, the snapshot in the hub's local cache is read.
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
        # Engines read the files that an index names, or all without an index, and load every tensor in them.
        weight_map = read_index(folder)
        files = folder.glob("*.safetensors") if weight_map is None else {folder / name for name in weight_map.values()}
        for file in sorted(files):
            for name, tensor in read_tensors(file):
                specs[name] = TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        if not specs:
            raise FileNotFoundError(f"{folder} has no .safetensors files with tensors")
    except (OSError, ValueError, ImportError) as exc:
        logger.warning(
            "the headers of checkpoint %r can't be read (%s), so offers are checked only by dry runs of the engine's "
            "loader",
            model,
            exc,
        )
        return None
    return list(specs.values())
