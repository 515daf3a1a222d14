"""Deltas of a publisher: its base, what a version costs as deltas, and whether they pay.

Invariants: a version is packed and encoded once, before it is offered, however many engines take it; the base has the
bits of one version, or of none; an engine that lacks that version gets a full update in the same publish.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from weightcast.errors import DeltaReport, InsufficientMemoryError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, Digest, all_bytes, queued_digest, write_header
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.format.messages import DeltaBase
from weightcast.format.packed_base import PackedBase
from weightcast.host import memory as host_memory
from weightcast.host.memory import SharedMemory
from weightcast.trainer.options import DeltaMode
from weightcast.trainer.packer import Fill, PackPlan
from weightcast.trainer.sent_digests import SentDigests

_NUM_FULL = 16
"""After deltas took longer than a full update, this many updates are full before deltas are tried again."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackedDeltas:
    """A version as it is sent to engines that have the version `base`. `manifest`: with the lengths that are sent.

    `payloads`: by bucket, its delta or, where that is no shorter, the raw payload. `digests`: of the raw payloads.
    `root`: the version's root digest.
    """

    base: DeltaBase
    manifest: Manifest
    payloads: Sequence[torch.Tensor]
    raw_sizes: Sequence[int]
    digests: Sequence[Digest]
    root: str

    def write(self, index: int, buffer: BucketBuffer, version: WeightVersion) -> int:
        """Write bucket `index` and its header; return the number of bytes to send."""
        payload, raw_bytes = self.payloads[index], self.raw_sizes[index]
        buffer.payload[: payload.nbytes].copy_(payload)
        is_raw = payload.nbytes == raw_bytes
        write_header(
            buffer.header,
            version,
            index,
            self.digests[index] if is_raw else queued_digest(payload),
            raw_bytes=raw_bytes,
            encoded_bytes=None if is_raw else payload.nbytes,
        )
        return HEADER_BYTES + payload.nbytes


class Deltas:
    """The base of a publisher, and the choice between deltas and full updates. `report`: on the last publish."""

    def __init__(self, mode: DeltaMode, reason_against: str = "") -> None:
        """`reason_against`: why "auto" sends no deltas at all, over this transport for example; or empty."""
        self.report = DeltaReport()
        self._mode = mode
        self._reason_against = reason_against if mode == "auto" else ""
        self._base: PackedBase | None = None
        self._scratch: torch.Tensor | None = None
        """Memory in which trainer ranks pack a bucket, to be compared with the base; kept while it is large enough."""
        self._full_seconds = float("inf")
        """Time for packing and sending in the last full publish that kept a base."""
        self._num_full = 0
        """So many publishes are full before deltas are tried again."""

    def begin(self, plan: PackPlan, again: int | None) -> bool:
        """Begin a publish; return whether engines are asked to keep its version, as this publisher does.

        `again`: number of a version that is sent once more, for which this changes nothing. With "always", raises
        InsufficientMemoryError if there is no room for a base.
        """
        if again is not None:
            self.report = DeltaReport(reason="the last version was sent once more")
            return self._base is not None and self._base.number == again
        self.report = DeltaReport(reason=self._reason_against)
        if not self.report.reason and self._num_full:
            self._num_full -= 1
            self.report.reason = "deltas took longer than a full update when they were tried last"
        if self.report.reason:
            self._base = None
        elif plan.layout.manifest.origins:
            self._base = None
            self.report.reason = "trainer ranks that can't map each other's memory send a part each"
            if self._mode == "always":
                raise ValueError(f'{self.report.reason}, so delta="always" is impossible: publish with delta=None')
        elif self._base is None or self._base.manifest_digest != plan.manifest_digest:
            self._base = None
            self.report.reason = "this publisher has no packed buckets of a former version of these tensors"
            try:
                host_memory.require(
                    sum(plan.layout.manifest.buckets), "the base of deltas", "publish with delta=None, or free memory"
                )
                self._base = PackedBase(plan.layout.manifest, plan.manifest_digest)
            except InsufficientMemoryError as exc:
                if self._mode == "always":
                    raise
                self.report.reason = str(exc)
        return self._base is not None

    def encode(
        self,
        fill: Fill,
        manifest: Manifest,
        version: WeightVersion,
        bases: Sequence[int],
        on_bucket: Callable[[], None],
    ) -> PackedDeltas | None:
        """Pack all buckets, and make their deltas; None if no engine has this publisher's base. `begin` comes first.

        `bases`: numbers of the versions that the engines have. `on_bucket` is called before each bucket. From here on
        the base has the new version.
        """
        base = self._base
        if base is None:
            return None
        if base.number < 0:
            self.report.reason = self.report.reason or "the last publish has not sent all of its version"
            return None
        if base.number not in bases:
            self.report.reason = f"no engine has the packed buckets of version {base.number}, the last one"
            return None
        start, of = time.perf_counter(), (base.number, base.root)
        if self._scratch is None or self._scratch.nbytes < manifest.max_bucket_bytes:
            self._scratch = SharedMemory.make(manifest.max_bucket_bytes, "comparing buckets").map().tensor()
        payloads, num_changed = list[torch.Tensor](), 0
        base.begin()
        for index in range(len(manifest.buckets)):
            on_bucket()
            digest = fill.fill(index, self._scratch, version)
            payload, changed = base.advance(index, self._scratch, digest)
            payloads.append(payload)
            num_changed += changed
        root, sizes = base.complete(version.number), tuple(payload.nbytes for payload in payloads)
        self.report.base, self.report.num_changed, self.report.num_words = of[0], num_changed, base.num_words
        self.report.num_bytes, self.report.encode_seconds = sum(sizes), time.perf_counter() - start
        return PackedDeltas(
            DeltaBase(*of, sizes, tuple(digest.hex() for digest in all_bytes(base.digests))),
            manifest.with_sizes(sizes),
            payloads,
            manifest.buckets,
            list(base.digests),
            root,
        )

    def keeping(self, fill: Fill, encoded: PackedDeltas | None) -> Fill:
        """Return a fill for full updates: `fill`, whose buckets become the base; of an encoded version, the base."""
        base = self._base
        if base is None:
            return fill
        return KeepingFill(fill, base) if encoded is None else BaseFill(base)

    def sent_full(self, number: int, seconds: float) -> None:
        """Note that a full publish has packed and sent everything, in this time."""
        if self._base is not None and self._base.number < 0:
            self._base.complete(number)
            self._full_seconds = seconds

    def sent(self, seconds: float, num_engines: int) -> None:
        """Note that so many engines have received the deltas, in this time from the first one's sending on."""
        self.report.num_engines = num_engines
        if self._mode == "auto" and self.report.encode_seconds + seconds > self._full_seconds:
            self._num_full = _NUM_FULL

    def release(self) -> None:
        """Free the base, so that the next publish is full."""
        self._base = self._scratch = None


class KeepingFill:
    """Implements `Fill`: fills from another one, and keeps what was filled as the base."""

    def __init__(self, fill: Fill, base: PackedBase) -> None:
        self.sent: SentDigests | None = None
        self._fill = fill
        self._base = base
        base.begin()

    def fill(self, index: int, payload: torch.Tensor, version: WeightVersion) -> Digest:
        digest = self._fill.fill(index, payload, version)
        self._base.keep(index, payload, digest)
        return digest

    def others(self) -> Sequence[Digest]:
        return self._fill.others()

    def forget_views(self) -> None:
        self._fill.forget_views()


class BaseFill:
    """Implements `Fill` from the base: for a version of which deltas were made, so that the source is read once."""

    def __init__(self, base: PackedBase) -> None:
        self.sent: SentDigests | None = None
        self._base = base

    def fill(self, index: int, payload: torch.Tensor, version: WeightVersion) -> Digest:
        kept = self._base.payloads[index]
        payload[: kept.nbytes].copy_(kept)
        return self._base.digests[index]

    def others(self) -> Sequence[Digest]:
        return ()

    def forget_views(self) -> None: ...
