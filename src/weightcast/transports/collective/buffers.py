"""Memory that a receiver's buckets arrive in and are handed out from: its own, or shared with other workers.

Workers of one engine on one host share: the one that has joined the group receives into memory that the others map.
Invariants: the same index is the same buffer in every update while the manifest stays; what a group that was left may
still write to is never handed out, and never waited for; what an engine writes into a bucket stays its own, so that
none spoils another's bytes.
"""

from __future__ import annotations

import dataclasses
import threading

import torch

from weightcast.errors import PeerTimeoutError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, arena_layout_of
from weightcast.format.manifest import Manifest
from weightcast.host.deadline import GRACE_SECONDS
from weightcast.host.memory import SharedMemory
from weightcast.transports.kept_memory import KeptMemory, allocate

NUM_UNDER_WAY = 2
"""Broadcasts that a receiver waits for at once, at most: the next one follows without a pause."""
NUM_SLOTS = 1 + NUM_UNDER_WAY
"""Streaming: one that is read, and those that arrive."""
_HOST_MEMORY = torch.device("cpu")
_WHAT = "receiving this update"


@dataclasses.dataclass(frozen=True, slots=True)
class BucketTarget:
    """Memory for the next bucket, of `num_bytes` with its header. `staging`: host memory to copy it to from there."""

    index: int
    buffer: BucketBuffer
    num_bytes: int
    staging: BucketBuffer | None = None

    @property
    def flat(self) -> torch.Tensor:
        """The bytes that are broadcast."""
        return self.buffer.flat(self.num_bytes)


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Writing:
    """A thread that may write to `targets`, also after its group was left."""

    targets: tuple[BucketTarget, ...] = ()
    thread: threading.Thread | None = None

    def has_ended(self, seconds: float) -> bool:
        """Wait that long for it to end; whether it has."""
        if self.thread is None:
            return True
        if threading.current_thread() is not self.thread:
            self.thread.join(seconds)
        return not self.thread.is_alive()


class ReceiveBuffers:
    """A receiver's memory for buckets, of one update after the other."""

    def __init__(self, peer: str, device: torch.device) -> None:
        self._shared: SharedMemory | None = None
        """Memory of staged updates that workers of this host read together, if they do."""
        self._is_lent = False
        self._peer = peer
        self._device = device
        self._memory = KeptMemory(device, _WHAT)
        self._replaced: dict[int, BucketBuffer] = {}
        """By slot: where its buckets arrive because a group that was left may still write to the slot."""
        self._left: list[Writing] = []

    def prepare(self, manifest: Manifest, *, staged: bool) -> None:
        """Have memory for an update. Raises InsufficientMemoryError."""
        device, shared = _HOST_MEMORY if staged else self._device, self._shared if staged else None
        if (device, shared) != (self._memory.device, self._memory.shared) or self._replaced:
            self.free()
            self._memory = KeptMemory(device, _WHAT, shared=shared)
        # Staged, a place for each bucket; streaming, slots in turn.
        self._memory.prepare(arena_layout_of(manifest, num_slots=NUM_SLOTS, staged=staged))

    def buffer(self, index: int) -> BucketBuffer:
        """A bucket that has come in, as this worker sees it."""
        return self._replaced.get(self._memory.arena_layout.slots[index]) or self._memory.buffer(index)

    def reread(self, buffer: BucketBuffer) -> bool:
        """Drop what this worker wrote over a bucket; False where every update arrives again."""
        return self._memory.reread(buffer)

    def free(self) -> None:
        """Free it; what was handed out stays as long as it is referred to."""
        self._memory.free()
        self._replaced.clear()

    # --- which memory, from the next `prepare` on ---

    def keep_alone(self) -> str:
        """Use memory of this worker's own."""
        self._use(None)
        return ""

    def lend(self) -> str:
        """Use memory that others of this host map, too; return where they find it."""
        if self._shared is None or not self._is_lent:
            self._use(SharedMemory.make(), is_lent=True)
        assert self._shared is not None
        return self._shared.location

    def read_along(self, location: str) -> None:
        """Use what another worker lends. Raises UnsupportedError if this process can't reach it."""
        if self._shared is None or self._shared.location != location:
            self._use(SharedMemory.open(location))

    def _use(self, shared: SharedMemory | None, *, is_lent: bool = False) -> None:
        if self._shared is not None:
            self._shared.close()
        self._shared, self._is_lent = shared, is_lent

    def close(self) -> None:
        """Free it and map nothing more."""
        self.free()
        self._use(None)

    # --- the stream's thread ---

    def target(self, manifest: Manifest, index: int, *, is_here: bool) -> BucketTarget:
        """Return the memory to receive bucket `index` into. `is_here`: it has arrived before, and this copy is dropped.

        Raises PeerTimeoutError: a broadcast that was left does not end.
        """
        num_bytes = HEADER_BYTES + manifest.buckets[index]
        buffer = None if is_here else self._await_target(index)
        if buffer is None or buffer.header.device != self._device:
            landing = BucketBuffer.of(allocate(num_bytes, self._device, "receiving this bucket"))
            return BucketTarget(index, landing, num_bytes, staging=buffer)
        return BucketTarget(index, buffer, num_bytes)

    def _await_target(self, index: int) -> BucketBuffer:
        self._left = [stream for stream in self._left if not stream.has_ended(0)]
        if self._memory.shared is not None:
            if not all(stream.has_ended(GRACE_SECONDS) for stream in self._left):
                raise PeerTimeoutError("a broadcast of a former group is still under way", peer=self._peer)
            return self._memory.target(index)
        buffer = self.buffer(index)
        # Another manifest's buckets may lie across.
        start, end = _span(buffer)
        late = [_span(target.staging or target.buffer) for stream in self._left for target in stream.targets]
        if any(start < other_end and other_start < end for other_start, other_end in late):
            slots, sizes = self._memory.arena_layout.slots, self._memory.arena_layout.sizes_bytes
            largest = max(size for slot, size in zip(slots, sizes, strict=True) if slot == slots[index])
            self._replaced[slots[index]] = BucketBuffer.of(self._memory.allocate(HEADER_BYTES + largest))
        return self.buffer(index)

    def leave(self, stream: Writing) -> None:
        """A broadcast of this stream may go on for a while."""
        self._left.append(stream)


def _span(buffer: BucketBuffer) -> tuple[int, int]:
    """The addresses from its first byte to behind its last."""
    return buffer.header.data_ptr(), buffer.payload.data_ptr() + buffer.payload.numel()
