"""A worker's end of the ipc transport: maps the sender's arena once, and is told what in it is whole.

Invariants: a sender that has closed the connection (because this receiver made no progress for too long, say) gives
nothing more; records of a former update are never taken for the present one; the iterating thread reads the connection,
and lets go of the condition while it waits for it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import socket
import time
from typing import Any, TypeAlias

import msgspec
import torch

from weightcast.errors import ManifestError, PeerDiedError, PeerTimeoutError, WeightcastError, from_record
from weightcast.format.bucket import HEADER_BYTES
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host.closing import on_failure
from weightcast.host.deadline import Deadline
from weightcast.links.link import check_same_user
from weightcast.seams.transport import Bucket
from weightcast.transports.ipc import devices, records
from weightcast.transports.ipc.arena import MappedSharedArena
from weightcast.transports.ipc.channel import SCHEME, Channel
from weightcast.transports.ipc.cuda import MappedCudaArena
from weightcast.transports.receiving import CONNECT_SECONDS, PUBLISHER, ReceivingEnd, WantedUpdate

_RETRY_SECONDS = 0.01
_Arena: TypeAlias = MappedSharedArena | MappedCudaArena


@dataclasses.dataclass(slots=True, eq=False)
class IncomingUpdate:
    """An update that the sender has begun, as far as it has told of it. `is_over`: this end has done with it."""

    begin: records.IpcBegin
    ready: collections.deque[tuple[records.BucketReady, _Arena]] = dataclasses.field(default_factory=collections.deque)
    aborted: str | None = None
    is_over: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class IpcUpdate(WantedUpdate[IncomingUpdate]):
    """`taken`: the bucket that was handed out last, and its arena."""

    taken: tuple[records.BucketReady, _Arena] | None = None


class IpcReceiver(ReceivingEnd[IpcUpdate]):
    """Implements `Receiver`. Memory: none of its own, but for a bucket's pages that the engine writes to."""

    def __init__(
        self, url: str, *, peer: str, run: str, deadline_seconds: float = 60.0, device: torch.device | None = None
    ) -> None:
        """Connect as `peer` to a sender's address; of several, to that of `device`, by default host memory.

        Raises PeerDiedError, PeerTimeoutError, StaleVersionError.
        """
        super().__init__(run, deadline_seconds)
        self._num_waiting = 0
        self._arena: _Arena | None = None
        self._incoming: IncomingUpdate | None = None
        address = devices.choose(url, device or torch.device("cpu"))
        self._channel = _connect(address, records.IpcHello(run, peer), min(deadline_seconds, CONNECT_SECONDS))
        with on_failure(self._channel.close):
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Wait for `version` from now on. Raises PeerDiedError if the sender has gone."""
        self._check_run(version)
        self.end()
        with self._condition:
            # An iteration of the former update was woken by `end`; it must not take what is meant for this one.
            if not self._condition.wait_for(lambda: self._num_waiting == 0, self._deadline_seconds):
                raise PeerTimeoutError("the iteration of the former update did not end", peer=PUBLISHER)
            self._require_open()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._heard_at = time.monotonic()
            self._listen()
            self._require_connection()
            self._wanted = IpcUpdate(manifest, version, staged)
            self._tell(records.Awaiting(version.number))
            self._match()

    def reread(self, bucket: Bucket) -> bool:
        """Drop what this process wrote over a bucket, if it could: the mapping is private. The views stay valid."""
        with self._condition:
            return self._arena is not None and self._arena.reread(bucket.buffer)

    def end(self) -> None:
        with self._condition:
            if self._wanted is not None:
                with contextlib.suppress(WeightcastError):
                    self._listen()
            super().end()

    def _leave(self, wanted: IpcUpdate) -> None:
        os.eventfd_write(self._wake, 1)
        if self._arena is not None and not wanted.is_whole:
            try:
                self._arena.reset()
            except WeightcastError as exc:
                self._give_up(f"it was disconnected: {exc}")
        if wanted.begun is None:
            self._tell(records.IpcEnded(wanted.version.number, 0))
        else:
            self._be_done(wanted.begun)

    def _disconnect(self) -> None:
        os.eventfd_write(self._wake, 1)
        if self._num_waiting == 0:
            self._free()

    def _free(self) -> None:
        self._channel.close()
        os.close(self._wake)
        if self._arena is not None:
            self._arena.close()
        self._arena = self._incoming = None

    # --- buckets ---

    def _next_bucket(self, wanted: IpcUpdate) -> Bucket | None:
        """Raises ManifestError if the bytes that the sender speaks of aren't the next bucket's."""
        incoming, index = wanted.begun, wanted.num_taken
        if incoming is None or not incoming.ready:
            return None
        ready, arena = wanted.taken = incoming.ready.popleft()
        size_bytes = wanted.manifest.buckets[index]
        largest, payload = HEADER_BYTES + size_bytes, ready.offset_bytes + HEADER_BYTES
        if ready.index != index:
            raise ManifestError(f"bucket {ready.index} was announced, bucket {index} is the next")
        if not HEADER_BYTES <= ready.num_bytes <= largest:
            what = f"bucket {index} of {ready.num_bytes} bytes was announced, expected {HEADER_BYTES} to {largest}"
            raise ManifestError(what, fault="size")
        if ready.offset_bytes + largest > arena.size_bytes:
            raise ManifestError(f"bucket {index} of {largest} bytes would end behind the arena", fault="offset")
        arena.wait_ready(ready.event)
        if index == 0:
            arena.buffers.forget_above(wanted.num_buckets)
        return Bucket(index, arena.buffers.get(index, ready.offset_bytes, payload, size_bytes))

    def _release(self, wanted: IpcUpdate, index: int) -> None:
        if not wanted.staged and wanted.taken is not None:
            ready, arena = wanted.taken
            arena.finish()
            with self._condition:
                if self._wanted is wanted:
                    self._tell(records.Released(ready.version, ready.update, ready.generation, ready.index))

    def _wait(self, wanted: IpcUpdate, seconds: float) -> None:
        """Let go of the condition until there is something to hear, or `end` or `close` wakes us."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        self._num_waiting += 1
        self._condition.release()
        try:
            poller.poll(seconds * 1000)
        finally:
            self._condition.acquire()
            self._num_waiting -= 1
            self._condition.notify_all()
            if self._closed and self._num_waiting == 0:
                self._free()

    # --- records ---

    def _listen(self) -> None:
        """Take every record that is there. Raises ManifestError for one that can't be."""
        while not self._ended:
            try:
                packet = self._channel.receive(records.ToReceiver, max_descriptors=1)
                if packet is None:
                    break
                self._heard_at = time.monotonic()
                self._on_record(*packet)
            except EOFError as exc:
                self._give_up(str(exc))
            except BaseException as exc:
                self._give_up(f"it was disconnected: {exc}")
                raise
        if self._wanted is not None:
            begun = self._wanted.begun
            self._wanted.aborted = None if begun is None else begun.aborted

    def _on_record(self, record: Any, descriptor: int | None) -> None:
        if descriptor is not None and not isinstance(record, records.SharedArena):
            os.close(descriptor)
        # What is said of another update, or of one that is over here, counts for nothing.
        incoming = None if self._incoming is None or self._incoming.is_over else self._incoming
        match record:
            case records.SharedArena() | records.CudaArena():
                if isinstance(record, records.CudaArena):
                    arena: _Arena = MappedCudaArena(record)
                elif descriptor is not None:
                    arena = MappedSharedArena(record, descriptor)
                else:
                    raise ManifestError("an arena was announced without its descriptor", fault="type")
                former, self._arena = self._arena, arena
                if former is not None:
                    former.close()
            case records.IpcBegin():
                self._on_begin(record)
            case records.IpcAborted() if incoming is not None and incoming.begin.update == record.update:
                incoming.aborted = record.reason
            case records.BucketReady() if incoming is not None and incoming.begin.update == record.update:
                if self._arena is None or record.generation != self._arena.generation:
                    where = f"arena {record.generation}, which is not known here"
                    raise ManifestError(f"bucket {record.index} lies in {where}")
                # With its arena: the sender may announce a new one before this bucket's turn.
                incoming.ready.append((record, self._arena))

    def _on_begin(self, begin: records.IpcBegin) -> None:
        former, self._incoming = self._incoming, IncomingUpdate(begin)
        wanted = self._wanted
        if wanted is not None and wanted.begun is former and not wanted.num_taken:
            # A second attempt; the first was begun before the sender had heard that it was given up here.
            wanted.begun = None
        elif former is not None and former.aborted is None:
            former.aborted = f"the publisher went on to version {begin.version}"
        self._match()

    def _match(self) -> None:
        """Join what the sender has begun with what is wanted; what isn't wanted is released at once."""
        wanted, incoming = self._wanted, self._incoming
        if wanted is None or wanted.begun is not None or incoming is None or incoming.is_over:
            return
        if incoming.begin.version != wanted.version.number or incoming.aborted is not None:
            self._be_done(incoming)
            return
        wanted.check_begun(incoming.begin.num_buckets, incoming.begin.staged)
        wanted.begun = incoming

    def _be_done(self, incoming: IncomingUpdate) -> None:
        if not incoming.is_over:
            incoming.is_over = True
            incoming.ready.clear()
            self._tell(records.IpcEnded(incoming.begin.version, incoming.begin.update))

    def _tell(self, record: msgspec.Struct) -> None:
        if self._ended:
            return
        try:
            if not self._channel.send(record):
                self._give_up("it takes no records")
        except EOFError as exc:
            self._give_up(str(exc))

    def _give_up(self, reason: str) -> None:
        """The connection is of no more use; the sender is told by its end."""
        self._ended = reason
        self._channel.close()


def _connect(url: str, hello: records.IpcHello, deadline_seconds: float) -> Channel:
    """Connect to a sender's address and be welcomed. Raises PeerDiedError, PeerTimeoutError or what it refuses with."""
    name = url.removeprefix(SCHEME)
    if not url.startswith(SCHEME) or not name.startswith("@"):
        raise ValueError(f"{url!r} is not the address of an ipc sender; expected {SCHEME}@NAME, as in Sender.address")
    deadline = Deadline(deadline_seconds)
    channel = Channel(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    with on_failure(channel.close):
        try:
            while True:
                try:
                    channel.sock.connect("\0" + name[1:])
                    break
                except BlockingIOError:
                    # Its queue of new connections is full; a Unix socket gives no event for that.
                    if deadline.has_passed:
                        raise
                    time.sleep(_RETRY_SECONDS)
            check_same_user(channel.sock)
            channel.send(hello)
            poller = select.poll()
            poller.register(channel, select.POLLIN)
            while (packet := channel.receive(records.ToReceiver)) is None:
                if deadline.has_passed:
                    late = f"the publisher at {url} did not welcome this peer by the deadline"
                    raise PeerTimeoutError(late, peer=PUBLISHER)
                poller.poll(deadline.remaining_seconds * 1000)
        except EOFError as exc:
            raise PeerDiedError(f"the publisher at {url} closed the connection: {exc}", peer=PUBLISHER) from exc
        except OSError as exc:
            raise PeerDiedError(
                f"no publisher of this user answers at {url}: {exc}. ipc:// needs both ends on one host and in one "
                "network namespace (one container or pod, or --network=host)",
                peer=PUBLISHER,
            ) from exc
        record = packet[0]
        if isinstance(record, records.Refused):
            raise from_record(record.error)
        if not isinstance(record, records.Welcome):
            raise ManifestError(f"the publisher at {url} answered a hello with {type(record).__name__}", fault="type")
        return channel
