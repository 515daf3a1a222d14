"""The publisher's end of the ipc transport: one arena, written once for all receivers on the host.

Invariants: every wait polls all connections at once, lets newcomers in and tells those that wait that the sender lives;
a peer that makes no progress for `deadline_seconds` is dropped, and so is one that sends anything unexpected; a peer is
gone before its successor of the same name is there. All calls but `close` come from one thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from weightcast.errors import ClosedError, ManifestError, PeerDiedError, WeightcastError
from weightcast.host.deadline import Deadline
from weightcast.transports.ipc.arena import OwnedSharedArena
from weightcast.transports.ipc.channel import SCHEME, Channel, Listener
from weightcast.transports.ipc.records import ToSender
from weightcast.transports.records import KeepAlive
from weightcast.transports.sending import ArenaSender, ConnectedPeer

if TYPE_CHECKING:
    from weightcast.transports.ipc.cuda import OwnedCudaArena

IpcArena: TypeAlias = "OwnedSharedArena | OwnedCudaArena"


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class IpcPeer(ConnectedPeer):
    """`unsent`: records that found no room, and were not to be waited for; they go before the next one."""

    channel: Channel
    unsent: list[msgspec.Struct] = dataclasses.field(default_factory=list)


class IpcSender(ArenaSender[IpcPeer, IpcArena]):
    """Implements `Sender`; see `ArenaSender`."""

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
        super().__init__(run, deadline_seconds=deadline_seconds, num_slots=num_slots, device=device)
        self._listener = Listener(run)
        self.address = self._listener.address
        self._is_closing = False

    def close(self) -> None:
        """May be called from another thread, whose call that waits raises ClosedError then."""
        if not self._is_closing:
            self._is_closing = True
            self._listener.wake()
        super().close()

    # --- records ---

    def _announce(self, peer: IpcPeer, arena: IpcArena) -> bool:
        return self._post(peer, *arena.announcement())

    def _give_sign(self, peer: IpcPeer) -> None:
        # No room, or gone: noticed where something is waited for.
        with contextlib.suppress(EOFError):
            peer.channel.send(KeepAlive())

    def _post(self, peer: IpcPeer, record: msgspec.Struct, descriptor: int | None = None, *, wait: bool = True) -> bool:
        deadline: Deadline | None = None
        while self._peers.get(peer.name) is peer:
            try:
                if self._send_unsent(peer) and peer.channel.send(record, descriptor):
                    return True
            except EOFError as exc:
                self._drop(peer, peer.died(exc), may_be_reading=False)
                return False
            if not wait:
                # It is only behind, and hears it when it has read what is before it.
                peer.unsent.append(record)
                return True
            deadline = deadline or Deadline(self._deadline_seconds)
            if deadline.has_passed:
                self._drop(peer, self._timed_out(peer.name, "took no record"), may_be_reading=True)
                return False
            self._wait(deadline.remaining_seconds, writing=peer)
        return False

    def _send_unsent(self, peer: IpcPeer) -> bool:
        """Whether nothing is unsent any more. Raises EOFError at the end of the connection."""
        while peer.unsent and peer.channel.send(peer.unsent[0]):
            del peer.unsent[0]
        return not peer.unsent

    def _listen(self) -> None:
        self._let_in()
        self._wait(0)

    def _wait(self, seconds: float, *, writing: IpcPeer | None = None) -> None:
        """Wait until somebody says or does something (or there is room to write to `writing`), and take all of it."""
        if self._is_closing and seconds > 0:
            raise ClosedError("this sender was closed")
        self._give_signs()
        poller = select.poll()
        poller.register(self._listener.arrived, select.POLLIN)
        by_descriptor = {peer.channel.fileno(): peer for peer in self._peers.values()}
        for descriptor, peer in by_descriptor.items():
            poller.register(descriptor, select.POLLIN | (select.POLLOUT if peer is writing or peer.unsent else 0))
        for descriptor, events in poller.poll(min(seconds, self._sign_seconds) * 1000):
            if descriptor == self._listener.arrived:
                self._let_in()
                continue
            with contextlib.suppress(EOFError):  # reading notices it too
                self._send_unsent(by_descriptor[descriptor])
            if events & ~select.POLLOUT:
                self._read(by_descriptor[descriptor])

    def _let_in(self) -> None:
        """Take in whoever has been welcomed by now."""
        for name, channel in self._listener.take():
            if name in self._peers:
                self._read(self._peers[name])
            self._on_connected(IpcPeer(name, channel=channel))

    def _read(self, peer: IpcPeer) -> None:
        """Take every record that a peer has sent; `progress_at` moves with each."""
        try:
            while self._peers.get(peer.name) is peer:
                packet = peer.channel.receive(ToSender)
                if packet is None:
                    return
                self._on_record(peer, packet[0])
        except EOFError as exc:
            self._drop(peer, peer.died(exc), may_be_reading=False)
        except ManifestError as exc:
            error = PeerDiedError(f"{peer.name} was disconnected, it sent no valid record: {exc}", peer=peer.name)
            self._drop(peer, error, may_be_reading=True)

    def _drop(self, peer: IpcPeer, error: WeightcastError, *, may_be_reading: bool) -> None:
        peer.channel.close()
        super()._drop(peer, error, may_be_reading=may_be_reading)

    def _disconnect(self) -> None:
        # Memory that the last readers have left by now is freed at once.
        self._listen()
        for peer in self._peers.values():
            peer.channel.close()
        self._peers.clear()
        self._listener.close()
        self._close_arena()

    # --- the arena ---

    def _make_arena(self, generation: int, size_bytes: int, device: torch.device) -> IpcArena:
        if device.type == "cuda":
            # Here: host memory needs none of it.
            from weightcast.transports.ipc.cuda import OwnedCudaArena

            return OwnedCudaArena(generation, size_bytes, device)
        return OwnedSharedArena(generation, size_bytes)
