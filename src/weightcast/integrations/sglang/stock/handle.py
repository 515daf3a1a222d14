"""Writes the one message that SGLang reads as a pickle: where a flattened bucket lies in shared memory.

It is written here opcode by opcode, from a closed set of values. Nothing here, or anywhere in weightcast, reads one.
The functions that are named are those of SGLang's list of what may be read: torch's own for memory that is shared
between processes, and SGLang's for a GPU's, which knows a GPU by its UUID.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from weightcast.integrations.sglang.stock.flattened import FlatTensor

_REDUCTIONS = "torch.multiprocessing.reductions"


class Global(NamedTuple):
    """A name that the reader looks up."""

    module: str
    name: str


class Call(NamedTuple):
    """What the reader calls, and the attributes that it then sets."""

    function: Global
    arguments: tuple[Value, ...]
    attributes: tuple[tuple[str, Value], ...] = ()


class Listed(NamedTuple):
    """A list."""

    values: tuple[Value, ...]


class Mapped(NamedTuple):
    """A dict."""

    items: tuple[tuple[str, Value], ...]


Value: TypeAlias = "bool | int | str | bytes | tuple[Value, ...] | Global | Call | Listed | Mapped"


def handle(flat: torch.Tensor, places: Sequence[FlatTensor]) -> str:
    """A message for one rank, which reads it once. `flat`: uint8, made by `shared` on a CPU, or in a GPU's memory."""
    tensor = _on_gpu(flat) if flat.is_cuda else _on_cpu(flat)
    bucket = Mapped((("flattened_tensor", tensor), ("metadata", Listed(tuple(_metadata(place) for place in places)))))
    return base64.b64encode(b"\x80\x03" + _written(bucket) + b".").decode()


def shared(num_bytes: int) -> torch.Tensor:
    """Host memory with a name that other processes of this user can open, as torch shares it; freed with the tensor."""
    storage = torch.UntypedStorage._new_using_filename_cpu(max(num_bytes, 1))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))


def _on_cpu(flat: torch.Tensor) -> Call:
    storage: Any = flat.untyped_storage()
    manager, name, size = storage._share_filename_cpu_()
    # Whoever opens it gives one reference back.
    storage._shared_incref()
    opened = Call(Global(_REDUCTIONS, "rebuild_storage_filename"), (_UNTYPED, manager, name, size))
    typed = Call(Global(_REDUCTIONS, "rebuild_typed_storage"), (opened, Global("torch", "uint8")))
    place = (int(flat.storage_offset()), (flat.numel(),), (1,), False)
    return Call(Global(_REDUCTIONS, "rebuild_tensor"), (Global("torch", "Tensor"), typed, place))


def _on_gpu(flat: torch.Tensor) -> Call:
    storage: Any = flat.untyped_storage()
    _, name, size, offset, counter, counter_offset, event, must_wait = storage._share_cuda_()
    uuid = str(torch.cuda.get_device_properties(flat.device).uuid)
    what = (Global("torch", "Tensor"), (flat.numel(),), (1,), int(flat.storage_offset()))
    memory = (Global("torch.storage", "TypedStorage"), Global("torch", "uint8"), uuid, name, size, offset, False)
    rest = (counter, counter_offset, event, must_wait)
    return Call(Global("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"), (*what, *memory, *rest))


def _metadata(place: FlatTensor) -> Call:
    attributes: tuple[tuple[str, Value], ...] = (
        ("name", place.name),
        ("shape", Call(Global("torch", "Size"), (place.shape,))),
        ("dtype", Global("torch", place.dtype)),
        ("start_idx", place.start),
        ("end_idx", place.end),
        ("numel", place.end - place.start),
    )
    return Call(Global("types", "SimpleNamespace"), (), attributes)


_UNTYPED = Global("torch.storage", "UntypedStorage")


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
            return called + (_written(Mapped(attributes)) + b"b" if attributes else b"")
        case Listed(values):
            return b"](" + b"".join(map(_written, values)) + b"e"
        case Mapped(items):
            return b"}(" + b"".join(_written(key) + _written(item) for key, item in items) + b"u"
        case tuple():
            return b"(" + b"".join(map(_written, value)) + b"t"
    raise AssertionError(value)
