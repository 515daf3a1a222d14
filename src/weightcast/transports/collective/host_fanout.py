"""Workers of one engine on one host: one receives, all read the same memory. Made of the same-host transport.

The one that has joined the group packs nothing: what it receives lands in the arena of a sender of its own, to which
every worker, itself too, has a receiver. An arena's mapping is private to each, so that no engine spoils another's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast import registry
from weightcast.errors import WeightcastError
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Receiver, Sender

_URL = "ipc://"


class SharedMemory:
    """The receiving worker's arena. Used by one thread, that of the stream. Costs the whole version, once per host."""

    def __init__(self, run: str, readers: Sequence[str], deadline_seconds: float) -> None:
        self.readers = tuple(readers)
        self._sender: Sender = registry.transport(_URL).sender(_URL, run=run, deadline_seconds=deadline_seconds)
        self.address: str = self._sender.address
        self._update = 0
        self._num_delivered = 0

    def begin(self, update: int, manifest: Manifest, version: WeightVersion) -> None:
        """Once for each update, before its first bucket. Raises PeerError if a reader is missing."""
        if update == self._update:
            return
        self._update, self._num_delivered = update, 0
        self._sender.open(manifest, version, peers=self.readers, staged=True)
        self._require_readers()

    def buffer(self, index: int) -> torch.Tensor:
        """Where bucket `index`, the next one, is to arrive."""
        return self._sender.buffer(index)

    def has(self, index: int) -> bool:
        """Whether the readers have been told of that bucket: a stream may have been left while it did."""
        return index < self._num_delivered

    def deliver(self, index: int) -> None:
        """Bucket `index` is whole; once is enough. Raises PeerError if a reader was lost."""
        if self.has(index):
            return
        self._num_delivered = index + 1
        self._sender.send(index)
        self._require_readers()

    def close(self) -> None:
        self._sender.close()

    def _require_readers(self) -> None:
        lost: WeightcastError | None = next(iter(self._sender.failures.values()), None)
        if lost is not None:
            raise lost


def read_along(address: str, *, peer: str, run: str, deadline_seconds: float) -> Receiver:
    """Connect to a SharedMemory. Raises PeerError."""
    made: Receiver = registry.transport(_URL).receiver(address, peer=peer, run=run, deadline_seconds=deadline_seconds)
    return made
