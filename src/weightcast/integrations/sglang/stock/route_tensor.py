"""Flattened buckets in memory shared by trainer and servers: one handle for each bucket and rank.

Invariant: a handle is sent only to a server that listens only on this host's loopback. A server that can't open the
memory, for example in a container, would end its process.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from collections.abc import Sequence
from typing import Any

import torch

from weightcast.errors import UnsupportedError
from weightcast.host import device as host_device
from weightcast.integrations.sglang.stock.buckets import FlatTensor
from weightcast.integrations.sglang.stock.handle import TESTED_VERSIONS, CudaHandle, handle, in_file, on_gpu
from weightcast.integrations.sglang.stock.routes import SglangRoutes
from weightcast.seams.client import SenderContext


class TensorRoute:
    """`ipc://`. Shared memory on a CPU, CUDA IPC on a GPU."""

    def __init__(self, context: SenderContext) -> None:
        self.device = context.device
        self._handles: dict[tuple[int, str, int], CudaHandle] = {}
        """By storage, server and rank. Kept, because torch nests one more wrapper each time a GPU's storage is shared,
        and frees them recursively."""

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
        handles = [self._handle(flat, places, server.name, rank) for rank in range(server.num_ranks)]
        server.map(handles, is_last=is_last)

    def _handle(self, flat: torch.Tensor, places: Sequence[FlatTensor], server: str, rank: int) -> str:
        storage: Any = flat.untyped_storage()
        offset = int(flat.storage_offset())
        if not flat.is_cuda:
            manager, name, size = storage._share_filename_cpu_()
            # The process that opens it releases one reference.
            storage._shared_incref()
            return handle(in_file(manager, name, size, flat.numel(), offset), places)
        key = (int(storage.data_ptr()), server, rank)
        if key not in self._handles:
            self._handles[key] = storage._share_cuda_()
        uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
        return handle(on_gpu(self._handles[key], uuid, flat.numel(), offset), places)

    def close(self) -> None:
        self._handles.clear()


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
