"""The base of deltas: the packed buckets of one version, in host memory, at each end.

The publisher makes deltas against its base, and an engine's worker adds them to its own. Both have the bits of the same
version, which is named by its number and root digest, so that a delta is never added to another version's buckets.
Trainer ranks that send from several origins have a base each, of their own origin's buckets.

Ranks of an engine on one host have one base in memory that they share. Invariants: each bucket is written by one rank,
and only while all of them receive a version, between their accepting its offer and their reporting it received.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
from collections.abc import Iterable

import torch

from weightcast.errors import IntegrityError
from weightcast.format.bucket import Digest, root_digest
from weightcast.format.manifest import ITEMSIZE_BYTES, Manifest
from weightcast.native import deltas
from weightcast.native.tables import MAX_THREADS, Lanes, added, chunk_lanes, digest_of_lanes

MAX_WORD_BYTES = 4


class PackedBase:
    """The packed buckets of one version. Memory: those buckets, in host memory; where deltas are added, 1/128 more.

    `number`, `root`: of the version of which all own buckets are here; -1 while they are of none, or of several.
    """

    def __init__(
        self,
        manifest: Manifest,
        manifest_digest: str,
        common: torch.Tensor | None = None,
        own: Iterable[int] | None = None,
    ) -> None:
        """`own`: the buckets that this process writes, by default all; the others have no memory here.

        `common`: memory of all buckets, which the ranks of an engine on this host share.
        """
        self.manifest, self.manifest_digest = manifest, manifest_digest
        self.is_common = common is not None
        self.own = frozenset(range(len(manifest.buckets)) if own is None else own)
        self.number, self.root = -1, ""
        sizes = [size if self.is_common or index in self.own else 0 for index, size in enumerate(manifest.buckets)]
        whole = base_memory(sum(sizes)) if common is None else common
        ends = itertools.accumulate(sizes)
        self.payloads = [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self.digests: list[Digest] = [b""] * len(sizes)
        self._lanes: dict[int, Lanes] = {}
        """By bucket to which a delta was added, its chunks' lanes, by which its digest follows the changes."""
        self.pieces: dict[int, deltas.Pieces] = {}
        """By bucket, digests of parts of tensors, which follow the changes that `advance` finds."""
        self.word_bytes = word_sizes(manifest)
        self.num_words = sum(size // word for size, word in zip(manifest.buckets, self.word_bytes, strict=True))

    def begin(self) -> None:
        """Let the buckets become those of another version, one after the other."""
        self.number, self.root = -1, ""

    def complete(self, number: int) -> str:
        """All own buckets are of version `number` now. Returns its root digest, if all buckets' digests are here."""
        self.root = root_digest(self.manifest_digest, self.digests)
        self.number = number
        return self.root

    def keep(self, index: int, payload: torch.Tensor, digest: Digest) -> None:
        """Copy the new version's bucket, whose payload has this digest, if it is one of this rank's own."""
        if index in self.own:
            self.payloads[index].copy_(payload[: self.payloads[index].nbytes])
            self._lanes.pop(index, None)
            self.pieces.pop(index, None)
        self.digests[index] = digest

    def advance(
        self, index: int, payload: torch.Tensor, digest: Digest, *, by_classes: bool = False
    ) -> tuple[torch.Tensor, int]:
        """Copy the new version's bucket, and return what to send in its place, and the number of changed words.

        That is a delta, or the bucket of this base where a delta would be no shorter. `by_classes`: its codec.
        """
        mine, pieces = self.payloads[index], self.pieces.get(index)
        delta, num_changed = deltas.encode(
            *(mine, payload[: mine.nbytes], self.word_bytes[index]),
            by_classes=by_classes,
            advance=True,
            pieces=pieces,
            threads=_num_threads(),
        )
        self.digests[index] = digest
        return mine if delta is None else delta, num_changed

    def unchanged(self, index: int) -> torch.Tensor:
        """Return what to send for a bucket that the new version has unchanged; see `advance`."""
        mine = self.payloads[index]
        delta = deltas.without_changes(mine.nbytes // self.word_bytes[index])
        return delta if delta.nbytes < mine.nbytes else mine

    def add(self, index: int, delta: torch.Tensor) -> deltas.ChangedWords:
        """Make the bucket that of the new version, and return what changed.

        The first delta reads all of the bucket for its digest, those after it what they change. Raises IntegrityError
        for a delta that is damaged.
        """
        mine = self.payloads[index]
        if index not in self._lanes:
            self._lanes[index] = chunk_lanes(mine, threads=_num_threads())
        changed = add_delta(mine, delta, self.word_bytes[index], self._lanes[index])
        self.digests[index] = added(digest_of_lanes(self._lanes[index], mine.nbytes))
        return changed


def base_memory(num_bytes: int) -> torch.Tensor:
    """Return memory of this process, in huge pages where the kernel has them: changes are found and added faster."""
    mapping = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def word_sizes(manifest: Manifest) -> list[int]:
    """Return the size in bytes of the words of each bucket, as which deltas count them: of the smallest element."""
    sizes = [MAX_WORD_BYTES] * len(manifest.buckets)
    for record in manifest.tensors:
        for piece in record.pieces:
            sizes[piece.bucket] = min(sizes[piece.bucket], ITEMSIZE_BYTES[record.dtype])
    return sizes


def add_delta(
    payload: torch.Tensor, delta: torch.Tensor, word_bytes: int, lanes: Lanes | None = None
) -> deltas.ChangedWords:
    """Add a delta to a raw payload, and to its lanes; return what changed.

    Raises IntegrityError, with nothing changed, for a delta that is damaged.
    """
    threads, num_words = _num_threads(), payload.nbytes // word_bytes
    try:
        changes = deltas.decode(delta, num_words, word_bytes, base=payload, threads=threads)
    except ValueError as exc:
        raise IntegrityError(f"a bucket's delta is damaged: {exc}; publish again") from exc
    return changes.apply(payload, lanes=lanes, threads=threads)


def _num_threads() -> int:
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))
