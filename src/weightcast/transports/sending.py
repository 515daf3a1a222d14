"""What the publisher's ends of all transports have in common: the life of an update, and of an arena that peers read.

Invariants: a slot of an arena is rewritten only when each receiver that was told of its content has released it or has
died; if one may still be reading (it made no progress for a deadline), the arena is abandoned to it and a new one takes
its place, also in the middle of an update. Nothing is copied but by the caller.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from weightcast.errors import ClosedError, PeerDiedError, PeerTimeoutError, UpdateAbortedError, WeightcastError
from weightcast.format.bucket import HEADER_BYTES, ArenaLayout, BucketBuffer, Buffers, place
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host.deadline import Deadline

logger = logging.getLogger(__name__)

MAX_REASON_CHARACTERS = 4096
_MAX_SIGN_SECONDS = 5.0
"""Well under a receiver's own deadline, however patient the sender is."""


@dataclasses.dataclass(slots=True, eq=False)
class SentUpdate:
    """The update in progress, or the last one. `next`: the bucket to be sent next. `aborted`: why it was given up."""

    number: int
    version: WeightVersion
    manifest: Manifest
    staged: bool
    arena_layout: ArenaLayout
    next: int = 0
    is_open: bool = True
    aborted: str | None = None

    @property
    def num_buckets(self) -> int:
        return len(self.manifest.buckets)

    @property
    def is_whole(self) -> bool:
        return self.next >= self.num_buckets

    def check_next(self, index: int) -> None:
        """Raises ValueError unless bucket `index` is the next one."""
        if index != self.next or self.is_whole:
            raise ValueError(f"bucket {index} of {self.num_buckets}: bucket {self.next} is the next")


def check_length(manifest: Manifest, index: int, num_bytes: int) -> None:
    """Raises ValueError unless that many bytes are a header and at most the raw payload of bucket `index`."""
    largest = HEADER_BYTES + manifest.buckets[index]
    if not HEADER_BYTES <= num_bytes <= largest:
        raise ValueError(f"{num_bytes} bytes of bucket {index} were to be sent, expected {HEADER_BYTES} to {largest}")


U = TypeVar("U", bound=SentUpdate)


class SendingEnd(abc.ABC, Generic[U]):
    """Opens, aborts and closes; knows who fails. A transport says how its peers are told."""

    address: str

    def __init__(self, run: str, deadline_seconds: float) -> None:
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._sign_seconds = min(deadline_seconds / 4, _MAX_SIGN_SECONDS)
        self._waiting: Iterable[str] = ()
        """The peers that are told now and then that the sender lives, while it waits for another."""
        self._next_sign_at = 0.0
        self._failures: dict[str, WeightcastError] = {}
        self._update: U | None = None
        self._num_updates = 0
        self._closed = False

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Those who were dropped, or have gone, since `open`. Does not wait."""
        return dict(self._failures)

    def abort(self, reason: str) -> None:
        """End the update for every peer; what they hold they release. Does not wait."""
        update = self._update
        if update is not None and update.is_open and not self._closed:
            update.is_open, update.aborted = False, reason[:MAX_REASON_CHARACTERS]
            self._tell_aborted(update)

    def close(self) -> None:
        """Disconnect all peers and free everything. Idempotent."""
        if not self._closed:
            self.abort("the publisher was closed")
            self._closed = True
            self._disconnect()

    # --- what a transport adds ---

    @abc.abstractmethod
    def _tell_aborted(self, update: U) -> None: ...

    @abc.abstractmethod
    def _disconnect(self) -> None:
        """Nothing is sent any more: disconnect everybody, free all memory."""

    @abc.abstractmethod
    def _is_connected(self, name: str) -> bool: ...

    @abc.abstractmethod
    def _has_left(self, name: str) -> bool:
        """Whether the peer was connected once and is no more."""

    @abc.abstractmethod
    def _wait(self, seconds: float) -> None:
        """Wait at most that long until a peer does something, and take in what it does; give signs of life."""

    def _give_sign(self, name: str) -> None:
        """Tell a peer, if it is connected, that the sender lives. Does not wait."""
        return

    # --- for transports ---

    def _give_signs(self) -> None:
        """To be called in every wait."""
        now = time.monotonic()
        if now >= self._next_sign_at:
            self._next_sign_at = now + self._sign_seconds
            for name in list(self._waiting):
                self._give_sign(name)

    def _begin_open(self, version: WeightVersion, peers: Sequence[str]) -> None:
        """Give the former update up. Raises ClosedError, ValueError for a version of another run."""
        self._require_open()
        if version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this sender of run {self._run}")
        if self._update is not None and self._update.is_whole:
            self._update.is_open = False
        self.abort("the publisher began another update")
        self._failures = {}
        self._waiting = tuple(peers)

    def _await_connected(self, names: Sequence[str]) -> None:
        """Wait until all are connected or have failed; who is absent at the deadline, or has gone, is a failure."""

        def is_missing(name: str) -> bool:
            return name not in self._failures and not self._is_connected(name) and not self._has_left(name)

        deadline = Deadline(self._deadline_seconds)
        while any(map(is_missing, names)) and not deadline.has_passed:
            self._wait(deadline.remaining_seconds)
        for name in names:
            if is_missing(name):
                waited = f"within {self._deadline_seconds:g} s"
                self._failures[name] = PeerTimeoutError(f"{name} did not connect {waited}", peer=name)
            elif name not in self._failures and not self._is_connected(name):
                self._failures[name] = PeerDiedError(f"the receiver of {name} has gone and is not back", peer=name)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this sender was closed")

    def _require_update(self) -> U:
        self._require_open()
        update = self._update
        if update is None or not update.is_open:
            raise UpdateAbortedError("no update is open: it was aborted, or open() was not called")
        return update

    def _timed_out(self, name: str, what: str) -> PeerTimeoutError:
        return PeerTimeoutError(f"{name} {what} for {self._deadline_seconds:g} s and was dropped", peer=name)


# --- senders whose receivers read the sender's own memory ---


class OwnedArena:
    """The sender's end of memory that peers read. `generation`: its number among the sender's arenas."""

    def __init__(self, generation: int, whole: torch.Tensor, device: torch.device) -> None:
        self.generation = generation
        self.size_bytes = whole.numel()
        self.device = device
        self.buffers = Buffers(whole)

    def close(self, *, free: bool) -> None:
        """Let go of it. With `free`, give the memory back at once, whoever still has it."""
        del self.buffers


@dataclasses.dataclass(slots=True, eq=False)
class ConnectedPeer:
    """A receiver that is connected. `declined`: the version that it gave up before it began."""

    name: str
    progress_at: float = dataclasses.field(default_factory=time.monotonic)
    declined: int | None = None


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class ArenaUpdate(SentUpdate):
    """`peers`: those who still take it. It stays when it is whole, since its buckets may still be read."""

    device: torch.device
    peers: set[str]


P = TypeVar("P", bound=ConnectedPeer)
A = TypeVar("A", bound=OwnedArena)


class ArenaSender(SendingEnd[ArenaUpdate], Generic[P, A]):
    """Implements `Sender`.

    Memory: streaming, `num_slots` buckets; staged, the whole version; kept for the next update. With a CUDA `device`
    streaming buckets lie in that device's memory; staged ones are in host memory always.
    """

    def __init__(self, run: str, *, deadline_seconds: float, num_slots: int, device: torch.device | str | None) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 1, and 2 to overlap packing with reading")
        super().__init__(run, deadline_seconds)
        self.condition = threading.Condition()
        """Held in every call; a transport whose peers are other processes needs nobody else to hold it."""
        self._num_slots = num_slots
        self._device = torch.device(device or "cpu")
        self._peers: dict[str, P] = {}
        self._left: set[str] = set()
        self._arena: A | None = None
        self._generation = 0
        self._readers: dict[int, set[str]] = {}
        self._lost_slots: set[int] = set()

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Those who were dropped, or have gone, since `open`: as of now. Does not wait."""
        with self.condition:
            if not self._closed:
                self._listen()
            return dict(self._failures)

    def connected(self, peers: Sequence[str]) -> list[str]:
        """Those of these peers that are connected now. Does not wait."""
        with self.condition:
            self._require_open()
            self._listen()
            return [name for name in peers if name in self._peers]

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        """Begin an update. Waits until the former one's buckets are released and `peers` are connected; those who fail
        in that, or were connected and have gone, are in `failures`. Raises InsufficientMemoryError.
        """
        with self.condition:
            self._begin_open(version, peers)
            self._listen()
            self._await_released()
            arena_layout = place(manifest, num_slots=self._num_slots, staged=staged)
            device = torch.device("cpu") if staged else self._device
            self._prepare_arena(arena_layout, device)
            self._await_connected(peers)
            for name in [name for name in peers if name not in self._failures]:
                if self._peers[name].declined == version.number:
                    what = f"{name} gave version {version.number} up before it began"
                    self._failures[name] = UpdateAbortedError(what)
            self._num_updates += 1
            number, taking_part = self._num_updates, {name for name in peers if name not in self._failures}
            update = ArenaUpdate(number, version, manifest, staged, arena_layout, device=device, peers=taking_part)
            self._update = update
            self._waiting = update.peers
            self._tell_begun(update)

    def buffer(self, index: int) -> BucketBuffer:
        """Where bucket `index`, the next one, is to be packed. Waits until its slot is free."""
        with self.condition:
            update = self._require_update()
            update.check_next(index)
            arena_layout = update.arena_layout
            self._listen()
            self._await_released(arena_layout.slots[index])
            if self._arena is None or arena_layout.slots[index] in self._lost_slots:
                self._replace_arena(arena_layout.size_bytes, update.device)
            assert self._arena is not None
            return self._arena.buffers.at(arena_layout, index)

    def send(self, index: int, num_bytes: int) -> int:
        """Tell the peers of bucket `index`; the next follows. Waits only for a peer hundreds of buckets behind."""
        with self.condition:
            update = self._require_update()
            update.check_next(index)
            check_length(update.manifest, index, num_bytes)
            assert self._arena is not None
            update.next = index + 1
            self._tell_ready(update, index, num_bytes, self._arena)
        return index + 1

    def abort(self, reason: str) -> None:
        with self.condition:
            super().abort(reason)
            if self._update is not None and not self._update.is_open:
                self._update.peers.clear()

    def close(self) -> None:
        with self.condition:
            super().close()

    # --- what a transport adds ---

    @abc.abstractmethod
    def _tell_begun(self, update: ArenaUpdate) -> None: ...

    @abc.abstractmethod
    def _tell_ready(self, update: ArenaUpdate, index: int, num_bytes: int, arena: A) -> None:
        """Tell the update's peers of a bucket and its length, and note in `_readers` who was told."""

    @abc.abstractmethod
    def _make_arena(self, generation: int, size_bytes: int, device: torch.device) -> A:
        """Raises InsufficientMemoryError."""

    @abc.abstractmethod
    def _listen(self) -> None:
        """Take in what peers have done by now. Does not wait."""

    # --- what peers do ---

    def _on_connected(self, peer: P) -> None:
        """Let a receiver in; one of the same name is replaced."""
        former = self._peers.get(peer.name)
        if former is not None:
            error = PeerDiedError(f"{peer.name} connected anew in the middle of an update", peer=peer.name)
            self._drop(former, error, may_be_reading=True)
        self._left.discard(peer.name)
        self._peers[peer.name] = peer

    def _on_released(self, peer: P, generation: int, index: int) -> None:
        """The peer has done with a bucket of the present update."""
        update, arena = self._update, self._arena
        if update is not None and arena is not None and generation == arena.generation and index < update.num_buckets:
            self._readers.get(update.arena_layout.slots[index], set()).discard(peer.name)

    def _on_ended(self, peer: P, update: ArenaUpdate) -> None:
        """The peer takes no more of the present update, and holds nothing of it."""
        self._forget_reader(peer.name)
        if peer.name in update.peers and not update.is_whole:
            what = f"{peer.name} left the update after {update.next} of {update.num_buckets} buckets were sent"
            self._failures[peer.name] = UpdateAbortedError(what)
        update.peers.discard(peer.name)

    def _drop(self, peer: P, error: WeightcastError, *, may_be_reading: bool) -> None:
        """The peer is disconnected. `may_be_reading`: its process may live, and read what it was given."""
        name, update = peer.name, self._update
        if self._peers.get(name) is not peer:
            return
        del self._peers[name]
        self._left.add(name)
        held = self._forget_reader(name)
        if may_be_reading:
            self._lost_slots |= held
        if (update is not None and name in update.peers) or (held and isinstance(error, PeerTimeoutError)):
            logger.warning("%s", error)
            self._failures[name] = error
        if update is not None:
            update.peers.discard(name)

    def _forget_reader(self, name: str) -> set[int]:
        """The slots that the peer was reading."""
        held = {slot for slot, readers in self._readers.items() if name in readers}
        for slot in held:
            self._readers[slot].discard(name)
        return held

    # --- waiting ---

    def _is_connected(self, name: str) -> bool:
        return name in self._peers

    def _has_left(self, name: str) -> bool:
        return name in self._left

    def _await_released(self, slot: int | None = None) -> None:
        """Wait until nobody reads a slot, or any; a reader that does nothing for the deadline is dropped."""
        start = time.monotonic()
        while names := self._names_reading(slot):
            now = time.monotonic()
            ends = {name: max(start, self._peers[name].progress_at) + self._deadline_seconds for name in names}
            # Listen before anyone is dropped: it may be this process that stood still.
            self._wait(max(0.0, min(ends.values()) - now))
            for name in self._names_reading(slot):
                peer = self._peers[name]
                if name in ends and ends[name] <= now and peer.progress_at < now:
                    self._drop(peer, self._timed_out(name, "released nothing"), may_be_reading=True)

    def _names_reading(self, slot: int | None) -> set[str]:
        return set().union(*self._readers.values()) if slot is None else set(self._readers.get(slot, ()))

    # --- the arena ---

    def _prepare_arena(self, arena_layout: ArenaLayout, device: torch.device) -> None:
        arena, needed = self._arena, arena_layout.size_bytes
        self._readers.clear()
        if arena is not None and not self._lost_slots and arena.device == device and arena.size_bytes >= needed:
            arena.buffers.forget_above(len(arena_layout.slots))
        elif needed:
            self._replace_arena(needed, device)

    def _replace_arena(self, size_bytes: int, device: torch.device) -> None:
        self._close_arena()
        self._generation += 1
        self._arena = self._make_arena(self._generation, size_bytes, device)
        self._readers.clear()
        self._lost_slots.clear()

    def _close_arena(self) -> None:
        """Let go of the arena. Its memory is freed, unless a stalled reader may still be in it."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close(free=not self._lost_slots and not any(self._readers.values()))
