"""The way that bucketing replaced: one message and its answer over a local socket for every tensor.

For each tensor the publisher copies it into warm shared memory and tells every engine its name, dtype and shape; each
engine copies it into its parameter and answers; then the next. Nothing is digested, and the engine looks up its
parameter in a dict: this is the quickest such loop, not a strawman.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import msgspec
import torch

from weightcast.bench.channel import Channel, SharedBytes
from weightcast.bucket import DTYPE_NAMES, TORCH_DTYPES


class TensorMessage(msgspec.Struct, frozen=True):
    """The tensor of this name now lies at the start of the shared memory. An empty name ends the loop."""

    name: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


class Done(msgspec.Struct, frozen=True):
    """The engine has copied it."""


def publish(tensors: Mapping[str, torch.Tensor], slot: torch.Tensor, engines: Sequence[Channel]) -> float:
    """Send every tensor to every engine, one round trip each; return the seconds it took."""
    start = time.perf_counter()
    for name, tensor in tensors.items():
        _view(slot, tensor.dtype, tensor.shape).copy_(tensor)
        message = TensorMessage(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        for engine in engines:
            engine.send(message)
        for engine in engines:
            engine.receive(Done)
    return time.perf_counter() - start


def end(engines: Sequence[Channel]) -> None:
    """Tell the engines that no tensor follows."""
    for engine in engines:
        engine.send(TensorMessage(""))


def receive(parameters: Mapping[str, torch.Tensor], slot: torch.Tensor, publisher: Channel) -> None:
    """The engine's end of `publish`, until `end`."""
    done = Done()
    while (message := publisher.receive(TensorMessage)).name:
        view = _view(slot, TORCH_DTYPES[message.dtype], message.shape)
        parameters[message.name].copy_(view)
        publisher.send(done)


def slot_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """What the shared memory must hold: the largest tensor."""
    return max(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def make_slot(tensors: Mapping[str, torch.Tensor]) -> SharedBytes:
    """Shared memory for the largest tensor, every page of it resident."""
    slot = SharedBytes.create(slot_bytes(tensors))
    slot.tensor.zero_()
    return slot


def _view(slot: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    numel = math.prod(shape)
    return slot[: numel * dtype.itemsize].view(dtype).view(shape)
