"""Flattened buckets in memory that trainer and servers share: one handle for each bucket and rank.

A handle is the one message that SGLang reads as a pickle. It is written here opcode by opcode, from a closed set of
values; nothing here, or anywhere in weightcast, reads one. The functions that it names are those of SGLang's list of
what may be read: torch's own for memory that is shared between processes, and SGLang's for a GPU's, which knows a GPU
by its UUID. Invariant: a handle is sent only to a server of this host and user. One that can't open it would end its
process.
"""

from __future__ import annotations

import base64
import dataclasses
import ipaddress
import os
import socket
import struct
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from weightcast.errors import UnsupportedError
from weightcast.host import device as host_device
from weightcast.integrations.sglang.stock.buckets import FlatTensor
from weightcast.integrations.sglang.stock.server import Servers, SglangStockServer
from weightcast.seams.client import SenderContext

_LISTENS = "0A"
_REDUCTIONS = "torch.multiprocessing.reductions"
_Share: TypeAlias = tuple[Any, ...]
"""Of torch's `_share_cuda_`."""


class TensorRoute:
    """`ipc://`: implements `sender.Route`. Shared memory on a CPU, CUDA IPC on a GPU."""

    is_staged = False

    def __init__(self, context: SenderContext) -> None:
        self.device = context.device
        self._shares: dict[tuple[int, str, int], _Share] = {}
        """By storage, server and rank. torch wraps a GPU's storage once more each time that it is shared, and unwraps
        all of it when it is freed, call in call."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        self._shares.clear()
        if self.device.type == "cpu":
            return shared(num_bytes)
        return host_device.empty(num_bytes, self.device, "a flattened bucket", "use smaller buckets")

    def open(self, servers: Servers, version: int) -> None:
        """Keep only servers of this host."""
        servers.each(_require_here)

    def ship(self, servers: Servers, places: Sequence[FlatTensor], flat: torch.Tensor, *, is_last: bool) -> None:
        """One bucket to every server; returns when each has loaded it, or was dropped."""

        def map_it(server: SglangStockServer) -> None:
            handles = [self._handle(flat, places, server.name, rank) for rank in range(server.num_ranks)]
            server.routes.map(handles, is_last=is_last)

        servers.each(map_it)

    def _handle(self, flat: torch.Tensor, places: Sequence[FlatTensor], server: str, rank: int) -> str:
        if not flat.is_cuda:
            return handle(flat, places)
        storage: Any = flat.untyped_storage()
        key = (int(storage.data_ptr()), server, rank)
        if key not in self._shares:
            self._shares[key] = storage._share_cuda_()
        return handle(flat, places, self._shares[key])

    def close(self, servers: Servers) -> None:
        """Nothing stays on a server."""
        self._shares.clear()


# --- who can open a handle ---


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
    for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            words = line.split()
            host, _, number = words[1].partition(":")
            if words[3] == _LISTENS and int(number, 16) == port:
                raw = bytes.fromhex(host)
                # Four bytes at a time, each in this host's order.
                address = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
                yield ipaddress.ip_address(address), int(words[7])


# --- what a handle is ---


@dataclasses.dataclass(frozen=True, slots=True)
class Global:
    """A name that the reader looks up."""

    module: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What the reader calls, and the attributes that it then sets."""

    function: Global
    arguments: tuple[Value, ...]
    attributes: dict[str, Value] | None = None


Value: TypeAlias = "bool | int | str | bytes | tuple[Value, ...] | list[Value] | dict[str, Value] | Global | Call"
_UNTYPED, _UINT8 = Global("torch.storage", "UntypedStorage"), Global("torch", "uint8")


def shared(num_bytes: int) -> torch.Tensor:
    """Host memory with a name that other processes of this user can open, as torch shares it; freed with the tensor."""
    storage = torch.UntypedStorage._new_using_filename_cpu(max(num_bytes, 1))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))


def handle(flat: torch.Tensor, places: Sequence[FlatTensor], share: _Share | None = None) -> str:
    """A message for one rank, which reads it once. `flat`: uint8, made by `shared` on a CPU, or in a GPU's memory.

    `share`: on a GPU what `_share_cuda_` of its storage gave for this rank.
    """
    metadata: list[Value] = []
    for place in places:
        attributes: dict[str, Value] = {
            "name": place.name,
            "shape": Call(Global("torch", "Size"), (place.shape,)),
            "dtype": Global("torch", place.dtype),
            "start_idx": place.start,
            "end_idx": place.end,
            "numel": place.end - place.start,
        }
        metadata.append(Call(Global("types", "SimpleNamespace"), (), attributes))
    tensor = _on_cpu(flat) if share is None else _on_gpu(flat, share)
    bucket = _written({"flattened_tensor": tensor, "metadata": metadata})
    return base64.b64encode(b"\x80\x03" + bucket + b".").decode()


def _on_cpu(flat: torch.Tensor) -> Call:
    storage: Any = flat.untyped_storage()
    manager, name, size = storage._share_filename_cpu_()
    # The process that opens it gives one reference back.
    storage._shared_incref()
    opened = Call(Global(_REDUCTIONS, "rebuild_storage_filename"), (_UNTYPED, manager, name, size))
    typed = Call(Global(_REDUCTIONS, "rebuild_typed_storage"), (opened, _UINT8))
    place = (int(flat.storage_offset()), (flat.numel(),), (1,), False)
    return Call(Global(_REDUCTIONS, "rebuild_tensor"), (Global("torch", "Tensor"), typed, place))


def _on_gpu(flat: torch.Tensor, share: _Share) -> Call:
    _, name, size, offset, counter, counter_offset, event, must_wait = share
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    what = (Global("torch", "Tensor"), (flat.numel(),), (1,), int(flat.storage_offset()))
    memory = (Global("torch.storage", "TypedStorage"), _UINT8, uuid, name, size, offset, False)
    rest = (counter, counter_offset, event, must_wait)
    return Call(Global("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"), (*what, *memory, *rest))


def _written(value: Value) -> bytes:
    match value:
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(data)]) + data
        case str():
            data = value.encode()
            return b"X" + struct.pack("<I", len(data)) + data
        case bytes():
            return b"B" + struct.pack("<I", len(value)) + value
        case Global(module, name):
            return f"c{module}\n{name}\n".encode()
        case Call(function, arguments, attributes):
            called = _written(function) + _written(arguments) + b"R"
            return called + (_written(attributes) + b"b" if attributes else b"")
        case list():
            return b"](" + b"".join(map(_written, value)) + b"e"
        case dict():
            return b"}(" + b"".join(_written(key) + _written(item) for key, item in value.items()) + b"u"
    return b"(" + b"".join(map(_written, value)) + b"t"
