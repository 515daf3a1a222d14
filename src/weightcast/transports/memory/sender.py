"""The publisher's end of the memory transport, and all its state, under one condition that its receivers share.

Invariants: a buffer is rewritten only when every receiver that was told of it has released it or has gone, and is
abandoned to one that was dropped; an update that was given up is never taken for its successor, not even under the same
version.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from weightcast.errors import (
    ClosedError,
    PeerDiedError,
    PeerTimeoutError,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.format.bucket import TRAILER_BYTES, slot_size_bytes
from weightcast.format.geometry import align
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import memory as host_memory

SCHEME = "memory://"
_SIGNS_PER_DEADLINE = 4
_MAX_SIGN_SECONDS = 10.0

senders: dict[str, MemorySender] = {}
"""Every open sender of this process, by address."""


@dataclasses.dataclass(slots=True, eq=False)
class PeerState:
    """A receiver's place at its sender. `gone` says why it has none any more, `declined` which version it gave up."""

    peer: str
    progress_at: float
    gone: str = ""
    declined: int | None = None
    last_ended: int = 0


@dataclasses.dataclass(slots=True, eq=False)
class SentUpdate:
    """The update in progress, or the last one, whose buffers may still be held."""

    number: int
    version: WeightVersion
    manifest: Manifest
    staged: bool
    states: set[PeerState]
    sent: list[torch.Tensor] = dataclasses.field(default_factory=list)
    aborted: str | None = None

    @property
    def is_whole(self) -> bool:
        return len(self.sent) == len(self.manifest.buckets)


class MemorySender:
    """Implements `Sender`. Memory: streaming, `num_slots` buckets; staged, the whole version; kept."""

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
            raise ValueError(f"{url!r}: a memory sender finds a free address by itself; pass {SCHEME!r}")
        if num_slots < 1:
            raise ValueError(f"num_slots is {num_slots}; it must be at least 1")
        self.address = f"{SCHEME}{secrets.token_hex(16)}"
        self.run = run
        self.condition = threading.Condition()
        self.states: dict[str, PeerState] = {}
        self.update: SentUpdate | None = None
        self.alive_at = time.monotonic()
        self._deadline_seconds = deadline_seconds
        self._sign_seconds = min(deadline_seconds / _SIGNS_PER_DEADLINE, _MAX_SIGN_SECONDS)
        self._num_slots = num_slots
        self._device = torch.device(device or "cpu")
        self._buffers: dict[int, torch.Tensor] = {}
        self._readers: dict[int, set[PeerState]] = {}
        self._left: set[str] = set()
        self._failures: dict[str, WeightcastError] = {}
        self._num_updates = 0
        self._closed = False
        senders[self.address] = self

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        return dict(self._failures)

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        """Begin an update. Waits until the former one's buckets are released and `peers` are connected."""
        if version.run != self.run:
            raise ValueError(f"version {version.number} is of run {version.run}, this sender of run {self.run}")
        with self.condition:
            self._require_open()
            self._end_former()
            self._wait_released(lambda: set().union(*self._readers.values()))
            self.update = None
            self._prepare(manifest, staged)
            self._gather_peers(peers, version)
            self._num_updates += 1
            states = {self.states[name] for name in peers if name not in self._failures}
            self.update = SentUpdate(self._num_updates, version, manifest, staged, states)
            self._wake()

    def buffer(self, index: int) -> torch.Tensor:
        """Where bucket `index`, the next one, is to be packed. Waits until its buffer is free."""
        with self.condition:
            update = self._require_update(index)
            slot = self._slot(update, index)
            self._wait_released(lambda: self._readers.get(slot, set()))
            if slot not in self._buffers:
                size_bytes = _size_bytes(update.manifest, slot, update.staged)
                self._buffers[slot] = torch.empty(size_bytes, dtype=torch.uint8, device=self._device)
            return self._buffers[slot]

    def send(self, index: int) -> int:
        """Tell the peers of bucket `index`; the next follows. Never waits."""
        with self.condition:
            update = self._require_update(index)
            slot = self._slot(update, index)
            update.sent.append(self._buffers[slot])
            self._readers.setdefault(slot, set()).update(update.states)
            self._wake()
        return index + 1

    def connected(self, peers: Sequence[str]) -> list[str]:
        with self.condition:
            return [name for name in peers if name in self.states]

    def abort(self, reason: str) -> None:
        """End the update for every peer; what they hold they release."""
        with self.condition:
            if self.update is not None and self.update.aborted is None and not self._closed:
                self.update.aborted = reason
                self._wake()

    def close(self) -> None:
        """Every receiver loses its sender. Idempotent."""
        with self.condition:
            if not self._closed:
                self.abort("the publisher was closed")
                self._closed = True
                senders.pop(self.address, None)
                for state in self.states.values():
                    state.gone = "the publisher was closed"
                self._buffers.clear()
                self._wake()

    # --- for receivers; the caller holds the condition ---

    def join(self, peer: str) -> PeerState:
        """Let a receiver in; one of the same name is replaced."""
        former = self.states.get(peer)
        if former is not None:
            error = PeerDiedError(f"{peer} connected anew in the middle of an update", peer=peer)
            self._drop(former, error, may_be_reading=True)
        self._left.discard(peer)
        self.states[peer] = state = PeerState(peer, time.monotonic())
        self._wake()
        return state

    def leave(self, state: PeerState) -> None:
        """A receiver disconnects."""
        self._drop(
            state, PeerDiedError(f"the receiver of {state.peer} has gone", peer=state.peer), may_be_reading=False
        )
        self._wake()

    def release(self, state: PeerState, update: SentUpdate, index: int) -> None:
        if update is self.update:
            self._readers.get(self._slot(update, index), set()).discard(state)
        state.progress_at = time.monotonic()
        self.condition.notify_all()

    def end(self, state: PeerState, update: SentUpdate | None, version: WeightVersion) -> None:
        """A receiver has done with an update, or with a version that has not begun."""
        current = self.update
        if update is None:
            state.declined = version.number
        if current is not None and current is (update or current) and current.version == version:
            for readers in self._readers.values():
                readers.discard(state)
            if state in current.states and not current.is_whole and current.aborted is None:
                self._failures[state.peer] = UpdateAbortedError(f"{state.peer} left after {len(current.sent)} buckets")
            current.states.discard(state)
            state.last_ended = current.number
        state.progress_at = time.monotonic()
        self.condition.notify_all()

    # --- inside ---

    def _wake(self) -> None:
        self.alive_at = time.monotonic()
        self.condition.notify_all()

    def _end_former(self) -> None:
        former = self.update
        if former is not None:
            if not former.is_whole:
                self.abort("the publisher began another update")
            former.states.clear()
        self._failures = {}

    def _wait_released(self, holders: Callable[[], set[PeerState]]) -> None:
        start = time.monotonic()
        while states := set(holders()):
            ends = {state: max(start, state.progress_at) + self._deadline_seconds for state in states}
            now = time.monotonic()
            for state in (state for state, end in ends.items() if end <= now):
                what = f"{state.peer} released nothing for {self._deadline_seconds:g} s and was dropped"
                self._drop(state, PeerTimeoutError(what, peer=state.peer), may_be_reading=True)
            self._wake()
            self.condition.wait(
                max(
                    0.0,
                    min(min(ends.values()) - now, self._sign_seconds),
                )
            )

    def _drop(self, state: PeerState, error: WeightcastError, *, may_be_reading: bool) -> None:
        if self.states.get(state.peer) is not state:
            return
        del self.states[state.peer]
        self._left.add(state.peer)
        state.gone = str(error)
        held = [slot for slot, readers in self._readers.items() if state in readers]
        for slot in held:
            self._readers[slot].discard(state)
            if may_be_reading:
                self._buffers.pop(slot, None)
        is_taking_part = self.update is not None and self.update.aborted is None and state in self.update.states
        if is_taking_part or (held and isinstance(error, PeerTimeoutError)):
            self._failures[state.peer] = error
        if self.update is not None:
            self.update.states.discard(state)

    def _prepare(self, manifest: Manifest, staged: bool) -> None:
        """Keep the buffers that fit, drop the others. Raises InsufficientMemoryError."""
        self._readers.clear()
        num_slots = len(manifest.buckets) if staged else min(self._num_slots, len(manifest.buckets))
        sizes = {slot: _size_bytes(manifest, slot, staged) for slot in range(num_slots)}
        self._buffers = {s: b for s, b in self._buffers.items() if s in sizes and b.numel() == sizes[s]}
        needed = sum(size for slot, size in sizes.items() if slot not in self._buffers)
        if needed:
            host_memory.require(needed, "sending this update", host_memory.LESS_AT_ONCE)

    def _gather_peers(self, names: Sequence[str], version: WeightVersion) -> None:
        def missing() -> bool:
            return any(n not in self.states and n not in self._left and n not in self._failures for n in names)

        end = time.monotonic() + self._deadline_seconds
        while missing() and (remaining := end - time.monotonic()) > 0:
            self._wake()
            self.condition.wait(min(remaining, self._sign_seconds))
        for name in names:
            if name in self._failures:
                continue
            if name in self.states and self.states[name].declined == version.number:
                self._failures[name] = UpdateAbortedError(f"{name} gave version {version.number} up before it began")
            elif name not in self.states and name in self._left:
                self._failures[name] = PeerDiedError(f"the receiver of {name} has gone and is not back", peer=name)
            elif name not in self.states:
                waited = f"within {self._deadline_seconds:g} s"
                self._failures[name] = PeerTimeoutError(f"{name} did not connect {waited}", peer=name)

    def _slot(self, update: SentUpdate, index: int) -> int:
        return index if update.staged else index % self._num_slots

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this sender was closed")

    def _require_update(self, index: int) -> SentUpdate:
        self._require_open()
        update = self.update
        if update is None or update.aborted is not None:
            raise UpdateAbortedError("no update is open: it was aborted, or open() was not called")
        if index != len(update.sent) or update.is_whole:
            raise ValueError(f"bucket {index} of {len(update.manifest.buckets)}: bucket {len(update.sent)} is the next")
        return update


def _size_bytes(manifest: Manifest, slot: int, staged: bool) -> int:
    return align(manifest.buckets[slot] + TRAILER_BYTES) if staged else slot_size_bytes(manifest)
