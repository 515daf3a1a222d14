"""The checkpoint folder that vLLM servers reload: a version of a store, written out while somebody needs it.

It lies in the store's own directory, which servers see under the same path. Host memory while it is written: one
version.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

from weightcast import registry
from weightcast.errors import ClosedError, StaleVersionError
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.seams.source import Regions, Source
from weightcast.store.address import StoreAddress
from weightcast.trainer.export import export

FOLDER = ".checkpoint"
"""In the store. Its name begins with a point, as do those of all that a store leaves alone."""
_EMPTY = "empty"

_lock = threading.Lock()
_num_users: dict[Path, int] = {}


def hold(url: str, version: WeightVersion) -> Path:
    """The folder of this version, which is being published: written by who asks first, shared with who asks after it.

    Raises StaleVersionError if the store has got another one, IntegrityError, InsufficientMemoryError, OSError.
    """
    folder = StoreAddress.parse(url).directory / FOLDER
    path = folder / f"{version.number}-{version.run}"
    with _lock:
        if path not in _num_users:
            # What is there was left by a publisher that died, or by an update that was given up.
            shutil.rmtree(folder, ignore_errors=True)
            for other in [known for known in _num_users if known.parent == folder]:
                del _num_users[other]
            _write(url, version, path)
        _num_users[path] = _num_users.get(path, 0) + 1
    return path


def release(path: Path) -> None:
    """With its last user the folder goes."""
    with _lock:
        if path not in _num_users:
            return
        _num_users[path] -= 1
        if _num_users[path] == 0:
            del _num_users[path]
            shutil.rmtree(path.parent, ignore_errors=True)


def empty(path: Path) -> Path:
    """A checkpoint without tensors, beside `path`."""
    return path.with_name(_EMPTY)


def _write(url: str, version: WeightVersion, path: Path) -> None:
    try:
        source = registry.stored_source(url, version=version)
    except ClosedError as exc:
        raise StaleVersionError(f"{exc}: another publisher writes it; give each a store of its own") from exc
    try:
        export(_Nothing(), empty(path))
        export(source, path)
    except BaseException:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise


class _Nothing(Source):
    """A source of no tensors."""

    def specs(self) -> Sequence[TensorSpec]:
        return ()

    def regions(self) -> Regions:
        return {}
