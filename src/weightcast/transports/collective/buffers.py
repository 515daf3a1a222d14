"""Where a receiver's buckets come in and from where they are handed out: memory of its own, or shared with others.

Workers of one engine on one host share: the one that has joined the group receives into the arena of an ipc sender of
its own, to which every worker, itself too, has a receiver. Invariants: the same index is the same buffer in every
update while the manifest stays; what a group that was left may still write to is never handed out, and never waited
for; an arena's mapping is private to each worker, so that no engine spoils another's bytes. The receiver's lock is
never held here while somebody is waited for.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weightcast import registry
from weightcast.errors import PeerDiedError, PeerTimeoutError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, place
from weightcast.format.manifest import Manifest
from weightcast.host.closing import on_failure
from weightcast.seams.transport import Receiver
from weightcast.transports.kept_memory import KeptMemory, allocate
from weightcast.transports.receiving import PeerUpdate

NUM_UNDER_WAY = 2
"""Broadcasts that a receiver waits for at once, at most: the next one follows without a pause."""
NUM_SLOTS = 1 + NUM_UNDER_WAY
"""Streaming: one that is read, and those that arrive."""
_SHARED, _HOST_MEMORY = "ipc://", torch.device("cpu")
_WHAT = "receiving this update"
_READERS_PATIENCE = 10.0
"""A reader waits that many deadlines for the worker that receives: its own link says whether the publisher lives."""
_STREAM_END_SECONDS = 5.0


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


class SharedMemory:
    """The receiving worker's arena. Used by one thread, that of the stream. Costs the whole version, once per host."""

    def __init__(self, run: str, readers: Sequence[str], deadline_seconds: float) -> None:
        self.readers = tuple(readers)
        make = registry.transport(_SHARED).sender
        self._sender = make(_SHARED, run=run, device=_HOST_MEMORY, deadline_seconds=deadline_seconds)
        self.address: str = self._sender.address
        self._update = 0
        self._num_delivered = 0

    def buffer(self, update: PeerUpdate, index: int) -> BucketBuffer | None:
        """Where bucket `index`, the next one, is to arrive. Raises PeerError if a reader is missing.

        None if the readers have been told of it: a stream may have been left while it did.
        """
        if update.number != self._update:
            self._update, self._num_delivered = update.number, 0
            self._sender.open(update.manifest, update.version, peers=self.readers, staged=True)
            self._require_readers()
        return None if index < self._num_delivered else self._sender.buffer(index)

    def deliver(self, index: int, num_bytes: int) -> None:
        """Bucket `index` is whole; once is enough. Raises PeerError if a reader was lost."""
        if index >= self._num_delivered:
            self._num_delivered = index + 1
            self._sender.send(index, num_bytes)
            self._require_readers()

    def close(self) -> None:
        self._sender.close()

    def _require_readers(self) -> None:
        for lost in self._sender.failures.values():
            raise PeerDiedError(str(lost))


class SharedReading(NamedTuple):
    """What a worker reads along with others: `reader`, connected to `address`; `memory`: its own, if it receives."""

    reader: Receiver | None = None
    memory: SharedMemory | None = None
    address: str = ""

    def close(self) -> None:
        for end in (self.reader, self.memory):
            if end is not None:
                end.close()


class ReceiveBuffers:
    """`sharing` has a reader while another worker, or this one for others, receives into shared memory."""

    def __init__(self, run: str, peer: str, device: torch.device, deadline_seconds: float) -> None:
        self.sharing = SharedReading()
        self._run, self._peer = run, peer
        self._device = device
        self._deadline_seconds = deadline_seconds
        self._memory = KeptMemory(device, _WHAT)
        self._replaced: dict[int, BucketBuffer] = {}
        """By slot: where its buckets arrive because a group that was left may still write to the slot."""
        self._left: list[Writing] = []

    def prepare(self, manifest: Manifest, *, staged: bool) -> None:
        """Have memory for an update, unless it is shared. Raises InsufficientMemoryError."""
        if self.sharing.reader is not None:
            return
        device = _HOST_MEMORY if staged else self._device
        if device != self._memory.device or self._replaced:
            self.free()
            self._memory = KeptMemory(device, _WHAT)
        # Staged, a place for each bucket; streaming, slots in turn.
        self._memory.prepare(place(manifest, num_slots=NUM_SLOTS, staged=staged))

    def buffer(self, index: int) -> BucketBuffer:
        """A bucket that has come in, in memory of our own."""
        return self._replaced.get(self._memory.arena_layout.slots[index]) or self._memory.buffer(index)

    def free(self) -> None:
        """Free memory of our own; what was handed out stays as long as it is referred to."""
        self._memory.free()
        self._replaced.clear()

    # --- sharing ---

    def connect(self, readers: tuple[str, ...], address: str) -> SharedReading:
        """Connect to the worker that receives at `address`, or receive for these `readers` too; for neither, nothing.

        Waits for the other worker, so the receiver's lock must not be held. `use` or `discard` what it returns, which
        is what is used already if that will do. Raises PeerError, OSError.
        """
        names, used = (self._peer, *readers), self.sharing
        if address:
            return used if used.address == address else SharedReading(self._reader_of(address), None, address)
        if not readers:
            return SharedReading()
        if used.memory is not None and used.memory.readers == names:
            return used
        memory = SharedMemory(self._run, names, self._deadline_seconds)
        with on_failure(memory.close):
            return SharedReading(self._reader_of(memory.address), memory, memory.address)

    def _reader_of(self, address: str) -> Receiver:
        patience = self._deadline_seconds * _READERS_PATIENCE
        make = registry.transport(_SHARED).receiver
        return make(address, run=self._run, peer=self._peer, device=_HOST_MEMORY, deadline_seconds=patience)

    def use(self, sharing: SharedReading) -> None:
        """Read from there, and receive for those, from now on."""
        if sharing is not self.sharing:
            former, self.sharing = self.sharing, sharing
            former.close()
            if sharing.reader is not None:
                self.free()

    def discard(self, sharing: SharedReading) -> None:
        """Close what `connect` returned, unless it is used."""
        if sharing is not self.sharing:
            sharing.close()

    def end_reader(self) -> None:
        """Wake an iteration of what is shared."""
        if self.sharing.reader is not None:
            self.sharing.reader.end()

    # --- the stream's thread ---

    @property
    def is_shared(self) -> bool:
        """Whether others read along: then one bucket is received after the other."""
        return self.sharing.memory is not None

    def target(self, update: PeerUpdate, index: int, *, is_here: bool) -> BucketTarget:
        """Where bucket `index` is to be received. `is_here`: it is here already, and only passes by.

        Raises PeerError: somebody who reads along was lost, or a broadcast that was left does not end.
        """
        num_bytes = HEADER_BYTES + update.manifest.buckets[index]
        buffer = None if is_here else self._place(update, index)
        if buffer is None or buffer.header.device != self._device:
            landing = BucketBuffer.of(allocate(num_bytes, self._device, "receiving this bucket"))
            return BucketTarget(index, landing, num_bytes, staging=buffer)
        return BucketTarget(index, buffer, num_bytes)

    def _place(self, update: PeerUpdate, index: int) -> BucketBuffer | None:
        self._left = [stream for stream in self._left if not stream.has_ended(0)]
        if (memory := self.sharing.memory) is not None:
            if not all(stream.has_ended(_STREAM_END_SECONDS) for stream in self._left):
                raise PeerTimeoutError("a broadcast of a former group is still under way", peer=self._peer)
            return memory.buffer(update, index)
        buffer = self.buffer(index)
        # Another manifest's buckets may lie across.
        start, end = _span(buffer)
        late = [_span(target.staging or target.buffer) for stream in self._left for target in stream.targets]
        if any(start < other_end and other_start < end for other_start, other_end in late):
            slots, sizes = self._memory.arena_layout.slots, self._memory.arena_layout.sizes_bytes
            largest = max(size for slot, size in zip(slots, sizes, strict=True) if slot == slots[index])
            self._replaced[slots[index]] = BucketBuffer.of(self._memory.allocate(HEADER_BYTES + largest))
        return self.buffer(index)

    def deliver(self, target: BucketTarget) -> None:
        """A bucket has come in, for the first time. Raises PeerError."""
        if (memory := self.sharing.memory) is not None:
            memory.deliver(target.index, target.num_bytes)

    def leave(self, stream: Writing) -> None:
        """A broadcast of this stream may go on for a while."""
        self._left.append(stream)

    def close(self) -> None:
        """Free everything; what was handed out stays as long as it is referred to."""
        if self.is_shared:
            for stream in self._left:
                stream.has_ended(_STREAM_END_SECONDS)
        self.use(SharedReading())
        self.free()


def _span(buffer: BucketBuffer) -> tuple[int, int]:
    """The addresses from its first byte to behind its last."""
    return buffer.header.data_ptr(), buffer.payload.data_ptr() + buffer.payload.numel()
