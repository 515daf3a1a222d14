"""A worker's end of the collective transport: hears the sender over a link, and takes its broadcasts in the background.

Invariants: anything that still arrives from a group that was left is ignored; a thread that takes a group's broadcasts
ends with the group, or at the next bucket after the group was left; a broadcast that nobody answers any more ends with
the sender's side.
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
from weightcast.transports.collective.buffers import NUM_SLOTS, NUM_UNDER_WAY, BucketTarget, ReceiveBuffers, Writing
from weightcast.transports.receiving import PeerReceiver, PeerUpdate
from weightcast.transports.sending import MAX_REASON_CHARACTERS


@dataclasses.dataclass(slots=True, eq=False)
class BroadcastUpdate(PeerUpdate):
    """`num_received` buckets are here, `num_released` of them may be overwritten.

    `reads`: streaming to a GPU, by slot, what was queued when its bucket was released, and may still read it.
    """

    num_received: int = 0
    num_released: int = 0
    reads: dict[int, host_device.Event] = dataclasses.field(default_factory=dict)


_receivers: weakref.WeakSet[CollectiveReceiver] = weakref.WeakSet()
"""Those of this process."""
_receivers_lock = threading.Lock()


class CollectiveReceiver(PeerReceiver[BroadcastUpdate]):
    """Implements `Receiver`.

    Memory: staged, the whole version, in host memory, once for all workers of the engine on this host; streaming, three
    buckets, on the GPU with NCCL. Besides, two buckets where they can't arrive in their place: staged with NCCL, and
    those that come again after a loss.
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
        """`device`: where NCCL's broadcasts arrive, a GPU. Raises UnsupportedError."""
        self.backend = registry.scheme(url)
        process_group.require(self.backend)
        if self.backend == "nccl" and (device is None or device.type != "cuda"):
            raise UnsupportedError(
                "nccl moves memory of GPUs, and this engine does not say that its weights are on one: give the engine "
                "a property `devices` (see weightcast.seams.engine.OnDevice), or publish over gloo://"
            )
        self.device = torch.device("cpu") if device is None or self.backend != "nccl" else device
        self._buffers = ReceiveBuffers(peer, self.device)
        self._stream: BroadcastStream | None = None
        self._epoch = 0
        """Of the group that this worker was invited to last."""
        super().__init__(run, link, deadline_seconds, records.ToReceiver)
        close_at_exit(self)
        with _receivers_lock:
            _receivers.add(self)

    def reread(self, bucket: Bucket) -> bool:
        """With shared memory, what this worker wrote over a bucket is dropped; else every update arrives again."""
        return self._buffers.reread(bucket.buffer)

    def release(self) -> None:
        """Free the memory that is kept for the next update; see `Receiver.release`."""
        with self._condition:
            if not self._closed and self._wanted is None:
                self._buffers.free()
                host_device.empty_cache(self.device)

    def _want(self, manifest: Manifest, version: WeightVersion, staged: bool) -> BroadcastUpdate:
        self._buffers.prepare(manifest, staged=staged)
        return BroadcastUpdate(manifest, version, staged)

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
        is_queued = not wanted.staged and host_device.has_streams(self.device)
        read = host_device.recorded(self.device) if is_queued else None
        with self._condition:
            if read is not None:
                wanted.reads[index % NUM_SLOTS] = read
            wanted.num_released = index + 1
            self._condition.notify_all()

    # --- what the sender says, in the thread that reads the link ---

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
                self._tell(answer)
            case records.Connect():
                if self._stream is not None and self._epoch == record.epoch:
                    self._stream.start()
            case records.Arrived(number, num_buckets):
                wanted = self._wanted
                if wanted is not None and wanted.version.number == number and self._stream is None:
                    wanted.num_received = max(wanted.num_received, num_buckets)
                    self._tell_read_along(wanted)

    def _answer(self, invitation: records.Join | records.ReadAlong) -> records.Joining:
        """Have the memory that it takes. Raises InsufficientMemoryError, UnsupportedError."""
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
        self._tell(records.Progress(self._epoch, number, wanted.num_received, wanted.num_buckets))

    def _leave_group(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.leave()
            self._buffers.leave(stream)
            self._condition.notify_all()

    # --- what the stream does, in its own thread ---

    def next_target(self, stream: BroadcastStream, *, wait: bool) -> BucketTarget | None:
        """Return memory for the next bucket; None if none can be received now; with `wait` only if the stream was left.

        On a GPU the thread's own stream waits for what still reads the bucket that was there.
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
                self._tell(stream.progress(wanted))
        return target

    @property
    def is_among_several(self) -> bool:
        """True if this process also takes broadcasts of other origins on this GPU.

        Engines begin those in orders of their own. A broadcast that is queued behind another one may then stand in a
        queue of the GPU's before that of another origin, for which another engine waits, and so on in a circle: surely
        with CUDA_DEVICE_MAX_CONNECTIONS=1. A broadcast that is queued behind none runs beside the others, in any order.
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
            self._tell(stream.progress(wanted))
            self._condition.notify_all()

    def on_broken(self, stream: BroadcastStream, reason: str, *, is_own: bool = False) -> None:
        """`is_own`: by this receiver's own failure. The sender finds out who was lost, and invites to another group."""
        with self._condition:
            if not stream.is_left:
                self._leave_group()
                self._tell(records.JoinFailed(stream.join.epoch, reason[:MAX_REASON_CHARACTERS], is_own))


@dataclasses.dataclass(eq=False)
class BroadcastStream(Writing):
    """A receiver's part in one group: a thread that connects to it and takes its broadcasts in order, two at a time.

    `host`: the address of this host that the others reach. `position`: the bucket that comes next, once the sender has
    said so; `num_received`: of the update, in this group. `is_in_group`: whether what fails now is the group's failure,
    and not this receiver's own.
    """

    receiver: CollectiveReceiver
    join: records.Join
    host: str
    position: int | None = None
    num_received: int = 0
    is_left: bool = False
    is_in_group: bool = True
    group: ProcessGroup | None = None

    def progress(self, wanted: BroadcastUpdate) -> records.Progress:
        return records.Progress(self.join.epoch, wanted.version.number, self.num_received, self.position or 0)

    def start(self) -> None:
        """Connect, and take what is broadcast. Idempotent."""
        if self.thread is None:
            self.thread = awaited_at_exit(self._run, "weightcast-collective")

    def leave(self) -> None:
        """Nothing that comes counts any more. With NCCL, a broadcast that is waited for ends; gloo's can't be ended."""
        self.is_left = True
        if self.group is not None and self.receiver.backend == "nccl":
            awaited_at_exit(self.group.close, "weightcast-group-end")

    def _run(self) -> None:
        try:
            join = self.join
            # The link says whether the sender lives. But gloo does not wake a receive whose connection broke in the
            # middle of a message: its thread, sockets and buffer live until then.
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
        """Return whether the stream was left by now; another thread may leave it at any time."""
        return self.is_left

    def _receive_all(self, group: ProcessGroup) -> None:
        """Begin to receive as many buckets as can be, if need be wait for one, take the first; until it was left."""
        works: collections.deque[Work] = collections.deque()
        while True:
            while len(works) < (1 if self.receiver.is_among_several else NUM_UNDER_WAY):
                self.is_in_group = False
                target = self.receiver.next_target(self, wait=not works)
                if target is None:
                    break
                self.targets = (*self.targets, target)
                if self._was_left():
                    # The thread that left it may have looked for targets before.
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
            # This thread may wait for the next update now, and must not keep the slot, which `release` gives back.
            del target
