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
from weightcast.listener import Link, LinkListener
from weightcast.transports.collective_records import (
    Answer,
    Ended,
    FromReceiver,
    JoinFailed,
    Joining,
    Opened,
    Waiting,
    Whole,
)


@dataclasses.dataclass(eq=False)
class Member:
    """One receiver's connection and what it has told."""

    name: str
    link: Link
    declined: int | None = None
    ended_update: int = 0
    whole_update: int = 0
    joining: Joining = dataclasses.field(default_factory=lambda: Joining(epoch=0))
    join_failed: JoinFailed | None = None
    answer: Answer | None = None

    def hear(self) -> None:
        for message in self.link.take():
            self._take(message)

    def _take(self, message: Any) -> None:
        match message:
            case Opened():
                self.declined = None
            case Joining():
                self.joining, self.join_failed = message, None
            case JoinFailed():
                self.join_failed = message
            case Whole():
                self.whole_update = message.update
            case Ended(update=0):
                self.declined = message.version
            case Ended():
                self.ended_update = message.update
            case Answer():
                self.answer = message

    def has_left(self, epoch: int) -> bool:
        """Whether it could not connect to that group, or is in it no more."""
        return self.join_failed is not None and self.join_failed.epoch == epoch

    def loss(self, update: int, version: int) -> WeightcastError | None:
        """Why it takes no more of the update, if so."""
        if not self.link.is_alive:
            return PeerDiedError(f"the receiver of {self.name} has gone: {self.link.ended}", peer=self.name)
        if self.whole_update == update:
            return None
        if self.ended_update == update or self.declined == version:
            return UpdateAbortedError(f"{self.name} left the update of version {version}")
        return None


class Members:
    """Every receiver that has connected, by name."""

    def __init__(self, run: str, host: str, port: int, heartbeat_seconds: float) -> None:
        """Listen. Raises OSError if the address can't be had."""
        self.listener = LinkListener(
            run, host=host, port=port, heartbeat_seconds=heartbeat_seconds, messages=FromReceiver
        )
        self.condition: threading.Condition = self.listener.condition
        self._members: dict[str, Member] = {}

    def get(self, name: str) -> Member | None:
        """The connected member of that name, with all that it has said; None if it is not connected now."""
        links = self.listener.links(name)
        if not links:
            return None
        member = self._members.get(name)
        if member is None or member.link is not links[-1]:
            member = self._members[name] = Member(name, links[-1])
        member.hear()
        return member

    def was_there(self, name: str) -> bool:
        """Whether it was connected once."""
        return name in self._members

    def tell(self, members: Iterable[Member], message: msgspec.Struct) -> None:
        for member in members:
            member.link.send(message)

    def give_sign(self, members: Iterable[Member]) -> None:
        self.tell((member for member in members if member.link.is_alive), Waiting())

    def close(self) -> None:
        self.listener.close()
