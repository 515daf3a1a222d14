"""What a publish is measured against: a memcpy, a raw broadcast, and the steps per tensor that buckets replaced.

Each function that sends has its engine's end beside it; `worker` calls those. Handshakes and warm memory lie outside
what is timed.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy
import torch
from torch.distributed import Work

from publishing.channel import ANSWER_SECONDS, BenchChannel, Done, await_done, send_all
from publishing.result import BenchSettings
from weightcast.format.bucket import (
    DTYPE_NAMES,
    HEADER_BYTES,
    TORCH_DTYPES,
    BucketBuffer,
    check_bucket,
    payload_digest,
    write_header,
)
from weightcast.format.manifest import WeightVersion
from weightcast.host import device as host_device
from weightcast.host.memory import SharedMemory
from weightcast.process_group import ProcessGroup, Store, serve_store, wait
from weightcast.seams.engine import Engine

MAX_MEMCPY_BYTES = 2 << 30
NUM_BUFFERS = 2
VERSION = WeightVersion("0" * 32, 0)

Tensors: TypeAlias = Mapping[str, torch.Tensor]
Channels: TypeAlias = Sequence[BenchChannel]


class TensorMessage(msgspec.Struct, frozen=True):
    """The tensor of this name is next. An empty name ends the tensors."""

    name: str
    index: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()


class UseSlot(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """Map the slot of a `TensorSlot`, and load what comes into it."""

    location: str


class JoinGroup(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """Join the process group of the baselines, whose store has this port."""

    port: int


class Broadcasts(msgspec.Struct, frozen=True, tag=True, tag_field="kind"):
    """Take part in one raw broadcast of all bytes, or in a broadcast for each tensor."""

    per_tensor: bool


EngineCommand: TypeAlias = UseSlot | JoinGroup | Broadcasts
"""What the bench sends to an engine, which answers each with Done once it is ready."""


class Memcpy:
    """Copies `num_bytes` between two warm buffers, as memcpy does it: one thread. On a GPU: device to device.

    Memory: twice `num_bytes`, at most twice MAX_MEMCPY_BYTES; beyond that the buffers, which no cache could hold, are
    copied repeatedly until `num_bytes` have been.
    """

    def __init__(self, num_bytes: int, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._numel = -(-num_bytes // 2)
        size = min(self._numel, MAX_MEMCPY_BYTES // 2)
        self._source = torch.ones(size, dtype=torch.bfloat16, device=device)
        self._target = torch.empty(size, dtype=torch.bfloat16, device=device)
        self.seconds()

    def seconds(self) -> float:
        """Copy once; return how long it took. numpy's copy of a contiguous array is one call of memcpy."""
        if self._device.type != "cpu":
            return self.all_threads_seconds()
        target, source = (tensor.view(torch.int16).numpy() for tensor in (self._target, self._source))
        return self._timed(numpy.copyto, target, source)

    def all_threads_seconds(self) -> float:
        """The same by torch's `copy_` with torch's default threads."""
        return self._timed(torch.Tensor.copy_, self._target, self._source)

    def _timed(self, copy: Callable[[Any, Any], object], target: Any, source: Any) -> float:
        host_device.synchronize(self._device)
        left, start = self._numel, time.perf_counter()
        while left > 0:
            size = min(left, len(source))
            copy(target[:size], source[:size])
            left -= size
        host_device.synchronize(self._device)
        return time.perf_counter() - start


def load_each(engine: Engine, bench: BenchChannel, take: Callable[[TensorMessage], torch.Tensor]) -> None:
    """The engine's end of a step per tensor: load what `take` makes of each message, and answer."""
    done = Done()
    bench.send(done)
    while (message := bench.receive(TensorMessage)).name:
        engine.load([(message.name, take(message))])
        bench.send(done)


class TensorSlot:
    """Warm shared memory of one tensor: the way of one round trip over a local socket for every tensor.

    It proves as much as a publish does, with the same parts: the publisher copies a tensor into the slot, writes its
    header and sends each engine a record; each checks header and digest, loads the tensor and answers; then the next.
    The channel is lean (one packet each way, no threads, no HTTP), so what it costs is the round trip.
    """

    def __init__(self, largest_bytes: int) -> None:
        """Raises InsufficientMemoryError if the host or a cgroup hasn't that much left."""
        self._memory = SharedMemory.make(HEADER_BYTES + largest_bytes, "a slot for each tensor").map()
        self.buffer = BucketBuffer.of(self._memory.tensor())
        self.buffer.payload.zero_()

    def lend(self, engines: Channels) -> None:
        """Let every engine map the slot; they wait for tensors until `end`."""
        send_all(engines, UseSlot(self._memory.memory.location))
        await_done(engines)

    def publish(self, tensors: Tensors, engines: Channels) -> float:
        """Send every tensor to every engine, one round trip each; return the seconds it took."""
        start = time.perf_counter()
        for index, (name, tensor) in enumerate(tensors.items()):
            payload, size = self.buffer.payload, tensor.nbytes
            _view(payload, tensor.dtype, tensor.shape).copy_(tensor)
            digest = payload_digest(payload[:size])
            write_header(self.buffer.header, VERSION, index, digest, raw_bytes=size)
            send_all(engines, TensorMessage(name, index, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
            await_done(engines)
        return time.perf_counter() - start

    def end(self, engines: Channels) -> None:
        """Tell the engines that no tensor follows."""
        send_all(engines, TensorMessage(""))

    def close(self) -> None:
        self._memory.free()
        self._memory.memory.close()


def take_from_slot(buffer: BucketBuffer, message: TensorMessage) -> torch.Tensor:
    """The engine's end of `TensorSlot.publish`: the checked tensor, a view. Raises IntegrityError."""
    tensor = _view(buffer.payload, TORCH_DTYPES[message.dtype], message.shape)
    check_bucket(buffer, tensor.nbytes, VERSION, message.index)
    return tensor


class BaselineGroup:
    """A member of a process group of this process (rank 0) and all engines, of the transport's kind.

    The raw limit: `num_bytes` in flat buffers of the bucket's size, and nothing else: no packing, no digest, no
    installing. They come from two buffers, as a publish's do, and arrive where a publish's do: in two, or when staged
    in memory for all of them; the buffers are resident from the start. The way per tensor: a message that names it, one
    broadcast into a tensor of its own, the engine's `load`, and the answer; none of a publish's other promises.
    """

    def __init__(self, settings: BenchSettings, num_bytes: int, store: Store, rank: int) -> None:
        """Blocks until all members are there. Raises PeerError."""
        self._device = torch.device(settings.engine_device(rank - 1) if rank else settings.device)
        self._group = ProcessGroup(
            settings.transport,
            store,
            rank=rank,
            size=settings.num_engines + 1,
            timeout_seconds=ANSWER_SECONDS,
            host=settings.host,
            device=self._device if settings.transport == "nccl" else None,
        )
        self._num_bytes, self._buffer_bytes = num_bytes, settings.bucket_size_for(num_bytes)
        holds_all = rank > 0 and settings.install == "staged"
        num_buffers = -(-num_bytes // self._buffer_bytes) if holds_all else NUM_BUFFERS
        self.buffers = [
            torch.ones(self._buffer_bytes, dtype=torch.uint8, device=self._device) for _ in range(num_buffers)
        ]

    def close(self) -> None:
        """Disconnect; the group's store ends with it."""
        self._group.close()
        del self._group

    def send_raw(self, engines: Channels) -> float:
        """Broadcast all bytes; return the seconds until every engine has them."""
        send_all(engines, Broadcasts(per_tensor=False))
        await_done(engines)
        start = time.perf_counter()
        self._broadcast_raw()
        await_done(engines)
        return time.perf_counter() - start

    def take_raw(self, bench: BenchChannel) -> None:
        """The engine's end of `send_raw`."""
        bench.send(Done())
        self._broadcast_raw()
        bench.send(Done())

    def _broadcast_raw(self) -> None:
        works = collections.deque[Work]()
        for index, start in enumerate(range(0, self._num_bytes, self._buffer_bytes)):
            if len(works) == NUM_BUFFERS:
                wait(works.popleft())
            buffer = self.buffers[index % len(self.buffers)][: min(self._buffer_bytes, self._num_bytes - start)]
            works.append(self._group.broadcast(buffer, root=0))
        for work in works:
            wait(work)
        host_device.synchronize(self._device)

    def publish(self, tensors: Tensors, engines: Channels) -> float:
        """Send every tensor to every engine; return the seconds until all are loaded."""
        send_all(engines, Broadcasts(per_tensor=True))
        await_done(engines)
        start = time.perf_counter()
        for index, (name, tensor) in enumerate(tensors.items()):
            send_all(engines, TensorMessage(name, index, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)))
            wait(self._group.broadcast(tensor, root=0))
            await_done(engines)
        seconds = time.perf_counter() - start
        send_all(engines, TensorMessage(""))
        return seconds

    def take(self, message: TensorMessage) -> torch.Tensor:
        """The engine's end of `publish`, for one tensor."""
        tensor = torch.empty(message.shape, dtype=TORCH_DTYPES[message.dtype], device=self._device)
        wait(self._group.broadcast(tensor, root=0))
        return tensor


def make_group(settings: BenchSettings, num_bytes: int, engines: Channels) -> BaselineGroup:
    """This process's member of the group, once every engine has joined it too."""
    store, port = serve_store(settings.host, ANSWER_SECONDS)
    send_all(engines, JoinGroup(port))
    group = BaselineGroup(settings, num_bytes, store, rank=0)
    await_done(engines)
    return group


def _view(memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    numel = math.prod(shape)
    return memory[: numel * dtype.itemsize].view(dtype).view(shape)
