"""Deltas of a publisher: its base, what a version costs as deltas, and whether they pay.

Invariants: a version is packed and encoded once, before it is offered, however many engines take it; the base has the
bits of one version, or of none; an engine that lacks that version gets a full update in the same publish. If trainer
ranks send from several origins, each has the base of its own buckets; deltas are made only if all are of one version.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from weightcast.errors import DeltaReport, InsufficientMemoryError, listed
from weightcast.format.bucket import (
    HEADER_BYTES,
    BucketBuffer,
    Digest,
    all_bytes,
    queued_digest,
    slot_size_bytes,
    write_header,
)
from weightcast.format.manifest import ITEMSIZE_BYTES, Manifest, WeightVersion
from weightcast.format.messages import DeltaBase
from weightcast.format.packed_base import PackedBase
from weightcast.host import memory as host_memory
from weightcast.host.memory import SharedMemory
from weightcast.trainer.options import DeltaMode
from weightcast.trainer.packer import Fill, PackPlan
from weightcast.trainer.sent_digests import SentDigests

_NUM_FULL = 16
"""After deltas took longer than a full update, this many updates are full before deltas are tried again."""
_SAMPLED = 16
"""One in so many of the buckets that are unchanged by the source's revisions is compared nevertheless."""


class OriginBase(PackedBase):
    """The base of the buckets that one origin sends, which becomes that of each version as it is packed.

    `encoded`: by bucket of the version that was encoded last, its delta or, where that is no shorter, the raw payload.
    `num_changed`: number of words of that version that had changed. `revisions`: the source's, of the base's version.
    """

    def __init__(self, manifest: Manifest, manifest_digest: str, origin: int) -> None:
        """Raises InsufficientMemoryError."""
        span = manifest.spans[origin]
        sizes = manifest.buckets[span.start : span.stop]
        host_memory.require(sum(sizes), "the base of deltas", "publish with delta=None, or free memory")
        super().__init__(manifest, manifest_digest, own=span)
        self.encoded: dict[int, torch.Tensor] = {}
        self.num_changed = 0
        self.revisions: Mapping[str, int] = {}
        self.origin = origin

    def begin(self) -> None:
        super().begin()
        self.encoded, self.num_changed, self.revisions = {}, 0, {}

    def unchanged_by(self, revisions: Mapping[str, int]) -> set[int]:
        """Return the buckets of which all tensors have the revision of the base."""
        kept = {name for name, _ in self.revisions.items() & revisions.items()}
        if not kept:
            return set()
        changed = (record for record in self.manifest.tensors if record.name not in kept)
        return set(self.own) - {piece.bucket for record in changed for piece in record.pieces}

    def require_unchanged(self, index: int, payload: torch.Tensor) -> None:
        """Raise ValueError, which names the tensors, unless the new version's bucket has the bits of the base's."""
        mine = self.payloads[index]
        if torch.equal(mine, payload[: mine.nbytes]):
            return
        found = []
        for record in self.manifest.tensors:
            for piece in record.pieces:
                start = piece.offset_bytes
                end = start + piece.region.numel * ITEMSIZE_BYTES[record.dtype]
                if piece.bucket == index and not torch.equal(mine[start:end], payload[start:end]):
                    found.append(repr(record.name))
        raise ValueError(
            "revisions() of the source returned the numbers of the last publish for tensors whose values have changed: "
            f"{listed(found, separator=', ')}. Return a new number for each tensor that may have changed, or leave it "
            "out; the next publish sends all weights"
        )

    def encode(self, index: int, payload: torch.Tensor, digest: Digest, sent: SentDigests | None) -> None:
        """Make the delta of the new version's bucket, and keep the bucket. `sent` gets the digests of its tensors.

        The first time that reads all of the bucket; from then on the digests follow the changes.
        """
        self.encoded[index], num_changed = self.advance(index, payload, digest)
        self.num_changed += num_changed
        if sent is not None:
            sent.add(index, payload, self.pieces.get(index))
            if index not in self.pieces:
                self.pieces[index] = sent.pieces(index, self.word_bytes[index])

    def write(self, index: int, payload: torch.Tensor, buffer: BucketBuffer, version: WeightVersion) -> int:
        """Write a bucket of the base's version, raw or as its delta, and its header; return the bytes to send."""
        raw_bytes = self.manifest.buckets[index]
        is_raw = payload.nbytes == raw_bytes
        buffer.payload[: payload.nbytes].copy_(payload)
        write_header(
            buffer.header,
            version,
            index,
            self.digests[index] if is_raw else queued_digest(payload),
            raw_bytes=raw_bytes,
            encoded_bytes=None if is_raw else payload.nbytes,
            origin=self.origin,
        )
        return HEADER_BYTES + payload.nbytes


def scratch_of(manifest: Manifest, former: BucketBuffer | None) -> BucketBuffer:
    """Return memory in which trainer ranks pack a bucket, to be compared with the base: the former, if large enough."""
    num_bytes = slot_size_bytes(manifest)
    if former is not None and HEADER_BYTES + former.payload.nbytes >= num_bytes:
        return former
    return BucketBuffer.of(SharedMemory.make(num_bytes, "comparing buckets").map().tensor())


class EncodedBuckets(NamedTuple):
    """The buckets that other origins have encoded: their lengths, digests of the raw payloads, words that changed."""

    sizes: Sequence[int]
    digests: Sequence[Digest]
    num_changed: int


class OtherBases(Protocol):
    """Other trainer ranks, which lead other origins and have an `OriginBase` each."""

    def keep_bases(self) -> set[int]:
        """Have each of these ranks keep the version; return the numbers of the versions of their bases.

        Raises InsufficientMemoryError if one has no room for a base.
        """

    def begin_encoding(self, version: WeightVersion) -> None:
        """Have buckets that are filled from now on encoded by the ranks that lead their origins."""

    def encoded(self) -> EncodedBuckets:
        """Fill and encode what the other origins have more than this one; return all that they have encoded."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedDeltas:
    """A version as it is sent to engines that have the version `base`. `manifest`: with the lengths that are sent.

    `buckets`: the base, which has the version by now. `payloads`: what is sent of each of its buckets.
    """

    base: DeltaBase
    manifest: Manifest
    buckets: OriginBase
    payloads: Mapping[int, torch.Tensor]


class Deltas:
    """The base of a publisher, and the choice between deltas and full updates. `report`: on the last publish."""

    def __init__(self, mode: DeltaMode, reason_against: str = "") -> None:
        """`reason_against`: why "auto" sends no deltas at all, over this transport for example; or empty."""
        self.report = DeltaReport()
        self._mode = mode
        self._reason_against = reason_against if mode == "auto" else ""
        self._base: OriginBase | None = None
        self._scratch: BucketBuffer | None = None
        self._revisions: Mapping[str, int] = {}
        """The source's, of the version that is published."""
        self._full_seconds = float("inf")
        """Time for packing and sending in the last full publish that kept a base."""
        self._num_full = 0
        """So many publishes are full before deltas are tried again."""

    def begin(self, plan: PackPlan, others: OtherBases | None, again: int | None, revisions: Mapping[str, int]) -> bool:
        """Begin a publish; return whether engines are asked to keep its version, as this publisher does.

        `again`: number of a version that is sent once more, for which this changes nothing. `revisions`: the source's,
        if it has some. With "always", raises InsufficientMemoryError if there is no room for a base.
        """
        if again is not None:
            self.report = DeltaReport(reason="the last version was sent once more")
            return self._base is not None and self._base.number == again
        self._revisions = dict(revisions)
        self.report = DeltaReport(reason=self._reason_against)
        if not self.report.reason and self._num_full:
            self._num_full -= 1
            self.report.reason = "deltas took longer than a full update when they were tried last"
        if self.report.reason:
            self._base = None
            return False
        try:
            if self._base is None or self._base.manifest_digest != plan.manifest_digest:
                self._base = None
                self.report.reason = "this publisher has no packed buckets of a former version of these tensors"
                self._base = OriginBase(plan.layout.manifest, plan.manifest_digest, 0)
            if others is not None and others.keep_bases() - {self._base.number}:
                self._base.begin()
        except InsufficientMemoryError as exc:
            self._base, self.report.reason = None, str(exc)
            if self._mode == "always":
                raise
        return self._base is not None

    def encode(
        self,
        fill: Fill,
        others: OtherBases | None,
        manifest: Manifest,
        version: WeightVersion,
        bases: Sequence[int],
        sent: SentDigests | None,
        on_bucket: Callable[[], None],
    ) -> PackedDeltas | None:
        """Pack all buckets, and make their deltas. `begin` comes first; from here on the base has the new version.

        Returns None if no engine has this publisher's base; then the caller keeps the buckets in `base_to_fill`.

        `bases`: numbers of the versions that the engines have. `sent`: gets the digests of tensors. `on_bucket` is
        called before each bucket.
        """
        base = self._base
        if base is None:
            return None
        if base.number < 0:
            self.report.reason = self.report.reason or "the last publish has not sent all of its version"
        elif base.number not in bases:
            self.report.reason = f"no engine has the packed buckets of version {base.number}, the last one"
        if self.report.reason:
            base.begin()
            return None
        start, of = time.perf_counter(), (base.number, base.root)
        self._scratch = scratch = scratch_of(manifest, self._scratch)
        # With verify="installed" every bucket is packed and compared.
        unchanged = checked = base.unchanged_by(self._revisions)
        if sent is None:
            checked = set(secrets.SystemRandom().sample(sorted(unchanged), -(-len(unchanged) // _SAMPLED)))
        base.begin()
        if others is not None:
            others.begin_encoding(version)
        for index in manifest.spans[0]:
            on_bucket()
            if index in unchanged - checked:
                base.encoded[index] = base.unchanged(index)
                continue
            digest = fill.fill(index, scratch.payload, version)
            if index in checked:
                base.require_unchanged(index, scratch.payload)
            base.encode(index, scratch.payload, digest, sent)
        theirs = EncodedBuckets((), (), 0) if others is None else others.encoded()
        payloads, base.digests[len(base.own) :] = base.encoded, theirs.digests
        sizes = (*(payload.nbytes for payload in payloads.values()), *theirs.sizes)
        base.complete(version.number)
        base.encoded, base.revisions = {}, self._revisions
        self.report.base, self.report.num_words = of[0], base.num_words
        self.report.num_changed = base.num_changed + theirs.num_changed
        self.report.num_bytes, self.report.encode_seconds = sum(sizes), time.perf_counter() - start
        digests = tuple(digest.hex() for digest in all_bytes(base.digests))
        return PackedDeltas(DeltaBase(*of, sizes, digests), manifest.with_sizes(sizes), base, payloads)

    @property
    def base_to_fill(self) -> OriginBase | None:
        """The base, if there is one that has not all of the version yet."""
        return None if self._base is None or self._base.number >= 0 else self._base

    def sent_full(self, number: int, digests: Sequence[Digest], seconds: float) -> None:
        """Note that a full publish has packed and sent all buckets, of these digests, in this time."""
        if self._base is not None and self._base.number < 0:
            self._base.digests = list(digests)
            self._base.complete(number)
            self._base.revisions = self._revisions
            self._full_seconds = seconds

    def sent(self, seconds: float, num_engines: int) -> None:
        """Note that so many engines have received the deltas, in this time from the first one's sending on."""
        self.report.num_engines = num_engines
        if self._mode == "auto" and self.report.encode_seconds + seconds > self._full_seconds:
            self._num_full = _NUM_FULL

    def release(self) -> None:
        """Free the base, so that the next publish is full."""
        self._base = self._scratch = None
