"""One sender for a publish with several arenas: the publishing rank's own, and those of the other arena ranks.

A bucket is gathered and packed once, on the publishing rank, and then broadcast as it is, with its trailer: every arena
holds the same bytes under the same digest, and a worker's check covers this way as well. Invariants: each peer is
served by the arena that it is connected to, and by no other; a disconnected peer is reported by the arena that it used
last; with a single arena there is no extra communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from weightcast.errors import WeightcastError, from_record
from weightcast.format.manifest import Manifest, WeightVersion, encode
from weightcast.seams.transport import PerDevice, Sender
from weightcast.trainer.group.exchange import TrainerRanks
from weightcast.trainer.group.records import ConnectedPeers, Instruction, LostPeers, Opening, RankStatus


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceArena:
    """Another rank's arena, as receivers find it."""

    group_rank: int
    label: str
    address: str


class MultiDeviceSender:
    """Implements `Sender`, on the publishing rank. `own` closes with it; the others' are their ranks'."""

    def __init__(self, own: Sender, ranks: TrainerRanks, per_device: PerDevice) -> None:
        self.address = own.address
        self._own = own
        self._ranks = ranks
        self._per_device = per_device
        self._arenas: Sequence[DeviceArena] = ()
        self._homes: dict[str, int] = {}
        self._lost: dict[int, dict[str, WeightcastError]] = {}
        self._num_buckets = 0
        self._is_whole = False
        self._buffer: torch.Tensor | None = None

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

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        """Begin an update on every arena, for the peers that are there. Raises what any arena rank raises."""
        self._num_buckets, self._is_whole = len(manifest.buckets), False
        self._lost = {arena.group_rank: {} for arena in self._arenas}
        if not self._arenas:
            self._own.open(manifest, version, peers=peers, staged=staged)
            return
        self._ranks.version = version.number
        self._ranks.announce_when_idle(Instruction.OPEN, data=encode(Opening(version.number, tuple(peers), staged)))
        own = self._assigned(peers)
        self._own.open(manifest, version, peers=own, staged=staged)
        self._ranks.announce_when_idle(Instruction.WAIT)

    def _assigned(self, peers: Sequence[str]) -> list[str]:
        """Tell every arena rank which peers it serves; return those of the publishing rank."""
        homes = {name: home for name in peers if (home := self._homes.get(name)) is not None}
        for arena in self._arenas:
            there: ConnectedPeers = self._ranks.receive_message(ConnectedPeers, arena.group_rank)
            homes |= dict.fromkeys(there.names, arena.group_rank)
        homes |= dict.fromkeys(self._own.connected(peers), 0)
        self._homes = homes
        for arena in self._arenas:
            names = tuple(name for name in peers if homes.get(name) == arena.group_rank)
            self._ranks.send_message(ConnectedPeers(names), arena.group_rank)
        others = {arena.group_rank for arena in self._arenas}
        return [name for name in peers if homes.get(name) not in others]

    def buffer(self, index: int) -> torch.Tensor:
        """The publishing rank's own place for bucket `index`."""
        self._buffer = self._own.buffer(index)
        return self._buffer

    def send(self, index: int) -> int:
        """Have every arena rank take bucket `index`, as soon as it has a place for it; then all peers may read it."""
        buffer, self._buffer = self._buffer, None
        following = self._own.send(index)
        if self._arenas:
            assert buffer is not None
            statuses = self._ranks.announce_when_idle(Instruction.SPREAD, index)
            self._ranks.broadcast_bucket(buffer)
            self._notice(statuses)
            self._is_whole = following == self._num_buckets
        return following

    def _notice(self, statuses: Sequence[RankStatus]) -> None:
        if any(statuses[rank].num_failures > len(lost) for rank, lost in self._lost.items()):
            self._ask()

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
