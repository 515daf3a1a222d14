"""A checkpoint directory that servers load by themselves: beside a store, one for each version.

Servers go on serving while it is written; they load it in the install. Invariants: a directory gets its name when it is
whole; the last two stay, since a server keeps the path of what it has loaded.
"""

from __future__ import annotations

import shutil
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import torch

from weightcast.checkpoint.files import UnfinishedDirectory, write_tensors
from weightcast.integrations.sglang.stock.buckets import FlatTensor
from weightcast.integrations.sglang.stock.server import Servers
from weightcast.seams.client import SenderContext

FOLDER = "sglang"
_NUM_KEPT = 2


class DiskRoute:
    """`file:///dir`: implements `sender.Route`. The servers must see the directory under the same path."""

    is_staged = True

    def __init__(self, context: SenderContext) -> None:
        self.device = torch.device("cpu")
        self._folder = Path(urllib.parse.unquote(urllib.parse.urlsplit(context.url).path)) / FOLDER
        self._run = context.run
        self._writing: UnfinishedDirectory | None = None
        self._target = self._folder
        self._num_files = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def open(self, servers: Servers, version: int) -> None:
        """Begin a directory."""
        self.close(servers)
        self._target = self._folder / f"{self._run[:12]}-{version}"
        self._writing = UnfinishedDirectory(self._target)
        self._num_files = 0

    def ship(self, servers: Servers, places: Sequence[FlatTensor], flat: torch.Tensor, *, is_last: bool) -> None:
        """Write one file; after the last, tell every server what it is to load. Raises UnsupportedError, OSError."""
        assert self._writing is not None
        self._num_files += 1
        file = self._writing.path / f"model-{self._num_files:05d}.safetensors"
        write_tensors(file, {place.name: place.view(flat) for place in places})
        if is_last:
            self._writing.finish()
            self._writing = None
            versions = (path for path in self._folder.iterdir() if not path.name.startswith("."))
            for path in sorted(versions, key=lambda path: path.stat().st_mtime)[:-_NUM_KEPT]:
                shutil.rmtree(path, ignore_errors=True)
            for server in servers.living:
                server.directory = str(self._target)

    def close(self, servers: Servers) -> None:
        """Discard a directory that is not whole."""
        if self._writing is not None:
            self._writing.discard()
            self._writing = None
