"""Publishes a checkpoint directory of safetensors files, read by memory mapping: no copy, no pickle."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from weightcast.checkpoint.live import CASTABLE
from weightcast.errors import ClosedError
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.geometry import whole
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import Regions

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20


class SafetensorsSource:
    """A `Source` of a directory with `model.safetensors`, or an index and its shards, or of one .safetensors file.

    Tensors are private views of the mapped files: memory is the page cache, and values are read when they are packed.
    Don't write to the files meanwhile. `dtype`: what half, bfloat16, single and double precision tensors are cast to
    while they are packed: `specs` have it, `regions` don't; others stay. Raises FileNotFoundError if a file is missing,
    ValueError if one can't be read, a name occurs in two shards or `dtype` is no such dtype, ClosedError after `close`.
    """

    def __init__(self, path: str | Path, *, dtype: torch.dtype | None = None) -> None:
        if dtype is not None and DTYPE_NAMES.get(dtype) not in CASTABLE:
            raise ValueError(f"dtype is {dtype}; weights can be cast to {', '.join(sorted(CASTABLE))}")
        self._tensors: dict[str, torch.Tensor] = {}
        self._files = contextlib.ExitStack()
        self._closed = False
        found_in: dict[str, Path] = {}
        try:
            for file in _files(Path(path)):
                for name, tensor in self._read(file):
                    if name in found_in:
                        raise ValueError(f"the tensor {name!r} is both in {found_in[name]} and in {file}: remove one")
                    found_in[name] = file
                    self._tensors[name] = tensor
            _check_index(Path(path), found_in)
        except BaseException:
            self.close()
            raise
        held = (TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in self._tensors.items())
        self._specs = tuple(held if dtype is None else (_cast(spec, DTYPE_NAMES[dtype]) for spec in held))
        self._regions = {name: ((whole(tensor.shape), tensor),) for name, tensor in self._tensors.items()}

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, file by file, in the order of the bytes."""
        self._require_open()
        return self._specs

    def regions(self) -> Regions:
        """Every tensor whole, as a view of its file."""
        self._require_open()
        return self._regions

    def close(self) -> None:
        """Let the files go; they stay mapped as long as somebody holds one of their tensors. Idempotent."""
        self._closed = True
        self._tensors = {}
        self._regions = {}
        self._files.close()

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this SafetensorsSource was closed: make a new one")

    def _read(self, file: Path) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            opened: Any = self._files.enter_context(safe_open(str(file), framework="pt"))
            tensors = [(name, opened.get_tensor(name)) for name in opened.offset_keys()]
        except (SafetensorError, OSError) as exc:
            raise ValueError(f"{file} can't be read as a safetensors file: {exc}") from exc
        for name, tensor in tensors:
            if tensor.dtype not in DTYPE_NAMES:
                raise ValueError(f"{name!r} in {file} is {tensor.dtype}, which can't travel")
        yield from tensors


def _cast(spec: TensorSpec, dtype: str) -> TensorSpec:
    return msgspec.structs.replace(spec, dtype=dtype) if spec.dtype in CASTABLE else spec


def _files(path: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises FileNotFoundError or ValueError if they can't be told."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a directory nor a file")
    if (path / INDEX_FILE).is_file():
        return _shards(path)
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise ValueError(f"{path} has {len(others)} safetensors files but no {INDEX_FILE}: name one of them")
    raise FileNotFoundError(f"{path} has no {SINGLE_FILE} and no {INDEX_FILE}")


def _shards(directory: Path) -> list[Path]:
    names = sorted(set(_weight_map(directory).values()))
    foreign = [name for name in names if Path(name).name != name]
    if foreign:
        raise ValueError(f"{directory / INDEX_FILE} names files outside its directory: {', '.join(foreign[:8])}")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks {len(missing)} of {len(names)} shards that its index names: {', '.join(missing[:8])}"
        )
    return [directory / name for name in names]


def _weight_map(directory: Path) -> dict[str, str]:
    index = directory / INDEX_FILE
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise ValueError(f"{index} has {index.stat().st_size} bytes; the limit is {MAX_INDEX_BYTES}")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ValueError(f"{index} is not an index with a weight_map: {type(exc).__name__}: {exc}") from exc


def _check_index(path: Path, found_in: Mapping[str, Path]) -> None:
    """What the index promises must be there; what it does not name is published all the same."""
    if not path.is_dir() or not (path / INDEX_FILE).is_file():
        return
    missing = sorted(name for name in _weight_map(path) if name not in found_in)
    if missing:
        shown = ", ".join(missing[:8])
        raise ValueError(f"{len(missing)} tensors that {path / INDEX_FILE} names are in no shard: {shown}")
