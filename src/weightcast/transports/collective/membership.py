"""Keeps the sender's group one of exactly those who take the update: forms it, and forms it anew after a loss.

Invariants: whoever is lost is named with the reason, and all workers of its engine with it, since an engine is updated
whole or not at all; every wait ends by the deadline, and tells the others meanwhile that the sender lives; what fails
twice with nobody to blame is given up.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

import torch

from weightcast.errors import PeerDiedError, PeerError, PeerTimeoutError, UpdateAbortedError, WeightcastError
from weightcast.format.bucket import ArenaLayout
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.transports.collective.broadcast_group import BroadcastGroup
from weightcast.transports.collective.members import GroupMember, GroupMembers, send_to_all
from weightcast.transports.collective.records import BeginUpdate, Connect, ProgressQuestion, UpdateAborted

logger = logging.getLogger(__name__)

_MAX_ANSWER_SECONDS = 5.0
_MAX_NEWS_SECONDS = 1.0
_POLL_SECONDS = 0.002
"""How often a GPU is asked whether a broadcast is over; on a CPU it says so itself."""


@dataclasses.dataclass(slots=True, eq=False)
class GroupUpdate:
    """The sender's update. `next` is the bucket to be sent next, `members` are those who still take it."""

    number: int
    version: WeightVersion
    manifest: Manifest
    staged: bool
    arena_layout: ArenaLayout
    members: list[GroupMember]
    next: int = 0
    is_open: bool = True
    is_rewound: bool = False
    resumed_at: int = 0
    num_fruitless: int = 0

    @property
    def num_buckets(self) -> int:
        return len(self.manifest.buckets)

    @property
    def is_whole(self) -> bool:
        return self.next >= self.num_buckets

    def readers(self) -> dict[GroupMember, list[GroupMember]]:
        """Who joins the group, and who reads along with each: staged, the other workers of an engine on its host."""
        joined: dict[object, GroupMember] = {}
        readers: dict[GroupMember, list[GroupMember]] = {}
        for member in sorted(self.members, key=lambda m: (m.engine, m.engine_rank)):
            first = joined.setdefault((member.engine, member.host) if self.staged else member, member)
            readers.setdefault(first, [])
            if first is not member:
                readers[first].append(member)
        return readers


class Membership:
    """The sender's group, kept from update to update. `failures` since the last `begin`."""

    def __init__(
        self, members: GroupMembers, backend: str, host: str, *, device: torch.device, deadline_seconds: float
    ) -> None:
        self.failures: dict[str, WeightcastError] = {}
        self.epoch: BroadcastGroup | None = None
        self.num_epochs = 0
        self.slots_are_lost = False
        """A broadcast of a group that was left may still be reading the slots."""
        self._members = members
        self._condition = members.condition
        self._backend = backend
        self._host = host
        self._device = device
        self._deadline_seconds = deadline_seconds
        self._sign_seconds = members.sign_seconds
        self._num_questions = 0

    def connected(self, names: Sequence[str]) -> list[GroupMember]:
        """The members of these names; waits for those that were never there, and notes who is missing."""
        end = time.monotonic() + self._deadline_seconds

        def missing() -> list[str]:
            return [name for name in names if self._members.get(name) is None and not self._members.was_there(name)]

        with self._condition:
            while missing() and (remaining := end - time.monotonic()) > 0:
                self._condition.wait(min(remaining, self._sign_seconds))
                self._members.give_sign(filter(None, map(self._members.get, names)))
        found = {name: self._members.get(name) for name in names}
        for name, member in found.items():
            if member is None and self._members.was_there(name):
                self.failures[name] = PeerDiedError(f"the receiver of {name} has gone and is not back", peer=name)
            elif member is None:
                waited = f"{self._deadline_seconds:g} s"
                self.failures[name] = PeerTimeoutError(f"{name} did not connect within {waited}", peer=name)
        return [member for member in found.values() if member is not None]

    def form(self, update: GroupUpdate) -> None:
        """Have a group of exactly the update's members, and tell them where the update goes on."""
        self._drop_lost(update)
        while update.members and not (self.epoch is not None and self.epoch.is_of(update.readers())):
            self.leave()
            self._make_epoch(update)
        epoch = self.epoch
        if not update.members or epoch is None:
            self.leave()
            return
        have = [m.joining.num_received if m.joining.update == update.number else 0 for m in epoch.joined]
        update.next = min(have) if update.next else 0
        if update.next > update.resumed_at:
            update.resumed_at, update.num_fruitless = update.next, 0
        begin = BeginUpdate(
            epoch=epoch.number,
            update=update.number,
            version=update.version.number,
            staged=update.staged,
            num_buckets=update.num_buckets,
            first=update.next,
        )
        send_to_all(update.members, begin)

    def leave(self) -> None:
        """Close the group, without waiting for broadcasts under way."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            self.slots_are_lost |= not epoch.is_quiet()
            epoch.close()

    def recover(self, update: GroupUpdate, *, is_late: bool) -> None:
        """Find out who was lost, and go on without them in a new group: `update.next` is what comes then."""
        num_before, error = len(update.members), self.epoch and self.epoch.error()
        self._find_lost(update, is_late=is_late)
        self.leave()
        if len(update.members) == num_before:
            self._count_fruitless(update, error or PeerTimeoutError(f"no progress for {self._deadline_seconds:g} s"))
        update.is_rewound = True
        self.form(update)

    def is_in_trouble(self, update: GroupUpdate) -> bool:
        """Whether the group can't go on as it is."""
        epoch = self.epoch
        if epoch is not None and (epoch.error() is not None or any(m.has_left(epoch.number) for m in update.members)):
            return True
        return self._has_losses(update)

    def wait(
        self,
        update: GroupUpdate,
        is_done: Callable[[], bool],
        *,
        seconds: float | None = None,
        in_trouble: bool = False,
    ) -> bool:
        """Wait until it is done or there is trouble; False at the deadline. `in_trouble`: wait for losses only."""
        end = time.monotonic() + (self._deadline_seconds if seconds is None else seconds)
        next_sign = time.monotonic() + self._sign_seconds
        tick = _POLL_SECONDS if self._backend == "nccl" else self._sign_seconds
        with self._condition:
            while True:
                for member in update.members:
                    member.take_messages()
                if is_done() or (self._has_losses(update) if in_trouble else self.is_in_trouble(update)):
                    return True
                now = time.monotonic()
                if now >= end:
                    return False
                if now >= next_sign:
                    next_sign = now + self._sign_seconds
                    self._members.give_sign(update.members)
                self._condition.wait(min(end - now, tick))

    # --- one group ---

    def _make_epoch(self, update: GroupUpdate) -> None:
        """Invite everybody; connect if all answer, else drop who does not."""
        self.num_epochs += 1
        try:
            epoch = BroadcastGroup(self.num_epochs, self._backend, self._host, update.readers(), self._deadline_seconds)
        except PeerError as exc:
            self._count_fruitless(update, exc)
            return
        try:
            epoch.invite()
            if not self._have_answered(update, epoch.joined, epoch.number):
                return
            epoch.invite_readers()
            if not self._have_answered(update, update.members, epoch.number):
                return
            # Only now: whoever waits in gloo for somebody who does not come can't be woken.
            send_to_all(epoch.joined, Connect(epoch.number))
            epoch.connect(self._device, self._condition)
            self.wait(update, lambda: epoch.is_connected or epoch.connect_error is not None)
            if epoch.is_connected and not self._has_losses(update):
                self.epoch = epoch
                return
            self._blame_for_connecting(update, epoch)
        finally:
            if self.epoch is not epoch:
                epoch.close()

    def _have_answered(self, update: GroupUpdate, members: Sequence[GroupMember], epoch: int) -> bool:
        """Wait for answers to an invitation; drop who gives none. Whether everybody did."""
        self.wait(update, lambda: all(member.has_joined(epoch) or member.has_left(epoch) for member in members))
        self._drop_lost(update)
        silent = [member for member in members if not member.has_joined(epoch)]
        for member in silent:
            if member in update.members:
                error = self._could_not_join(member) if member.has_left(epoch) else None
                self._lose(update, member, error or self._timed_out(member, "answered no invitation to a group"))
        return not silent

    def _blame_for_connecting(self, update: GroupUpdate, epoch: BroadcastGroup) -> None:
        """Who has died; else who could not connect: with a dead member nobody can."""
        num_before = len(update.members)
        self._drop_lost(update)
        if len(update.members) < num_before:
            return
        for member in [member for member in update.members if member.has_left(epoch.number)]:
            self._lose(update, member, self._could_not_join(member))
        if len(update.members) == num_before:
            late = PeerTimeoutError(f"no group within {self._deadline_seconds:g} s")
            self._count_fruitless(update, epoch.connect_error or late)

    def _could_not_join(self, member: GroupMember) -> PeerDiedError:
        assert member.join_failed is not None
        text = f"{member.name} could not connect to the group: {member.join_failed.reason}"
        return PeerDiedError(text, peer=member.name)

    def _count_fruitless(self, update: GroupUpdate, cause: WeightcastError) -> None:
        update.num_fruitless += 1
        if update.num_fruitless > 1:
            for member in list(update.members):
                self._lose(update, member, PeerDiedError(f"{member.name}: {cause}", peer=member.name))

    # --- losses ---

    def _has_losses(self, update: GroupUpdate) -> bool:
        return any(m.loss(update.number, update.version.number) is not None for m in update.members)

    def _drop_lost(self, update: GroupUpdate) -> None:
        """Note who has gone, or takes no more of it."""
        for member in update.members:
            member.take_messages()
        losses = [(m, loss) for m in update.members if (loss := m.loss(update.number, update.version.number))]
        for member, loss in losses:
            self._lose(update, member, loss)

    def _lose(self, update: GroupUpdate, member: GroupMember, error: WeightcastError) -> None:
        logger.warning("%s", error)
        self.failures[member.name] = error
        if isinstance(error, PeerTimeoutError):
            member.link.end(f"the publisher gave this receiver up: {error}")
        others = [m for m in update.members if m.engine == member.engine and m is not member]
        update.members = [m for m in update.members if m.engine != member.engine]
        for other in others:
            reason = f"{member.name}, of the same engine, was lost: {error}"
            self.failures.setdefault(other.name, UpdateAbortedError(reason))
            send_to_all([other], UpdateAborted(update.number, reason))

    def _find_lost(self, update: GroupUpdate, *, is_late: bool) -> None:
        """Drop whoever has gone or left; if nobody has, whoever does not answer or holds the others up."""
        epoch = self.epoch
        has_left = epoch is not None and any(member.has_left(epoch.number) for member in update.members)
        if not is_late and not has_left:
            # The end of a broadcast may be seen before the end of the link of the one who caused it.
            self.wait(update, lambda: False, seconds=min(_MAX_NEWS_SECONDS, self._deadline_seconds), in_trouble=True)
        num_before = len(update.members)
        self._drop_lost(update)
        if len(update.members) < num_before or not update.members:
            return
        if epoch is not None and has_left:
            for member in [m for m in update.members if m.has_failed(epoch.number)]:
                self._lose(update, member, self._could_not_join(member))
            return
        for member in self._slow(update, is_late=is_late):
            if member in update.members:
                self._lose(update, member, self._timed_out(member, "took no bucket"))

    def _slow(self, update: GroupUpdate, *, is_late: bool) -> list[GroupMember]:
        """Ask all members how far they are: those that don't answer, else those that take none, else those behind.

        Being behind is no fault at first: gloo wakes neither end of a connection that broke in the middle of a message,
        so that a healthy member waits for bytes that can't come. Only who is behind in a new group as well is slow.
        """
        self._num_questions += 1
        question = self._num_questions
        send_to_all(update.members, ProgressQuestion(question))
        patience = min(_MAX_ANSWER_SECONDS, self._deadline_seconds)
        self.wait(
            update, lambda: all(m.has_answered(question) for m in update.members), seconds=patience, in_trouble=True
        )
        silent = [member for member in update.members if not member.has_answered(question)]
        if silent or not is_late:
            return silent
        answers = {m: m.answer for m in update.members if m.answer is not None and m.answer.update == update.number}
        busy = [m for m in update.members if m not in answers or not answers[m].is_waiting]
        if busy or not update.num_fruitless:
            return busy
        furthest = max(answer.num_received for answer in answers.values())
        return [m for m, answer in answers.items() if answer.num_received < furthest]

    def _timed_out(self, member: GroupMember, what: str) -> PeerTimeoutError:
        text = f"{member.name} {what} for {self._deadline_seconds:g} s and was dropped"
        return PeerTimeoutError(text, peer=member.name)
