"""Publishes a checkpoint directory of safetensors files, read by memory mapping: no copy, no pickle."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weightcast.checkpoint.live import CASTABLE
from weightcast.errors import ClosedError
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.geometry import whole
from weightcast.format.manifest import TensorSpec
from weightcast.host.closing import on_failure
from weightcast.seams.source import Held, Regions

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
        self._files = contextlib.ExitStack()
        self._closed = False
        self._specs: list[TensorSpec] = []
        self._regions: dict[str, tuple[Held, ...]] = {}
        found_in: dict[str, Path] = {}
        with on_failure(self.close):
            files, expected = _files(Path(path))
            for file in files:
                for name, tensor in self._read(file):
                    if name in found_in:
                        raise ValueError(f"the tensor {name!r} is both in {found_in[name]} and in {file}: remove one")
                    found_in[name] = file
                    held = DTYPE_NAMES[tensor.dtype]
                    published = DTYPE_NAMES[dtype] if dtype is not None and held in CASTABLE else held
                    self._specs.append(TensorSpec(name, published, tuple(tensor.shape)))
                    self._regions[name] = ((whole(tensor.shape), tensor),)
            missing = sorted(expected - found_in.keys())
            if missing:
                shown = ", ".join(missing[:8])
                raise ValueError(
                    f"{len(missing)} tensors that {Path(path) / INDEX_FILE} names are in no shard: {shown}"
                )

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
        self._regions = {}
        self._files.close()

    def __enter__(self) -> SafetensorsSource:
        return self

    def __exit__(self, *error: object) -> None:
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


def _files(path: Path) -> tuple[list[Path], set[str]]:
    """The safetensors files of a checkpoint, and the tensors that its index names; there may be more in the files.

    Raises FileNotFoundError or ValueError if they can't be told.
    """
    if path.is_file():
        return [path], set()
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is neither a directory nor a file")
    index = path / INDEX_FILE
    if index.is_file():
        weight_map = _weight_map(index)
        names = sorted(set(weight_map.values()))
        foreign = [name for name in names if Path(name).name != name]
        if foreign:
            raise ValueError(f"{index} names files outside its directory: {', '.join(foreign[:8])}")
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"{path} lacks {len(missing)} of {len(names)} shards that its index names: {', '.join(missing[:8])}"
            )
        return [path / name for name in names], set(weight_map)
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE], set()
    others = sorted(path.glob("*.safetensors"))
    if len(others) == 1:
        return others, set()
    if others:
        raise ValueError(f"{path} has {len(others)} safetensors files but no {INDEX_FILE}: name one of them")
    raise FileNotFoundError(f"{path} has no {SINGLE_FILE} and no {INDEX_FILE}")


def _weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise ValueError(f"{index} has {index.stat().st_size} bytes; the limit is {MAX_INDEX_BYTES}")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ValueError(f"{index} is not an index with a weight_map: {type(exc).__name__}: {exc}") from exc
