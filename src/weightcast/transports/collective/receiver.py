"""A worker's end of the collective transport: records arrive over the link, broadcasts in a background thread.

Invariants: anything that still arrives from a former group is ignored; the thread that receives a group's broadcasts
ends with the group, or at the next bucket after the receiver has left the group; a posted broadcast ends at the latest
when the sender closes the group.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import weakref
from typing import Any

import torch
from torch.distributed import Work

from weightcast import process_group, registry
from weightcast.errors import UnsupportedError, WeightcastError, to_record
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import device as host_device
from weightcast.host.closing import awaited_at_exit, close_at_exit
from weightcast.host.copy import copy_all
from weightcast.host.deadline import MAX_SECONDS
from weightcast.links.link import WorkerLink
from weightcast.process_group import ProcessGroup, join_store
from weightcast.seams.transport import Bucket
from weightcast.transports.collective import records
from weightcast.transports.collective.buffers import NUM_SLOTS, NUM_UNDER_WAY, BucketTarget, ReceiveBuffers
from weightcast.transports.receiving import PeerReceiver, PeerUpdate
from weightcast.transports.sending import MAX_REASON_CHARACTERS


@dataclasses.dataclass(slots=True, eq=False)
class BroadcastUpdate(PeerUpdate):
    """The update that the worker waits for, with its progress.

    `num_received` buckets are here; `num_released` of them may be overwritten. `reads`: when streaming to a GPU, an
    event for each slot, recorded when its bucket was released: reads that were queued by then may still be running.
    """

    num_received: int = 0
    num_released: int = 0
    reads: dict[int, host_device.Event] = dataclasses.field(default_factory=dict)


_receivers: weakref.WeakSet[CollectiveReceiver] = weakref.WeakSet()
"""All receivers of this process."""
_receivers_lock = threading.Lock()


class CollectiveReceiver(PeerReceiver[BroadcastUpdate]):
    """Implements `Receiver`.

    Memory: staged, the whole version in host memory, once for all workers of the engine on this host; streaming, three
    buckets, on the GPU with NCCL. Two further buckets if they can't be received into their slots: staged with NCCL, or
    received again after a loss.
    """

    def __init__(
        self,
        url: str,
        *,
        peer: str,
        run: str,
        link: WorkerLink | None,
        deadline_seconds: float = 60.0,
        device: torch.device | None = None,
    ) -> None:
        """Make a receiver. `device` is the GPU on which NCCL's broadcasts arrive. Raises UnsupportedError."""
        self.backend = registry.scheme(url)
        process_group.require(self.backend)
        if self.backend == "nccl" and (device is None or device.type != "cuda"):
            raise UnsupportedError(
                f"nccl sends GPU memory, and this engine's weights are on {device or 'no device that it names'}: give "
                "the engine a property `devices` (see weightcast.seams.engine.OnDevice) if they are on a GPU, or "
                "publish over gloo://"
            )
        self.device = torch.device("cpu") if device is None or self.backend != "nccl" else device
        self._buffers = ReceiveBuffers(peer, self.device)
        self._stream: BroadcastStream | None = None
        self._epoch = 0
        """Epoch of the group that this worker was invited to last."""
        super().__init__(run, link, deadline_seconds, records.ToReceiver)
        close_at_exit(self)
        with _receivers_lock:
            _receivers.add(self)

    def reread(self, bucket: Bucket) -> bool:
        """Drop this worker's writes into a bucket; return False if its memory is not shared."""
        return self._buffers.reread(bucket.buffer)

    def release(self) -> None:
        """Free the memory that is kept for the next update; see `Receiver.release`."""
        with self._condition:
            if not self._closed and self._wanted is None:
                self._buffers.free()
                host_device.empty_cache(self.device)

    def _want(self, manifest: Manifest, version: WeightVersion, staged: bool) -> BroadcastUpdate:
        self._buffers.prepare(manifest, staged=staged)
        return BroadcastUpdate(manifest, version, staged, len(manifest.buckets))

    def _leave(self, wanted: BroadcastUpdate) -> None:
        super()._leave(wanted)
        stream = self._stream
        if stream is not None and stream.num_received < wanted.num_buckets:
            self._leave_group()

    def _on_aborted(self, wanted: BroadcastUpdate) -> None:
        self._leave_group()

    def _disconnect(self) -> None:
        super()._disconnect()
        self._leave_group()
        self._buffers.close()

    # --- buckets ---

    def _next_bucket(self, wanted: BroadcastUpdate) -> Bucket | None:
        index = wanted.num_read
        return Bucket(index, self._buffers.buffer(index)) if wanted.num_received > index else None

    def _release(self, wanted: BroadcastUpdate, index: int) -> None:
        is_queued = not wanted.staged and self.device.type == "cuda"
        read = host_device.recorded(self.device) if is_queued else None
        with self._condition:
            if read is not None:
                wanted.reads[index % NUM_SLOTS] = read
            wanted.num_released = index + 1
            self._condition.notify_all()

    # --- records of the sender, in the thread that reads the link ---

    def _on_begun(self, wanted: BroadcastUpdate) -> None:
        stream = self._stream
        if stream is None:
            self._tell_read_along(wanted)
        else:
            stream.position, stream.num_received = 0, 0
        self._condition.notify_all()

    def _on_other(self, record: Any) -> None:
        match record:
            case records.Join() | records.ReadAlong():
                self._leave_group()
                self._epoch = record.epoch
                try:
                    answer: records.Joining | records.JoinFailed = self._answer(record)
                except WeightcastError as exc:
                    answer = records.JoinFailed(record.epoch, str(exc)[:MAX_REASON_CHARACTERS], is_own=True)
                self._link.send(answer)
            case records.Connect():
                if self._stream is not None and self._epoch == record.epoch:
                    self._stream.start()
            case records.Arrived(number, num_buckets):
                wanted = self._wanted
                if wanted is not None and wanted.version.number == number and self._stream is None:
                    wanted.num_received = max(wanted.num_received, num_buckets)
                    self._tell_read_along(wanted)

    def _answer(self, invitation: records.Join | records.ReadAlong) -> records.Joining:
        """Prepare the memory for a group and return the answer. Raises InsufficientMemoryError, UnsupportedError."""
        buffers, memory = self._buffers, ""
        if isinstance(invitation, records.ReadAlong):
            buffers.read_along(invitation.memory)
        else:
            memory = buffers.lend() if invitation.is_read_along else buffers.keep_alone()
            self._stream = BroadcastStream(self, invitation, self._link.local_host)
        wanted = self._wanted
        if wanted is not None and wanted.begin is None:
            buffers.prepare(wanted.manifest, staged=wanted.staged)
        return records.Joining(invitation.epoch, memory)

    def _tell_read_along(self, wanted: BroadcastUpdate) -> None:
        number = wanted.version.number
        self._link.send(records.Progress(self._epoch, number, wanted.num_received, wanted.num_buckets))

    def _leave_group(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.leave()
            if stream.thread is not None:
                self._buffers.leave(stream.thread, stream.targets)
            self._condition.notify_all()

    # --- called by the stream, in its own thread ---

    def next_target(self, stream: BroadcastStream, *, wait: bool) -> BucketTarget | None:
        """Return memory for the next bucket, or None if there is no room now; with `wait`, only if the group was left.

        On a GPU the thread's CUDA stream waits for queued reads of the slot's former bucket.
        """
        with self._condition:
            if wait:
                self._condition.wait_for(lambda: stream.is_left or self._has_room(stream))
            elif stream.join.is_read_along or not self._has_room(stream):
                return None
            wanted, index = self._wanted, stream.position
            if stream.is_left or wanted is None or index is None:
                return None
            stream.position = index + 1
            is_here = index < wanted.num_received
            read = wanted.reads.get(index % NUM_SLOTS)
        if read is not None:
            host_device.queue_behind(read, self.device)
        target = self._buffers.target(wanted.manifest, index, is_here=is_here)
        with self._condition:
            if not stream.is_left:
                self._link.send(stream.progress(wanted))
        return target

    @property
    def is_among_several(self) -> bool:
        """True if this process also receives broadcasts of other origins on this GPU.

        Engines post those in different orders. If each origin's next broadcast were queued behind its former one, then
        kernels of two origins could block each other in the GPU's hardware queues on several engines in a circle, which
        is certain with CUDA_DEVICE_MAX_CONNECTIONS=1. With one broadcast posted per origin, they run in any order.
        """
        if self.backend != "nccl":
            return False
        with _receivers_lock:
            return sum(other.device == self.device and not other._closed for other in _receivers) > 1

    def _has_room(self, stream: BroadcastStream) -> bool:
        wanted, index = self._wanted, stream.position
        if wanted is None or wanted.begin is None or index is None or index >= wanted.num_buckets:
            return False
        return wanted.staged or index < wanted.num_released + NUM_SLOTS

    def on_received(self, stream: BroadcastStream, target: BucketTarget) -> None:
        with self._condition:
            wanted = self._wanted
            if stream.is_left or wanted is None:
                return
            stream.num_received = target.index + 1
            wanted.num_received = max(wanted.num_received, stream.num_received)
            self._link.send(stream.progress(wanted))
            self._condition.notify_all()

    def on_broken(self, stream: BroadcastStream, reason: str, *, is_own: bool = False) -> None:
        """Leave the group and tell the sender, which invites the survivors to another group.

        `is_own`: this receiver itself has failed.
        """
        with self._condition:
            if not stream.is_left:
                self._leave_group()
                self._link.send(records.JoinFailed(stream.join.epoch, reason[:MAX_REASON_CHARACTERS], is_own))


@dataclasses.dataclass(eq=False)
class BroadcastStream:
    """A receiver's part in one group: a thread that connects to it and receives its broadcasts in order, two at a time.

    `host`: the address of this host that other members connect to. `targets`: the memory of the posted broadcasts.
    `position`: the bucket to post next, None until the sender has begun; `num_received`: number of the update's buckets
    that were received in this group. `is_in_group`: true while the thread waits for the group, so that an error is the
    group's failure and not this receiver's own.
    """

    receiver: CollectiveReceiver
    join: records.Join
    host: str
    thread: threading.Thread | None = None
    targets: tuple[BucketTarget, ...] = ()
    position: int | None = None
    num_received: int = 0
    is_left: bool = False
    is_in_group: bool = True
    group: ProcessGroup | None = None

    def progress(self, wanted: BroadcastUpdate) -> records.Progress:
        return records.Progress(self.join.epoch, wanted.version.number, self.num_received, self.position or 0)

    def start(self) -> None:
        """Start the thread, which connects and receives. Idempotent."""
        if self.thread is None:
            self.thread = awaited_at_exit(self._run, "weightcast-collective")

    def leave(self) -> None:
        """Ignore all further broadcasts. NCCL's posted broadcasts are aborted; those of gloo can't be."""
        self.is_left = True
        if self.group is not None and self.receiver.backend == "nccl":
            awaited_at_exit(self.group.close, "weightcast-group-end")

    def _run(self) -> None:
        try:
            join = self.join
            # The link shows if the sender lives, so that this limit is only needed for gloo, which does not wake a
            # receive whose connection broke in the middle of a message: its thread, sockets and buffer live until then.
            timeout_seconds = min(join.deadline_seconds + self.receiver._deadline_seconds, MAX_SECONDS)
            # The engine's default stream must never wait for a broadcast.
            with host_device.own_stream(self.receiver.device):
                self.group = ProcessGroup(
                    self.receiver.backend,
                    join_store(join.host, join.port, timeout_seconds),
                    rank=join.group_rank,
                    size=join.group_size,
                    timeout_seconds=timeout_seconds,
                    host=self.host,
                    device=self.receiver.device,
                    is_left=self._was_left,
                )
                self._receive_all(self.group)
        except Exception as exc:
            is_own = not self.is_in_group or not isinstance(exc, WeightcastError)
            self.receiver.on_broken(self, to_record(exc).message, is_own=is_own)
        finally:
            group, self.group = self.group, None
            if group is not None:
                group.close()

    def _was_left(self) -> bool:
        """Return true if the group was left by now; another thread may leave it at any time."""
        return self.is_left

    def _receive_all(self, group: ProcessGroup) -> None:
        """Post broadcasts while there is room, wait for the first one, and repeat until the group is left."""
        works: collections.deque[Work] = collections.deque()
        while True:
            while len(works) < (1 if self.receiver.is_among_several else NUM_UNDER_WAY):
                self.is_in_group = False
                target = self.receiver.next_target(self, wait=not works)
                if target is None:
                    break
                self.targets = (*self.targets, target)
                if self._was_left():
                    # The thread that left the group may have read `targets` before this one was added.
                    return
                self.is_in_group = True
                works.append(group.broadcast(target.flat, root=0))
            if self._was_left() or not works:
                return
            self.is_in_group = True
            group.wait(works.popleft(), self._was_left)
            self.is_in_group = False
            if self._was_left():
                return
            target = self.targets[0]
            if target.staging is not None:
                copy_all([target.staging.flat(target.num_bytes)], [target.flat])
            self.targets = self.targets[1:]
            self.receiver.on_received(self, target)
            # This thread may now wait for the next update; its reference would keep memory alive that `release` frees.
            del target
