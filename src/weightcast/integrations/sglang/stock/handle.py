"""The message with which a rank of stock SGLang maps a flattened bucket: the only pickle that weightcast writes.

It is written opcode by opcode, from the closed table of names below and plain values; no code of weightcast reads a
pickle. The names are on SGLang's list of allowed ones: torch's for memory that is shared between processes, and
SGLang's for GPU memory, which identifies a GPU by its UUID. Invariant: equal values give equal bytes, and the message
is sent only to a version of SGLang with which its reader was tested.
"""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import Sequence
from typing import TypeAlias

from weightcast.integrations.sglang.stock.buckets import FlatTensor

TESTED_VERSIONS = ("0.5.23",)
"""Versions of SGLang whose reader was tested."""


@dataclasses.dataclass(frozen=True, slots=True)
class Global:
    """A name that the reader looks up."""

    module: str
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call that the reader makes, and the attributes that it then sets on the result."""

    function: Global
    arguments: tuple[Value, ...]
    attributes: dict[str, Value] | None = None


Value: TypeAlias = "bool | int | str | bytes | tuple[Value, ...] | list[Value] | dict[str, Value] | Global | Call"
CudaHandle: TypeAlias = "tuple[int, bytes, int, int, bytes, int, bytes, bool]"
"""Return value of torch's `_share_cuda_` for a storage."""

TENSOR = Global("torch", "Tensor")
UINT8 = Global("torch", "uint8")
SIZE = Global("torch", "Size")
ENTRY = Global("types", "SimpleNamespace")
STORAGE = Global("torch.storage", "UntypedStorage")
TYPED_STORAGE = Global("torch.storage", "TypedStorage")
STORAGE_OF_FILE = Global("torch.multiprocessing.reductions", "rebuild_storage_filename")
WITH_DTYPE = Global("torch.multiprocessing.reductions", "rebuild_typed_storage")
TENSOR_OF_STORAGE = Global("torch.multiprocessing.reductions", "rebuild_tensor")
TENSOR_OF_GPU = Global("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified")


def in_file(manager: bytes, name: bytes, storage_bytes: int, num_bytes: int, offset: int) -> Call:
    """Return a uint8 vector in the host's shared memory, from the result of torch's `_share_filename_cpu_`."""
    opened = Call(STORAGE_OF_FILE, (STORAGE, manager, name, storage_bytes))
    return Call(TENSOR_OF_STORAGE, (TENSOR, Call(WITH_DTYPE, (opened, UINT8)), (offset, (num_bytes,), (1,), False)))


def on_gpu(share: CudaHandle, uuid: str, num_bytes: int, offset: int) -> Call:
    """Return a uint8 vector in the memory of the GPU with this UUID."""
    _, name, size, storage_offset, counter, counter_offset, event, must_wait = share
    what = (TENSOR, (num_bytes,), (1,), offset)
    memory = (TYPED_STORAGE, UINT8, uuid, name, size, storage_offset, False)
    return Call(TENSOR_OF_GPU, (*what, *memory, counter, counter_offset, event, must_wait))


def handle(bucket: Call, places: Sequence[FlatTensor]) -> str:
    """Return the message, in base64: the bucket, and its tensors' layout."""
    entries: list[Value] = []
    for place in places:
        attributes: dict[str, Value] = {
            "name": place.name,
            "shape": Call(SIZE, (place.shape,)),
            "dtype": Global("torch", place.dtype),
            "start_idx": place.start,
            "end_idx": place.end,
            "numel": place.end - place.start,
        }
        entries.append(Call(ENTRY, (), attributes))
    return base64.b64encode(b"\x80\x03" + _written({"flattened_tensor": bucket, "metadata": entries}) + b".").decode()


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
