"""The sender's side of the control connections: who is connected, and what each has said. Nothing here waits.

Invariants: a member is known by its link, so that one that has connected anew is another one; what a link brings is
taken in order; the condition is the listener's, which is notified of everything that happens.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable
from typing import Any

import msgspec

from weightcast.errors import PeerDiedError, UpdateAbortedError, WeightcastError
from weightcast.links.link import Link, LinkListener
from weightcast.transports.collective.records import (
    AllReceived,
    FromReceiver,
    HostIdentity,
    JoinFailed,
    Joining,
    KeepAlive,
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
    join_failed: JoinFailed | None = None
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
            self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case HostIdentity():
                self.host = message.host
            case Opened():
                self.declined = None
            case Joining():
                self.joining, self.join_failed = message, None
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
        return self.join_failed is not None and self.join_failed.epoch == epoch

    def has_failed(self, epoch: int) -> bool:
        """Whether it left that group for a reason of its own, and not because another member did."""
        return self.join_failed is not None and self.join_failed.epoch == epoch and self.join_failed.is_own

    def has_joined(self, epoch: int) -> bool:
        """Whether it has answered the invitation to that group."""
        return self.joining.epoch == epoch

    def has_answered(self, question: int) -> bool:
        return self.answer is not None and self.answer.question == question

    def loss(self, update: int, version: int) -> WeightcastError | None:
        """Why it takes no more of the update, if so."""
        if not self.link.is_alive:
            return PeerDiedError(f"the receiver of {self.name} has gone: {self.link.ended}", peer=self.name)
        if self.whole_update == update:
            return None
        if self.ended_update == update or self.declined == version:
            return UpdateAbortedError(f"{self.name} left the update of version {version}")
        return None


def send_to_all(members: Iterable[GroupMember], message: msgspec.Struct) -> None:
    for member in members:
        member.link.send(message)


class GroupMembers:
    """Every receiver that has connected, by name."""

    def __init__(self, run: str, host: str, port: int, sign_seconds: float) -> None:
        """Listen; give a sign of life that often. Raises OSError if the address can't be had."""
        self.sign_seconds = sign_seconds
        self.listener = LinkListener(run, host=host, port=port, heartbeat_seconds=sign_seconds, messages=FromReceiver)
        self.condition: threading.Condition = self.listener.condition
        self._members: dict[str, GroupMember] = {}

    def get(self, name: str) -> GroupMember | None:
        """The member of that name, if it is connected now and has said where it is; with all that it has said."""
        links = self.listener.links(name)
        if not links:
            return None
        member = self._members.get(name)
        if member is None or member.link is not links[-1]:
            member = self._members[name] = GroupMember(name, links[-1])
        member.take_messages()
        return member if member.host else None

    def was_there(self, name: str) -> bool:
        """Whether it was connected once, and is no more."""
        member = self._members.get(name)
        return member is not None and bool(member.host) and not member.link.is_alive

    def give_sign(self, members: Iterable[GroupMember]) -> None:
        """Tell them that the sender waits, and lives."""
        send_to_all((member for member in members if member.link.is_alive), KeepAlive())

    def close(self) -> None:
        self.listener.close()
