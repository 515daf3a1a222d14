"""The publisher's end of a store: buckets go to the files of a slot; the last one seals the version.

Invariants: a bucket's buffer is handed out again only when its bytes are with the filesystem; an error of any writing
thread is raised, and nothing is sealed then; what is sealed is given up unless `commit` comes next. All calls come from
one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from weightcast.errors import ClosedError, UpdateAbortedError, WeightcastError
from weightcast.format.bucket import DIGEST_BYTES, TRAILER_BYTES, Buffers, buffer_size_bytes, slot_size_bytes
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.store.address import MAX_BUFFERS, StoreAddress
from weightcast.store.writing import StoreWriter


class StoreSender:
    """Implements `Sender` and `VersionedSender`.

    Memory: one bucket; with several threads one more for each, but no more than there are, and at most `MAX_BUFFERS`.
    The store's files besides (see `StoreWriter`).
    """

    def __init__(
        self, url: str, *, run: str, deadline_seconds: float = 60.0, device: torch.device | str | None = None
    ) -> None:
        """Take the store. Raises as `StoreWriter`."""
        address = StoreAddress.parse(url)
        self.address = url
        self._run = run
        self._is_pinned = torch.device(device or "cpu").type == "cuda"
        self._max_buffers = 1 if address.num_threads == 1 else min(address.num_threads + 1, MAX_BUFFERS)
        self._num_buffers = 1
        # It starts a thread only for a bucket that no other one is free for.
        self._pool = ThreadPoolExecutor(self._max_buffers, "weightcast-store") if address.num_threads > 1 else None
        self._ring: torch.Tensor | None = None
        self._buffers = Buffers(torch.empty(0, dtype=torch.uint8))
        self._stride = 0
        self._manifest: Manifest | None = None
        self._digests: list[bytes] = []
        self._writes: dict[int, Future[None]] = {}
        self._is_sealed = False
        self._closed = False
        self._writer = StoreWriter(address, run, deadline_seconds=deadline_seconds)

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Always empty: a store does not know who reads it."""
        return {}

    def newest_version(self) -> int:
        """The number of the store's newest version, or of the last one that was given up, whichever is larger.

        Of whichever run; -1 for none. Raises as `StoreWriter.hold`.
        """
        self._require_open()
        self._writer.hold()
        newest = self._writer.newest
        return max(self._writer.last_number, -1 if newest is None else newest.number)

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        """Take a free slot and make room in it; `peers` and `staged` change nothing. See `StoreWriter.begin`."""
        self._require_open()
        if version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this sender of run {self._run}")
        self.abort("the publisher began another update")
        self._writer.begin(manifest, version)
        self._manifest, self._digests = manifest, []
        self._prepare_ring(manifest)
        if not manifest.buckets:
            self._seal()

    def buffer(self, index: int) -> torch.Tensor:
        """Where bucket `index`, the next one, is to be packed. Waits until the former one there was written."""
        manifest = self._require_update(index)
        place = index % self._num_buffers
        self._finish(place)
        return self._buffers.get(index, place * self._stride, buffer_size_bytes(manifest, index))

    def send(self, index: int) -> int:
        """Write bucket `index`; seal with the last. Raises InsufficientMemoryError, StaleVersionError, OSError."""
        manifest = self._require_update(index)
        place, size = index % self._num_buffers, manifest.buckets[index] + TRAILER_BYTES
        data = self._buffers.get(index, place * self._stride, buffer_size_bytes(manifest, index)).numpy().data[:size]
        self._digests.append(bytes(data[size - DIGEST_BYTES :]))
        if self._pool is None or self._num_buffers == 1:
            self._writer.write(index, data)
        else:
            self._writes[place] = self._pool.submit(self._writer.write, index, data)
        if index + 1 == len(manifest.buckets):
            self._seal()
        return index + 1

    def commit(self) -> None:
        """Make the version whose buckets were all sent the newest. Raises as `StoreWriter.commit`."""
        self._require_open()
        if not self._is_sealed:
            raise UpdateAbortedError("no version is whole: it was committed or aborted, or buckets of it are missing")
        self._writer.commit()
        self._is_sealed = False

    def connected(self, peers: Sequence[str]) -> list[str]:
        """All of them: readers of a store connect to nobody."""
        return list(peers)

    def abort(self, reason: str) -> None:
        """Give the version up; the one before stays."""
        if self._writer.is_held:  # else the threads are another process's
            wait(self._writes.values())
        self._writes.clear()
        self._manifest, self._is_sealed = None, False
        if not self._closed:
            self._writer.abort(reason)

    def close(self) -> None:
        """Let the store go; another publisher may take it. Idempotent."""
        if self._closed:
            return
        self.abort("the publisher was closed")
        self._closed = True
        self._writer.close()
        if self._pool is not None:
            self._pool.shutdown()
        self._let_go_of_ring()

    def _seal(self) -> None:
        for place in list(self._writes):
            self._finish(place)
        self._writer.seal(self._digests)
        self._manifest, self._is_sealed = None, True

    def _finish(self, place: int) -> None:
        write = self._writes.pop(place, None)
        if write is not None:
            write.result()

    def _prepare_ring(self, manifest: Manifest) -> None:
        self._num_buffers = max(1, min(self._max_buffers, len(manifest.buckets)))
        self._stride = max(slot_size_bytes(manifest), self._stride)
        needed = self._stride * self._num_buffers
        if self._ring is None or needed > len(self._ring):
            self._let_go_of_ring()
            # Zeros: what lies between the end of a bucket and of its buffer must not be another's memory.
            self._ring = torch.zeros(needed, dtype=torch.uint8, pin_memory=self._is_pinned)
            self._buffers = Buffers(self._ring)
        self._buffers.forget_above(len(manifest.buckets))

    def _let_go_of_ring(self) -> None:
        self._ring = None
        self._buffers = Buffers(torch.empty(0, dtype=torch.uint8))

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this sender was closed")

    def _require_update(self, index: int) -> Manifest:
        self._require_open()
        manifest = self._manifest
        if manifest is None:
            raise UpdateAbortedError("no update is open: it was committed or aborted, or open() was not called")
        if index != len(self._digests):
            raise ValueError(f"bucket {index} of {len(manifest.buckets)}: bucket {len(self._digests)} is the next")
        return manifest
