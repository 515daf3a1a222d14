"""A receiver's part in one group: a thread that connects to it and takes its broadcasts, one after the other.

Invariants: it touches the receiver only through `Sink`, which ignores a stream that was left; it ends when its group
does, or at the next bucket after `leave`; a broadcast that nobody answers any more ends with the sender's side of it.
"""

from __future__ import annotations

import dataclasses
import threading
from typing import Protocol

import torch
import torch.distributed

from weightcast.bucket import TRAILER_BYTES
from weightcast.errors import WeightcastError
from weightcast.process_group import ProcessGroup, join_store, wait
from weightcast.transports.collective_records import Join


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where the next bucket of `num_bytes` payload bytes goes; `staging`: and to where in host memory from there."""

    index: int
    buffer: torch.Tensor
    num_bytes: int
    staging: torch.Tensor | None = None


class Sink(Protocol):
    """What a stream fills."""

    def next_target(self, stream: Stream) -> Target | None:
        """Wait until a bucket can be received; None once the stream was left."""
        ...

    def on_received(self, stream: Stream, target: Target) -> None: ...

    def on_broken(self, stream: Stream, error: WeightcastError) -> None: ...


class Stream:
    """Made when the sender invites to a group; `position` is the sink's own note of which bucket comes next."""

    def __init__(self, sink: Sink, join: Join, backend: str, *, host: str, device: torch.device) -> None:
        self.epoch = join.epoch
        self.position = 0
        self.is_left = False
        self.target: Target | None = None
        """What a broadcast may be writing to."""
        self._sink = sink
        self._join = join
        self._backend = backend
        self._host = host
        self._device = device
        self._thread = threading.Thread(target=self._run, name="weightcast-collective", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def has_ended(self, seconds: float) -> bool:
        """Wait that long for it to end; whether it has."""
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        group: ProcessGroup | None = None
        try:
            group = self._connect()
            self._take_all(group)
        except WeightcastError as exc:
            self._sink.on_broken(self, exc)
        finally:
            if group is not None:
                group.close()

    def _connect(self) -> ProcessGroup:
        join = self._join
        return ProcessGroup(
            self._backend,
            join_store(join.host, join.port, join.timeout_seconds),
            rank=join.group_rank,
            size=join.group_size,
            timeout_seconds=join.timeout_seconds,
            host=self._host,
            device=self._device,
        )

    def _take_all(self, group: ProcessGroup) -> None:
        while (target := self._sink.next_target(self)) is not None:
            self.target = target
            end = target.num_bytes + TRAILER_BYTES
            wait(group.broadcast(target.buffer[:end], root=0))
            if target.staging is not None:
                target.staging[:end].copy_(target.buffer[:end])
            elif target.buffer.is_cuda:
                torch.cuda.current_stream(target.buffer.device).synchronize()
            self.target = None
            self._sink.on_received(self, target)
