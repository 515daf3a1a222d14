"""Which trainer ranks have an arena of their own: one for each device of the publishing rank's host.

Invariants: the publishing rank decides, from what each rank says of its device, and without a second device nothing is
connected and nobody has an arena but itself; all ranks join and leave the group of arenas together, in one agreement; a
sender that was made is kept, with the workers that are connected to it, as long as the run lasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import torch

from weightcast.host.memory import host_identity
from weightcast.seams.transport import PerDevice, Sender
from weightcast.trainer.group.arena_rank import RankArena
from weightcast.trainer.group.exchange import TrainerRanks
from weightcast.trainer.group.multi_device_sender import DeviceArena


@dataclasses.dataclass(frozen=True, slots=True)
class SenderFactory:
    """How a trainer rank makes an arena of its own: `make_sender(run, device)`."""

    per_device: PerDevice
    make_sender: Callable[[str, torch.device], Sender]
    deadline_seconds: float


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
    """An arena rank to the publishing one: of its sender. Empty: it could not be made, as the next exchange tells."""

    address: str


class DeviceArenas:
    """This rank's side. `others`: on the publishing rank, those of other ranks; `own`: on another rank, its own."""

    def __init__(self, ranks: TrainerRanks, sender_factory: SenderFactory | None) -> None:
        """`sender_factory`: None where one arena serves all."""
        self.others: list[DeviceArena] = []
        self.own: RankArena | None = None
        self._ranks = ranks
        self._sender_factory = sender_factory
        self._num_seatings = 0

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

    # --- the publishing rank ---

    def assignment(self, locations: Sequence[SenderLocation]) -> SenderAssignment:
        """Who has an arena: the publishing rank, and the first rank on every other device of its host."""
        first = locations[0]
        found = {first.label: 0}
        for group_rank, location in enumerate(locations):
            if location.label and (location.host, location.device_type) == (first.host, first.device_type):
                found.setdefault(location.label, group_rank)
        if len(found) == 1:
            return SenderAssignment()
        self._num_seatings += 1
        return SenderAssignment(tuple(found.values()), self._num_seatings)

    def lead(self, assignment: SenderAssignment, locations: Sequence[SenderLocation], device: torch.device) -> None:
        """Connect with the other arena ranks, and hear where receivers find their senders. Raises PeerError."""
        self.others = []
        if not assignment.group_ranks:
            return
        self._ranks.connect_arenas(assignment.group_ranks, assignment.number, device)
        for group_rank in assignment.group_ranks[1:]:
            told: _Address = self._ranks.receive_message(_Address, group_rank)
            self.others.append(DeviceArena(group_rank, locations[group_rank].label, told.address))

    # --- the others ---

    def follow(self, assignment: SenderAssignment, run: str, device: torch.device) -> BaseException | None:
        """Have an arena if this rank is to have one; returns why it could not be made. Raises PeerError."""
        if self._ranks.group_rank not in assignment.group_ranks:
            self.close()
            return None
        if self.own is not None and self.own.run != run:
            self.close()
        error: BaseException | None = None
        try:
            if self.own is None:
                self.own = self._made(run, device)
        except BaseException as exc:
            error = exc
        self._ranks.connect_arenas(
            assignment.group_ranks, assignment.number, device if self.own is None else self.own.device
        )
        self._ranks.send_message(_Address("" if self.own is None else self.own.address), 0)
        return error

    def _made(self, run: str, device: torch.device) -> RankArena:
        assert self._sender_factory is not None
        sender = self._sender_factory.make_sender(run, device)
        return RankArena(
            self._ranks, sender, run=run, device=device, deadline_seconds=self._sender_factory.deadline_seconds
        )
