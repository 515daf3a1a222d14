"""Source of a checkpoint directory of safetensors files, memory-mapped or copied. Pickles are never read."""

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

    Tensors are private views of the mapped files: the memory is the page cache, and values are read when they are
    packed. Don't write to the files meanwhile. With `copied` the files are read here, into host memory of the
    checkpoint's size, and may change or be deleted afterwards. `dtype`: half, bfloat16, single and double precision
    tensors are cast to it while they are packed (`specs` has it, `regions` does not); others are not. "engine": each
    tensor is cast to the engines' dtype of it. Raises FileNotFoundError if a file is missing; ValueError if a file
    can't be read, a name occurs in two shards, `dtype` is not supported or `path` is a store; ClosedError after
    `close`.
    """

    def __init__(self, path: str | Path, *, dtype: CastTo | None = None, copied: bool = False) -> None:
        target = None if dtype is None else cast_target(dtype)
        self.casts_to_engines = dtype == "engine"
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path is a {type(path).__name__}; it must be the path of a checkpoint's directory or file")
        self._closed = False
        path = Path(path)
        weight_map = read_index(path)
        tensors: dict[str, torch.Tensor] = {}
        found_in: dict[str, Path] = {}
        for file in _files(path, weight_map):
            for name, tensor in read_tensors(file, copied=copied):
                if name in found_in:
                    raise ValueError(f"the tensor {name!r} is in {found_in[name]} and in {file}: remove one of the two")
                found_in[name] = file
                tensors[name] = tensor
        # Every tensor of the index must be in a shard; tensors that the index lacks are published too.
        missing = sorted(name for name in weight_map or () if name not in found_in)
        if missing:
            shown = ", ".join(missing[:8])
            raise ValueError(
                f"{len(missing)} tensors of {path / INDEX_FILE} are in no shard: {shown}; write the checkpoint again"
            )
        if not tensors:
            raise ValueError(f"{path} has no tensors: name a checkpoint with weights")
        held = (TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items())
        self._specs = cast_specs(held, target)
        self._regions = {name: ((whole(tensor.shape), tensor),) for name, tensor in tensors.items()}

    def specs(self) -> Sequence[TensorSpec]:
        """Return every tensor's spec, file by file, in the order of their bytes."""
        self._require_open()
        return self._specs

    def regions(self) -> Regions:
        """Return every tensor as a view of its file."""
        self._require_open()
        return self._regions

    def close(self) -> None:
        """Close the files. A file stays mapped as long as the caller keeps one of its tensors. Idempotent."""
        self._closed = True
        self._regions = {}

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this SafetensorsSource was closed: make a new one")


def _files(path: Path, weight_map: Mapping[str, str] | None) -> list[Path]:
    """Return the safetensors files of a checkpoint. Raises FileNotFoundError or ValueError if they are ambiguous."""
    # A URL that was converted to a Path has lost a slash.
    directory = Path(str(path).removeprefix("file:"))
    if directory != path or (path / POINTER).is_file():
        raise ValueError(
            f"{path} is a store of versions, not a checkpoint: use its URL, file://{directory.absolute()}, with "
            "StoreSource, `weightcast inspect`, or `weightcast follow` to install its versions in engines"
        )
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a directory nor a file: check the path")
    if weight_map is not None:
        return [path / name for name in sorted(set(weight_map.values()))]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    others = sorted(file for file in path.glob("*.safetensors") if file.is_file())  # opening a FIFO would wait
    if len(others) == 1:
        return others
    if others:
        raise ValueError(
            f"{path} has {len(others)} safetensors files but no {INDEX_FILE}: pass the path of one file, or add the "
            "index"
        )
    remedy = ""
    if any(pickled := [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        remedy = (
            f": {pickled[0].name} is a pickle, which is never read; save the model with safetensors (save_pretrained)"
        )
    raise FileNotFoundError(f"{path} has no {SINGLE_FILE} and no {INDEX_FILE}{remedy}")
