"""The way that bucketing replaced: one message and its answer over a local socket for every tensor.

It proves as much as a publish does, with the same parts: the publisher copies a tensor into warm shared memory, writes
its trailer and tells every engine; each engine checks trailer and digest, loads the tensor and answers; then the next.
The channel is the leanest there is (one packet each way, no threads, no HTTP), so what it costs is the round trip.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import msgspec
import torch

from weightcast.bench.channel import BenchChannel, SharedBytes
from weightcast.format.bucket import DTYPE_NAMES, TORCH_DTYPES, TRAILER_BYTES, check_trailer, write_trailer
from weightcast.format.manifest import WeightVersion
from weightcast.seams.engine import Engine

VERSION = WeightVersion("0" * 32, 0)


class TensorMessage(msgspec.Struct, frozen=True):
    """The tensor of this name now lies at the start of the shared memory. An empty name ends the loop."""

    name: str
    index: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()


class Done(msgspec.Struct, frozen=True):
    """The engine has loaded it."""


def publish(tensors: Mapping[str, torch.Tensor], slot: torch.Tensor, engines: Sequence[BenchChannel]) -> float:
    """Send every tensor to every engine, one round trip each; return the seconds it took."""
    start = time.perf_counter()
    for index, (name, tensor) in enumerate(tensors.items()):
        _view(slot, tensor.dtype, tensor.shape).copy_(tensor)
        write_trailer(slot, tensor.nbytes, VERSION, index, "xxh3-128")
        message = TensorMessage(name, index, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        for engine in engines:
            engine.send(message)
        for engine in engines:
            engine.receive(Done)
    return time.perf_counter() - start


def end(engines: Sequence[BenchChannel]) -> None:
    """Tell the engines that no tensor follows."""
    for engine in engines:
        engine.send(TensorMessage(""))


def receive(engine: Engine, slot: torch.Tensor, publisher: BenchChannel) -> None:
    """The engine's end of `publish`, until `end`."""
    done = Done()
    while (message := publisher.receive(TensorMessage)).name:
        view = _view(slot, TORCH_DTYPES[message.dtype], message.shape)
        check_trailer(slot, view.nbytes, VERSION, message.index, "xxh3-128")
        engine.load([(message.name, view)])
        publisher.send(done)


def slot_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """What the shared memory must hold: the largest tensor and a trailer."""
    return max(tensor.nbytes for tensor in tensors.values()) + TRAILER_BYTES


def make_slot(tensors: Mapping[str, torch.Tensor]) -> SharedBytes:
    """Shared memory for the largest tensor, every page of it resident."""
    slot = SharedBytes.create(slot_bytes(tensors))
    slot.tensor.zero_()
    return slot


def _view(slot: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    numel = math.prod(shape)
    return slot[: numel * dtype.itemsize].view(dtype).view(shape)
