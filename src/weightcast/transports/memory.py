"""`memory://`: sender and receivers in one process hand each other references. The reference for every contract.

Invariants: all state is the sender's, under one condition that its receivers share; an update that was given up is
never taken for its successor, not even under the same version.
"""

from __future__ import annotations

import dataclasses
import secrets
import time

import torch

from weightcast.errors import PeerDiedError, StaleVersionError, WeightcastError
from weightcast.format.bucket import BucketBuffer
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import memory as host_memory
from weightcast.seams.transport import Bucket, Transport
from weightcast.transports.receiving import PUBLISHER, ReceivingEnd, WantedUpdate
from weightcast.transports.sending import ArenaSender, ArenaUpdate, ConnectedPeer, OwnedArena

_SCHEME = "memory://"

_senders: dict[str, MemorySender] = {}
"""Every open sender of this process, by address."""


@dataclasses.dataclass(slots=True, eq=False)
class MemoryPeer(ConnectedPeer):
    """`gone`: why it is no longer connected. `invited`: the update that it may take part in, until it ends it."""

    gone: str = ""
    invited: int = 0


class MemorySender(ArenaSender[MemoryPeer, OwnedArena]):
    """Implements `Sender`; see `ArenaSender`."""

    def __init__(
        self,
        url: str = _SCHEME,
        *,
        run: str,
        deadline_seconds: float = 60.0,
        num_slots: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        if url != _SCHEME:
            raise ValueError(f"{url!r}: a memory sender finds a free address by itself; pass {_SCHEME!r}")
        super().__init__(run, deadline_seconds=deadline_seconds, num_slots=num_slots, device=device)
        self.run = run
        self.address = f"{_SCHEME}{secrets.token_hex(16)}"
        self.sent: list[tuple[int, BucketBuffer]] = []
        """The buckets of the present update, each with the generation of its arena."""
        self.alive_at = time.monotonic()
        _senders[self.address] = self

    # --- for receivers; the caller holds the condition ---

    @property
    def update(self) -> ArenaUpdate | None:
        return self._update

    def join(self, name: str) -> MemoryPeer:
        """Let a receiver in; one of the same name is replaced."""
        peer = MemoryPeer(name)
        self._on_connected(peer)
        self._wake()
        return peer

    def leave(self, peer: MemoryPeer) -> None:
        error = PeerDiedError(f"the receiver of {peer.name} has gone", peer=peer.name)
        self._drop(peer, error, may_be_reading=False)
        self._wake()

    def release(self, peer: MemoryPeer, update: ArenaUpdate, index: int) -> None:
        if update is self._update and self._peers.get(peer.name) is peer:
            self._on_released(peer, self.sent[index][0], index)
        self._on_progress(peer)

    def end(self, peer: MemoryPeer, update: ArenaUpdate | None, version: WeightVersion) -> None:
        """A receiver has done with an update, or with a version that has not begun."""
        current = self._update
        if update is None:
            peer.declined = version.number
        is_meant = current is (update or current) and self._peers.get(peer.name) is peer
        if current is not None and current.version == version and is_meant:
            self._on_ended(peer, current)
            peer.invited = 0
        self._on_progress(peer)

    # --- inside ---

    def _on_progress(self, peer: MemoryPeer) -> None:
        peer.progress_at = time.monotonic()
        self.condition.notify_all()

    def _wake(self) -> None:
        self.alive_at = time.monotonic()
        self.condition.notify_all()

    def _wait(self, seconds: float) -> None:
        self._wake()
        self.condition.wait(min(seconds, self._sign_seconds))

    def _listen(self) -> None:
        """Receivers are heard as they speak."""

    def _tell_begun(self, update: ArenaUpdate) -> None:
        self.sent = []
        for name in update.peers:
            self._peers[name].invited = update.number
        self._wake()

    def _tell_ready(self, update: ArenaUpdate, index: int, num_bytes: int, arena: OwnedArena) -> None:
        # Receivers have the buffer itself: its header says how long the bucket is.
        self.sent.append((arena.generation, arena.buffers.at(update.arena_layout, index)))
        self._readers.setdefault(update.arena_layout.slots[index], set()).update(update.peers)
        self._wake()

    def _tell_aborted(self, update: ArenaUpdate) -> None:
        self._wake()

    def _make_arena(self, generation: int, size_bytes: int, device: torch.device) -> OwnedArena:
        if device.type == "cpu":
            host_memory.require(size_bytes, "sending this update", host_memory.LESS_AT_ONCE)
        return OwnedArena(generation, torch.empty(size_bytes, dtype=torch.uint8, device=device), device)

    def _drop(self, peer: MemoryPeer, error: WeightcastError, *, may_be_reading: bool) -> None:
        peer.gone = peer.gone or str(error)
        super()._drop(peer, error, may_be_reading=may_be_reading)

    def _disconnect(self) -> None:
        _senders.pop(self.address, None)
        for peer in self._peers.values():
            peer.gone = "the publisher was closed"
        self._close_arena()
        self._wake()


class MemoryReceiver(ReceivingEnd[WantedUpdate[ArenaUpdate]]):
    """Memory: none."""

    def __init__(
        self, url: str, *, peer: str, run: str, deadline_seconds: float = 60.0, device: torch.device | None = None
    ) -> None:
        """`device` changes nothing: buckets are the sender's own memory.

        Raises PeerDiedError if there is no such sender, StaleVersionError if it is of another run.
        """
        if not url.startswith(_SCHEME):
            raise ValueError(f"{url!r} is not the address of a memory sender; expected {_SCHEME}NAME")
        sender = _senders.get(url)
        if sender is None:
            raise PeerDiedError(f"no publisher in this process has the address {url}", peer=PUBLISHER)
        if sender.run != run:
            raise StaleVersionError(f"the receiver is of run {run}, the publisher of {sender.run}: init again")
        super().__init__(run, deadline_seconds, sender.condition)
        self._sender = sender
        with self._condition:
            self._peer = sender.join(peer)

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Wait for `version` from now on. Raises PeerDiedError if the sender has gone."""
        self._check_run(version)
        self.end()
        with self._condition:
            self._listen()
            self._require_connection()
            update = self._sender.update
            if update is not None and (update.version != version or update.aborted is not None):
                # Nobody here has opened it, or it was given up.
                self._sender.end(self._peer, update, update.version)
            self._peer.declined = None
            self._wanted = WantedUpdate(manifest, version, staged)

    def _listen(self) -> None:
        wanted, update = self._wanted, self._sender.update
        self._heard_at, self._ended = self._sender.alive_at, self._peer.gone
        if wanted is None:
            return
        invited = update if update is not None and update.number == self._peer.invited else None
        if wanted.begun is None and invited is not None and invited.version == wanted.version:
            wanted.check_begun(invited.num_buckets, invited.staged)
            wanted.begun = invited
        if wanted.begun is not None:
            wanted.aborted = wanted.begun.aborted
            if wanted.aborted is None and not self._ended and wanted.begun is not update:
                wanted.aborted = "the publisher went on to another update"

    def _next_bucket(self, wanted: WantedUpdate[ArenaUpdate]) -> Bucket | None:
        index, sent = wanted.num_taken, self._sender.sent
        return None if wanted.begun is None or len(sent) <= index else Bucket(index, sent[index][1])

    def _release(self, wanted: WantedUpdate[ArenaUpdate], index: int) -> None:
        with self._condition:
            if not wanted.staged and self._wanted is wanted and wanted.begun is not None:
                self._sender.release(self._peer, wanted.begun, index)

    def _leave(self, wanted: WantedUpdate[ArenaUpdate]) -> None:
        self._sender.end(self._peer, wanted.begun, wanted.version)

    def _disconnect(self) -> None:
        self._sender.leave(self._peer)


TRANSPORT = Transport(
    sender=MemorySender,
    receiver=MemoryReceiver,
    default_bucket_size_bytes={"cpu": 64 << 20, "cuda": 512 << 20},
    same_host=True,
)
