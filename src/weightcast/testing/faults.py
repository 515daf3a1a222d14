"""Transports that go wrong on purpose: wrappers of any sender or receiver, never patches of one.

A fault strikes at one bucket of one update and is spent then; the next update goes through. What an engine may make of
it is always the same: nothing. The old version stays, and the error says what was found.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from weightcast.errors import WeightcastError
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Bucket, Receiver, Sender, Transport

SCHEME = "faulty"


@dataclasses.dataclass(frozen=True, slots=True)
class Corrupt:
    """One bit of bucket `at` is turned over."""

    at: int
    byte: int = 0
    bit: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """Bucket `at` never arrives. At a sender: its bytes don't, so that the slot has what it had before."""

    at: int


@dataclasses.dataclass(frozen=True, slots=True)
class Duplicate:
    """Bucket `at` arrives twice. At a sender: its bytes arrive again in the next one's place."""

    at: int


@dataclasses.dataclass(frozen=True, slots=True)
class Reorder:
    """Buckets `at` and `at` + 1 change places. At a receiver only."""

    at: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """Nothing goes on at bucket `at` until `until` is set, or `deadline_seconds` have passed."""

    at: int
    until: threading.Event
    deadline_seconds: float = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Kill:
    """`action` is called at bucket `at`, before it goes on: close a peer, end a process by its pid, raise."""

    at: int
    action: Callable[[], object]


SenderFault: TypeAlias = Corrupt | Drop | Duplicate | Stall | Kill
Fault: TypeAlias = SenderFault | Reorder


class FaultySender:
    """A `Sender` that passes everything on to another one, but for `fault`, which may be set again between updates."""

    def __init__(self, inner: Sender, fault: SenderFault | None = None) -> None:
        self.inner = inner
        self.fault = fault
        self.address = inner.address
        self._buffers: dict[int, torch.Tensor] = {}
        self._before: dict[int, torch.Tensor] = {}

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        return self.inner.failures

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        self._buffers.clear()
        self._before.clear()
        self.inner.open(manifest, version, peers=peers, staged=staged)

    def buffer(self, index: int) -> torch.Tensor:
        self._buffers[index] = buffer = self.inner.buffer(index)
        if isinstance(self.fault, Drop) and self.fault.at == index:
            self._before[index] = buffer.clone()
        return buffer

    def send(self, index: int) -> int:
        fault = self.fault
        if isinstance(fault, Duplicate) and index == fault.at:
            self._before[index] = self._buffers[index].clone()
        if fault is not None and index == fault.at + isinstance(fault, Duplicate):
            self.fault = None
            self._strike(fault, index)
        return self.inner.send(index)

    def connected(self, peers: Sequence[str]) -> Sequence[str]:
        return self.inner.connected(peers)

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self._buffers.clear()
        self._before.clear()
        self.inner.close()

    def _strike(self, fault: SenderFault, index: int) -> None:
        buffer = self._buffers[index]
        match fault:
            case Corrupt():
                buffer[fault.byte] ^= 1 << fault.bit
            case Drop() | Duplicate():
                came = self._before[fault.at]
                num_bytes = min(came.numel(), buffer.numel())
                buffer[:num_bytes] = came[:num_bytes]
            case Stall():
                fault.until.wait(fault.deadline_seconds)
            case Kill():
                fault.action()


class FaultyReceiver:
    """A `Receiver` that passes everything on from another one, but for `fault`, which may be set again."""

    def __init__(self, inner: Receiver, fault: Fault | None = None) -> None:
        self.inner = inner
        self.fault = fault

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        self.inner.open(manifest, version, staged=staged)

    def __iter__(self) -> Iterator[Bucket]:
        held: Bucket | None = None
        for bucket in self.inner:
            if held is not None:
                yield bucket
                yield held
                held = None
            elif self.fault is None or bucket.index != self.fault.at:
                yield bucket
            elif isinstance(self.fault, Reorder):
                self.fault, held = None, _copy(bucket)
            else:
                fault, self.fault = self.fault, None
                yield from _struck(fault, bucket)
        if held is not None:
            yield held

    def reread(self, bucket: Bucket) -> bool:
        return self.inner.reread(bucket)

    def end(self) -> None:
        self.inner.end()

    def close(self) -> None:
        self.inner.close()


def _struck(fault: Fault, bucket: Bucket) -> Sequence[Bucket]:
    match fault:
        case Drop():
            return ()
        case Duplicate():
            return bucket, bucket
        case Corrupt():
            bad = _copy(bucket)
            bad.buffer[fault.byte] ^= 1 << fault.bit
            return (bad,)
        case Stall():
            fault.until.wait(fault.deadline_seconds)
        case Kill():
            fault.action()
    return (bucket,)


def _copy(bucket: Bucket) -> Bucket:
    """What another bucket's turn must not take away."""
    return Bucket(bucket.index, bucket.buffer.clone())


class FaultyTransport:
    """Registers as any transport does, and keeps the wrapped ends that were made, by peer, so that faults can be set.

    `sender_fault` and `receiver_faults` (by peer) are given to ends that are made later.
    """

    def __init__(self, inner: Transport, url: str) -> None:
        self._inner, self._url = inner, url
        self.senders: list[FaultySender] = []
        self.receivers: dict[str, FaultyReceiver] = {}
        self.sender_fault: SenderFault | None = None
        self.receiver_faults: dict[str, Fault] = {}

    def transport(self) -> Transport:
        return dataclasses.replace(self._inner, sender=self._make_sender, receiver=self._make_receiver)

    def _make_sender(self, _url: str, **options: object) -> Sender:
        sender = FaultySender(self._inner.sender(self._url, **options), self.sender_fault)
        # Receivers must come by way of the wrapper as well.
        sender.address = f"{SCHEME}://{sender.inner.address}"
        self.senders.append(sender)
        return sender

    def _make_receiver(self, url: str, *, peer: str, **options: object) -> Receiver:
        inner = self._inner.receiver(url.removeprefix(f"{SCHEME}://"), peer=peer, **options)
        self.receivers[peer] = FaultyReceiver(inner, self.receiver_faults.pop(peer, None))
        return self.receivers[peer]
