"""A worker's end of the collective transport: hears the sender over a link, and takes its broadcasts in the background.

Invariants: what a group that was left still brings counts for nothing; records of a former update are never taken for
the present one.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import torch

from weightcast import process_group
from weightcast.errors import UnsupportedError, WeightcastError
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.format.messages import Hello
from weightcast.host.closing import on_failure
from weightcast.host.memory import host_identity
from weightcast.links.link import WorkerLink
from weightcast.seams.transport import Bucket, Receiver
from weightcast.transports.collective import records
from weightcast.transports.collective.broadcast_reader import BroadcastReader, BucketTarget
from weightcast.transports.collective.receive_buffers import NUM_SLOTS, ReceiveBuffers
from weightcast.transports.receiving import CONNECT_SECONDS, ReceivingEnd, WantedUpdate
from weightcast.transports.sending import MAX_REASON_CHARACTERS


@dataclasses.dataclass(slots=True, eq=False)
class BroadcastUpdate(WantedUpdate[records.BeginUpdate]):
    """`begun` in its latest form. `num_released` buckets may be overwritten."""

    num_received: int = 0
    num_released: int = 0

    @property
    def number(self) -> int:
        return 0 if self.begun is None else self.begun.update


class CollectiveReceiver(ReceivingEnd[BroadcastUpdate]):
    """Implements `Receiver`, and `BucketSink`.

    Memory: staged, the whole version, in host memory, once for all workers of the engine on this host; streaming, three
    buckets, on the GPU with NCCL. Besides, two buckets where they can't arrive in their place: staged with NCCL, and
    those that come again after a loss.
    """

    def __init__(
        self, url: str, *, peer: str, run: str, deadline_seconds: float = 60.0, device: torch.device | None = None
    ) -> None:
        """Connect to a sender's address, as `peer`. `device`: where NCCL's broadcasts arrive, a GPU.

        Raises PeerDiedError, UnsupportedError, ManifestError.
        """
        super().__init__(run, deadline_seconds)
        address = records.parse_address(url)
        self._backend = address.backend
        process_group.require(self._backend)
        if self._backend == "nccl" and (device is None or device.type != "cuda"):
            raise UnsupportedError(
                "nccl moves memory of GPUs, and this engine does not say that its weights are on one: give the engine "
                "a property `device` (see weightcast.seams.engine.OnDevice), or publish over gloo://"
            )
        self._device = torch.device("cpu") if device is None or self._backend != "nccl" else device
        self._buffers = ReceiveBuffers(run, peer, self._device, deadline_seconds)
        self._epoch = 0
        self._pending: records.BeginUpdate | None = None
        self._stream: BroadcastReader | None = None
        self._publisher = f"the publisher at {address.url.rpartition('/')[0]}"
        self._ready = threading.Event()
        process_group.close_at_exit(self)
        connect_seconds = min(deadline_seconds, CONNECT_SECONDS)
        self._link = WorkerLink(
            f"tcp:{address.host}:{address.port}",
            Hello(run, peer, 0, address.secret),
            lease_seconds=deadline_seconds,
            on_end=self._on_end,
            on_message=self._on_message,
            messages=records.ToReceiver,
            connect_seconds=connect_seconds,
        )
        self._send(records.HostIdentity(host_identity()))
        self._ready.set()
        with on_failure(self._link.close):
            # What is offered to this worker may be sent at once: by then the sender must know of it.
            self._link.await_welcome(connect_seconds)

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Wait for `version` from now on. Raises PeerDiedError if the sender has gone, InsufficientMemoryError."""
        self._check_run(version)
        self.end()
        with self._condition:
            self._require_connection()
            self._buffers.prepare(manifest, staged=staged)
            self._heard_at = time.monotonic()
            self._wanted = BroadcastUpdate(manifest, version, staged)
            self._send(records.Opened(version.number))
            self._match()
            self._condition.notify_all()

    def reread(self, bucket: Bucket) -> bool:
        """With shared memory, what this worker wrote over a bucket is dropped; else every update arrives anew."""
        reader = self._buffers.reader
        return reader is not None and reader.reread(bucket)

    def close(self) -> None:
        super().close()
        self._link.close()
        self._buffers.close()

    def _leave(self, wanted: BroadcastUpdate) -> None:
        if wanted.num_received < wanted.num_buckets:
            self._send(records.UpdateEnded(wanted.version.number, wanted.number))
            self._leave_group()
        self._buffers.end_reader()

    def _disconnect(self) -> None:
        self._leave_group()
        if self._buffers.reader is not None:
            self._buffers.reader.close()

    # --- buckets ---

    def _buckets(self, wanted: BroadcastUpdate) -> Iterator[Bucket]:
        if wanted.num_buckets == 0:
            return
        with self._condition:
            self._await(wanted, lambda: wanted.begun)
            reader = self._buffers.reader
        yield from super()._buckets(wanted) if reader is None else self._shared_buckets(wanted, reader)

    def _shared_buckets(self, wanted: BroadcastUpdate, reader: Receiver) -> Iterator[Bucket]:
        try:
            for bucket in reader:
                wanted.num_taken += 1
                yield bucket
                del bucket
        except WeightcastError:
            with self._condition:
                self._check_live(wanted)
            raise
        with self._condition:
            self._check_live(wanted)
            if self._stream is None:
                self._on_whole(wanted)

    def _next_bucket(self, wanted: BroadcastUpdate) -> Bucket | None:
        index = wanted.num_taken
        return Bucket(index, self._buffers.buffer(index)) if wanted.num_received > index else None

    def _release(self, wanted: BroadcastUpdate, index: int) -> None:
        with self._condition:
            wanted.num_released = index + 1
            self._condition.notify_all()

    def _patience_seconds(self, wanted: BroadcastUpdate) -> float:
        """The sender may at any time wait for somebody, a trainer rank say, before it packs."""
        return 2 * self._deadline_seconds

    # --- what the sender says, in the link's thread ---

    def _on_end(self, reason: str) -> None:
        with self._condition:
            self._ended = reason
            self._leave_group()
            self._buffers.end_reader()
            self._condition.notify_all()

    def _on_message(self, message: Any) -> None:
        self._ready.wait(CONNECT_SECONDS)
        with self._condition:
            self._heard_at = time.monotonic()
            match message:
                case records.Join():
                    self._on_join(message)
                case records.Connect():
                    if self._stream is not None and self._stream.epoch == message.epoch:
                        self._stream.start()
                case records.ReadAlong():
                    self._on_read_along(message)
                case records.BeginUpdate():
                    self._pending = message
                    self._match()
                case records.UpdateAborted():
                    self._on_aborted(message)
                case records.ProgressQuestion():
                    self._on_ask(message)
            self._condition.notify_all()

    def _on_join(self, join: records.Join) -> None:
        self._leave_group()
        self._pending, wanted = None, self._wanted
        try:
            shared = self._buffers.share(join.readers)
            if wanted is not None and wanted.begun is None:
                self._buffers.prepare(wanted.manifest, staged=wanted.staged)
        except WeightcastError as exc:
            self._send_failed(join.epoch, exc)
            return
        self._epoch = join.epoch
        self._stream = BroadcastReader(self, join, self._backend, host=self._link.local_host, device=self._device)
        update, num_received = self._progress()
        self._send(records.Joining(join.epoch, update, num_received, shared))

    def _on_read_along(self, other: records.ReadAlong) -> None:
        self._leave_group()
        self._pending = None
        try:
            self._buffers.read_from(other.address)
        except WeightcastError as exc:
            self._send_failed(other.epoch, exc)
            return
        self._epoch = other.epoch
        self._send(records.Joining(other.epoch))

    def _on_aborted(self, aborted: records.UpdateAborted) -> None:
        if self._pending is not None and self._pending.update == aborted.update:
            self._pending = None
        if self._wanted is not None and self._wanted.number == aborted.update:
            self._wanted.aborted = aborted.reason
            self._buffers.end_reader()
        self._leave_group()

    def _on_ask(self, ask: records.ProgressQuestion) -> None:
        wanted, stream = self._wanted, self._stream
        is_whole = wanted is not None and wanted.num_received == wanted.num_buckets
        is_waiting = stream is None or bool(stream.targets) or is_whole
        self._send(records.Progress(ask.question, *self._progress(), is_waiting))

    def _progress(self) -> tuple[int, int]:
        """The update that is wanted, or 0, and how many buckets of it have come in."""
        wanted = self._wanted
        return (0, 0) if wanted is None else (wanted.number, wanted.num_received)

    def _match(self) -> None:
        """Join what the sender has begun with what is wanted; what isn't wanted is declined at once."""
        wanted, begin = self._wanted, self._pending
        if wanted is None or begin is None or (wanted.begun is not None and wanted.number != begin.update):
            return
        self._pending = None
        if begin.version != wanted.version.number:
            self._decline(begin)
            return
        if begin.epoch != self._epoch:
            self._send(records.JoinFailed(begin.epoch, "it has left this group"))
            return
        found, expected = (begin.num_buckets, begin.staged), (wanted.num_buckets, wanted.staged)
        # Who reads along takes no buckets of the group's, and counts none.
        if found != expected or (self._stream is not None and begin.first > wanted.num_received):
            wanted.aborted = f"the publisher sends (buckets, staged) = {found}, the offer said {expected}"
            self._buffers.end_reader()
            self._decline(begin)
            return
        is_first, wanted.begun = wanted.begun is None, begin
        if self._buffers.reader is not None and is_first:
            self._buffers.reader.open(wanted.manifest, wanted.version, staged=True)
        if self._stream is not None:
            self._stream.position = begin.first
        if wanted.num_received == wanted.num_buckets:
            self._send(records.AllReceived(begin.update))

    def _decline(self, begin: records.BeginUpdate) -> None:
        self._send(records.UpdateEnded(begin.version, begin.update))
        self._leave_group()

    # --- what the stream does, in its own thread ---

    def next_target(self, stream: BroadcastReader, *, wait: bool) -> BucketTarget | None:
        with self._condition:
            if wait:
                self._condition.wait_for(lambda: stream.is_left or self._has_room(stream))
            elif self._buffers.is_shared or not self._has_room(stream):
                return None
            wanted, index = self._wanted, stream.position
            if stream.is_left or wanted is None:
                return None
            stream.position += 1
            is_here = index < wanted.num_received
        return self._buffers.target(wanted.number, wanted.manifest, wanted.version, index, is_here=is_here)

    def _has_room(self, stream: BroadcastReader) -> bool:
        wanted = self._wanted
        if wanted is None or wanted.begun is None or wanted.begun.epoch != stream.epoch:
            return False
        if stream.position >= wanted.num_buckets:
            return False
        return wanted.staged or stream.position < wanted.num_released + NUM_SLOTS

    def on_received(self, stream: BroadcastReader, target: BucketTarget) -> None:
        with self._condition:
            wanted = self._wanted
            if stream.is_left or wanted is None:
                return
        if target.index >= wanted.num_received:
            self._buffers.deliver(target)
        with self._condition:
            if self._stream is not stream or self._wanted is not wanted:
                return
            self._heard_at = time.monotonic()
            wanted.num_received = max(wanted.num_received, target.index + 1)
            if wanted.num_received == wanted.num_buckets:
                self._on_whole(wanted)
            self._condition.notify_all()

    def _on_whole(self, wanted: BroadcastUpdate) -> None:
        wanted.num_received = wanted.num_buckets
        self._send(records.AllReceived(wanted.number))

    def on_broken(self, stream: BroadcastReader, error: WeightcastError, *, is_own: bool = False) -> None:
        with self._condition:
            if not stream.is_left:
                # The sender finds out who was lost, and invites to another group.
                self._leave_group()
                self._send_failed(stream.epoch, error, is_own=is_own)

    def _leave_group(self) -> None:
        stream, self._stream = self._stream, None
        self._epoch = 0
        if stream is not None:
            stream.is_left = True
            self._buffers.leave(stream)
            self._condition.notify_all()

    def _send_failed(self, epoch: int, error: WeightcastError, *, is_own: bool = False) -> None:
        self._send(records.JoinFailed(epoch, str(error)[:MAX_REASON_CHARACTERS], is_own))

    def _send(self, record: msgspec.Struct) -> None:
        # A sender that has gone is noticed by the link's own thread.
        try:
            self._link.send(record)
        except OSError:
            self._ended = "it takes no records"
