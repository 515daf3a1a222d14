"""Flattened buckets in memory that trainer and servers share: one handle for each bucket and rank.

Invariant: a handle is sent only to a server of this host and user. One that can't open it would end its process.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from weightcast.errors import UnsupportedError
from weightcast.integrations.sglang.stock.flattened import FlatTensor
from weightcast.integrations.sglang.stock.handle import handle, shared
from weightcast.integrations.sglang.stock.server import Servers, SglangStockServer
from weightcast.seams.client import SenderContext

_LISTENS = "0A"


class TensorRoute:
    """`ipc://`: implements `stock_sender.Route`. Shared memory on a CPU, CUDA IPC on a GPU."""

    is_staged = False

    def __init__(self, context: SenderContext) -> None:
        self.device = context.device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        if self.device.type == "cpu":
            return shared(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def open(self, servers: Servers, version: int) -> None:
        """Have only servers of this host."""
        servers.each(_require_here)

    def ship(self, servers: Servers, places: Sequence[FlatTensor], flat: torch.Tensor, *, is_last: bool) -> None:
        """One bucket to every server; returns when each has loaded it, or was dropped."""

        def map_it(server: SglangStockServer) -> None:
            server.routes.map([handle(flat, places) for _ in range(server.num_ranks)], is_last=is_last)

        servers.each(map_it)

    def close(self, servers: Servers) -> None:
        """Nothing stays on a server."""


def _require_here(server: SglangStockServer) -> None:
    """Raises UnsupportedError unless a process of this user listens at the server's address on this host."""
    parts = urllib.parse.urlsplit(server.name)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    wanted = {str(info[4][0]) for info in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)}
    for address, uid in _listeners(port):
        if (address.is_unspecified or str(address) in wanted) and uid == os.geteuid():
            return
    raise UnsupportedError(
        f"{server.name} is not served by a process of this user on this host, so it can't open this one's memory: use "
        "gloo:// or nccl://"
    )


def _listeners(port: int) -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Who listens on a TCP port of this host: address and user."""
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            host, _, number = words[1].partition(":")
            if words[3] == _LISTENS and int(number, 16) == port:
                raw = bytes.fromhex(host)
                # Four bytes at a time, each in this host's order.
                yield (
                    ipaddress.ip_address(b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))),
                    int(words[7]),
                )
