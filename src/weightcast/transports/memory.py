"""`memory://`: sender and receivers in one process hand each other references. The reference for every contract.

Invariant: all state of a sender and its receivers is under one condition, which they share.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
from typing import Any

import msgspec
import torch

from weightcast.errors import PeerDiedError, StaleVersionError, WeightcastError
from weightcast.host import device as host_device
from weightcast.seams.transport import Transport
from weightcast.transports.kept_memory import MemoryToSend
from weightcast.transports.receiving import PUBLISHER, ArenaReceiver, MappedArena
from weightcast.transports.sending import ArenaSender, ConnectedPeer, OwnedArena

_SCHEME = "memory://"

_senders: dict[str, MemorySender] = {}
"""Every open sender of this process, by address."""


@dataclasses.dataclass(slots=True, eq=False)
class MemoryPeer(ConnectedPeer):
    """`inbox`: what the sender has said and the receiver not taken in. `gone`: why it is no longer connected."""

    inbox: collections.deque[Any] = dataclasses.field(default_factory=collections.deque)
    gone: str = ""


class MemoryArena(OwnedArena, MappedArena):
    """Both ends of an arena."""

    def __init__(self, generation: int, size_bytes: int, device: torch.device) -> None:
        super().__init__(generation, MemoryToSend(device, "sending this update").allocate(size_bytes), device)

    def reset(self) -> None:
        """Wait for the device: work that was queued by an update that was given up may still read the arena."""
        host_device.synchronize(self.device)

    def close(self, *, free: bool = False) -> None:
        """The memory stays as long as a tensor needs it."""


class MemorySender(ArenaSender[MemoryPeer, MemoryArena]):
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
        self.address = f"{_SCHEME}{secrets.token_hex(16)}"
        _senders[self.address] = self

    def let_in(self, name: str) -> MemoryPeer:
        """Let a receiver in; one of the same name is replaced."""
        with self.condition:
            peer = MemoryPeer(name)
            self._on_connected(peer)
            self.condition.notify_all()
            return peer

    def hear(self, peer: MemoryPeer, record: msgspec.Struct | None) -> None:
        """Take in a record of a receiver; None: the receiver has gone."""
        if self._peers.get(peer.name) is peer:
            if record is None:
                self._drop(peer, peer.died("it was closed"), may_be_reading=False)
            else:
                self._on_record(peer, record)
            self.condition.notify_all()

    def _post(self, peer: MemoryPeer, record: Any, *, wait: bool = True) -> bool:
        peer.inbox.append(record)
        self.condition.notify_all()
        return True

    def _announce(self, peer: MemoryPeer, arena: MemoryArena) -> bool:
        return self._post(peer, arena)

    def _make_arena(self, generation: int, size_bytes: int, device: torch.device) -> MemoryArena:
        return MemoryArena(generation, size_bytes, device)

    def _drop(self, peer: MemoryPeer, error: WeightcastError, *, may_be_reading: bool) -> None:
        peer.gone = peer.gone or str(error)
        super()._drop(peer, error, may_be_reading=may_be_reading)

    def _disconnect(self) -> None:
        _senders.pop(self.address, None)
        for peer in self._peers.values():
            peer.gone = "the publisher was closed"
        self._close_arena()


class MemoryReceiver(ArenaReceiver):
    """See `ArenaReceiver`."""

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
        self._peer = sender.let_in(peer)

    def _listen(self) -> None:
        self._ended = self._peer.gone
        while self._peer.inbox:
            self._on_record(self._peer.inbox.popleft())

    def _on_other(self, record: Any) -> None:
        if isinstance(record, MemoryArena):
            self._use_arena(record)
        else:
            super()._on_other(record)

    def _tell(self, record: msgspec.Struct) -> None:
        self._sender.hear(self._peer, record)

    def _disconnect(self) -> None:
        self._sender.hear(self._peer, None)
        super()._disconnect()


TRANSPORT = Transport(
    sender=MemorySender,
    receiver=MemoryReceiver,
    same_host=True,
    default_bucket_size_bytes={"cpu": 64 << 20, "cuda": 512 << 20, "cache": 8 << 20},
    mappable_on_gpu="staged",
)
