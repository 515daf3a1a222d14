"""Base classes of the senders of all transports with peers: updates, peers, and arenas that peers read.

Peers are workers that are connected to the publisher's link listener; a sender opens no connection. Links are read
under the listener's condition, by any thread that waits on it or by the listener's own, so a sender holds that
condition in every method.

Invariants: a peer that dies, stalls, leaves or sends an invalid record is dropped from the update, with the reason in
`failures`; every wait ends at the deadline, and accepts new peers meanwhile. A slot of an arena is rewritten only when
each receiver to which its content was announced has released it or has died. If one may still be reading (it made no
progress for a deadline), the sender leaves the arena to it and allocates another, even in the middle of an update. A
sender copies no bytes; only its caller does.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import torch

from weightcast.errors import ClosedError, PeerDiedError, PeerTimeoutError, UpdateAbortedError, WeightcastError
from weightcast.format.bucket import HEADER_BYTES, ArenaLayout, BucketBuffer, Buffers, arena_layout_of
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import device as host_device
from weightcast.host.deadline import GRACE_SECONDS, Deadline
from weightcast.links.link import Link, LinkListener, frame
from weightcast.seams.transport import Sender
from weightcast.transports import records

logger = logging.getLogger(__name__)

MAX_REASON_CHARACTERS = 4096
_NUM_SLOTS = 2
"""Slots of a streaming arena: one is packed while the other is read."""


@dataclasses.dataclass(slots=True, eq=False)
class SentUpdate:
    """The update in progress, or the last one, whose buckets may still be read.

    `peers`: names of the peers that still take part. `next`: the bucket to send next. `aborted`: the reason for which
    it was aborted. `is_interrupted`: it has lost peers and must be opened again for the others.
    """

    version: WeightVersion
    manifest: Manifest
    staged: bool
    num_buckets: int
    arena_layout: ArenaLayout
    peers: set[str]
    next: int = 0
    is_open: bool = True
    is_interrupted: bool = False
    aborted: str | None = None

    @property
    def is_done(self) -> bool:
        return self.next >= self.num_buckets


@dataclasses.dataclass(slots=True, eq=False)
class ConnectedPeer:
    """A connected worker, by its link's name. If it connects again, it has another link and is another peer.

    `progress_at`: time of its last record. `opened`, `ended`: the last version that it has opened, and the last that it
    has ended, whether installed or aborted; -1 for none. `generation`: that of the sender's arena that it has mapped; 0
    for none.
    """

    name: str
    link: Link
    progress_at: float = dataclasses.field(default_factory=time.monotonic, kw_only=True)
    opened: int = dataclasses.field(default=-1, kw_only=True)
    ended: int = dataclasses.field(default=-1, kw_only=True)
    generation: int = dataclasses.field(default=0, kw_only=True)


def check_length(manifest: Manifest, index: int, num_bytes: int) -> None:
    """Raise ValueError unless `num_bytes` is a header and at most the raw payload of bucket `index`."""
    largest = HEADER_BYTES + manifest.buckets[index]
    if not HEADER_BYTES <= num_bytes <= largest:
        raise ValueError(f"num_bytes of bucket {index} is {num_bytes}, expected {HEADER_BYTES} to {largest}")


class RunSender(Sender):
    """Base of all senders: sends versions of one run, their buckets in order, until it is closed."""

    _closed = False

    def __init__(self, run: str) -> None:
        self.run = run

    def _require_open(self, version: WeightVersion | None = None) -> None:
        """Raise ClosedError if this is closed, ValueError for a version of another run."""
        if self._closed:
            raise ClosedError("this sender was closed: make another publisher")
        if version is not None and version.run != self.run:
            raise ValueError(f"version {version.number} is of run {version.run}, this sender of run {self.run}")


def check_next(index: int, following: int, num_buckets: int) -> None:
    """Raise ValueError unless bucket `index` is the next one and there is such a bucket."""
    if index >= num_buckets:
        raise ValueError(f"there is no bucket {index}: the plan has {num_buckets} buckets")
    if index != following:
        raise ValueError(f"bucket {index} was given, expected bucket {following}, which is the next one")


@contextlib.contextmanager
def unlocked(condition: threading.Condition) -> Iterator[None]:
    """Release a condition, which is not held recursively, during a wait for something else."""
    try:
        condition.release()
        yield
    finally:
        condition.acquire()


U = TypeVar("U", bound=SentUpdate)
P = TypeVar("P", bound=ConnectedPeer)


class SendingEnd(RunSender, abc.ABC, Generic[U, P]):
    """Base of senders with peers: knows which peers are connected and which have failed.

    A transport adds how bytes move and the records for that. `peer_type` is the class of its peers.
    """

    peer_type: type[P]

    def __init__(self, run: str, listener: LinkListener, deadline_seconds: float, messages: Any) -> None:
        """Make a sender for the peers that connect to `listener`, which its owner closes.

        `messages` is the union of the records that peers may send.
        """
        super().__init__(run)
        self._listener = listener
        listener.carry(messages)
        self.condition = listener.condition
        """Held in every method."""
        self._deadline_seconds = deadline_seconds
        self._peers: dict[str, P] = {}
        self._failures: dict[str, WeightcastError] = {}
        self._update: U | None = None

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Errors of the peers that were lost since the version was opened, by name. Does not wait."""
        with self.condition:
            if not self._closed:
                self._listen()
            return dict(self._failures)

    def connected(self, peers: Sequence[str]) -> list[str]:
        """Return those of `peers` that are connected now. Does not wait."""
        with self.condition:
            self._require_open()
            self._listen()
            return [name for name in peers if name in self._peers]

    def abort(self, reason: str) -> None:
        """Abort the update for every peer, which then releases its buckets. Does not wait."""
        with self.condition:
            update = self._update
            if update is not None and update.is_open and not self._closed:
                update.is_open, update.aborted = False, reason[:MAX_REASON_CHARACTERS]
                self._on_aborted(update)

    def close(self) -> None:
        """End the links of all peers and free everything. Idempotent."""
        with self.condition:
            if not self._closed:
                self.abort("the publisher was closed")
                # Handle the records that have arrived: memory that nobody reads any more is freed at once.
                self._listen()
                self._closed = True
                for peer in self._peers.values():
                    peer.link.end("the publisher was closed")
                self._peers.clear()
                self._free()
                self.condition.notify_all()

    # --- methods that a transport implements; the caller holds the condition ---

    @abc.abstractmethod
    def _free(self) -> None:
        """Free the memory in which the buckets lie, unless a stalled reader may still read it."""

    @abc.abstractmethod
    def _on_ended(self, peer: P, update: U) -> None:
        """Handle the end of the present update at a peer, which is lost if it can't have received all buckets."""

    def _on_other(self, peer: P, record: Any) -> None:
        """Handle a record that only this transport has."""

    # --- records of peers ---

    def _listen(self) -> bool:
        """Add new peers, and handle records and lost links; return whether there were any. Does not wait."""
        has_heard = False
        self.condition.read()
        for link in self._listener.joined.values():
            former = self._peers.get(link.peer)
            if not link.ended and (former is None or former.link is not link):
                if former is not None:
                    self._hear(former)
                self._peers[link.peer] = self.peer_type(link.peer, link)
                has_heard = True
        for peer in list(self._peers.values()):
            if peer.link.records or peer.link.ended:
                self._hear(peer)
                has_heard = True
        return has_heard

    def _hear(self, peer: P) -> None:
        """Handle the records of a peer, and the end of its link."""
        link, update = peer.link, self._update
        while link.records:
            record, peer.progress_at = link.records.popleft(), time.monotonic()
            if isinstance(record, records.Opened):
                peer.opened, peer.generation = record.version, record.generation
            elif not isinstance(record, records.UpdateEnded):
                self._on_other(peer, record)
            else:
                peer.ended = record.version
                if update is not None and record.version == update.version.number:
                    self._on_ended(peer, update)
        if link.ended:
            gone = PeerDiedError(f"the receiver of {peer.name} has disconnected: {link.ended}", peer=peer.name)
            self._drop(peer, gone, may_be_reading=not link.has_left)

    def _on_aborted(self, update: U) -> None:
        """Tell the update's peers that it was aborted. The link of one that has stopped reading ends."""
        self._listen()
        for name in sorted(update.peers):
            if name in self._peers:
                self._peers[name].link.send(records.UpdateAborted(update.version.number, update.aborted or ""))
        update.peers.clear()

    def _drop(self, peer: P, error: WeightcastError, *, may_be_reading: bool) -> None:
        """End the link of a peer. `may_be_reading`: its process may live, and still read its buckets."""
        if self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            peer.link.end(f"the publisher dropped this receiver: {error}", goes_on=True)
            if self._update is not None and peer.name in self._update.peers:
                logger.warning("%s", error)
                self._lose(peer.name, error)

    def _lose(self, name: str, error: WeightcastError) -> None:
        """Remove a peer from the present update, because of `error`."""
        self._failures[name] = error
        if self._update is not None:
            self._update.peers.discard(name)

    # --- for transports ---

    def _post(self, peer: P, record: msgspec.Struct, descriptor: int | None = None) -> bool:
        """Send a record; wait for room in the socket up to the deadline. Return False if the peer is lost by then."""
        data, deadline = frame(record), None
        while self._peers.get(peer.name) is peer and not peer.link.put(data, descriptor):
            deadline = deadline or Deadline(self._deadline_seconds)
            if deadline.has_passed:
                self._drop(peer, self._timed_out(peer.name, "read no record"), may_be_reading=True)
                return False
            peer.link.wake_for_room(True)
            try:
                self._wait(deadline.remaining_seconds)
            finally:
                peer.link.wake_for_room(False)
        return self._peers.get(peer.name) is peer

    def _wait(self, seconds: float) -> None:
        """Wait for a new peer, a record or a lost link, for at most `seconds`, and handle them.

        Does not wait if there are some already: they would not notify the condition again. Raises ClosedError if
        another thread closes this sender.
        """
        if not self._listen():
            self.condition.wait(seconds)
            self._require_open()
            self._listen()

    def _begin_open(self, version: WeightVersion) -> None:
        """Abort the former update. Raises ClosedError, ValueError for a version of another run."""
        self._require_open(version)
        former = self._update
        if former is not None and former.is_done:
            former.is_open = False
        self.abort("the publisher began another update")
        if former is not None:
            former.peers.clear()
        self._failures = {}
        self._listen()

    def _await_opened(self, names: Sequence[str], version: WeightVersion) -> set[str]:
        """Wait until each peer has opened the version or has failed; return the names of those that have opened it.

        A peer that does not open it by the deadline fails; one that is not connected, or has ended the version already,
        fails at once.
        """
        deadline = Deadline(self._deadline_seconds)
        for name in names:
            while (peer := self._peers.get(name)) is not None and max(peer.opened, peer.ended) < version.number:
                if deadline.has_passed:
                    break
                self._wait(deadline.remaining_seconds)
        for name in names:
            peer = self._peers.get(name)
            if name in self._failures:
                continue
            if peer is None:
                self._failures[name] = PeerDiedError(f"the receiver of {name} is not connected any more", peer=name)
            elif max(peer.opened, peer.ended) < version.number:
                what = f"{name} has not opened version {version.number} within {self._deadline_seconds:g} s"
                self._failures[name] = PeerTimeoutError(what, peer=name)
            elif peer.ended >= version.number:
                what = f"{name} aborted version {version.number} before the sender began it"
                self._failures[name] = UpdateAbortedError(what)
        return set(names) - self._failures.keys()

    def _require_update(self, index: int) -> U:
        """Return the update in progress, whose next bucket must be `index`. Raises UpdateAbortedError, ValueError."""
        update = self._update
        if update is None or not update.is_open or update.is_interrupted:
            self._require_open()
            raise UpdateAbortedError("no update is open: call open() first (an abort or a lost peer ends an update)")
        check_next(index, update.next, update.num_buckets)
        return update

    def _timed_out(self, name: str, what: str) -> PeerTimeoutError:
        return PeerTimeoutError(f"{name} {what} for {self._deadline_seconds:g} s and was dropped", peer=name)


# --- senders whose receivers read the sender's own memory ---


class OwnedArena(abc.ABC):
    """The sender's end of memory that peers read. `generation` is its number among the sender's arenas.

    `is_populated`: its pages need no waiting for.
    """

    is_populated = True

    def __init__(self, generation: int, whole: torch.Tensor, device: torch.device) -> None:
        self.generation = generation
        self.size_bytes = whole.numel()
        self.device = device
        self.buffers = Buffers(whole)

    @abc.abstractmethod
    def announcement(self) -> tuple[msgspec.Struct, int | None]:
        """Return the record that a receiver needs to map the arena, and the file descriptor to send with it, if any."""

    def await_memory(self, end_bytes: int, seconds: float) -> float:
        """Wait up to `seconds` until the pages of the first `end_bytes` are populated; return the seconds waited.

        Raises InsufficientMemoryError if the host has too little memory for the arena's other pages.
        """
        return 0.0

    def close(self, *, free: bool) -> None:
        """Release the arena. With `free`, free its memory at once, even if receivers still map it."""
        del self.buffers


A = TypeVar("A", bound=OwnedArena)


class ArenaSender(SendingEnd[SentUpdate, ConnectedPeer], Generic[A]):
    """Implements `Sender`: peers read the sender's arena in place, so that the loss of one does not affect the others.

    A transport adds its kind of arena, and `only_url` if it has only one. `messages` are the records that its receivers
    send. Memory: two buckets when streaming, three on a GPU; the whole version when staged. It is kept for the next
    update. With a CUDA `device` streaming buckets lie in that device's memory; staged buckets are always in host
    memory. A bucket on a GPU is announced only when its packing is over, so that no receiver waits for work on the GPU
    that would end with this process.
    """

    peer_type = ConnectedPeer
    messages: ClassVar[Any] = records.Released | records.FromPeer
    only_url: ClassVar[str] = ""
    memory_seconds = 0.0

    def __init__(
        self,
        url: str,
        *,
        run: str,
        listener: LinkListener,
        deadline_seconds: float,
        device: torch.device | str | None = None,
    ) -> None:
        """Raises ValueError for another URL than the transport's only one."""
        if self.only_url and url != self.only_url:
            raise ValueError(f"{url!r} has an address, and {self.only_url} takes none: pass {self.only_url!r}")
        super().__init__(run, listener, deadline_seconds, self.messages)
        self._device = torch.device(device or "cpu")
        self._arena: A | None = None
        self._generation = 0
        self._readers: dict[int, set[str]] = {}
        self._lost_slots: set[int] = set()

    def prepare(self, manifest: Manifest, *, staged: bool) -> None:
        """Allocate the arena if it is in host memory; on a GPU that takes no time later. See `Sender.prepare`."""
        with self.condition:
            self._require_open()
            device, arena_layout = self._layout(manifest, staged=staged)
            if self._arena is None and device.type == "cpu" and arena_layout.size_bytes:
                self._replace_arena(arena_layout.size_bytes, device)

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Begin an update. Waits until the former update's buckets are released and `peers` have opened this one.

        Peers that fail to do so, or are gone, are in `failures`. Raises InsufficientMemoryError.
        """
        with self.condition:
            self._begin_open(version)
            self._await_released()
            arena = self._arena
            device, arena_layout = self._layout(manifest, staged=staged)
            self._readers.clear()
            has_room = arena is not None and arena.device == device and arena.size_bytes >= arena_layout.size_bytes
            if arena is not None and has_room and not self._lost_slots:
                arena.buffers.forget_above(len(arena_layout.slots))
                if not arena.is_populated:
                    self._await_memory(arena, 0)
            elif arena_layout.size_bytes:
                self._replace_arena(arena_layout.size_bytes, device)
            taking_part = self._await_opened(peers, version)
            self._update = update = SentUpdate(
                version, manifest, staged, len(manifest.buckets), arena_layout, taking_part
            )
            begin = records.BeginUpdate(version.number, staged, update.num_buckets)
            for name in sorted(update.peers):
                if name in update.peers:
                    self._post(self._peers[name], begin)
        return 0

    def buffer(self, index: int) -> BucketBuffer:
        """Return memory to pack bucket `index`, the next one, into. Waits until its slot is free."""
        with self.condition:
            update = self._require_update(index)
            arena_layout = update.arena_layout
            self._await_released(arena_layout.slots[index])
            if self._arena is None or arena_layout.slots[index] in self._lost_slots:
                self._replace_arena(arena_layout.size_bytes, self._layout(update.manifest, staged=update.staged)[0])
            arena = self._arena
            assert arena is not None
            if not arena.is_populated:
                self._await_memory(arena, arena_layout.payloads[index] + arena_layout.sizes_bytes[index])
            return arena.buffers.at(arena_layout, index)

    def send(self, index: int, num_bytes: int) -> None:
        """Announce bucket `index` to the peers, on a GPU once its packing is over.

        Waits only for that, and for a peer that is hundreds of buckets behind. Raises PeerTimeoutError if the packing
        does not end by the deadline.
        """
        with self.condition:
            update = self._require_update(index)
            check_length(update.manifest, index, num_bytes)
            arena = self._arena
            assert arena is not None, "buffer() comes first"
            if arena.device.type == "cuda":
                self._await_packed(index, host_device.recorded(arena.device))
            update.next = index + 1
            slot, offset_bytes = update.arena_layout.slots[index], update.arena_layout.headers[index]
            ready = records.BucketReady(update.version.number, arena.generation, index, offset_bytes, num_bytes)
            for name in sorted(update.peers):
                peer = self._peers.get(name)
                if peer is None or name not in update.peers:
                    continue
                if peer.generation != arena.generation:
                    if not self._post(peer, *arena.announcement()):
                        continue
                    peer.generation = arena.generation
                if self._post(peer, ready) and name in update.peers:
                    self._readers.setdefault(slot, set()).add(name)

    def release(self) -> None:
        """Free the arena; see `Sender.release`. A reader that has not released it by the deadline keeps it mapped."""
        with self.condition:
            self._require_open()
            self._await_released()
            self._free()

    def _await_packed(self, index: int, packed: host_device.Event) -> None:
        polls = Deadline(self._deadline_seconds).polls(host_device.POLL_SECONDS, host_device.POLL_SECONDS)
        with unlocked(self.condition):
            is_packed = any(packed.query() for _ in polls)
        self._require_update(index)
        if not is_packed:
            what = f"the trainer's GPU did not finish packing bucket {index} within {self._deadline_seconds:g} s"
            raise PeerTimeoutError(f"{what}: other work is queued before it, or the GPU hangs", peer="trainer")

    # --- the method that a transport implements ---

    @abc.abstractmethod
    def _make_arena(self, generation: int, size_bytes: int, device: torch.device) -> A:
        """Allocate an arena. Raises InsufficientMemoryError."""

    def _free(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close(free=not self._lost_slots and not any(self._readers.values()))

    # --- records of peers ---

    def _on_other(self, peer: ConnectedPeer, record: Any) -> None:
        update, arena = self._update, self._arena
        if not isinstance(record, records.Released) or update is None or arena is None:
            return
        is_meant = (record.version, record.generation) == (update.version.number, arena.generation)
        if is_meant and record.index < update.num_buckets:
            self._readers.get(update.arena_layout.slots[record.index], set()).discard(peer.name)

    def _on_ended(self, peer: ConnectedPeer, update: SentUpdate) -> None:
        for readers in self._readers.values():
            readers.discard(peer.name)
        if peer.name in update.peers and not update.is_done:
            what = f"{peer.name} ended the update after {update.next} of {update.num_buckets} buckets were sent"
            self._lose(peer.name, UpdateAbortedError(what))
        update.peers.discard(peer.name)

    def _drop(self, peer: ConnectedPeer, error: WeightcastError, *, may_be_reading: bool) -> None:
        if self._peers.get(peer.name) is not peer:
            return
        read = {slot for slot, readers in self._readers.items() if peer.name in readers}
        for slot in read:
            self._readers[slot].discard(peer.name)
        if may_be_reading:
            self._lost_slots |= read
        super()._drop(peer, error, may_be_reading=may_be_reading)
        if read and isinstance(error, PeerTimeoutError):
            self._failures[peer.name] = error

    def _await_released(self, slot: int | None = None) -> None:
        """Wait until no peer reads the slot, or for None any slot; drop a reader without progress for the deadline."""
        start = time.monotonic()
        readers = list(self._readers.values()) if slot is None else [self._readers.get(slot, set())]
        while names := set().union(*readers):
            now = time.monotonic()
            ends = {name: max(start, self._peers[name].progress_at) + self._deadline_seconds for name in names}
            # Read records before a peer is dropped: if this process was stopped, they may be waiting in its socket.
            self._wait(max(0.0, min(ends.values()) - now))
            for name in names & set().union(*readers):
                peer = self._peers[name]
                if ends[name] <= now and peer.progress_at < now:
                    self._drop(peer, self._timed_out(name, "released nothing"), may_be_reading=True)

    # --- the arena ---

    def _layout(self, manifest: Manifest, *, staged: bool) -> tuple[torch.device, ArenaLayout]:
        """Return where the arena of such an update lies, and its layout: the present one, for the same manifest."""
        device = torch.device("cpu") if staged else self._device
        # On a GPU a reader releases a bucket only after it got the next one, hence one more slot.
        num_slots, former = _NUM_SLOTS + (device.type == "cuda"), self._update
        if former is not None and former.manifest is manifest and former.staged == staged:
            return device, former.arena_layout
        return device, arena_layout_of(manifest, num_slots=num_slots, staged=staged)

    def _await_memory(self, arena: A, end_bytes: int) -> None:
        """Wait for the first bytes of the arena to be populated; if that takes too long, go on without."""
        with unlocked(self.condition):
            seconds = arena.await_memory(end_bytes, GRACE_SECONDS)
        self._require_open()
        self.memory_seconds += seconds

    def _replace_arena(self, size_bytes: int, device: torch.device) -> None:
        self._free()
        self._generation += 1
        start = time.perf_counter()
        self._arena = self._make_arena(self._generation, size_bytes, device)
        self.memory_seconds += time.perf_counter() - start
        self._readers.clear()
        self._lost_slots.clear()
