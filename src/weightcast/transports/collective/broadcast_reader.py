"""A receiver's part in one group: a thread that connects to it and takes its broadcasts in order, two at a time.

Invariants: it touches the receiver only through `BucketSink`, which ignores a reader that was left; it ends when its
group does, or at the next bucket after it was left; a broadcast that nobody answers any more ends with the sender's
side.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Protocol

import torch
from torch.distributed import Work

from weightcast.errors import WeightcastError, detached
from weightcast.format.bucket import BucketBuffer
from weightcast.process_group import ProcessGroup, in_background, join_store, wait
from weightcast.transports.collective.records import Join

NUM_UNDER_WAY = 2
"""Broadcasts that a receiver waits for at once: the next one follows without a pause."""


@dataclasses.dataclass(frozen=True, slots=True)
class BucketTarget:
    """Where the next bucket goes, of `num_bytes` with its header; `staging`: and to where in host memory from there."""

    index: int
    buffer: BucketBuffer
    num_bytes: int
    staging: BucketBuffer | None = None

    @property
    def flat(self) -> torch.Tensor:
        """What is broadcast."""
        return self.buffer.flat(self.num_bytes)

    @property
    def destination(self) -> BucketBuffer:
        """Where its bytes come to lie in the end."""
        return self.buffer if self.staging is None else self.staging


class BucketSink(Protocol):
    """What a stream fills."""

    def next_target(self, stream: BroadcastReader, *, wait: bool) -> BucketTarget | None:
        """Where the next bucket goes; None if none can be received now. With `wait` only once the stream was left."""
        ...

    def on_received(self, stream: BroadcastReader, target: BucketTarget) -> None: ...

    def on_broken(self, stream: BroadcastReader, error: WeightcastError, *, is_own: bool) -> None:
        """`is_own`: it is this receiver's own failure, and not the group's."""
        ...


class BroadcastReader:
    """Made when the sender invites to a group; `position` is the sink's own note of which target comes next."""

    def __init__(self, sink: BucketSink, join: Join, backend: str, *, host: str, device: torch.device) -> None:
        self.epoch = join.epoch
        self.position = 0
        self.is_left = False
        self.targets: tuple[BucketTarget, ...] = ()
        """What broadcasts may be writing to, in order."""
        self._is_in_group = True
        self._sink = sink
        self._join = join
        self._backend = backend
        self._host = host
        self._device = device
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Connect, and take what is broadcast. Idempotent."""
        if self._thread is None:
            self._thread = in_background(self._run, "weightcast-collective")

    def has_ended(self, seconds: float) -> bool:
        """Wait that long for it to end; whether it has."""
        thread = self._thread
        if thread is None:
            return True
        if threading.current_thread() is not thread:
            thread.join(seconds)
        return not thread.is_alive()

    def _run(self) -> None:
        group: ProcessGroup | None = None
        try:
            join = self._join
            group = ProcessGroup(
                self._backend,
                join_store(join.host, join.port, join.timeout_seconds),
                rank=join.group_rank,
                size=join.group_size,
                timeout_seconds=join.timeout_seconds,
                host=self._host,
                device=self._device,
            )
            self._take_all(group)
        except Exception as exc:
            is_own = not self._is_in_group or not isinstance(exc, WeightcastError)
            self._sink.on_broken(self, detached(exc), is_own=is_own)
        finally:
            if group is not None:
                group.close()

    def _was_left(self) -> bool:
        """As of now: another thread decides."""
        return self.is_left

    def _take_all(self, group: ProcessGroup) -> None:
        works: collections.deque[Work] = collections.deque()
        while True:
            self._begin_all(group, works)
            if self._was_left() or not works:
                return
            self._is_in_group = True
            wait(works.popleft())
            self._is_in_group = False
            if self._was_left():
                return
            target = self.targets[0]
            if target.staging is not None:
                target.staging.flat(target.num_bytes).copy_(target.flat)
            elif target.buffer.header.is_cuda:
                torch.cuda.current_stream(target.buffer.header.device).synchronize()
            self.targets = self.targets[1:]
            self._sink.on_received(self, target)

    def _begin_all(self, group: ProcessGroup, works: collections.deque[Work]) -> None:
        """Wait for a bucket that can be received, unless one is under way; begin to receive as many as can be."""
        while len(works) < NUM_UNDER_WAY:
            self._is_in_group = False
            target = self._sink.next_target(self, wait=not works)
            if target is None:
                return
            self.targets = (*self.targets, target)
            if self._was_left():
                # Whoever left it may have looked for targets before.
                return
            self._is_in_group = True
            works.append(group.broadcast(target.flat, root=0))
