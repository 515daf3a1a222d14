"""Host memory that a sender shares with receivers: an anonymous file, sealed against resizing, sent as a descriptor.

Invariants: a receiver maps only memory whose size can't change (a file that shrinks would cause SIGBUS); a receiver's
writes into its mapping are private (copy on write), so that no engine can change the bytes that another reads; a tensor
keeps its mapping alive, so that no view loses its memory; an offset has the same tensor object as long as the arena
lives; pages are populated in advance only while the host and every cgroup have room for all that remain.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

import torch

from weightcast.format.bucket import BucketBuffer, Buffers
from weightcast.host import memory as host_memory
from weightcast.host.closing import awaited_at_exit, close_at_exit, on_failure
from weightcast.host.deadline import GRACE_SECONDS, Deadline
from weightcast.host.memory import SharedMemory
from weightcast.native import tables
from weightcast.transports.ipc.records import SharedArena
from weightcast.transports.receiving import MappedArena
from weightcast.transports.sending import OwnedArena

_WHAT = "the arena of this update"
_STEP_BYTES = 32 << 20
"""Bytes that one thread populates before it checks the available memory again."""


class OwnedSharedArena(OwnedArena):
    """The sender's end. Background threads populate its pages."""

    def __init__(self, generation: int, size_bytes: int) -> None:
        """Allocate `size_bytes`. Raises InsufficientMemoryError if the host or a cgroup has less available."""
        self._mapping = SharedMemory.make(size_bytes, _WHAT).map()
        whole = self._mapping.tensor()
        super().__init__(generation, whole, torch.device("cpu"))
        self.populating = Populating(whole, _WHAT)
        self.is_populated = False

    def await_memory(self, end_bytes: int, seconds: float) -> float:
        waited_seconds = self.populating.wait(end_bytes, seconds)
        self.is_populated = self.populating.touched_bytes >= self.size_bytes
        return waited_seconds

    def announcement(self) -> tuple[SharedArena, int]:
        return SharedArena(self.generation, self.size_bytes), self._mapping.memory.descriptor

    def close(self, *, free: bool) -> None:
        # First, since the threads must not touch a page after it was freed.
        self.populating.close()
        if free:
            self._mapping.free()
        # Not unmapped here: the publisher may still have views of it.
        self._mapping.memory.close()
        del self._mapping
        super().close(free=free)


class Populating:
    """Populates the pages of a flat buffer in host memory in order, in threads that end when all are populated.

    The first writes to the buffer then don't wait for the kernel to find and clear pages. `close` ends the threads; a
    forked child has none.
    """

    def __init__(self, memory: torch.Tensor, what: str, remedy: str = host_memory.LESS_AT_ONCE) -> None:
        """Start the threads. An error says that `what` needs the memory and recommends `remedy`."""
        self._memory: torch.Tensor | None = memory
        self._size_bytes = memory.numel()
        self._what, self._remedy = what, remedy
        self._changed = threading.Condition()
        self._next = 0
        self._under_way: set[int] = set()
        self._has_stopped = False
        """True if the threads end before they have touched every page."""
        self._threads: list[threading.Thread] = []
        num_steps = -(-self._size_bytes // _STEP_BYTES)
        close_at_exit(self)
        try:
            # Half of the cores; the others compute and pack.
            for _ in range(min(num_steps, tables.MAX_THREADS, -(-len(os.sched_getaffinity(0)) // 2))):
                self._threads.append(awaited_at_exit(self._run, "weightcast-populate"))
        except RuntimeError:  # The limit of threads is reached, or the interpreter ends.
            self._has_stopped = not self._threads

    def wait(self, end_bytes: int, seconds: float) -> float:
        """Wait up to `seconds` until the first `end_bytes` were touched; return the seconds waited.

        Pages that were not touched by then are allocated when they are written. Raises InsufficientMemoryError if the
        threads stopped for lack of memory and there still is too little for the remaining pages.
        """
        start = time.perf_counter()
        with self._changed:
            if self.touched_bytes >= (self._size_bytes if self._has_stopped else end_bytes):
                return 0.0
            self._changed.wait_for(lambda: self._has_stopped or self.touched_bytes >= end_bytes, seconds)
            if self._has_stopped and (rest_bytes := self._size_bytes - self.touched_bytes) > 0:
                host_memory.require(rest_bytes, self._what, self._remedy)
                # The caller writes to the rest now: count it as touched, so that later calls don't check it again.
                self._next = self._size_bytes
                self._under_way.clear()
        return time.perf_counter() - start

    def close(self) -> None:
        """Stop the threads. Idempotent, from any thread."""
        with self._changed:
            self._has_stopped = True
            self._changed.notify_all()
        deadline = Deadline(GRACE_SECONDS)
        for thread in self._threads:
            thread.join(deadline.remaining_seconds)
        self._memory = None

    @property
    def touched_bytes(self) -> int:
        """Number of bytes from the start of the buffer whose pages were all touched."""
        return min(self._under_way, default=self._next)

    def _run(self) -> None:
        memory = self._memory  # This reference keeps the memory mapped.
        while memory is not None:
            with self._changed:
                start = self._next
                if self._has_stopped or start >= self._size_bytes:
                    return
                if host_memory.available_bytes() < self._size_bytes - self.touched_bytes:
                    self._has_stopped = True
                    self._changed.notify_all()
                    return
                self._next += _STEP_BYTES
                self._under_way.add(start)
            is_touched = False
            with contextlib.suppress(OSError):  # Memory is short or faulty: the thread that writes gets the error.
                is_touched = tables.populate(memory.data_ptr() + start, min(_STEP_BYTES, self._size_bytes - start))
            with self._changed:
                if is_touched:
                    self._under_way.discard(start)
                else:
                    self._has_stopped = True
                self._changed.notify_all()


class MappedSharedArena(MappedArena):
    """The receiver's end. Owns the descriptor that it is made from, even if the constructor fails."""

    def __init__(self, record: SharedArena, descriptor: int) -> None:
        """Map the memory. Raises ManifestError if its size is not that of `record`, or it is not sealed."""
        self.generation = record.generation
        self.size_bytes = record.size_bytes
        self._memory = SharedMemory.received(descriptor, record.size_bytes)
        with on_failure(self._memory.close):
            self.reset()

    def reset(self) -> None:
        """Map the memory again, without this process's writes into the former mapping."""
        self._mapping = self._memory.map(private=True)
        self.buffers = Buffers(self._mapping.tensor())

    def reread(self, buffer: BucketBuffer) -> bool:
        """Make `buffer` show the sender's bytes again where this process wrote over them."""
        self._mapping.reread(buffer.header)
        self._mapping.reread(buffer.payload)
        return True

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped as long as a tensor refers to it."""
        self._memory.close()
        del self._mapping
