"""Arenas of several trainer ranks: one sender for each device of the publishing rank's host, and one that drives them.

A bucket is gathered and packed once, on the publishing rank, and then broadcast as it is, with its header: every arena
holds the same bytes under the same digest, and a worker's check covers this way as well. Invariants: the publishing
rank decides which ranks have an arena, and without a second device nothing is connected; all ranks join and leave the
group of arenas together, in one agreement; a sender that was made is kept, with the workers that are connected to it,
as long as the run lasts; each peer is served by the arena that it chose to connect to, and by no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import NamedTuple

import msgspec
import torch

from weightcast.errors import ErrorRecord, WeightcastError, from_record, to_record
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer
from weightcast.format.manifest import Manifest, WeightVersion, encode
from weightcast.host.memory import host_identity
from weightcast.seams.transport import PerDevice, Sender
from weightcast.trainer.group.exchange import Instruction, RankStatus, TrainerRanks


class SenderLocation(msgspec.Struct, frozen=True):
    """A rank to the publishing one: where its arena would be. Without a `label` it has none of its own."""

    host: str
    device_type: str
    label: str


class SenderAssignment(msgspec.Struct, frozen=True):
    """The publishing rank to all: the group ranks with an arena, itself first, or none; each time another `number`."""

    group_ranks: tuple[int, ...] = ()
    number: int = 0


class _Address(msgspec.Struct, frozen=True):
    """An arena rank to the publishing one: of its sender. Empty: it could not be made; the next exchange raises why."""

    address: str


class Opening(msgspec.Struct, frozen=True):
    """The publishing rank to all: an update begins for these peers, on whichever arena each of them reads."""

    version: int
    peers: tuple[str, ...]
    staged: bool


class ConnectedPeers(msgspec.Struct, frozen=True):
    """An arena rank to the publishing one: which of the peers are connected to it; back: which it is to serve."""

    names: tuple[str, ...]


class LostPeers(msgspec.Struct, frozen=True):
    """An arena rank to the publishing one: its sender's failures, by peer."""

    failures: dict[str, ErrorRecord]


@dataclasses.dataclass(frozen=True, slots=True)
class SenderFactory:
    """How a trainer rank makes an arena of its own: `make_sender(run, device)`."""

    per_device: PerDevice
    make_sender: Callable[[str, torch.device], Sender]
    deadline_seconds: float


class DeviceArena(NamedTuple):
    """Another rank's arena, as receivers find it."""

    group_rank: int
    label: str
    address: str


class DeviceArenas:
    """This rank's side. `others`: on the publishing rank, those of other ranks; `own`: on another rank, its own."""

    def __init__(self, ranks: TrainerRanks, sender_factory: SenderFactory | None) -> None:
        """`sender_factory`: None where one arena serves all."""
        self.others: list[DeviceArena] = []
        self.own: RankArena | None = None
        self._ranks = ranks
        self._sender_factory = sender_factory
        self._num_assignments = 0

    def location(self, device: torch.device) -> SenderLocation:
        """Where this rank's arena is or would be. `device`: of its weights, which may be another one by now."""
        if self.own is not None:
            device = self.own.device
        label = "" if self._sender_factory is None else self._sender_factory.per_device.label(device)
        return SenderLocation(host_identity(), device.type, label)

    def close(self) -> None:
        """Free this rank's arena. Idempotent."""
        arena, self.own = self.own, None
        if arena is not None:
            arena.close()

    def assignment(self, locations: Sequence[SenderLocation]) -> SenderAssignment:
        """Who has an arena: the publishing rank, and the first rank on every other device of its host."""
        first = locations[0]
        found = {first.label: 0}
        for group_rank, location in enumerate(locations):
            if location.label and (location.host, location.device_type) == (first.host, first.device_type):
                found.setdefault(location.label, group_rank)
        if len(found) == 1:
            return SenderAssignment()
        self._num_assignments += 1
        return SenderAssignment(tuple(found.values()), self._num_assignments)

    def lead(self, assignment: SenderAssignment, locations: Sequence[SenderLocation], device: torch.device) -> None:
        """Connect with the other arena ranks, and hear where receivers find their senders. Raises PeerError."""
        self.others = []
        if not assignment.group_ranks:
            return
        self._ranks.connect_arenas(assignment.group_ranks, assignment.number, device)
        for group_rank in assignment.group_ranks[1:]:
            told: _Address = self._ranks.receive_message(_Address, group_rank)
            self.others.append(DeviceArena(group_rank, locations[group_rank].label, told.address))

    def follow(self, assignment: SenderAssignment, run: str, device: torch.device) -> None:
        """Have an arena if this rank is to have one; if it can't be made, the next exchange raises why.

        Raises PeerError.
        """
        factory = self._sender_factory
        if self._ranks.group_rank not in assignment.group_ranks:
            self.close()
            return
        if self.own is not None and self.own.run != run:
            self.close()
        with self._ranks.error_at_next_exchange():
            if self.own is None:
                assert factory is not None
                sender = factory.make_sender(run, device)
                self.own = RankArena(self._ranks, sender, run, device, factory.deadline_seconds)
        used_device, address = (device, "") if self.own is None else (self.own.device, self.own.address)
        self._ranks.connect_arenas(assignment.group_ranks, assignment.number, used_device)
        self._ranks.send_message(_Address(address), 0)


class RankArena:
    """Another rank's arena: a sender for the workers on this rank's device, driven by the publishing rank.

    The sender's calls, which may wait for workers, are made in a thread of their own, one after the other; this rank
    takes part in every exchange meanwhile, and only says that it is busy. What goes wrong in the thread is brought to
    the next exchange, and so ends the publish on every rank.

    One thread calls it. Memory: the sender's slots, of device memory on a GPU, and nothing besides: buckets arrive in
    their places.
    """

    def __init__(
        self, ranks: TrainerRanks, sender: Sender, run: str, device: torch.device, deadline_seconds: float
    ) -> None:
        self.run = run
        self.device = device
        self.address = sender.address
        self._ranks = ranks
        self._sender = sender
        self._deadline_seconds = deadline_seconds
        self._pool = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightcast-arena")
        self._task: futures.Future[None] | None = None
        self._is_open = False
        self._failures: dict[str, WeightcastError] = {}
        self._lengths: tuple[int, ...] = ()
        """Of the buckets, with their headers."""
        self._buffer: BucketBuffer | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def status(self) -> RankStatus:
        """What this rank brings to an exchange. If it is not busy, its workers are given a sign of life.

        Raises what went wrong in the update in progress, once that has ended.
        """
        if self._task is not None and not self._task.done():
            return RankStatus(is_busy=True)
        if self._task is not None and self._is_open:
            self._task.result()
        self._failures = dict(self._sender.failures)
        return RankStatus(num_failures=len(self._failures))

    def open(self, manifest: Manifest, opening: Opening) -> None:
        """Say which peers are here, be told which of them to serve, and begin the update. Raises PeerError."""
        self._is_open, self._lengths = True, tuple(HEADER_BYTES + size for size in manifest.buckets)
        self._ranks.send_message(ConnectedPeers(tuple(self._sender.connected(opening.peers))), 0)
        served: ConnectedPeers = self._ranks.receive_message(ConnectedPeers, 0)

        def open_sender() -> None:
            self._buffer = None
            version = WeightVersion(self.run, opening.version)
            self._sender.open(manifest, version, peers=served.names, staged=opening.staged)
            self._ready(0)

        self._begin(open_sender)

    def take(self, index: int) -> None:
        """Take bucket `index` from the publishing rank, and have it read."""

        def take() -> None:
            buffer, self._buffer = self._buffer, None
            assert buffer is not None
            self._ranks.receive_bucket(buffer.flat(self._lengths[index]))
            self._sender.send(index, self._lengths[index])
            self._ready(index + 1)

        self._begin(take)

    def announce_failures(self) -> None:
        """Raises PeerError."""
        self._ranks.send_message(LostPeers({name: to_record(error) for name, error in self._failures.items()}), 0)

    def wait(self) -> None:
        """Wait until this rank is not busy, at most for a quarter of the deadline: the others wait meanwhile."""
        if self._task is not None:
            futures.wait([self._task], self._deadline_seconds / 4)

    def end(self) -> None:
        """The update has ended everywhere."""
        self._is_open = False

    def abort(self, reason: str) -> bool:
        """The publish has failed: end the update, after what is under way. False if none had begun."""
        was_open, self._is_open = self._is_open, False

        def abort() -> None:
            self._buffer = None
            self._sender.abort(reason)

        if was_open:
            self._begin(abort)
        return was_open

    def close(self) -> None:
        """Free everything; waits for what is under way."""
        self._pool.shutdown(wait=True)
        self._buffer = None
        self._sender.close()

    def _begin(self, call: Callable[[], None]) -> None:
        def run() -> None:
            with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
                call()

        self._task = self._pool.submit(run)

    def _ready(self, index: int) -> None:
        """Wait already for the place of the next bucket, while it is being gathered."""
        if index < len(self._lengths):
            self._buffer = self._sender.buffer(index)


class MultiDeviceSender:
    """Implements `Sender`, on the publishing rank. `own` closes with it; the others' are their ranks'.

    A disconnected peer is reported by the arena that it used last; with a single arena there is no communication.
    """

    def __init__(self, own: Sender, ranks: TrainerRanks, per_device: PerDevice) -> None:
        self.address = own.address
        self._own = own
        self._ranks = ranks
        self._per_device = per_device
        self._arenas: Sequence[DeviceArena] = ()
        self._homes: dict[str, int] = {}
        """The group rank whose arena each peer is connected to."""
        self._lost: dict[int, dict[str, WeightcastError]] = {}
        """By group rank."""
        self._num_buckets = 0
        self._is_whole = False
        self._buffer: BucketBuffer | None = None

    def use(self, arenas: Sequence[DeviceArena]) -> None:
        """Speak for these from now on; their ranks are connected."""
        self._arenas = arenas
        self.address = self._per_device.join(self._own.address, {arena.label: arena.address for arena in arenas})

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Of all arenas. Of the others' as of the last bucket; once all were sent, as of now."""
        if self._is_whole:
            self._ask()
        failures = dict(self._own.failures)
        for lost in self._lost.values():
            failures |= lost
        return failures

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Begin an update on every arena, for the peers that are there. Raises what any arena rank raises."""
        self._num_buckets, self._is_whole = len(manifest.buckets), False
        self._lost = {arena.group_rank: {} for arena in self._arenas}
        if not self._arenas:
            return self._own.open(manifest, version, peers=peers, staged=staged)
        self._ranks.version = version.number
        self._ranks.announce_when_idle(Instruction.OPEN, data=encode(Opening(version.number, tuple(peers), staged)))
        homes = {name: home for name in peers if (home := self._homes.get(name)) is not None}
        for rank in self._lost:
            there: ConnectedPeers = self._ranks.receive_message(ConnectedPeers, rank)
            homes |= dict.fromkeys(there.names, rank)
        homes |= dict.fromkeys(self._own.connected(peers), 0)
        self._homes = homes
        for rank in self._lost:
            names = tuple(name for name in peers if homes.get(name) == rank)
            self._ranks.send_message(ConnectedPeers(names), rank)
        own = [name for name in peers if homes.get(name) not in self._lost]
        first = self._own.open(manifest, version, peers=own, staged=staged)
        self._ranks.announce_when_idle(Instruction.WAIT)
        return first

    def buffer(self, index: int) -> BucketBuffer:
        """The publishing rank's own place for bucket `index`."""
        self._buffer = self._own.buffer(index)
        return self._buffer

    def send(self, index: int, num_bytes: int) -> None:
        """Have every arena rank take bucket `index`, as soon as it has a place for it; then all peers may read it."""
        buffer, self._buffer = self._buffer, None
        self._own.send(index, num_bytes)
        if self._arenas:
            assert buffer is not None
            statuses = self._ranks.announce_when_idle(Instruction.SPREAD, index)
            self._ranks.broadcast_bucket(buffer.flat(num_bytes))
            if any(statuses[rank].num_failures > len(lost) for rank, lost in self._lost.items()):
                self._ask()
            self._is_whole = index + 1 == self._num_buckets

    def _ask(self) -> None:
        self._ranks.announce_when_idle(Instruction.ASK)
        for rank in self._lost:
            lost: LostPeers = self._ranks.receive_message(LostPeers, rank)
            self._lost[rank] = {name: from_record(record) for name, record in lost.failures.items()}

    def connected(self, peers: Sequence[str]) -> list[str]:
        """All of them: each rank knows its own, and says who is missing when an update is opened."""
        return list(peers)

    def abort(self, reason: str) -> None:
        """End the update here. The other arena ranks end it when they learn how the publish ended."""
        self._buffer, self._is_whole = None, False
        self._own.abort(reason)

    def close(self) -> None:
        """Free the publishing rank's arena. Idempotent."""
        self._buffer = None
        self._own.close()
