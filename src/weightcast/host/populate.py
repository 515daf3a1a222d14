"""Memory that threads touch in the background, so that those who write to it first need not wait for the kernel.

Invariants: the memory stays mapped while a thread may touch it; the pages are touched in order, and only as long as the
host and every enclosing cgroup have room for all that are left; no thread is left after `close`; a forked child has
none.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import torch

from weightcast.host import memory as host_memory
from weightcast.host.closing import awaited_at_exit, close_at_exit
from weightcast.host.deadline import Deadline
from weightcast.native import tables

_STEP_BYTES = 32 << 20
"""Between two questions for how much memory there is."""
_CLOSE_SECONDS = 5.0
"""For the kernel to end a step, which takes milliseconds."""


class Populating:
    """Touches the pages of a flat buffer in host memory, in threads that end by themselves."""

    def __init__(self, memory: torch.Tensor, what: str, remedy: str = host_memory.LESS_AT_ONCE) -> None:
        """`what` needs the memory, and `remedy` helps where there is too little: for an error's text."""
        self._memory: torch.Tensor | None = memory
        self._size_bytes = memory.numel()
        self._what, self._remedy = what, remedy
        self._changed = threading.Condition()
        self._next = 0
        self._under_way: set[int] = set()
        self._has_stopped = False
        """Before the end, if not everything was touched."""
        self._threads: list[threading.Thread] = []
        num_steps = -(-self._size_bytes // _STEP_BYTES)
        close_at_exit(self)
        try:
            for _ in range(min(num_steps, tables.MAX_THREADS, len(os.sched_getaffinity(0)))):
                self._threads.append(awaited_at_exit(self._run, "weightcast-populate"))
        except RuntimeError:  # the limit of threads, or the interpreter ends
            self._has_stopped = not self._threads

    def wait(self, end_bytes: int, seconds: float) -> float:
        """Wait, at most that long, until the first `end_bytes` were touched; return how long it took, in seconds.

        What was not touched then costs memory when it is written. Raises InsufficientMemoryError if memory ran short
        before the end, and there is too little for the rest still.
        """
        start = time.perf_counter()
        with self._changed:
            if self._touched_bytes >= (self._size_bytes if self._has_stopped else end_bytes):
                return 0.0
            Deadline(seconds).wait_for(self._changed, lambda: self._has_stopped or self._touched_bytes >= end_bytes)
            if self._has_stopped and (rest_bytes := self._size_bytes - self._touched_bytes) > 0:
                host_memory.require(rest_bytes, self._what, self._remedy)
                # It is written now, and is not asked for twice.
                self._next = self._size_bytes
                self._under_way.clear()
        return time.perf_counter() - start

    def close(self) -> None:
        """Touch nothing any more. Idempotent, from any thread."""
        with self._changed:
            self._has_stopped = True
            self._changed.notify_all()
        deadline = Deadline(_CLOSE_SECONDS)
        for thread in self._threads:
            thread.join(deadline.remaining_seconds)
        self._memory = None

    @property
    def _touched_bytes(self) -> int:
        """The pages before that were touched."""
        return min(self._under_way, default=self._next)

    def _run(self) -> None:
        memory = self._memory  # Mapped as long as this thread has it.
        while memory is not None and (start := self._begin()) is not None:
            is_touched = False
            with contextlib.suppress(OSError):  # Memory ran short meanwhile, or is broken: who writes to it is told.
                is_touched = tables.populate(memory.data_ptr() + start, min(_STEP_BYTES, self._size_bytes - start))
            with self._changed:
                if is_touched:
                    self._under_way.discard(start)
                else:
                    self._has_stopped = True
                self._changed.notify_all()

    def _begin(self) -> int | None:
        """Return where the next step begins, or None after the last one."""
        with self._changed:
            start = self._next
            if self._has_stopped or start >= self._size_bytes:
                return None
            if host_memory.available_bytes() < self._size_bytes - self._touched_bytes:
                self._has_stopped = True
                self._changed.notify_all()
                return None
            self._next += _STEP_BYTES
            self._under_way.add(start)
            return start
