"""A run's session with a worker: its link and its receivers, connected in the background, and its layouts."""

from __future__ import annotations

import contextlib
import datetime
import functools
import hmac
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from msgspec import UNSET

from weightcast import registry
from weightcast.errors import (
    ClosedError,
    ErrorRecord,
    InsufficientMemoryError,
    RefusedError,
    UnsupportedError,
    WeightcastError,
    WrongBaseError,
    from_record,
    malformed,
    to_record,
)
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.format.messages import Failed, Hello, InitInfo, LinkMessage, Offer, Secret, UpdateInfo
from weightcast.format.packed_base import PackedBase
from weightcast.host import device as host_device
from weightcast.host import memory as host_memory
from weightcast.host.closing import awaited_at_exit, on_failure
from weightcast.host.deadline import GRACE_SECONDS
from weightcast.host.descriptors import shortage
from weightcast.host.memory import SharedMemory, host_identity
from weightcast.links.link import WorkerLink
from weightcast.seams.transport import Bucket, Portion, Receiver
from weightcast.serving.install import Install
from weightcast.serving.update import Update

logger = logging.getLogger(__name__)


class PublisherSession:
    """One run's claim on the worker, with its link, its receivers and the layouts that it has sent."""

    def __init__(
        self,
        info: InitInfo,
        engine_rank: int,
        device: torch.device,
        on_end: Callable[[PublisherSession, str], None],
        *,
        is_alone: bool,
    ) -> None:
        """`device`: of the engine's weights. `is_alone`: the engine has no other ranks."""
        self.info = info
        self.ended: ErrorRecord | None = None
        """The error with which the session has ended; None before that."""
        self.offering = threading.Lock()
        """Serialises offers: each is checked and opened before the next one."""
        self.update: Update | None = None
        self.last_offered = -1
        self.base: PackedBase | None = None
        """The packed buckets to which the next version's deltas are added, if the publisher has asked to keep them."""
        self._base_memory: SharedMemory | None = None
        """Memory for the base of all ranks of the engine on this host, which use that of the first of them."""
        self._freeing = threading.Lock()
        """Locked while that memory is freed or closed: `release` may run beside `close`."""
        self.install: Install | None = None
        """The install of the layout that was offered last."""
        self.receiver: Receiver | None = None
        self._links: list[WorkerLink] = []
        """To the publisher, and to the trainer ranks that send other origins' buckets; empty until it connects."""
        self._began_at = datetime.datetime.now(datetime.UTC)
        self._began = time.monotonic()
        self._on_end = on_end
        self._engine_rank = engine_rank
        self._is_alone = is_alone
        self.device = device
        self._connected = threading.Event()
        self.receiving: threading.Thread | None = None
        """The thread that receives the update."""

    @functools.cached_property
    def stream(self) -> Any:
        """The stream of its receiving threads, made once: torch hands out its few streams again and again."""
        return host_device.stream(self.device)

    @property
    def is_abandoned(self) -> bool:
        """True if the session's publisher is gone, also before the link has noticed it, and no install is running."""
        is_gone = bool(self._links) and self._links[0].has_ended
        return is_gone and not (self.update is not None and self.update.is_writing)

    @property
    def is_dropped(self) -> bool:
        """True if the session's publisher has said that its run goes on without this engine."""
        return bool(self._links) and self._links[0].is_dropped

    def require_going_on(self) -> None:
        """Raise the error with which the session has ended, if it has."""
        if self.ended is not None:
            raise from_record(self.ended)

    def is_of(self, secret: Secret) -> bool:
        """Return whether this is the secret of the session's publisher."""
        return secret is not UNSET and hmac.compare_digest(secret, self.info.secret)

    def require_publisher(self, info: UpdateInfo) -> None:
        """Raise RefusedError unless the session's publisher sent this. The secret shows that; a run's id is public."""
        if not self.is_of(info.secret):
            raise RefusedError(
                f"this {type(info).__name__.lower()} of version {info.version} lacks the secret of run {info.run}: "
                "only the publisher that holds this engine may send it"
            )

    def who(self) -> str:
        """Describe the holder of the worker, since when, and what ends the session, for a publisher that is refused."""
        info, since = self.info, self._began_at.isoformat(" ", "seconds")
        where = "" if info.publisher is UNSET else f" ({info.publisher})"
        begin = f"run {info.run}{where} has held this engine since {since}, for {time.monotonic() - self._began:.0f} s"
        if self._links and self._links[0].has_ended:
            return f"{begin}; its publisher is gone, and the engine is free once the install in progress has ended"
        lives = "While that publisher's process lives, also if the publisher is not used, the lease does not end"
        if not self._links or not self._links[0].is_open:
            return f"{begin}, and is still connecting. {lives}"
        silent, lease = self._links[0].silent_seconds, info.lease_seconds
        return (
            f"{begin}; its publisher sent its last message {silent:.1f} s ago. {lives}; without another message it "
            f"ends in at most {max(0.0, lease - silent):.0f} s"
        )

    def connect(self) -> None:
        """Connect the link and the receivers, in a thread of its own."""
        info, rank = self.info, self._engine_rank
        failure: str | None = None
        try:
            receivers: list[Receiver] = []
            with on_failure(lambda: _for_all([receiver.close for receiver in receivers])):
                for address in (info.link, *info.origins):
                    link = WorkerLink(
                        address,
                        lease_seconds=info.lease_seconds,
                        deadline_seconds=info.deadline_seconds,
                        on_end=functools.partial(self._on_end, self) if address == info.link else None,
                        on_release=self._release_in_background,
                    )
                    self._links.append(link)
                    receiver = registry.transport(info.transport).receiver(
                        info.transport,
                        peer=f"{info.engine}#{rank}" if rank else info.engine,
                        run=info.run,
                        link=link,
                        device=self.device,
                        # A publisher that waits for an engine's answer sends nothing else until it has it.
                        deadline_seconds=info.deadline_seconds + info.lease_seconds,
                    )
                    receivers.append(receiver)
            self.receiver = OriginReceivers(receivers) if info.origins else receivers[0]
            memory = "" if self._is_alone else self.receiver.common_memory()
            if not (self._is_alone or memory):
                self._base_memory = SharedMemory.make(what="the base of deltas")
                memory = self._base_memory.location
            hello = Hello(info.run, info.engine, rank, info.secret, host=host_identity(), memory=memory)
            # The publisher's last: its hello means that this worker is ready for an offer.
            for link in self._links[1:]:
                link.open(hello)
                link.await_welcome()
            if self.ended is None:
                # Not after the session has ended: a late hello would be taken for that of the next session.
                self._links[0].open(hello)
        except Exception as exc:
            said = str(exc) if isinstance(exc, WeightcastError) else f"{type(exc).__name__}: {exc}"
            failure = shortage(exc) or said
            logger.warning("could not connect to the publisher of run %s: %s", info.run[:8], failure)
        if failure is not None:
            self._on_end(self, f"the connection to its publisher failed: {failure}")
        self._connected.set()
        if self.ended is not None:
            self.close()

    def _release_in_background(self) -> None:
        # Not in the link's thread, since freeing GPU memory waits for all queued work.
        awaited_at_exit(functools.partial(self.release, self.last_offered), "weightcast-release")

    def release(self, number: int) -> None:
        """Release the memory that is kept for the next update, unless one has begun after version `number`."""
        with self.offering:
            if self.last_offered != number or (self.update is not None and not self.update.has_ended()):
                return
            # `own_stream` relaxes the thread's capture mode: GPU memory is freed while an engine may capture a graph.
            with host_device.own_stream(self.device), contextlib.suppress(WeightcastError):
                with self._freeing:
                    self.base, memory = None, self._base_memory
                    # No other rank uses it now: a version that ended well has ended on all, and none receives the next
                    # one before this rank has accepted it.
                    if memory is not None and os.fstat(memory.descriptor).st_size:
                        memory.map().free()
                if self.install is not None:
                    self.install.forget_views()
                if self.receiver is not None:
                    self.receiver.release()

    def base_of(self, offer: Offer, manifest: Manifest, portion: Portion | None) -> PackedBase | None:
        """Return the base of the offer's deltas or, for a full update, where to keep its buckets, if there is room.

        `portion`: of the buckets, if several ranks on this host share a base, in the memory of the first of them.
        Raises WrongBaseError if the known base is another version's, ManifestError for lengths that deltas of this
        layout can't have.
        """
        sizes, base, known = manifest.buckets, offer.base, self.base
        if known is not None and known.manifest_digest != offer.manifest_digest:
            known = None
        if base is not None:
            if known is None or (known.number, known.root) != (base.version, base.root):
                found = "of no version" if known is None or known.number < 0 else f"of version {known.number}"
                raise WrongBaseError(
                    f"deltas on version {base.version} (root digest {base.root}) were offered, but this worker has the "
                    f"packed buckets {found}: offer a full update"
                )
            lengths = base.encoded_bytes
            if not (
                len(lengths) == len(base.digests) == len(sizes)
                and all(0 < length <= size and length % 8 == 0 for length, size in zip(lengths, sizes, strict=True))
            ):
                raise malformed("size", "the lengths of deltas do not fit the manifest's buckets: offer a full update")
            if offer.install != "staged":
                raise UnsupportedError('deltas are installed with install="staged": offer a full update')
            return known
        if offer.install != "staged":
            return None
        if known is None:
            memory = self._base_memory
            try:
                if portion is None or memory is None:
                    host_memory.require(sum(sizes), "the base of deltas", "publish with delta=None, or free memory")
                    return PackedBase(manifest, offer.manifest_digest)
                if portion.memory != memory.location:
                    memory = SharedMemory.open(portion.memory)
                memory.grow(sum(sizes), "the base of deltas")
                return PackedBase(manifest, offer.manifest_digest, memory.map().tensor(), portion.buckets)
            except (InsufficientMemoryError, UnsupportedError) as exc:
                logger.warning("the next version can't come as deltas: %s", exc)
        return known

    def require_receiver(self) -> Receiver:
        """Return the connected receiver.

        Raises the error with which the session has ended, ClosedError if it is still connecting.
        """
        # The publisher may answer the hello with an offer before the connecting thread has returned from sending it.
        if not self._connected.wait(GRACE_SECONDS):
            raise ClosedError("the link to the publisher is not connected yet: wait for the worker's hello, then offer")
        self.require_going_on()
        assert self.receiver is not None
        return self.receiver

    def require_origins(self, manifest: Manifest) -> None:
        """Raise ManifestError unless there is an address for each origin, or one address of a store for all."""
        if registry.transport(self.info.transport).keeps_versions:
            return
        found, known = len(manifest.spans), 1 + len(self.info.origins)
        if found > known:
            raise malformed(
                "origin",
                f"buckets of {found} origins were offered, but init named {known} addresses: offer as many origins",
            )

    def send(self, message: LinkMessage) -> None:
        """Send over the link, if there is one by now. Errors are ignored; see `WorkerLink.send`."""
        if self._links:
            self._links[0].send(message)

    def abort_update(self, error: WeightcastError) -> None:
        """Abort an update in progress, and report the error over the link."""
        if self.update is not None and self.update.abort(error):
            self.send(Failed(self.update.version.number, to_record(error)))

    def end_update(self, error: WeightcastError) -> None:
        """Abort an update in progress, and wait until its thread no longer uses the receiver."""
        if self.update is not None:
            self.update.abort(error)
        if self.receiving is not None:
            self.receiving.join(timeout=GRACE_SECONDS)
            if self.receiving.is_alive():
                raise ClosedError(
                    "the former update was aborted but its thread still uses the receiver: publish again, which "
                    "connects again"
                )

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if self.receiver is not None:
            self.receiver.close()
        for link in self._links:
            link.close()
        with self._freeing:
            self.base, memory, self._base_memory = None, self._base_memory, None
            if memory is not None:
                memory.close()
        # Views keep the transport's memory mapped, and this object may be part of a reference cycle.
        if self.install is not None:
            self.install.forget_views()


class OriginReceivers(Receiver):
    """Implements `Receiver` for an update from several origins, with one receiver for each.

    A bucket has its number in the whole manifest, and is valid until the next bucket of its origin is requested. An
    origin's error is raised when its next bucket is due.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        """`receivers[o]`: connected to the sender of origin o. An update of fewer origins uses the first ones."""
        self._receivers = receivers
        self._manifest: Manifest | None = None

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        self._manifest = manifest
        for origin, _ in enumerate(manifest.spans):
            part = manifest.of_origin(origin) if manifest.origins else manifest
            self._receivers[origin].open(part, version, staged=staged)

    def read_together(self, manifest: Manifest, portion: Portion) -> bool:
        return all(receiver.read_together(manifest, portion) for receiver in self._receivers)

    def __iter__(self) -> Iterator[Bucket]:
        """Yield every bucket once: in each round the next bucket of each origin."""
        manifest = self._manifest
        assert manifest is not None, "open() comes first"
        origins, spans = manifest.bucket_origins, manifest.spans
        arriving = [_numbered(*pair) for pair in zip(self._receivers, spans, strict=False)]
        for index in manifest.rounds:
            yield from itertools.islice(arriving[origins[index]], 1)
        # Each receiver is advanced once more: that releases its last bucket, and raises if its sender was lost.
        for rest in arriving:
            yield from rest

    def reread(self, bucket: Bucket) -> bool:
        assert self._manifest is not None, "open() comes first"
        origin = self._manifest.bucket_origins[bucket.index]
        start = self._manifest.spans[origin].start
        return self._receivers[origin].reread(Bucket(bucket.index - start, bucket.buffer))

    def end(self) -> None:
        _for_all([receiver.end for receiver in self._receivers])

    def release(self) -> None:
        _for_all([receiver.release for receiver in self._receivers])

    def close(self) -> None:
        _for_all([receiver.close for receiver in self._receivers])


def _numbered(receiver: Receiver, span: range) -> Iterator[Bucket]:
    """Yield the buckets of one origin, with their numbers in the whole manifest."""
    for bucket in receiver:
        yield Bucket(span.start + bucket.index, bucket.buffer)
        del bucket


def _for_all(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call, also after one has raised."""
    with contextlib.ExitStack() as stack:
        for call in calls:
            stack.callback(call)
