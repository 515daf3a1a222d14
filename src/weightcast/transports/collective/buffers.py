"""Memory that a receiver's buckets are received into and read from: its own, or shared with other workers.

Workers of one engine on one host share memory: one of them joins the group and receives into memory that the others
map. Invariants: while the manifest stays, an index has the same buffer in every update; memory that a former group may
still write to is not used for buckets; an engine's writes into a bucket are private, so that no worker can change the
bytes that another reads.
"""

from __future__ import annotations

import dataclasses
import threading

import torch

from weightcast.errors import PeerTimeoutError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, arena_layout_of
from weightcast.format.manifest import Manifest
from weightcast.host.deadline import GRACE_SECONDS, Deadline
from weightcast.host.memory import SharedMemory
from weightcast.transports.kept_memory import KeptMemory, allocate

NUM_UNDER_WAY = 2
"""Largest number of broadcasts that a receiver has posted at once, so that one follows the other without a pause."""
NUM_SLOTS = 1 + NUM_UNDER_WAY
"""Slots when streaming: one that is read, and one for each posted broadcast."""
_HOST_MEMORY = torch.device("cpu")
_WHAT = "receiving this update"


@dataclasses.dataclass(frozen=True, slots=True)
class BucketTarget:
    """Memory to receive a bucket into, `num_bytes` with its header. `staging`: host memory to copy it to afterwards."""

    index: int
    buffer: BucketBuffer
    num_bytes: int
    staging: BucketBuffer | None = None

    @property
    def flat(self) -> torch.Tensor:
        """The bytes to receive, as one tensor."""
        return self.buffer.flat(self.num_bytes)


class ReceiveBuffers:
    """A receiver's memory for buckets, reused from update to update."""

    def __init__(self, peer: str, device: torch.device) -> None:
        self._shared: SharedMemory | None = None
        """Memory for staged updates that several workers of this host read; None if this worker reads alone."""
        self._is_lent = False
        self._peer = peer
        self._device = device
        self._memory = KeptMemory(device, _WHAT)
        self._replaced: dict[int, BucketBuffer] = {}
        """Replacement for each slot that a former group may still write to."""
        self._left: list[tuple[threading.Thread, tuple[BucketTarget, ...]]] = []
        """Threads that may still write to these targets, for a group that the receiver has left."""

    def prepare(self, manifest: Manifest, *, staged: bool) -> None:
        """Prepare memory for an update. Raises InsufficientMemoryError."""
        device, shared = _HOST_MEMORY if staged else self._device, self._shared if staged else None
        if (device, shared) != (self._memory.device, self._memory.shared) or self._replaced:
            self.free()
            self._memory = KeptMemory(device, _WHAT, shared=shared)
        # Staged buckets have a slot each; streaming ones use the slots in turn.
        self._memory.prepare(arena_layout_of(manifest, num_slots=NUM_SLOTS, staged=staged))

    def buffer(self, index: int) -> BucketBuffer:
        """Return the memory to read a received bucket from."""
        return self._replaced.get(self._memory.arena_layout.slots[index]) or self._memory.buffer(index)

    def reread(self, buffer: BucketBuffer) -> bool:
        """Drop this worker's writes into a bucket; return False if its memory is not shared."""
        return self._memory.reread(buffer)

    def free(self) -> None:
        """Free the memory. Buffers that were returned stay valid as long as something refers to them."""
        self._memory.free()
        self._replaced.clear()

    # --- the choice of the memory that the next `prepare` uses ---

    def keep_alone(self) -> str:
        """Use memory of this worker alone. Return an empty location."""
        self._use(None)
        return ""

    def lend(self) -> str:
        """Use memory that other workers of this host map, too; return its location."""
        if self._shared is None or not self._is_lent:
            self._use(SharedMemory.make(), is_lent=True)
        assert self._shared is not None
        return self._shared.location

    def read_along(self, location: str) -> None:
        """Use the memory of another worker. Raises UnsupportedError if this process can't open it."""
        if self._shared is None or self._shared.location != location:
            self._use(SharedMemory.open(location))

    def _use(self, shared: SharedMemory | None, *, is_lent: bool = False) -> None:
        if self._shared is not None:
            self._shared.close()
        self._shared, self._is_lent = shared, is_lent

    def close(self) -> None:
        """Free the memory, and close the memory that is shared."""
        self.free()
        self._use(None)

    # --- called by the stream's thread ---

    def target(self, manifest: Manifest, index: int, *, is_here: bool) -> BucketTarget:
        """Return the memory to receive bucket `index` into. `is_here`: it arrived before, and this copy is dropped.

        Raises PeerTimeoutError if a broadcast of a former group does not end.
        """
        num_bytes = HEADER_BYTES + manifest.buckets[index]
        buffer = None if is_here else self._await_target(index)
        if buffer is None or buffer.header.device != self._device:
            landing = BucketBuffer.of(allocate(num_bytes, self._device, "receiving this bucket"))
            return BucketTarget(index, landing, num_bytes, staging=buffer)
        return BucketTarget(index, buffer, num_bytes)

    def _await_target(self, index: int) -> BucketBuffer:
        self._left = [left for left in self._left if left[0].is_alive()]
        if self._memory.shared is not None:
            deadline = Deadline(GRACE_SECONDS)
            for thread, _ in self._left:
                if thread is not threading.current_thread():
                    thread.join(deadline.remaining_seconds)
            if any(thread.is_alive() for thread, _ in self._left):
                what = f"a broadcast of a former group has not ended within {GRACE_SECONDS:g} s"
                raise PeerTimeoutError(f"{what}: it may still write to the memory of bucket {index}", peer=self._peer)
            return self._memory.target(index)
        buffer = self.buffer(index)
        # A former update of another manifest had other offsets: compare addresses, not slots.
        start, end = _span(buffer)
        late = [_span(target.staging or target.buffer) for _, targets in self._left for target in targets]
        if any(start < other_end and other_start < end for other_start, other_end in late):
            slots, sizes = self._memory.arena_layout.slots, self._memory.arena_layout.sizes_bytes
            largest = max(size for slot, size in zip(slots, sizes, strict=True) if slot == slots[index])
            self._replaced[slots[index]] = BucketBuffer.of(self._memory.allocate(HEADER_BYTES + largest))
        return self.buffer(index)

    def leave(self, thread: threading.Thread, targets: tuple[BucketTarget, ...]) -> None:
        """Note that a thread may still write to these targets, since broadcasts of a former group are under way."""
        self._left.append((thread, targets))


def _span(buffer: BucketBuffer) -> tuple[int, int]:
    """Return the address of the first byte and the one behind the last byte."""
    return buffer.header.data_ptr(), buffer.payload.data_ptr() + buffer.payload.numel()
