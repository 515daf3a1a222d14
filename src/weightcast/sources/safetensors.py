"""Publishes a checkpoint directory of safetensors files, read by memory mapping, or as a copy: no pickle."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from weightcast.checkpoint.files import INDEX_FILE, SINGLE_FILE, read_index, read_tensors
from weightcast.checkpoint.live import CastTo, cast_specs, cast_target
from weightcast.errors import ClosedError
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.geometry import whole
from weightcast.format.manifest import TensorSpec
from weightcast.host.closing import ClosedOnExit
from weightcast.seams.source import Regions
from weightcast.store.files import POINTER


class SafetensorsSource(ClosedOnExit):
    """A `Source` of a directory with `model.safetensors`, or an index and its shards, or of one .safetensors file.

    Tensors are private views of the mapped files: memory is the page cache, and values are read when they are packed.
    Don't write to the files meanwhile; with `copied` they are read here, into host memory of the checkpoint's size, and
    may change or go away afterwards. `dtype`: what half, bfloat16, single and double precision tensors are cast to
    while they are packed: `specs` have it, `regions` don't; others stay. "engine": each to the dtype that the engines
    have it in. Raises FileNotFoundError if a file is missing,
    ValueError if one can't be read, a name occurs in two shards, `dtype` is no such dtype or `path` is a store,
    ClosedError after `close`.
    """

    def __init__(self, path: str | Path, *, dtype: CastTo | None = None, copied: bool = False) -> None:
        target = None if dtype is None else cast_target(dtype)
        self.casts_to_engines = dtype == "engine"
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path is a {type(path).__name__}; it must be a checkpoint's directory or file")
        self._closed = False
        path = Path(path)
        weight_map = read_index(path)
        tensors: dict[str, torch.Tensor] = {}
        found_in: dict[str, Path] = {}
        for file in _files(path, weight_map):
            for name, tensor in read_tensors(file, copied=copied):
                if name in found_in:
                    raise ValueError(f"the tensor {name!r} is both in {found_in[name]} and in {file}: remove one")
                found_in[name] = file
                tensors[name] = tensor
        # What the index promises must be there; what it does not name is published all the same.
        missing = sorted(name for name in weight_map or () if name not in found_in)
        if missing:
            shown = ", ".join(missing[:8])
            raise ValueError(f"{len(missing)} tensors that {path / INDEX_FILE} names are in no shard: {shown}")
        if not tensors:
            raise ValueError(f"{path} has no tensors: an engine would lack them all")
        held = (TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items())
        self._specs = cast_specs(held, target)
        self._regions = {name: ((whole(tensor.shape), tensor),) for name, tensor in tensors.items()}

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, file by file, in the order of the bytes."""
        self._require_open()
        return self._specs

    def regions(self) -> Regions:
        """Every tensor whole, as a view of its file."""
        self._require_open()
        return self._regions

    def close(self) -> None:
        """Close the files; they stay mapped as long as the caller keeps one of their tensors. Idempotent."""
        self._closed = True
        self._regions = {}

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this SafetensorsSource was closed: make a new one")


def _files(path: Path, weight_map: Mapping[str, str] | None) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raises FileNotFoundError or ValueError if they are not certain."""
    # A URL that became a path has lost a slash.
    directory = Path(str(path).removeprefix("file:"))
    if directory != path or (path / POINTER).is_file():
        raise ValueError(
            f"{path} is a store of versions, not a checkpoint: call it file://{directory.absolute()}, and read it with "
            "StoreSource or `weightcast inspect`; `weightcast follow` passes it on to engines"
        )
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a directory nor a file")
    if weight_map is not None:
        return [path / name for name in sorted(set(weight_map.values()))]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    others = sorted(file for file in path.glob("*.safetensors") if file.is_file())  # opening a FIFO would wait
    if len(others) == 1:
        return others
    if others:
        raise ValueError(f"{path} has {len(others)} safetensors files but no {INDEX_FILE}: name one of them")
    remedy = ""
    if any(pickled := [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        remedy = (
            f": {pickled[0].name} is a pickle, which is never read; save the model with safetensors (save_pretrained)"
        )
    raise FileNotFoundError(f"{path} has no {SINGLE_FILE} and no {INDEX_FILE}{remedy}")
