"""Flattened buckets in memory that trainer and servers share: one handle for each bucket and rank.

Invariant: a handle is sent only to a server that listens on this host's loopback alone: one that can't open the memory,
in a container for example, would end its process.
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
from weightcast.integrations.sglang.stock.handle import CudaHandle, handle, in_file, on_gpu, require_tested
from weightcast.integrations.sglang.stock.server import Servers, SglangStockServer
from weightcast.seams.client import SenderContext


class TensorRoute:
    """`ipc://`: implements `sender.Route`. Shared memory on a CPU, CUDA IPC on a GPU."""

    def __init__(self, context: SenderContext) -> None:
        self.device = context.device
        self._handles: dict[tuple[int, str, int], CudaHandle] = {}
        """By storage, server and rank. torch wraps a GPU's storage once more each time that it is shared, and unwraps
        all of it when it is freed, call in call."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._handles.clear()
        if self.device.type == "cpu":
            return shared(num_bytes)
        return host_device.empty(num_bytes, self.device, "a flattened bucket", "use smaller buckets")

    def open(self, servers: Servers, version: int) -> None:
        """Keep only servers that can open a handle."""
        servers.each(_require_here)
        servers.each(lambda server: require_tested(server.routes.version, server.name))

    def ship(self, servers: Servers, places: Sequence[FlatTensor], flat: torch.Tensor, *, is_last: bool) -> None:
        """One bucket to every server; returns when each has loaded it, or was dropped."""

        def map_it(server: SglangStockServer) -> None:
            handles = [self._handle(flat, places, server.name, rank) for rank in range(server.num_ranks)]
            server.routes.map(handles, is_last=is_last)

        servers.each(map_it)

    def _handle(self, flat: torch.Tensor, places: Sequence[FlatTensor], server: str, rank: int) -> str:
        storage: Any = flat.untyped_storage()
        offset = int(flat.storage_offset())
        if not flat.is_cuda:
            manager, name, size = storage._share_filename_cpu_()
            # The process that opens it gives one reference back.
            storage._shared_incref()
            return handle(in_file(manager, name, size, flat.numel(), offset), places)
        key = (int(storage.data_ptr()), server, rank)
        if key not in self._handles:
            self._handles[key] = storage._share_cuda_()
        uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
        return handle(on_gpu(self._handles[key], uuid, flat.numel(), offset), places)

    def close(self, servers: Servers) -> None:
        """Nothing stays on a server."""
        self._handles.clear()


def shared(num_bytes: int) -> torch.Tensor:
    """Host memory with a name that other processes of this user can open, as torch shares it; freed with the tensor."""
    storage = torch.UntypedStorage._new_using_filename_cpu(max(num_bytes, 1))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))


def _require_here(server: SglangStockServer) -> None:
    """Raises UnsupportedError unless it is called and listens on loopback addresses: a container's port is on none."""
    called = urllib.parse.urlsplit(server.name).hostname or ""
    if not (_is_loopback(called) and _is_loopback(server.routes.listens_on)):
        raise UnsupportedError(
            f"{server.name} listens on {server.routes.listens_on or 'an unknown address'}: only one that is called and "
            "listens on this host's loopback (--host 127.0.0.1) is known to share its memory: use gloo:// or nccl://"
        )


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM) if host else []
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(info[4][0]).is_loopback for info in found)
