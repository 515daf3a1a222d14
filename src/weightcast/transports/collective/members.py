"""A receiver's control connection, seen from the sender: what the member has said. Nothing here waits.

Invariants: a member is known by its link, so that one that has connected again is another one; what a link brings is
taken in order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec

from weightcast.errors import PeerDiedError, UpdateAbortedError, WeightcastError
from weightcast.links.publisher_end import Link
from weightcast.transports.collective.records import (
    AllReceived,
    HostIdentity,
    JoinFailed,
    Joining,
    Opened,
    Progress,
    UpdateEnded,
)


@dataclasses.dataclass(eq=False)
class GroupMember:
    """One receiver's connection and what it has told."""

    name: str
    link: Link
    host: str = ""
    declined: int | None = None
    ended_update: int = 0
    whole_update: int = 0
    joining: Joining = dataclasses.field(default_factory=lambda: Joining(epoch=0))
    join_failed: JoinFailed = dataclasses.field(default_factory=lambda: JoinFailed(epoch=0, reason=""))
    answer: Progress | None = None

    @property
    def engine(self) -> str:
        """Workers of one engine have its name in common."""
        return self.name.partition("#")[0]

    @property
    def engine_rank(self) -> int:
        return int(self.name.partition("#")[2] or 0)

    def take_messages(self) -> None:
        for message in self.link.take():
            match message:
                case HostIdentity():
                    self.host = message.host
                case Opened():
                    self.declined = None
                case Joining():
                    self.joining, self.join_failed = message, JoinFailed(epoch=0, reason="")
                case JoinFailed():
                    self.join_failed = message
                case AllReceived():
                    self.whole_update = message.update
                case UpdateEnded(update=0):
                    self.declined = message.version
                case UpdateEnded():
                    self.ended_update = message.update
                case Progress():
                    self.answer = message

    def has_left(self, epoch: int) -> bool:
        """Whether it could not connect to that group, or is in it no more."""
        return self.join_failed.epoch == epoch

    def has_joined(self, epoch: int) -> bool:
        """Whether it has answered the invitation to that group."""
        return self.joining.epoch == epoch

    def has_answered(self, question: int) -> bool:
        return self.answer is not None and self.answer.question == question

    def loss(self, update: int, version: int) -> WeightcastError | None:
        """Why it takes no more of the update, if so."""
        if not self.link.is_alive:
            return PeerDiedError(f"the receiver of {self.name} has gone: {self.link.ended}", peer=self.name)
        if self.whole_update != update and (self.ended_update == update or self.declined == version):
            return UpdateAbortedError(f"{self.name} left the update of version {version}")
        return None


def send_to_all(members: Iterable[GroupMember], message: msgspec.Struct) -> None:
    for member in members:
        member.link.send(message)
