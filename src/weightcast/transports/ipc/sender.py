"""The publisher's end of the ipc transport: writes buckets into an arena and announces each that is complete.

Invariant: buckets that are streamed from a GPU stay on it (`device`); all others pass through host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from weightcast.host.deadline import Deadline
from weightcast.links.link import frame
from weightcast.transports.ipc import records
from weightcast.transports.ipc.arena import OwnedSharedArena
from weightcast.transports.linked import LinkedPeer, LinkedSender
from weightcast.transports.records import KeepAlive
from weightcast.transports.sending import ArenaSender, ArenaUpdate

if TYPE_CHECKING:
    from weightcast.transports.ipc.cuda import OwnedCudaArena

IpcArena: TypeAlias = "OwnedSharedArena | OwnedCudaArena"

SCHEME = "ipc://"


class IpcSender(LinkedSender[ArenaUpdate, LinkedPeer], ArenaSender[LinkedPeer, IpcArena]):
    """Implements `Sender`; see `ArenaSender`."""

    peer_type = LinkedPeer
    same_host = True

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
        super().__init__(
            url,
            run=run,
            deadline_seconds=deadline_seconds,
            records=records.FromReceiver,
            num_slots=num_slots,
            device=device,
        )

    def _announce(self, peer: LinkedPeer, arena: IpcArena) -> bool:
        return self._post(peer, *arena.announcement())

    def _give_sign(self, peer: LinkedPeer) -> None:
        # No room, or gone: noticed where something is waited for.
        peer.link.put(frame(KeepAlive()))

    def _post(
        self, peer: LinkedPeer, record: msgspec.Struct, descriptor: int | None = None, *, wait: bool = True
    ) -> bool:
        """Send a peer a record. Without `wait`, end the link of a peer that has no room for it."""
        if not wait:
            return super()._post(peer, record)
        data, deadline = frame(record), Deadline(self._deadline_seconds)
        while self._peers.get(peer.name) is peer and not peer.link.put(data, descriptor):
            if deadline.has_passed:
                self._drop(peer, self._timed_out(peer.name, "took no record"), may_be_reading=True)
                return False
            peer.link.wake_for_room(True)
            try:
                self._wait(deadline.remaining_seconds)
            finally:
                peer.link.wake_for_room(False)
        return self._peers.get(peer.name) is peer

    def _disconnect(self) -> None:
        # Memory that the last readers have left by now is freed at once.
        self._listen()
        self._peers.clear()
        self._close_arena()

    def _make_arena(self, generation: int, size_bytes: int, device: torch.device) -> IpcArena:
        if device.type == "cuda":
            # Here: host memory needs none of it.
            from weightcast.transports.ipc.cuda import OwnedCudaArena

            return OwnedCudaArena(generation, size_bytes, device)
        return OwnedSharedArena(generation, size_bytes)
