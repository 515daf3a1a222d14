"""The base of deltas: the packed buckets of one version, in host memory, at each end.

The publisher makes deltas against its base, and an engine's worker adds them to its own. Both have the bits of the same
version, which is named by its number and root digest, so that a delta is never added to another version's buckets.
"""

from __future__ import annotations

import itertools
import os

import torch

from weightcast.errors import IntegrityError
from weightcast.format.bucket import Digest, Layout, payload_digest, root_digest
from weightcast.format.manifest import ITEMSIZE_BYTES
from weightcast.native import deltas
from weightcast.native.tables import MAX_THREADS

_MAX_WORD_BYTES = 4


class PackedBase:
    """The packed buckets of one version. Memory: those buckets, in host memory.

    `number`, `root`: of the version of which all buckets are here; -1 while they are of none, or of several.
    """

    def __init__(self, layout: Layout, manifest_digest: str) -> None:
        self.manifest_digest = manifest_digest
        self.number, self.root = -1, ""
        sizes = layout.manifest.buckets
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
        ends = itertools.accumulate(sizes)
        self.payloads = [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self.digests: list[Digest] = [b""] * len(sizes)
        self._word_bytes = [
            min(_MAX_WORD_BYTES, *(ITEMSIZE_BYTES[entry.record.dtype] for entry in entries))
            for entries in layout.entries
        ]
        self.num_words = sum(size // word for size, word in zip(sizes, self._word_bytes, strict=True))
        self._threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))

    def begin(self) -> None:
        """Let the buckets become those of another version, one after the other."""
        self.number, self.root = -1, ""

    def complete(self, number: int) -> str:
        """All buckets are of version `number` now. Returns its root digest."""
        self.root = root_digest(self.manifest_digest, self.digests)
        self.number = number
        return self.root

    def keep(self, index: int, payload: torch.Tensor, digest: Digest) -> None:
        """Copy the new version's bucket, whose payload has this digest."""
        self.payloads[index].copy_(payload[: self.payloads[index].nbytes])
        self.digests[index] = digest

    def advance(self, index: int, payload: torch.Tensor, digest: Digest) -> tuple[torch.Tensor, int]:
        """Copy the new version's bucket, and return what to send in its place, and the number of changed words.

        That is a delta, or the bucket of this base where a delta would be no shorter.
        """
        mine = self.payloads[index]
        delta, num_changed = deltas.encode(
            mine, payload[: mine.nbytes], self._word_bytes[index], advance=True, threads=self._threads
        )
        self.digests[index] = digest
        return mine if delta is None else delta, num_changed

    def add(self, index: int, delta: torch.Tensor) -> torch.Tensor:
        """Make the bucket that of the new version; return it. Raises IntegrityError for a delta that is damaged."""
        mine, word_bytes = self.payloads[index], self._word_bytes[index]
        try:
            changes = deltas.decode(delta, mine.nbytes // word_bytes, word_bytes, threads=self._threads)
        except ValueError as exc:
            raise IntegrityError(f"bucket {index} has no valid delta: {exc}; publish again") from exc
        changes.apply(mine, threads=self._threads)
        self.digests[index] = payload_digest(mine)
        return mine
