"""Host memory that a sender shares with receivers: anonymous, sealed against resizing, passed on as a descriptor.

Invariants: a receiver maps nothing whose size could change under it (that would be a SIGBUS); what a receiver writes
into its mapping stays its own (copy on write), so that no engine can spoil another's bytes; a tensor keeps its mapping
alive, so that nothing is ever unmapped under a view; the same place gives the same tensor object until the arena goes;
pages are populated in advance only as long as the host and every cgroup have room for all that remain.
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
"""Memory that one thread populates between two checks of the memory that is available."""


class OwnedSharedArena(OwnedArena):
    """The sender's end. Costs `size_bytes` of host memory, which are populated in the background."""

    def __init__(self, generation: int, size_bytes: int) -> None:
        """Raise InsufficientMemoryError if the host or a cgroup has less than that available."""
        self._mapping = SharedMemory.make(size_bytes, _WHAT).map()
        whole = self._mapping.tensor()
        super().__init__(generation, whole, torch.device("cpu"))
        self.populating = Populating(whole, _WHAT)

    def await_memory(self, end_bytes: int, seconds: float) -> float:
        return self.populating.wait(end_bytes, seconds)

    def announcement(self) -> tuple[SharedArena, int]:
        return SharedArena(self.generation, self.size_bytes), self._mapping.memory.descriptor

    def close(self, *, free: bool) -> None:
        # First, since no page may be touched after it was freed.
        self.populating.close()
        if free:
            self._mapping.free()
        # Not unmapped here: views that the publisher keeps still point into it.
        self._mapping.memory.close()
        del self._mapping
        super().close(free=free)


class Populating:
    """Populates the pages of a flat buffer in host memory in order, in threads that end by themselves.

    The first writers of the buffer then need not wait for the kernel. No thread is left after `close`, and a forked
    child has none.
    """

    def __init__(self, memory: torch.Tensor, what: str, remedy: str = host_memory.LESS_AT_ONCE) -> None:
        """Start the threads. `what` needs the memory and `remedy` helps if there is too little: for an error's text."""
        self._memory: torch.Tensor | None = memory
        self._size_bytes = memory.numel()
        self._what, self._remedy = what, remedy
        self._changed = threading.Condition()
        self._next = 0
        self._under_way: set[int] = set()
        self._has_stopped = False
        """True if the threads end before every page was touched."""
        self._threads: list[threading.Thread] = []
        num_steps = -(-self._size_bytes // _STEP_BYTES)
        close_at_exit(self)
        try:
            # The other half of the cores computes and packs.
            for _ in range(min(num_steps, tables.MAX_THREADS, -(-len(os.sched_getaffinity(0)) // 2))):
                self._threads.append(awaited_at_exit(self._run, "weightcast-populate"))
        except RuntimeError:  # the limit of threads, or the interpreter ends
            self._has_stopped = not self._threads

    def wait(self, end_bytes: int, seconds: float) -> float:
        """Wait, at most that long, until the first `end_bytes` were touched; return how long it took, in seconds.

        Pages that were not touched by then cost memory when they are written. Raises InsufficientMemoryError if the
        threads stopped for lack of memory and there still is too little for the pages that remain.
        """
        start = time.perf_counter()
        with self._changed:
            if self._touched_bytes >= (self._size_bytes if self._has_stopped else end_bytes):
                return 0.0
            Deadline(seconds).wait_for(self._changed, lambda: self._has_stopped or self._touched_bytes >= end_bytes)
            if self._has_stopped and (rest_bytes := self._size_bytes - self._touched_bytes) > 0:
                host_memory.require(rest_bytes, self._what, self._remedy)
                # The caller writes to the rest now: count it as touched, so that no later call checks it again.
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
    def _touched_bytes(self) -> int:
        """Number of bytes from the start whose pages were all touched."""
        return min(self._under_way, default=self._next)

    def _run(self) -> None:
        memory = self._memory  # Mapped as long as this thread has it.
        while memory is not None and (start := self._begin()) is not None:
            is_touched = False
            with contextlib.suppress(OSError):  # Memory is short or faulty: its writer gets the error.
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


class MappedSharedArena(MappedArena):
    """The receiver's end. Owns the descriptor that it is made from, also if the construction fails."""

    def __init__(self, record: SharedArena, descriptor: int) -> None:
        """Raise ManifestError if the descriptor's size or seals are not those of `record`."""
        self.generation = record.generation
        self.size_bytes = record.size_bytes
        self._memory = SharedMemory.received(descriptor, record.size_bytes)
        with on_failure(self._memory.close):
            self.reset()

    def reset(self) -> None:
        """Map the memory again, without anything that this process wrote into the former mapping."""
        self._mapping = self._memory.map(private=True)
        self.buffers = Buffers(self._mapping.tensor())

    def reread(self, buffer: BucketBuffer) -> bool:
        """Make `buffer` show the sender's bytes again where this process wrote over them."""
        self._mapping.reread(buffer.header)
        self._mapping.reread(buffer.payload)
        return True

    def close(self) -> None:
        """Close the descriptor; the mapping stays as long as a tensor refers to it."""
        self._memory.close()
        del self._mapping
