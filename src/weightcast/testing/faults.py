"""Transports that go wrong on purpose: wrappers of any sender or receiver, never patches of one.

A fault strikes at one bucket of one update and is spent then; the next update goes through. An engine must never
install a faulty update: the old version stays, and the error says what was found.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from weightcast.errors import WeightcastError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Bucket, Portion, Receiver, Sender, Transport
from weightcast.seams.versions import StoredVersion

SCHEME = "faulty"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Strikes at bucket `at`."""

    at: int

    def strike(self, buffer: BucketBuffer) -> None:
        """Called with the bucket's bytes before it goes on. Drop, Duplicate and Reorder leave them as they are."""


@dataclasses.dataclass(frozen=True)
class Corrupt(Fault):
    """One bit of the bucket is turned over. `byte` counts from the beginning of its header on."""

    byte: int = 0
    bit: int = 0

    def strike(self, buffer: BucketBuffer) -> None:
        part, byte = (buffer.header, self.byte)
        if byte >= HEADER_BYTES:
            part, byte = buffer.payload, byte - HEADER_BYTES
        part[byte] ^= 1 << self.bit


class Drop(Fault):
    """The bucket never arrives. At a sender: its bytes don't, so that the slot has what it had before."""


class Duplicate(Fault):
    """The bucket arrives twice. At a sender: its bytes arrive again in the next one's place."""


class Reorder(Fault):
    """This bucket and the next one change places. At a receiver only."""


@dataclasses.dataclass(frozen=True)
class Stall(Fault):
    """Nothing goes on at this bucket until `until` is set, or `deadline_seconds` have passed."""

    until: threading.Event
    deadline_seconds: float = 60.0

    def strike(self, buffer: BucketBuffer) -> None:
        self.until.wait(self.deadline_seconds)


@dataclasses.dataclass(frozen=True)
class Kill(Fault):
    """`action` is called at this bucket, before it goes on: close a peer, end a process by its pid, raise."""

    action: Callable[[], object]

    def strike(self, buffer: BucketBuffer) -> None:
        self.action()


SenderFault: TypeAlias = Corrupt | Drop | Duplicate | Stall | Kill


class FaultySender(Sender):
    """A `Sender` that passes everything on to another one, but for `fault`, which may be set again between updates."""

    def __init__(self, inner: Sender, fault: SenderFault | None = None) -> None:
        self.inner = inner
        self.fault = fault
        self._buffers: dict[int, BucketBuffer] = {}
        self._before: dict[int, BucketBuffer] = {}

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        return self.inner.failures

    @property
    def memory_seconds(self) -> float:
        return self.inner.memory_seconds

    def prepare(self, manifest: Manifest, *, staged: bool) -> None:
        self.inner.prepare(manifest, staged=staged)

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        self._buffers.clear()
        self._before.clear()
        return self.inner.open(manifest, version, peers=peers, staged=staged)

    def buffer(self, index: int) -> BucketBuffer:
        self._buffers[index] = buffer = self.inner.buffer(index)
        if isinstance(self.fault, Drop) and self.fault.at == index:
            self._before[index] = _clone(buffer)
        return buffer

    def send(self, index: int, num_bytes: int) -> None:
        fault = self.fault
        if isinstance(fault, Duplicate) and index == fault.at:
            self._before[index] = _clone(self._buffers[index])
        if fault is not None and index == fault.at + isinstance(fault, Duplicate):
            self.fault, buffer = None, self._buffers[index]
            fault.strike(buffer)
            if isinstance(fault, (Drop, Duplicate)):
                came = self._before[fault.at]
                num_payload_bytes = min(came.payload.numel(), buffer.payload.numel())
                buffer.header.copy_(came.header)
                buffer.payload[:num_payload_bytes] = came.payload[:num_payload_bytes]
        self.inner.send(index, num_bytes)

    def connected(self, peers: Sequence[str]) -> Sequence[str]:
        return self.inner.connected(peers)

    def newest_version(self) -> int | None:
        return self.inner.newest_version()

    def begin_together(self, manifest: Manifest, version: WeightVersion) -> str:
        return self.inner.begin_together(manifest, version)

    def join(self, manifest: Manifest, origin: int, place: str) -> None:
        self.inner.join(manifest, origin, place)

    def seal(self, others: Sequence[bytes]) -> None:
        self.inner.seal(others)

    def commit(self) -> None:
        self.inner.commit()

    def release(self) -> None:
        self.inner.release()

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self._buffers.clear()
        self._before.clear()
        self.inner.close()


class FaultyReceiver(Receiver):
    """A `Receiver` that passes everything on from another one, but for `fault`, which may be set again."""

    def __init__(self, inner: Receiver, fault: Fault | None = None) -> None:
        self.inner = inner
        self.fault = fault

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        self.inner.open(manifest, version, staged=staged)

    def common_memory(self) -> str:
        return ""

    def read_together(self, manifest: Manifest, portion: Portion) -> bool:
        """No: faults are in what this receiver alone has."""
        return False

    def __iter__(self) -> Iterator[Bucket]:
        held: Bucket | None = None
        for bucket in self.inner:
            fault = self.fault
            if held is not None:
                yield bucket
                yield held
                held = None
            elif fault is None or bucket.index != fault.at:
                yield bucket
            else:
                self.fault = None
                if isinstance(fault, (Corrupt, Reorder)):  # a copy, for what another bucket's turn must not take away
                    bucket = Bucket(bucket.index, _clone(bucket.buffer))
                fault.strike(bucket.buffer)
                if isinstance(fault, Reorder):
                    held = bucket
                elif not isinstance(fault, Drop):
                    yield bucket
                if isinstance(fault, Duplicate):
                    yield bucket
        if held is not None:
            yield held

    def newest(self, known: WeightVersion | None) -> StoredVersion | None:
        return self.inner.newest(known)

    def reread(self, bucket: Bucket) -> bool:
        return self.inner.reread(bucket)

    def release(self) -> None:
        self.inner.release()

    def end(self) -> None:
        self.inner.end()

    def close(self) -> None:
        self.inner.close()


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

    def _make_sender(self, url: str, **options: Any) -> Sender:
        sender = FaultySender(self._inner.sender(self._url, **options), self.sender_fault)
        self.senders.append(sender)
        return sender

    def _make_receiver(self, url: str, *, peer: str, **options: Any) -> Receiver:
        inner = self._inner.receiver(self._url, peer=peer, **options)
        self.receivers[peer] = FaultyReceiver(inner, self.receiver_faults.pop(peer, None))
        return self.receivers[peer]


def _clone(buffer: BucketBuffer) -> BucketBuffer:
    return BucketBuffer(buffer.header.clone(), buffer.payload.clone())
