"""What a publish over gloo or NCCL is measured against, in a process group of the same kind between the same processes.

The raw limit: the same number of bytes in flat buffers of the bucket's size, and nothing else: no packing, no digest,
no installing. They come from two buffers, as a publish's do, and arrive where a publish's do: in two, or when staged
in memory for all of them. The per-tensor way that flat buckets replaced: for each tensor a message that names it, one
broadcast into a tensor of its own, the engine's `load`, and the answer; no digest, none of a publish's other promises.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch.distributed import Work

from weightcast.bench.channel import BenchChannel
from weightcast.bench.per_tensor import Done, TensorMessage
from weightcast.format.bucket import DTYPE_NAMES, TORCH_DTYPES
from weightcast.process_group import ProcessGroup, wait
from weightcast.seams.engine import Engine

NUM_BUFFERS = 2


class RawBroadcast(msgspec.Struct, frozen=True, tag=True):
    """Take part in one raw broadcast of that many bytes."""

    num_bytes: int


class TensorBroadcasts(msgspec.Struct, frozen=True, tag=True):
    """Take part in one round of a broadcast for each tensor."""


class Broadcasts:
    """One member of the group, with its flat buffers; they are resident from the start."""

    def __init__(self, group: ProcessGroup, buffer_bytes: int, device: torch.device, num_buffers: int) -> None:
        self._group: ProcessGroup | None = group
        self._device = device
        self.buffers = [torch.ones(buffer_bytes, dtype=torch.uint8, device=device) for _ in range(num_buffers)]

    def close(self) -> None:
        """Disconnect. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def send_raw(self, num_bytes: int, engines: Sequence[BenchChannel]) -> float:
        """Broadcast `num_bytes`; return the seconds until every engine has them."""
        for engine in engines:
            engine.send(RawBroadcast(num_bytes))
        for engine in engines:
            engine.receive(Done)  # it is there
        start = time.perf_counter()
        self._run_raw(num_bytes)
        for engine in engines:
            engine.receive(Done)
        return time.perf_counter() - start

    def take_raw(self, num_bytes: int, publisher: BenchChannel) -> None:
        """The engine's end of `send_raw`."""
        publisher.send(Done())
        self._run_raw(num_bytes)
        publisher.send(Done())

    def send_each(self, tensors: Mapping[str, torch.Tensor], engines: Sequence[BenchChannel]) -> float:
        """Send every tensor to every engine; return the seconds until all are loaded."""
        for engine in engines:
            engine.send(TensorBroadcasts())
        for engine in engines:
            engine.receive(Done)
        start = time.perf_counter()
        for index, (name, tensor) in enumerate(tensors.items()):
            message = TensorMessage(name, index, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
            for engine in engines:
                engine.send(message)
            wait(self._broadcast(tensor))
            for engine in engines:
                engine.receive(Done)
        seconds = time.perf_counter() - start
        for engine in engines:
            engine.send(TensorMessage(""))
        return seconds

    def take_each(self, engine: Engine, publisher: BenchChannel) -> None:
        """The engine's end of `send_each`."""
        done = Done()
        publisher.send(done)
        while (message := publisher.receive(TensorMessage)).name:
            tensor = torch.empty(message.shape, dtype=TORCH_DTYPES[message.dtype], device=self._device)
            wait(self._broadcast(tensor))
            engine.load([(message.name, tensor)])
            publisher.send(done)

    def _broadcast(self, tensor: torch.Tensor) -> Work:
        assert self._group is not None
        return self._group.broadcast(tensor, root=0)

    def _run_raw(self, num_bytes: int) -> None:
        """With two broadcasts under way all the time."""
        works: list[Work] = []
        for buffer in self._flat_buffers(num_bytes):
            if len(works) == NUM_BUFFERS:
                wait(works.pop(0))
            works.append(self._broadcast(buffer))
        for work in works:
            wait(work)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _flat_buffers(self, num_bytes: int) -> Iterator[torch.Tensor]:
        size = self.buffers[0].numel()
        for index, start in enumerate(range(0, num_bytes, size)):
            yield self.buffers[index % len(self.buffers)][: min(size, num_bytes - start)]
