"""The publisher's end of the ipc transport: one arena, written once for all receivers on the host.

Invariants: a slot is rewritten only when each receiver that was told of its content has released it or has died; if one
may still be reading (it stalled past the deadline), the arena is abandoned to it and a new one takes its place, also in
the middle of an update. Nothing is copied but by the caller. All calls come from one thread.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weightcast.errors import ClosedError, PeerDiedError, PeerTimeoutError, UpdateAbortedError, WeightcastError
from weightcast.format.bucket import ArenaLayout, place
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.transports.ipc.arena import OwnedSharedArena
from weightcast.transports.ipc.channel import SCHEME
from weightcast.transports.ipc.cuda import OwnedCudaArena
from weightcast.transports.ipc.listener import Listener
from weightcast.transports.ipc.peers import IpcPeers
from weightcast.transports.ipc.records import (
    MAX_REASON_CHARACTERS,
    Awaiting,
    BucketReady,
    IpcAborted,
    IpcBegin,
    IpcEnded,
    Released,
)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _OpenUpdate:
    """The update in progress, or the last one, whose buckets may still be held."""

    number: int
    version: WeightVersion
    arena_layout: ArenaLayout
    device: torch.device
    peers: set[str]
    num_sent: int = 0
    is_open: bool = True

    @property
    def is_whole(self) -> bool:
        return self.num_sent == len(self.arena_layout.slots)


class IpcSender:
    """Implements `Sender`.

    Memory: streaming, `num_slots` buckets; staged, the whole version; kept for the next update. With a CUDA `device`
    streaming buckets lie in that device's memory; staged ones are in host memory always.
    """

    def __init__(
        self,
        url: str = SCHEME,
        *,
        run: str,
        deadline_seconds: float = 60.0,
        num_slots: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        if url != SCHEME:
            raise ValueError(f"{url!r}: an ipc sender finds a free address by itself; pass {SCHEME!r}")
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 1, and 2 to overlap packing with reading")
        self._run = run
        self._num_slots = num_slots
        self._deadline_seconds = deadline_seconds
        self._device = torch.device(device or "cpu")
        self._arena: OwnedSharedArena | OwnedCudaArena | None = None
        self._generation = 0
        self._readers: dict[int, set[str]] = {}
        self._lost_slots: set[int] = set()
        self._update: _OpenUpdate | None = None
        self._num_updates = 0
        self._failures: dict[str, WeightcastError] = {}
        self._declined: dict[str, int] = {}
        self._closed = False
        listener = Listener(run)
        self.address = listener.address
        self._peers = IpcPeers(listener, self, deadline_seconds)

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Those who were dropped, or have gone, since `open`: as of now. Does not wait."""
        if not self._closed:
            self._peers.pump(0)
        return dict(self._failures)

    def connected(self, peers: Sequence[str]) -> list[str]:
        """Those of these peers that are connected now. Does not wait."""
        self._require_open()
        self._peers.let_in()
        self._peers.pump(0)
        return [name for name in peers if name in self._peers]

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        """Begin an update. Waits until the former one's buckets are released and `peers` are connected; those who fail
        in that, or were connected and have gone, are in `failures`. Raises InsufficientMemoryError.
        """
        self._require_open()
        if version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this sender of run {self._run}")
        if self._update is not None and self._update.is_whole:
            self._update.is_open = False
            self._update.peers.clear()
        self.abort("the publisher began another update")
        self._failures = {}
        self._peers.waiting = tuple(peers)
        self._peers.let_in()
        self._peers.pump(0)
        self._peers.wait_released(lambda: set().union(*self._readers.values()))
        arena_layout = place(manifest, num_slots=self._num_slots, staged=staged)
        device = torch.device("cpu") if staged else self._device
        self._prepare_arena(arena_layout, device)
        self._gather_peers(version, peers)
        self._begin(version, arena_layout, device, [name for name in peers if name not in self._failures], staged)

    def _begin(
        self,
        version: WeightVersion,
        arena_layout: ArenaLayout,
        device: torch.device,
        names: Sequence[str],
        staged: bool,
    ) -> None:
        self._num_updates += 1
        self._update = update = _OpenUpdate(self._num_updates, version, arena_layout, device, set(names))
        self._peers.waiting = update.peers
        for name in names:
            self._peers.post(name, IpcBegin(version.number, update.number, staged, len(arena_layout.slots)))

    def buffer(self, index: int) -> torch.Tensor:
        """Where bucket `index`, the next one, is to be packed. Waits until its slot is free."""
        update = self._require_update(index)
        slot = update.arena_layout.slots[index]
        self._peers.pump(0)
        self._peers.wait_released(lambda: self._readers.get(slot, set()))
        if self._arena is None or slot in self._lost_slots:
            self._replace_arena(update.arena_layout.size_bytes, update.device)
        assert self._arena is not None
        return self._arena.buffers.get(
            index, update.arena_layout.offsets[index], update.arena_layout.sizes_bytes[index]
        )

    def send(self, index: int) -> int:
        """Tell the peers of bucket `index`; the next follows. Waits only for a peer hundreds of buckets behind."""
        update = self._require_update(index)
        arena, slot = self._arena, update.arena_layout.slots[index]
        assert arena is not None
        offset_bytes, event = update.arena_layout.offsets[index], arena.mark_ready(slot)
        ready = BucketReady(update.version.number, update.number, arena.generation, index, offset_bytes, event)
        update.num_sent += 1
        for name in sorted(update.peers):
            if self._peers.generation(name) != arena.generation:
                record, descriptor = arena.announcement()
                if not self._peers.post(name, record, descriptor):
                    continue
                self._peers.set_generation(name, arena.generation)
            if name in update.peers and self._peers.post(name, ready) and name in update.peers:
                self._readers.setdefault(slot, set()).add(name)
        return index + 1

    def abort(self, reason: str) -> None:
        """End the update for every peer; what they hold they release. Does not wait."""
        update = self._update
        if update is None or not update.is_open or self._closed:
            return
        self._peers.pump(0)
        update.is_open = False
        aborted = IpcAborted(update.version.number, update.number, reason[:MAX_REASON_CHARACTERS])
        for name in sorted(update.peers):
            self._peers.post_now(name, aborted)
        update.peers.clear()

    def close(self) -> None:
        """Disconnect all peers and free the arena. Receivers that have mapped it may read on."""
        if self._closed:
            return
        self.abort("the publisher was closed")
        self._closed = True
        self._peers.close()
        if self._arena is not None:
            self._arena.close(free=not self._lost_slots and not any(self._readers.values()))
            self._arena = None

    # --- what the peers do ---

    def on_record(self, name: str, record: Any) -> None:
        update = self._update
        match record:
            case Awaiting():
                self._declined.pop(name, None)
            case IpcEnded(update=0):
                self._declined[name] = record.version
                if update is not None and update.version.number == record.version:
                    self._on_ended(name, update)
            case IpcEnded() if update is not None and record.update == update.number:
                self._on_ended(name, update)
            case Released() if update is not None and record.update == update.number:
                if self._arena is not None and record.generation == self._arena.generation:
                    self._on_released(name, update, record.index)

    def _on_released(self, name: str, update: _OpenUpdate, index: int) -> None:
        if index < len(update.arena_layout.slots):
            self._readers.get(update.arena_layout.slots[index], set()).discard(name)

    def _on_ended(self, name: str, update: _OpenUpdate) -> None:
        self._forget_reader(name)
        if name in update.peers and not update.is_whole:
            self._failures[name] = _left(name, update)
        update.peers.discard(name)

    def on_gone(self, name: str, error: WeightcastError, *, may_be_reading: bool) -> None:
        held = self._forget_reader(name)
        if may_be_reading:
            self._lost_slots |= held
        self._declined.pop(name, None)
        update = self._update
        if (update is not None and name in update.peers) or (held and isinstance(error, PeerTimeoutError)):
            logger.warning("%s", error)
            self._failures[name] = error
        if update is not None:
            update.peers.discard(name)

    def _forget_reader(self, name: str) -> set[int]:
        held = {slot for slot, readers in self._readers.items() if name in readers}
        for slot in held:
            self._readers[slot].discard(name)
        return held

    def _gather_peers(self, version: WeightVersion, names: Sequence[str]) -> None:
        """Wait until all are connected; who is gone, or has declined this version already, is a failure at once."""

        def missing() -> list[str]:
            absent = [name for name in names if name not in self._peers and name not in self._failures]
            return [name for name in absent if not self._peers.has_left(name)]

        start = time.monotonic()
        self._peers.wait_connected(missing)
        waited = f"{time.monotonic() - start:.1f} s"
        for name in names:
            if name in self._failures:
                continue
            if self._declined.get(name) == version.number:
                self._failures[name] = UpdateAbortedError(f"{name} gave version {version.number} up before it began")
            elif name not in self._peers and self._peers.has_left(name):
                self._failures[name] = PeerDiedError(f"the receiver of {name} has gone and is not back", peer=name)
            elif name not in self._peers:
                self._failures[name] = PeerTimeoutError(f"{name} did not connect within {waited}", peer=name)

    # --- the arena ---

    def _prepare_arena(self, arena_layout: ArenaLayout, device: torch.device) -> None:
        arena, needed = self._arena, arena_layout.size_bytes
        self._readers.clear()
        if arena is not None and not self._lost_slots and arena.device == device and arena.size_bytes >= needed:
            arena.buffers.forget_above(len(arena_layout.slots))
        elif needed:
            self._replace_arena(needed, device)

    def _replace_arena(self, size_bytes: int, device: torch.device) -> None:
        """Make a new arena. The old one's pages are freed, unless a stalled reader may still be in them."""
        if self._arena is not None:
            old, self._arena = self._arena, None
            old.close(free=not self._lost_slots and not any(self._readers.values()))
        self._generation += 1
        if device.type == "cuda":
            self._arena = OwnedCudaArena(self._generation, size_bytes, device)
        else:
            self._arena = OwnedSharedArena(self._generation, size_bytes)
        self._readers.clear()
        self._lost_slots.clear()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this sender was closed")

    def _require_update(self, index: int) -> _OpenUpdate:
        self._require_open()
        update = self._update
        if update is None or not update.is_open:
            raise UpdateAbortedError("no update is open: it was aborted, or open() was not called")
        if index != update.num_sent or update.is_whole:
            raise ValueError(
                f"bucket {index} of {len(update.arena_layout.slots)}: bucket {update.num_sent} is the next"
            )
        return update


def _left(name: str, update: _OpenUpdate) -> UpdateAbortedError:
    num_buckets = len(update.arena_layout.slots)
    return UpdateAbortedError(f"{name} left the update after {update.num_sent} of {num_buckets} buckets were sent")
