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
from weightcast.errors import WeightcastError, from_record, to_record
from weightcast.process_group import ProcessGroup, join_store, wait
from weightcast.transports.collective_records import Join


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where the next bucket of `num_bytes` payload bytes goes; `staging`: and to where in host memory from there."""

    index: int
    buffer: torch.Tensor
    num_bytes: int
    staging: torch.Tensor | None = None

    @property
    def destination(self) -> torch.Tensor:
        """Where its bytes come to lie in the end."""
        return self.buffer if self.staging is None else self.staging


class Sink(Protocol):
    """What a stream fills."""

    def next_target(self, stream: Stream) -> Target | None:
        """Wait until a bucket can be received; None once the stream was left."""
        ...

    def on_received(self, stream: Stream, target: Target) -> None: ...

    def on_broken(self, stream: Stream, error: WeightcastError, *, is_own: bool) -> None:
        """`is_own`: it is this receiver's own failure, and not the group's."""
        ...


class Stream:
    """Made when the sender invites to a group; `position` is the sink's own note of which bucket comes next."""

    def __init__(self, sink: Sink, join: Join, backend: str, *, host: str, device: torch.device) -> None:
        self.epoch = join.epoch
        self.position = 0
        self.is_left = False
        self.target: Target | None = None
        """What a broadcast may be writing to."""
        self._is_in_group = True
        self._sink = sink
        self._join = join
        self._backend = backend
        self._host = host
        self._device = device
        self._thread = threading.Thread(target=self._run, name="weightcast-collective", daemon=True)

    def start(self) -> None:
        """Connect, and take what is broadcast. Idempotent."""
        if self._thread.ident is None:
            self._thread.start()

    def has_ended(self, seconds: float) -> bool:
        """Wait that long for it to end; whether it has."""
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        group: ProcessGroup | None = None
        try:
            group = self._connect()
            self._take_all(group)
        except WeightcastError as exc:
            self._sink.on_broken(self, exc, is_own=not self._is_in_group)
        except Exception as exc:
            self._sink.on_broken(self, from_record(to_record(exc)), is_own=True)
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

    def _next_target(self) -> Target | None:
        self._is_in_group = False
        return self._sink.next_target(self)

    def _was_left(self) -> bool:
        """As of now: another thread decides."""
        return self.is_left

    def _take_all(self, group: ProcessGroup) -> None:
        while (target := self._next_target()) is not None:
            self.target = target
            if self._was_left():
                # Whoever left it may have looked for a target before.
                return
            end = target.num_bytes + TRAILER_BYTES
            self._is_in_group = True
            wait(group.broadcast(target.buffer[:end], root=0))
            self._is_in_group = False
            if self._was_left():
                return
            if target.staging is not None:
                target.staging[:end].copy_(target.buffer[:end])
            elif target.buffer.is_cuda:
                torch.cuda.current_stream(target.buffer.device).synchronize()
            self.target = None
            self._sink.on_received(self, target)
