"""The sender's connections: who is there, what they say, and how long they are waited for. One thread, no queue.

Invariants: every wait polls all connections at once, lets newcomers in and tells those who wait in turn that the sender
lives; a peer that makes no progress for `deadline_seconds` is dropped, and so is one that sends anything unexpected; a
peer is gone before its successor of the same name is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import msgspec

from weightcast.errors import ManifestError, PeerDiedError, PeerTimeoutError, WeightcastError
from weightcast.transports.ipc.channel import Channel
from weightcast.transports.ipc.listener import Listener
from weightcast.transports.ipc.records import IpcWaiting, ToSender

_SIGNS_PER_DEADLINE = 4
_MAX_SIGN_SECONDS = 10.0
"""Well under a receiver's own deadline, however patient the sender is."""


class PeerObserver(Protocol):
    """What is told of the peers; neither call may wait."""

    def on_record(self, name: str, record: Any) -> None: ...

    def on_gone(self, name: str, error: WeightcastError, *, may_be_reading: bool) -> None: ...


@dataclasses.dataclass(slots=True, eq=False)
class _Peer:
    channel: Channel
    progress_at: float
    generation: int = -1


class IpcPeers:
    """All connected receivers, by name. `waiting` are those to be told that the sender is alive."""

    def __init__(self, listener: Listener, watcher: PeerObserver, deadline_seconds: float) -> None:
        self.waiting: Iterable[str] = ()
        self._listener = listener
        self._watcher = watcher
        self._deadline_seconds = deadline_seconds
        self._sign_seconds = min(deadline_seconds / _SIGNS_PER_DEADLINE, _MAX_SIGN_SECONDS)
        self._peers: dict[str, _Peer] = {}
        self._left: set[str] = set()
        self._next_sign_at = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._peers

    def has_left(self, name: str) -> bool:
        """Whether it was connected once and is no more."""
        return name in self._left

    def generation(self, name: str) -> int:
        """The arena that this peer was told of, or -1."""
        return self._peers[name].generation

    def set_generation(self, name: str, generation: int) -> None:
        if name in self._peers:
            self._peers[name].generation = generation

    def post(self, name: str, record: msgspec.Struct, descriptor: int | None = None) -> bool:
        """Send a record, waiting for room by the deadline; False if the peer is gone, or went because of it."""
        peer, end = self._peers.get(name), time.monotonic() + self._deadline_seconds
        while peer is not None and self._peers.get(name) is peer:
            try:
                if peer.channel.send(record, descriptor):
                    return True
            except EOFError as exc:
                self.drop(name, _died(name, exc), may_be_reading=False)
                return False
            remaining = end - time.monotonic()
            if remaining <= 0:
                self.drop(name, self._timed_out(name, "took no record"), may_be_reading=True)
                return False
            self.pump(remaining, writing=peer)
        return False

    def post_now(self, name: str, record: msgspec.Struct) -> None:
        """Send a record without waiting; a peer that has no room for it is disconnected, which tells it as much."""
        peer = self._peers.get(name)
        if peer is None:
            return
        try:
            if not peer.channel.send(record):
                self.drop(name, self._timed_out(name, "took no record"), may_be_reading=True)
        except EOFError as exc:
            self.drop(name, _died(name, exc), may_be_reading=False)

    def wait_connected(self, names: Callable[[], Collection[str]]) -> None:
        """Wait until `names()`, those who are still missing, is empty, or the deadline."""
        end = time.monotonic() + self._deadline_seconds
        while names() and (remaining := end - time.monotonic()) > 0:
            self.pump(remaining)

    def wait_released(self, holders: Callable[[], Collection[str]]) -> None:
        """Wait until `holders()` is empty; a holder that does nothing for the deadline is dropped."""
        start = time.monotonic()
        while names := holders():
            now = time.monotonic()
            ends = {name: max(start, self._peers[name].progress_at) + self._deadline_seconds for name in names}
            # Listen before anyone is dropped: it may be this process that stood still.
            self.pump(max(0.0, min(ends.values()) - now))
            for name in list(holders()):
                if name in ends and ends[name] <= now and self._peers[name].progress_at < now:
                    self.drop(name, self._timed_out(name, "released nothing"), may_be_reading=True)

    def pump(self, timeout_seconds: float, *, writing: _Peer | None = None) -> None:
        """Wait until somebody says or does something (or there is room to write to `writing`), and take all of it."""
        self._give_signs()
        poller = select.poll()
        poller.register(self._listener.arrived, select.POLLIN)
        by_descriptor = {peer.channel.fileno(): name for name, peer in self._peers.items()}
        for peer in self._peers.values():
            poller.register(peer.channel, select.POLLIN | (select.POLLOUT if peer is writing else 0))
        patience = min(timeout_seconds, self._sign_seconds)
        for descriptor, events in poller.poll(patience * 1000):
            if descriptor == self._listener.arrived:
                self.let_in()
            elif events & ~select.POLLOUT and descriptor in by_descriptor:
                self._read(by_descriptor[descriptor])

    def drop(self, name: str, error: WeightcastError, *, may_be_reading: bool) -> None:
        """Disconnect a peer. `may_be_reading`: its process may live, and read what it was given."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.channel.close()
            self._left.add(name)
            self._watcher.on_gone(name, error, may_be_reading=may_be_reading)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.channel.close()
        self._peers.clear()
        self._listener.close()

    def let_in(self) -> None:
        """Take in whoever has been welcomed by now."""
        for name, channel in self._listener.take():
            self._read(name)
            error = PeerDiedError(f"{name} connected anew in the middle of an update", peer=name)
            self.drop(name, error, may_be_reading=True)
            self._left.discard(name)
            self._peers[name] = _Peer(channel, time.monotonic())

    def _read(self, name: str) -> None:
        """Take every record that a peer has sent; `progress_at` moves with each."""
        peer = self._peers.get(name)
        try:
            while peer is not None and self._peers.get(name) is peer:
                packet = peer.channel.receive(ToSender)
                if packet is None:
                    return
                peer.progress_at = time.monotonic()
                self._watcher.on_record(name, packet[0])
        except EOFError as exc:
            self.drop(name, _died(name, exc), may_be_reading=False)
        except ManifestError as exc:
            error = PeerDiedError(f"{name} was disconnected, it sent no valid record: {exc}", peer=name)
            self.drop(name, error, may_be_reading=True)

    def _give_signs(self) -> None:
        now = time.monotonic()
        if now < self._next_sign_at:
            return
        self._next_sign_at = now + self._sign_seconds
        for name in list(self.waiting):
            # No room, or gone: noticed where something is waited for.
            with contextlib.suppress(EOFError, KeyError):
                self._peers[name].channel.send(IpcWaiting())

    def _timed_out(self, name: str, what: str) -> PeerTimeoutError:
        return PeerTimeoutError(f"{name} {what} for {self._deadline_seconds:g} s and was dropped", peer=name)


def _died(name: str, exc: EOFError) -> PeerDiedError:
    return PeerDiedError(f"the receiver of {name} has gone: {exc}", peer=name)
