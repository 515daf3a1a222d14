"""A worker's end of the memory transport: reads its sender's state under the sender's condition.

Invariants: a bucket is handed out only in its turn and only while the sender lives. `end` and `close` may be called
from any thread and wake an iteration that waits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import torch

from weightcast.errors import (
    ClosedError,
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    StaleVersionError,
    UpdateAbortedError,
)
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Bucket, Receiver
from weightcast.transports.memory.sender import SCHEME, SentUpdate, senders

_PUBLISHER = "trainer"


@dataclasses.dataclass(slots=True, eq=False)
class _MemoryUpdate:
    """An update that the worker waits for."""

    manifest: Manifest
    version: WeightVersion
    staged: bool
    num_taken: int = 0
    update: SentUpdate | None = None


class MemoryReceiver(Receiver):
    """Memory: none."""

    def __init__(self, url: str, *, peer: str, run: str, deadline_seconds: float = 60.0) -> None:
        """Raises PeerDiedError if there is no such sender, StaleVersionError if it is of another run."""
        if not url.startswith(SCHEME):
            raise ValueError(f"{url!r} is not the address of a memory sender; expected {SCHEME}NAME")
        sender = senders.get(url)
        if sender is None:
            raise PeerDiedError(f"no publisher in this process has the address {url}", peer=_PUBLISHER)
        if sender.run != run:
            raise StaleVersionError(f"the receiver is of run {run}, the publisher of {sender.run}: init again")
        self._sender = sender
        self._deadline_seconds = deadline_seconds
        self._wanted: _MemoryUpdate | None = None
        self._closed = False
        with sender.condition:
            self._state = sender.join(peer)

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Wait for `version` from now on. Raises PeerDiedError if the sender has gone."""
        if version.run != self._sender.run:
            raise ValueError(f"version {version.number} is of run {version.run}, this receiver of {self._sender.run}")
        self.end()
        with self._sender.condition:
            self._require_connection()
            self._release_foreign(version)
            self._state.declined = None
            self._wanted = _MemoryUpdate(manifest, version, staged)

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket in order, once."""
        with self._sender.condition:
            self._require_open()
            wanted = self._wanted
        if wanted is None:
            raise UpdateAbortedError("no update is open: it was ended, or open() was not called")
        num_buckets = len(wanted.manifest.buckets)
        while wanted.num_taken < num_buckets:
            index = wanted.num_taken
            with self._sender.condition:
                buffer = self._next(wanted)
            yield Bucket(index, buffer)
            with self._sender.condition:
                if wanted.num_taken == num_buckets:
                    self._check_live(wanted)
                if not wanted.staged and self._wanted is wanted and wanted.update is not None:
                    self._sender.release(self._state, wanted.update, index)

    def end(self) -> None:
        """Release every bucket and wake an iteration, which raises UpdateAbortedError. Idempotent, from any thread."""
        with self._sender.condition:
            wanted, self._wanted = self._wanted, None
            if wanted is not None and not self._closed:
                self._sender.end(self._state, wanted.update, wanted.version)

    def close(self) -> None:
        """Disconnect; wakes an iteration, which raises ClosedError. Idempotent, from any thread."""
        with self._sender.condition:
            if not self._closed:
                self._closed, self._wanted = True, None
                self._sender.leave(self._state)

    def _next(self, wanted: _MemoryUpdate) -> torch.Tensor:
        start = time.monotonic()
        while True:
            self._check_live(wanted)
            update = wanted.update
            if update is not None and len(update.sent) > wanted.num_taken:
                wanted.num_taken += 1
                return update.sent[wanted.num_taken - 1]
            # Before an update begins the sender may itself wait for somebody else, up to its deadline.
            patience = self._deadline_seconds * (2 if update is None else 1)
            remaining = max(start, self._sender.alive_at) + patience - time.monotonic()
            if remaining <= 0:
                raise PeerTimeoutError(f"nothing was heard of the publisher for {patience:g} s", peer=_PUBLISHER)
            self._sender.condition.wait(remaining)

    def _check_live(self, wanted: _MemoryUpdate) -> None:
        self._require_open()
        if self._wanted is not wanted:
            raise UpdateAbortedError(f"version {wanted.version.number} was ended on this side")
        self._match(wanted)
        if wanted.update is not None and wanted.update.aborted is not None:
            raise UpdateAbortedError(wanted.update.aborted)
        self._require_connection()
        if wanted.update is not None and wanted.update is not self._sender.update:
            raise UpdateAbortedError("the publisher went on to another update")

    def _match(self, wanted: _MemoryUpdate) -> None:
        update = self._sender.update
        if wanted.update is not None or update is None or update.number <= self._state.last_ended:
            return
        if update.version != wanted.version or self._state not in update.states:
            return
        found, expected = (len(update.manifest.buckets), update.staged), (len(wanted.manifest.buckets), wanted.staged)
        if found != expected:
            raise ManifestError(f"the publisher sends (buckets, staged) = {found}, the offer said {expected}")
        wanted.update = update

    def _release_foreign(self, version: WeightVersion) -> None:
        """Be done with an update that nobody here has opened, or that was given up."""
        update = self._sender.update
        if update is not None and (update.version != version or update.aborted is not None):
            self._sender.end(self._state, update, update.version)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this receiver was closed")

    def _require_connection(self) -> None:
        self._require_open()
        if self._state.gone:
            raise PeerDiedError(f"the publisher has gone or dropped this receiver: {self._state.gone}", peer=_PUBLISHER)
