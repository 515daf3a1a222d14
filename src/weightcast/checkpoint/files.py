"""Checkpoint directories of safetensors files: `model.safetensors`, or shards and the index that names them.

Invariants: a directory is complete when it gets its name; tensors are read as views of mapped files, never unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from weightcast.errors import UnsupportedError
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.host import memory

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_INDEX_BYTES = 256 << 20
_CONFIGURATION = {".json", ".jinja", ".model", ".tiktoken", ".txt"}


class UnfinishedDirectory:
    """A directory with a temporary name: write files into `path`, then call `finish` or `discard`."""

    def __init__(self, target: Path) -> None:
        """Create the directory, and missing parents of `target`. Raises OSError."""
        self._target = target
        self.path = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
        try:
            self.path.mkdir(parents=True)
        except OSError as exc:
            raise OSError(exc.errno, f"the directory {target} can't be made: {exc.strerror}") from exc

    def finish(self) -> None:
        """Rename it to its target, which must not exist, or be empty. Raises OSError."""
        os.rename(self.path, self._target)

    def discard(self) -> None:
        """Remove it. Idempotent; does nothing after `finish`."""
        shutil.rmtree(self.path, ignore_errors=True)


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one file. Raises UnsupportedError for a dtype or a name that the format does not have, OSError."""
    if "__metadata__" in tensors:
        raise UnsupportedError("a tensor is named '__metadata__', as is a part of safetensors files: rename it")
    try:
        save_file(dict(tensors), str(file), metadata={"format": "pt"})
    except (SafetensorError, KeyError, ValueError) as exc:
        if found := re.search(r"\(os error (\d+)\)", str(exc)):  # safetensors gives errno only in its text
            number = int(found[1])
            raise OSError(number, os.strerror(number), str(file)) from exc
        dtypes = ", ".join(sorted({DTYPE_NAMES.get(t.dtype, str(t.dtype)) for t in tensors.values()}))
        raise UnsupportedError(
            f"{file.name} can't be written as safetensors (dtypes {dtypes}): {exc}; give the source another dtype"
        ) from exc


def write_index(directory: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Write the index. `weight_map`: by tensor, the name of its file."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def copy_configuration(model: Path, directory: Path) -> list[str]:
    """Copy a model's files other than weights (configuration, tokenizer, chat template); return their names.

    Code and subdirectories are not copied. Raises OSError.
    """
    names = sorted(
        path.name
        for path in model.iterdir()
        if path.suffix in _CONFIGURATION and not path.name.endswith(".index.json") and path.is_file()
    )
    for name in names:
        shutil.copyfile(model / name, directory / name)
    return names


def read_tensors(file: Path, *, copied: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield one file's tensors by name, in the order of their bytes, as private views of the mapped file.

    The file stays mapped as long as one of them is kept. `copied`: yield views of a copy in memory, so that the file
    may be truncated or deleted afterwards. Raises ValueError for a file that can't be read or an unsupported dtype,
    InsufficientMemoryError if the copy does not fit.
    """
    opened: Any
    try:
        with contextlib.ExitStack() as stack:
            found = Path(f"/proc/self/fd/{stack.enter_context(_copied(file))}") if copied else file
            opened = stack.enter_context(safe_open(str(found), framework="pt"))
            tensors = [(name, opened.get_tensor(name)) for name in opened.offset_keys()]
    except (SafetensorError, OSError, TypeError) as exc:  # torch raises TypeError for an impossible size
        what, *_ = str(exc).splitlines() or [type(exc).__name__]
        raise ValueError(f"{file} can't be read as a safetensors file: {what}") from exc
    for name, tensor in tensors:
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name!r} in {file} has dtype {tensor.dtype}, which weightcast can't send: convert the checkpoint"
            )
    yield from tensors


@contextlib.contextmanager
def _copied(file: Path) -> Iterator[int]:
    """Yield the descriptor of a file in memory with the same bytes. Raises OSError, InsufficientMemoryError."""
    with file.open("rb") as source:
        size = os.fstat(source.fileno()).st_size
        memory.require(size, f"a copy of {file}", "free memory")
        descriptor = os.memfd_create("weightcast-checkpoint", os.MFD_CLOEXEC)
        try:
            done = 0
            while done < size and (num_bytes := os.sendfile(descriptor, source.fileno(), done, size - done)):
                done += num_bytes
            yield descriptor
        finally:
            os.close(descriptor)


def read_index(directory: Path) -> dict[str, str] | None:
    """Return the file name of each tensor, from the index; None if there is no index.

    Raises ValueError if the index can't be read or names a file of another directory, FileNotFoundError if it names a
    missing file.
    """
    index = directory / INDEX_FILE
    if not index.is_file():
        return None
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise ValueError(f"{index} has {index.stat().st_size} bytes, the limit is {MAX_INDEX_BYTES}: check the file")
    try:
        found = json.loads(index.read_bytes())["weight_map"]
        weight_map = {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ValueError(f"{index} is not an index with a weight_map: {type(exc).__name__}: {exc}") from exc
    files = sorted(set(weight_map.values()))
    foreign = [file for file in files if Path(file).name != file]
    if foreign:
        raise ValueError(
            f"{index} names files outside its directory, which are not read: {', '.join(foreign[:8])}; put all shards "
            "beside the index"
        )
    missing = [file for file in files if not (directory / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks {len(missing)} of {len(files)} shards that its index names: {', '.join(missing[:8])}"
        )
    return weight_map
