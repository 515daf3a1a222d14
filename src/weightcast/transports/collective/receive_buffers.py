"""Where a receiver's buckets come in and from where they are handed out: memory of its own, or shared with others.

Invariants: what a group that was left may still write to is never handed out, and never waited for; with shared memory
this worker reads like every other, through a mapping that is private to it. The receiver's lock is never held here
while somebody is waited for.
"""

from __future__ import annotations

import dataclasses

import torch

from weightcast.errors import PeerTimeoutError
from weightcast.format.bucket import place
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Receiver
from weightcast.transports.collective.broadcast_reader import BroadcastReader, BucketTarget
from weightcast.transports.collective.host_fanout import SharedMemory, read_along
from weightcast.transports.collective.records import BeginUpdate
from weightcast.transports.collective.slots import NUM_SLOTS, ReceiveSlots

READERS_PATIENCE = 10.0
"""A reader waits that many deadlines for the worker that receives: its own link says whether the publisher lives."""
_STREAM_END_SECONDS = 5.0


@dataclasses.dataclass(slots=True, eq=False)
class WantedUpdate:
    """An update that the worker waits for; `begin` once the sender has begun it, in its latest form."""

    manifest: Manifest
    version: WeightVersion
    staged: bool
    begin: BeginUpdate | None = None
    num_received: int = 0
    num_taken: int = 0
    num_released: int = 0
    aborted: str | None = None

    @property
    def num_buckets(self) -> int:
        return len(self.manifest.buckets)

    @property
    def update(self) -> int:
        return 0 if self.begin is None else self.begin.update


class ReceiveBuffers:
    """`reader` is set while another worker, or this one for others, receives into shared memory."""

    def __init__(self, run: str, peer: str, device: torch.device, deadline_seconds: float) -> None:
        self.reader: Receiver | None = None
        self._run, self._peer = run, peer
        self._device = device
        self._deadline_seconds = deadline_seconds
        self._memory: ReceiveSlots | None = None
        self._shared: SharedMemory | None = None
        self._address = ""
        self._left: list[BroadcastReader] = []

    def prepare(self, manifest: Manifest, *, staged: bool) -> None:
        """Have memory for an update, unless it is shared. Raises InsufficientMemoryError."""
        if self.reader is not None:
            return
        arena_layout = place(manifest, num_slots=NUM_SLOTS, staged=staged)
        device = torch.device("cpu") if staged else self._device
        if self._memory is not None and self._memory.fits(arena_layout, device):
            self._memory.use(arena_layout)
            return
        self._memory = None
        self._memory = ReceiveSlots(manifest, staged=staged, device=self._device)

    def buffer(self, index: int) -> torch.Tensor:
        """A bucket that has come in, in memory of our own."""
        assert self._memory is not None
        return self._memory.buffer(index)

    # --- sharing ---

    def share(self, readers: tuple[str, ...]) -> str:
        """Receive for these workers too, or for none; where they read. Raises PeerError."""
        if not readers:
            self._stop_sharing()
            return ""
        names = (self._peer, *readers)
        if self._shared is None or self._shared.readers != names:
            self._stop_sharing()
            self._shared = SharedMemory(self._run, names, self._deadline_seconds)
            self.read_from(self._shared.address)
        return self._shared.address

    def read_from(self, address: str) -> None:
        """Read what another worker receives, or this one itself. Raises PeerError."""
        if self._address == address and self.reader is not None:
            return
        if self.reader is not None:
            self.reader.close()
        self._memory = None
        patience = self._deadline_seconds * READERS_PATIENCE
        self.reader = read_along(address, peer=self._peer, run=self._run, deadline_seconds=patience)
        self._address = address

    def _stop_sharing(self) -> None:
        reader, self.reader = self.reader, None
        shared, self._shared = self._shared, None
        self._address = ""
        if reader is not None:
            reader.close()
        if shared is not None:
            shared.close()

    # --- the stream's thread ---

    @property
    def is_shared(self) -> bool:
        """Whether others read along: then one bucket is received after the other."""
        return self._shared is not None

    def target(
        self, update: int, manifest: Manifest, version: WeightVersion, index: int, *, is_here: bool
    ) -> BucketTarget:
        """Where bucket `index` is to be received. `is_here`: it is here already, and only passes by.

        Raises PeerError: somebody who reads along was lost, or a broadcast that was left does not end.
        """
        num_bytes = manifest.buckets[index]
        buffer = None if is_here else self._place(update, manifest, version, index)
        if buffer is None or buffer.device != self._device:
            landing = torch.empty(num_bytes + 4096, dtype=torch.uint8, device=self._device)
            return BucketTarget(index, landing, num_bytes, staging=buffer)
        return BucketTarget(index, buffer, num_bytes)

    def _place(self, update: int, manifest: Manifest, version: WeightVersion, index: int) -> torch.Tensor | None:
        self._left = [stream for stream in self._left if not stream.has_ended(0)]
        if self._shared is not None:
            if not all(stream.has_ended(_STREAM_END_SECONDS) for stream in self._left):
                raise PeerTimeoutError("a broadcast of a former group is still under way", peer=self._peer)
            self._shared.begin(update, manifest, version)
            return None if self._shared.has(index) else self._shared.buffer(index)
        assert self._memory is not None
        buffer = self._memory.buffer(index)
        if any(_overlap(buffer, target.destination) for stream in self._left for target in stream.targets):
            self._memory.replace(index)
        return self._memory.buffer(index)

    def deliver(self, index: int) -> None:
        """Bucket `index` has come in, for the first time. Raises PeerError."""
        if self._shared is not None:
            self._shared.deliver(index)

    def leave(self, stream: BroadcastReader) -> None:
        """A broadcast of this stream may go on for a while."""
        self._left.append(stream)

    def close(self) -> None:
        """Free everything; what was handed out stays as long as it is referred to."""
        if self._shared is not None:
            for stream in self._left:
                stream.has_ended(_STREAM_END_SECONDS)
        self._stop_sharing()
        self._memory = None


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain byte tensors have memory in common; another manifest's buckets may lie across."""
    return a.data_ptr() < b.data_ptr() + b.numel() and b.data_ptr() < a.data_ptr() + a.numel()
