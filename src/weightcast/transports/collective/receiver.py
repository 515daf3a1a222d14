"""A worker's end of the collective transport: hears the sender over a link, and takes its broadcasts in the background.

Invariants: a bucket is handed out only in its turn, and only while the link lives; what a group that was left still
brings counts for nothing; records of a former update are never taken for the present one. `end` and `close` may be
called from any thread and wake an iteration that waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from weightcast import process_group
from weightcast.errors import ClosedError, PeerDiedError, PeerTimeoutError, UpdateAbortedError, WeightcastError
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.format.messages import Hello
from weightcast.host.memory import host_identity
from weightcast.links.link import WorkerLink
from weightcast.seams.transport import Bucket, Receiver
from weightcast.transports.collective.broadcast_reader import BroadcastReader, BucketTarget
from weightcast.transports.collective.receive_buffers import ReceiveBuffers, WantedUpdate
from weightcast.transports.collective.records import (
    MAX_REASON_CHARACTERS,
    AllReceived,
    BeginUpdate,
    Connect,
    HostIdentity,
    Join,
    JoinFailed,
    Joining,
    Opened,
    Progress,
    ProgressQuestion,
    ReadAlong,
    ToReceiver,
    UpdateAborted,
    UpdateEnded,
    parse_address,
)
from weightcast.transports.collective.slots import NUM_SLOTS

_PUBLISHER = "trainer"
_CONNECT_SECONDS = 15.0
_PATIENCE = 2.0
"""Deadlines without a word of the sender: it may itself wait for somebody, a trainer rank say, before it packs."""


class CollectiveReceiver(Receiver):
    """Implements `Receiver`, and `BucketSink`.

    Memory: staged, the whole version, in host memory, once for all workers of the engine on this host; streaming, three
    buckets, on the GPU with NCCL. Besides, two buckets where they can't arrive in their place: staged with NCCL, and
    those that come again after a loss.
    """

    def __init__(self, url: str, *, peer: str, run: str, deadline_seconds: float = 60.0) -> None:
        """Connect to a sender's address, as `peer`. Raises PeerDiedError, UnsupportedError, ManifestError."""
        address = parse_address(url)
        self._backend = address.backend
        process_group.require(self._backend)
        self._device = (
            torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")
        )
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._condition = threading.Condition()
        self._buffers = ReceiveBuffers(run, peer, self._device, deadline_seconds)
        self._epoch = 0
        self._wanted: WantedUpdate | None = None
        self._pending: BeginUpdate | None = None
        self._stream: BroadcastReader | None = None
        self._ended = ""
        self._closed = False
        self._heard_at = 0.0
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._where = f"{address.backend}://{host}:{address.port}"
        self._ready = threading.Event()
        process_group.close_at_exit(self)
        connect_seconds = min(deadline_seconds, _CONNECT_SECONDS)
        self._link = WorkerLink(
            f"tcp:{address.host}:{address.port}",
            Hello(run, peer, 0, address.secret),
            lease_seconds=deadline_seconds,
            on_end=self._on_end,
            on_message=self._on_message,
            messages=ToReceiver,
            connect_seconds=connect_seconds,
        )
        self._send(HostIdentity(host_identity()))
        self._ready.set()
        try:
            # What is offered to this worker may be sent at once: by then the sender must know of it.
            self._link.await_welcome(connect_seconds)
        except BaseException:
            self._link.close()
            raise

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Wait for `version` from now on. Raises PeerDiedError if the sender has gone, InsufficientMemoryError."""
        if version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this receiver of run {self._run}")
        self.end()
        with self._condition:
            self._require_connection()
            self._buffers.prepare(manifest, staged=staged)
            self._heard_at = time.monotonic()
            self._wanted = WantedUpdate(manifest, version, staged)
            self._send(Opened(version.number))
            self._match()
            self._condition.notify_all()

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket in order, once."""
        with self._condition:
            self._require_open()
            wanted = self._wanted
        if wanted is None:
            raise UpdateAbortedError("no update is open: it was ended, or open() was not called")
        if wanted.num_buckets == 0:
            return
        with self._condition:
            self._await(wanted, lambda: wanted.begin is not None)
            reader = self._buffers.reader
        yield from self._own_buckets(wanted) if reader is None else self._shared_buckets(wanted, reader)

    def _own_buckets(self, wanted: WantedUpdate) -> Iterator[Bucket]:
        while wanted.num_taken < wanted.num_buckets:
            with self._condition:
                self._await(wanted, lambda: wanted.num_received > wanted.num_taken)
                bucket = Bucket(wanted.num_taken, self._buffers.buffer(wanted.num_taken))
                wanted.num_taken += 1
            yield bucket
            del bucket
            with self._condition:
                if wanted.num_taken == wanted.num_buckets:
                    self._check_live(wanted)
                wanted.num_released = wanted.num_taken
                self._condition.notify_all()

    def _shared_buckets(self, wanted: WantedUpdate, reader: Receiver) -> Iterator[Bucket]:
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

    def reread(self, bucket: Bucket) -> bool:
        """With shared memory, what this worker wrote over a bucket is dropped; else every update arrives anew."""
        reader = self._buffers.reader
        return reader is not None and reader.reread(bucket)

    def end(self) -> None:
        """Give the update up or be done with it; wakes an iteration, which raises UpdateAbortedError. Idempotent."""
        with self._condition:
            wanted, self._wanted = self._wanted, None
            if wanted is None or self._closed:
                return
            if wanted.num_received < wanted.num_buckets:
                self._send(UpdateEnded(wanted.version.number, wanted.update))
                self._leave()
            if self._buffers.reader is not None:
                self._buffers.reader.end()
            self._condition.notify_all()

    def close(self) -> None:
        """Disconnect; wakes an iteration, which raises ClosedError. Idempotent, from any thread."""
        with self._condition:
            if self._closed:
                return
            self._closed, self._wanted = True, None
            self._leave()
            if self._buffers.reader is not None:
                self._buffers.reader.close()
            self._condition.notify_all()
        self._link.close()
        self._buffers.close()

    # --- what the sender says, in the link's thread ---

    def _on_end(self, reason: str) -> None:
        with self._condition:
            self._ended = reason
            self._leave()
            if self._buffers.reader is not None:
                self._buffers.reader.end()
            self._condition.notify_all()

    def _on_message(self, message: Any) -> None:
        self._ready.wait(_CONNECT_SECONDS)
        with self._condition:
            self._heard_at = time.monotonic()
            match message:
                case Join():
                    self._on_join(message)
                case Connect():
                    if self._stream is not None and self._stream.epoch == message.epoch:
                        self._stream.start()
                case ReadAlong():
                    self._on_read_along(message)
                case BeginUpdate():
                    self._pending = message
                    self._match()
                case UpdateAborted():
                    self._on_aborted(message)
                case ProgressQuestion():
                    self._on_ask(message)
            self._condition.notify_all()

    def _on_join(self, join: Join) -> None:
        self._leave()
        self._pending, wanted = None, self._wanted
        try:
            shared = self._buffers.share(join.readers)
            if wanted is not None and wanted.begin is None:
                self._buffers.prepare(wanted.manifest, staged=wanted.staged)
        except WeightcastError as exc:
            self._send(JoinFailed(join.epoch, str(exc)[:MAX_REASON_CHARACTERS]))
            return
        self._epoch = join.epoch
        self._stream = BroadcastReader(self, join, self._backend, host=self._link.local_host, device=self._device)
        update, num_received = (0, 0) if wanted is None else (wanted.update, wanted.num_received)
        self._send(Joining(join.epoch, update, num_received, shared))

    def _on_read_along(self, other: ReadAlong) -> None:
        self._leave()
        self._pending = None
        try:
            self._buffers.read_from(other.address)
        except WeightcastError as exc:
            self._send(JoinFailed(other.epoch, str(exc)[:MAX_REASON_CHARACTERS]))
            return
        self._epoch = other.epoch
        self._send(Joining(other.epoch))

    def _on_aborted(self, aborted: UpdateAborted) -> None:
        if self._pending is not None and self._pending.update == aborted.update:
            self._pending = None
        if self._wanted is not None and self._wanted.update == aborted.update:
            self._wanted.aborted = aborted.reason
            if self._buffers.reader is not None:
                self._buffers.reader.end()
        self._leave()

    def _on_ask(self, ask: ProgressQuestion) -> None:
        wanted, stream = self._wanted, self._stream
        is_whole = wanted is not None and wanted.num_received == wanted.num_buckets
        is_waiting = stream is None or bool(stream.targets) or is_whole
        update, num_received = (0, 0) if wanted is None else (wanted.update, wanted.num_received)
        self._send(Progress(ask.question, update, num_received, is_waiting))

    def _match(self) -> None:
        """Join what the sender has begun with what is wanted; what isn't wanted is declined at once."""
        wanted, begin = self._wanted, self._pending
        if wanted is None or begin is None or (wanted.begin is not None and wanted.update != begin.update):
            return
        if begin.version != wanted.version.number:
            self._decline(begin)
            return
        if begin.epoch != self._epoch:
            self._pending = None
            self._send(JoinFailed(begin.epoch, "it has left this group"))
            return
        found, expected = (begin.num_buckets, begin.staged), (wanted.num_buckets, wanted.staged)
        # Who reads along takes no buckets of the group's, and counts none.
        if found != expected or (self._stream is not None and begin.first > wanted.num_received):
            wanted.aborted = f"the publisher sends (buckets, staged) = {found}, the offer said {expected}"
            if self._buffers.reader is not None:
                self._buffers.reader.end()
            self._decline(begin)
            return
        is_first = wanted.begin is None
        wanted.begin, self._pending = begin, None
        if self._buffers.reader is not None and is_first:
            self._buffers.reader.open(wanted.manifest, wanted.version, staged=True)
        if self._stream is not None:
            self._stream.position = begin.first
        if wanted.num_received == wanted.num_buckets:
            self._send(AllReceived(begin.update))

    def _decline(self, begin: BeginUpdate) -> None:
        self._pending = None
        self._send(UpdateEnded(begin.version, begin.update))
        self._leave()

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
        return self._buffers.target(wanted.update, wanted.manifest, wanted.version, index, is_here=is_here)

    def _has_room(self, stream: BroadcastReader) -> bool:
        wanted = self._wanted
        if wanted is None or wanted.begin is None or wanted.begin.epoch != stream.epoch:
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
            self._buffers.deliver(target.index)
        with self._condition:
            if self._stream is not stream or self._wanted is not wanted:
                return
            self._heard_at = time.monotonic()
            wanted.num_received = max(wanted.num_received, target.index + 1)
            if wanted.num_received == wanted.num_buckets:
                self._on_whole(wanted)
            self._condition.notify_all()

    def _on_whole(self, wanted: WantedUpdate) -> None:
        wanted.num_received = wanted.num_buckets
        self._send(AllReceived(wanted.update))

    def on_broken(self, stream: BroadcastReader, error: WeightcastError, *, is_own: bool = False) -> None:
        with self._condition:
            if not stream.is_left:
                # The sender finds out who was lost, and invites to another group.
                self._leave()
                self._send(JoinFailed(stream.epoch, str(error)[:MAX_REASON_CHARACTERS], is_own))

    def _leave(self) -> None:
        """Be in no group any more."""
        stream, self._stream = self._stream, None
        self._epoch = 0
        if stream is not None:
            stream.is_left = True
            self._buffers.leave(stream)
            self._condition.notify_all()

    # --- waiting ---

    def _await(self, wanted: WantedUpdate, is_done: Callable[[], bool]) -> None:
        """Wait until it is done. Raises whatever ends the update, PeerTimeoutError if nothing is heard."""
        start = time.monotonic()
        while True:
            self._check_live(wanted)
            if is_done():
                return
            patience = self._deadline_seconds * _PATIENCE
            remaining = max(start, self._heard_at) + patience - time.monotonic()
            if remaining <= 0:
                raise PeerTimeoutError(f"nothing was heard of the publisher for {patience:g} s", peer=_PUBLISHER)
            self._condition.wait(remaining)

    def _check_live(self, wanted: WantedUpdate) -> None:
        self._require_open()
        if self._wanted is not wanted:
            raise UpdateAbortedError(f"version {wanted.version.number} was ended on this side")
        if wanted.aborted is not None:
            raise UpdateAbortedError(wanted.aborted)
        self._require_connection()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this receiver was closed")

    def _require_connection(self) -> None:
        self._require_open()
        if self._ended:
            raise PeerDiedError(f"the publisher at {self._where} has gone: {self._ended}", peer=_PUBLISHER)

    def _send(self, record: msgspec.Struct) -> None:
        # A sender that has gone is noticed by the link's own thread.
        try:
            self._link.send(record)
        except OSError:
            self._ended = "it takes no records"
