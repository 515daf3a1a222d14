"""Flattened buckets in memory shared by trainer and servers: one handle for each bucket and rank.

A handle is the only pickle that weightcast writes, and no code of weightcast reads one. It consists of plain values and
of names on SGLang's list of allowed ones, most of them torch's for memory that is shared between processes. Before
SGLang reads a handle, it replaces torch's `rebuild_cuda_tensor` by one that finds a GPU by its UUID.

Invariants: a handle is sent only to a server that listens only on this host's loopback, since a server that can't open
the memory, for example in a container, would end its process; and only to a version of SGLang whose reader was tested.
"""

from __future__ import annotations

import base64
import ipaddress
import pickle
import socket
import types
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import (
    rebuild_cuda_tensor,
    rebuild_storage_filename,
    rebuild_tensor,
    rebuild_typed_storage,
)

from weightcast.errors import UnsupportedError
from weightcast.format.bucket import TORCH_DTYPES
from weightcast.host import device as host_device
from weightcast.integrations.sglang.stock.buckets import FlatTensor
from weightcast.integrations.sglang.stock.routes import SglangRoutes
from weightcast.seams.client import SenderContext

TESTED_VERSIONS = ("0.5.23",)


class TensorRoute:
    """`ipc://`. Shared memory on a CPU, CUDA IPC on a GPU."""

    def __init__(self, context: SenderContext) -> None:
        self.device = context.device
        self._handles: dict[tuple[int, str, int], Any] = {}
        """Return values of torch's `_share_cuda_`, by storage, server and rank. Kept, because torch nests one more
        wrapper each time a GPU's storage is shared, and frees them recursively."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._handles.clear()
        if self.device.type == "cpu":
            return shared(num_bytes)
        return host_device.empty(num_bytes, self.device, "a flattened bucket", "use smaller buckets")

    def open(self, server: SglangRoutes) -> None:
        """Raise UnsupportedError for a server that can't open a handle.

        It must be called at, and listen on, loopback; a container's ports are not.
        """
        called = urllib.parse.urlsplit(server.name).hostname or ""
        if not (_is_loopback(called) and _is_loopback(server.listens_on)):
            raise UnsupportedError(
                f"{server.name} listens on {server.listens_on or 'an unknown address'}; ipc:// needs a server that is "
                "called at, and listens on, this host's loopback (--host 127.0.0.1): start it so, or use gloo:// or "
                "nccl://"
            )
        if server.version not in TESTED_VERSIONS:
            raise UnsupportedError(
                f"{server.name} is SGLang {server.version}; its form of shared memory handles is known only for "
                f"{', '.join(TESTED_VERSIONS)}, and a wrong one ends its process: publish over gloo://, nccl:// or "
                "file://"
            )

    def ship(self, server: SglangRoutes, places: Sequence[FlatTensor], flat: torch.Tensor, *, is_last: bool) -> None:
        """Send one bucket to a server; return when it has loaded it."""
        handles = [self.handle(flat, places, server.name, rank) for rank in range(server.num_ranks)]
        server.map(handles, is_last=is_last)

    def handle(self, flat: torch.Tensor, places: Sequence[FlatTensor], server: str, rank: int) -> str:
        """Return the message with which a rank maps a bucket, in base64: its memory, and its tensors' layout."""
        storage: Any = flat.untyped_storage()
        shape, stride, offset = (flat.numel(),), (1,), int(flat.storage_offset())
        if flat.is_cuda:
            key = (int(storage.data_ptr()), server, rank)
            if key not in self._handles:
                self._handles[key] = storage._share_cuda_()
            _, name, size, storage_offset, *rest = self._handles[key]
            uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
            memory = (torch.storage.TypedStorage, torch.uint8, uuid, name, size, storage_offset, False)
            bucket = _Call(rebuild_cuda_tensor, torch.Tensor, shape, stride, offset, *memory, *rest)
        else:
            manager, name, size = storage._share_filename_cpu_()
            # The process that opens it releases one reference.
            storage._shared_incref()
            opened = _Call(rebuild_storage_filename, torch.UntypedStorage, manager, name, size)
            typed = _Call(rebuild_typed_storage, opened, torch.uint8)
            bucket = _Call(rebuild_tensor, torch.Tensor, typed, (offset, shape, stride, False))
        layout = [
            types.SimpleNamespace(
                name=place.name,
                shape=torch.Size(place.shape),
                dtype=TORCH_DTYPES[place.dtype],
                start_idx=place.start,
                end_idx=place.end,
                numel=place.end - place.start,
            )
            for place in places
        ]
        return base64.b64encode(pickle.dumps({"flattened_tensor": bucket, "metadata": layout}, protocol=4)).decode()

    def close(self) -> None:
        self._handles.clear()


class _Call:
    """A call that the reader of a pickle makes: it gets the result in its place."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._function, self._arguments


def shared(num_bytes: int) -> torch.Tensor:
    """Allocate host memory that other processes of this user can open by name, as torch shares it."""
    storage = torch.UntypedStorage._new_using_filename_cpu(max(num_bytes, 1))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(info[4][0]).is_loopback for info in found)
