"""Transports that fail on purpose: wrappers of any sender or receiver, which need no patches.

A fault strikes once, at one bucket of one update; the next update succeeds. An engine must never install a faulty
update: the old version stays, and the error says what was found.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from weightcast.errors import WeightcastError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Bucket, Receiver, Sender, Transport
from weightcast.seams.versions import StoredVersion

SCHEME = "faulty"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Base of all faults. `at` is the index of the bucket at which it strikes."""

    at: int

    def strike(self, buffer: BucketBuffer) -> None:
        """Change or delay the bucket's bytes before it is passed on. Drop, Duplicate and Reorder do nothing here."""


@dataclasses.dataclass(frozen=True)
class Corrupt(Fault):
    """Flips one bit of the bucket. `byte` counts from the first byte of its header."""

    byte: int = 0
    bit: int = 0

    def strike(self, buffer: BucketBuffer) -> None:
        part, byte = (buffer.header, self.byte)
        if byte >= HEADER_BYTES:
            part, byte = buffer.payload, byte - HEADER_BYTES
        part[byte] ^= 1 << self.bit


class Drop(Fault):
    """Drops the bucket. At a sender: drops its bytes, so that its slot keeps its former content."""


class Duplicate(Fault):
    """Delivers the bucket twice. At a sender: sends its bytes again in place of the next bucket's."""


class Reorder(Fault):
    """Swaps this bucket and the next one. For receivers only."""


@dataclasses.dataclass(frozen=True)
class Stall(Fault):
    """Blocks at this bucket until the event `until` is set, or `deadline_seconds` have passed."""

    until: threading.Event
    deadline_seconds: float = 60.0

    def strike(self, buffer: BucketBuffer) -> None:
        self.until.wait(self.deadline_seconds)


@dataclasses.dataclass(frozen=True)
class Kill(Fault):
    """Calls `action` before this bucket is passed on, for example to close a peer, kill a process, or raise."""

    action: Callable[[], object]

    def strike(self, buffer: BucketBuffer) -> None:
        self.action()


SenderFault: TypeAlias = Corrupt | Drop | Duplicate | Stall | Kill


class SenderWrapper(Sender):
    """A `Sender` that passes calls on to `inner`, except those of an update's buckets."""

    def __init__(self, inner: Sender) -> None:
        self.inner = inner

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        return self.inner.failures

    @property
    def memory_seconds(self) -> float:
        return self.inner.memory_seconds

    def prepare(self, manifest: Manifest, *, staged: bool) -> None:
        self.inner.prepare(manifest, staged=staged)

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


class FaultySender(SenderWrapper):
    """Passes all calls on to another sender, except for `fault`, which may be set again between updates."""

    def __init__(self, inner: Sender, fault: SenderFault | None = None) -> None:
        super().__init__(inner)
        self.fault = fault
        self._buffers: dict[int, BucketBuffer] = {}
        self._before: dict[int, BucketBuffer] = {}

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

    def close(self) -> None:
        self._buffers.clear()
        self._before.clear()
        self.inner.close()


class FaultyReceiver(Receiver):
    """A `Receiver` that passes all calls on to `inner`, except for `fault`, which may be set again between updates.

    It reads into no memory of other receivers, so that a fault is only in its own.
    """

    def __init__(self, inner: Receiver, fault: Fault | None = None) -> None:
        self.inner = inner
        self.fault = fault

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        self.inner.open(manifest, version, staged=staged)

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
                if isinstance(fault, (Corrupt, Reorder)):  # A copy, since the next bucket may reuse the memory.
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
    """A transport to register under a scheme of its own, whose senders and receivers are wrapped ones of `inner`.

    `senders` and `receivers` (by peer) are the ends that were made, to set their faults. `sender_fault` and
    `receiver_faults` (by peer) are the faults of ends that are made later.
    """

    def __init__(self, inner: Transport, url: str) -> None:
        self._inner, self._url = inner, url
        self.senders: list[FaultySender] = []
        self.receivers: dict[str, FaultyReceiver] = {}
        self.sender_fault: SenderFault | None = None
        self.receiver_faults: dict[str, Fault] = {}

    def transport(self) -> Transport:
        """Return the registry entry."""
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
