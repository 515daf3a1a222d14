"""Keeps the sender's group one of exactly those who take the update: forms it, and forms it anew after a loss.

Invariants: each peer that is lost is named with the reason, and all workers of its engine with it, since an engine is
updated whole or not at all; every wait ends by the deadline, and tells the others meanwhile that the sender lives; what
fails twice with nobody to blame is given up.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import torch

from weightcast.errors import PeerDiedError, PeerError, PeerTimeoutError, UpdateAbortedError, WeightcastError
from weightcast.host.deadline import Deadline
from weightcast.links.link import LinkListener
from weightcast.transports.collective import records
from weightcast.transports.collective.broadcast_group import BroadcastGroup, GroupMember, GroupSettings, send_to_all
from weightcast.transports.sending import MAX_REASON_CHARACTERS, SendingEnd, SentUpdate

logger = logging.getLogger(__name__)

_MAX_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.002
"""How often a GPU is asked whether a broadcast is over; on a CPU it says so itself."""


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class GroupUpdate(SentUpdate):
    """`members` are those who still take it. `is_rewound`: `next` was set back, and the caller does not know yet."""

    members: list[GroupMember]
    is_rewound: bool = False
    resumed_at: int = 0
    num_fruitless: int = 0

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


class GroupSender(SendingEnd[GroupUpdate]):
    """A sender that has a group, kept from update to update."""

    def __init__(
        self, run: str, backend: str, host: str, port: int, *, device: torch.device, deadline_seconds: float
    ) -> None:
        """Listen. Raises OSError if the address can't be had."""
        super().__init__(run, deadline_seconds)
        self.listener = LinkListener(
            run, host=host, port=port, heartbeat_seconds=self._sign_seconds, messages=records.FromReceiver
        )
        self.condition = self.listener.condition
        """Notified of everything that happens."""
        self.epoch: BroadcastGroup | None = None
        self.num_epochs = 0
        self._slots_are_lost = False
        """A broadcast of a group that was left may still be reading the slots."""
        self._members: dict[str, GroupMember] = {}
        self._settings = GroupSettings(backend, host, device, deadline_seconds, self.condition)
        self._num_questions = 0

    def connected(self, peers: Sequence[str]) -> list[str]:
        """Those of these peers that are connected now. Does not wait."""
        return [name for name in peers if self._member(name) is not None]

    def _member(self, name: str) -> GroupMember | None:
        """The member of that name, if it is connected now and has said where it is; with all that it has said."""
        links = self.listener.links(name)
        if not links:
            return None
        member = self._members.get(name)
        if member is None or member.link is not links[-1]:
            member = self._members[name] = GroupMember(name, links[-1])
        member.take_messages()
        return member if member.host else None

    def _is_connected(self, name: str) -> bool:
        return self._member(name) is not None

    def _has_left(self, name: str) -> bool:
        member = self._members.get(name)
        return member is not None and bool(member.host) and not member.link.is_alive

    # --- waiting ---

    def _wait(self, seconds: float) -> None:
        """The caller holds the condition."""
        self._give_signs()
        self.condition.wait(min(seconds, self._sign_seconds))

    def _give_sign(self, name: str) -> None:
        member = self._members.get(name)
        if member is not None and member.link.is_alive:
            member.link.send(records.KeepAlive())

    def _wait_for(
        self,
        update: GroupUpdate,
        is_done: Callable[[], bool],
        *,
        seconds: float | None = None,
        is_interrupted: Callable[[GroupUpdate], bool] | None = None,
    ) -> bool:
        """Wait until it is done or interrupted, by default by any trouble; False at the deadline."""
        deadline = Deadline(self._deadline_seconds if seconds is None else seconds)
        poll_seconds = _POLL_SECONDS if self._settings.backend == "nccl" else self._deadline_seconds
        with self.condition:
            while True:
                for member in update.members:
                    member.take_messages()
                if is_done() or (is_interrupted or self._is_in_trouble)(update):
                    return True
                if deadline.has_passed:
                    return False
                self._wait(min(deadline.remaining_seconds, poll_seconds))

    def _is_in_trouble(self, update: GroupUpdate) -> bool:
        """Whether the group can't go on as it is."""
        epoch = self.epoch
        if epoch is not None and (epoch.error() is not None or any(m.has_left(epoch.number) for m in update.members)):
            return True
        return self._has_losses(update)

    def _has_losses(self, update: GroupUpdate) -> bool:
        return any(m.loss(update.number, update.version.number) is not None for m in update.members)

    # --- one group ---

    def _form(self, update: GroupUpdate) -> None:
        """Have a group of exactly the update's members, and tell them where the update goes on."""
        self._drop_lost(update)
        while update.members and not (self.epoch is not None and self.epoch.readers == update.readers()):
            self._leave()
            self._make_epoch(update)
        epoch = self.epoch
        if not update.members or epoch is None:
            self._leave()
            return
        have = [m.joining.num_received if m.joining.update == update.number else 0 for m in epoch.joined]
        update.next = min(have) if update.next else 0
        if update.next > update.resumed_at:
            update.resumed_at, update.num_fruitless = update.next, 0
        begin = records.BeginUpdate(
            epoch=epoch.number,
            update=update.number,
            version=update.version.number,
            staged=update.staged,
            num_buckets=update.num_buckets,
            first=update.next,
        )
        send_to_all(update.members, begin)

    def _leave(self) -> None:
        """Close the group, without waiting for broadcasts under way."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None:
            self._slots_are_lost |= not epoch.is_quiet()
            epoch.close()

    def _make_epoch(self, update: GroupUpdate) -> None:
        """Invite everybody; connect if all answer, else drop who does not."""
        self.num_epochs += 1
        try:
            epoch = BroadcastGroup(self.num_epochs, self._settings, update.readers())
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
            # Only now: a member that waits in gloo for one that does not come can't be woken.
            send_to_all(epoch.joined, records.Connect(epoch.number))
            epoch.connect()
            self._wait_for(update, lambda: epoch.is_connected or epoch.connect_error is not None)
            if epoch.is_connected and not self._has_losses(update):
                self.epoch = epoch
                return
            # With a dead member nobody can connect: then only that one is to blame.
            if not self._drop_lost(update) and not self._drop_failed(update, update.members, epoch.number):
                late = PeerTimeoutError(f"no group within {self._deadline_seconds:g} s")
                self._count_fruitless(update, epoch.connect_error or late)
        finally:
            if self.epoch is not epoch:
                epoch.close()

    def _have_answered(self, update: GroupUpdate, members: Sequence[GroupMember], epoch: int) -> bool:
        """Wait for answers to an invitation; drop who gives none. Whether everybody did."""
        self._wait_for(update, lambda: all(member.has_joined(epoch) or member.has_left(epoch) for member in members))
        self._drop_lost(update)
        silent = [member for member in members if not member.has_joined(epoch)]
        self._drop_failed(update, silent, epoch)
        for member in silent:
            if member in update.members:
                self._lose(update, member, self._timed_out(member.name, "answered no invitation to a group"))
        return not silent

    # --- losses ---

    def _recover(self, update: GroupUpdate, *, is_late: bool) -> None:
        """Find out who was lost, and go on without them in a new group: `update.next` is what comes then."""
        error = None if self.epoch is None else self.epoch.error()
        has_dropped = self._drop_who_broke_it(update, is_late=is_late)
        self._leave()
        if not has_dropped:
            self._count_fruitless(update, error or PeerTimeoutError(f"no progress for {self._deadline_seconds:g} s"))
        update.is_rewound = True
        self._form(update)

    def _drop_who_broke_it(self, update: GroupUpdate, *, is_late: bool) -> bool:
        """Drop who has gone or failed by itself; else who does not answer or delays the others. Whether anybody was.

        Members are asked how far they are, even if only to hear what they said before: a broadcast that a member broke
        may be seen to fail before the member's own message, or the end of its link, has come.
        """
        epoch = self.epoch
        silent = self._ask_progress(update)
        if self._drop_lost(update) or not update.members:
            return True
        if epoch is not None and any(member.has_left(epoch.number) for member in update.members):
            return self._drop_failed(update, [m for m in update.members if m.join_failed.is_own], epoch.number)
        slow = self._slow(update) if is_late and not silent else silent
        for member in slow:
            if member in update.members:
                self._lose(update, member, self._timed_out(member.name, "took no bucket"))
        return bool(slow)

    def _ask_progress(self, update: GroupUpdate) -> list[GroupMember]:
        """Ask all members how far they are. Returns those that don't answer; a loss ends the wait."""
        self._num_questions += 1
        question, members = self._num_questions, update.members
        send_to_all(members, records.ProgressQuestion(question))
        self._wait_for(
            update,
            lambda: all(member.has_answered(question) for member in members),
            seconds=min(_MAX_ANSWER_SECONDS, self._deadline_seconds),
            is_interrupted=self._has_losses,
        )
        return [member for member in members if not member.has_answered(question)]

    def _slow(self, update: GroupUpdate) -> list[GroupMember]:
        """Of members that have all answered: those that take no buckets, else those behind.

        Being behind is no fault at first: gloo wakes neither end of a connection that broke in the middle of a message,
        so that a healthy member waits for bytes that can't come. Only who is behind in a new group as well is slow.
        """
        members = update.members
        answers = {m: m.answer for m in members if m.answer is not None and m.answer.update == update.number}
        busy = [m for m in members if m not in answers or not answers[m].is_waiting]
        if busy or not update.num_fruitless:
            return busy
        furthest = max(answer.num_received for answer in answers.values())
        return [m for m, answer in answers.items() if answer.num_received < furthest]

    def _count_fruitless(self, update: GroupUpdate, cause: WeightcastError) -> None:
        update.num_fruitless += 1
        if update.num_fruitless > 1:
            for member in list(update.members):
                self._lose(update, member, PeerDiedError(f"{member.name}: {cause}", peer=member.name))

    def _drop_lost(self, update: GroupUpdate) -> bool:
        """Note who has gone, or takes no more of it; whether anybody was."""
        for member in update.members:
            member.take_messages()
        losses = [(m, loss) for m in update.members if (loss := m.loss(update.number, update.version.number))]
        for member, loss in losses:
            self._lose(update, member, loss)
        return bool(losses)

    def _drop_failed(self, update: GroupUpdate, members: Sequence[GroupMember], epoch: int) -> bool:
        """Drop those of these members that could not connect to the group, or left it; whether there are any."""
        failed = [member for member in members if member in update.members and member.has_left(epoch)]
        for member in failed:
            text = f"{member.name} could not connect to the group: {member.join_failed.reason}"
            self._lose(update, member, PeerDiedError(text, peer=member.name))
        return bool(failed)

    def _lose(self, update: GroupUpdate, member: GroupMember, error: WeightcastError) -> None:
        """The member takes no more of the update, and nor does its engine."""
        logger.warning("%s", error)
        self._failures[member.name] = error
        if isinstance(error, PeerTimeoutError):
            member.link.end(f"the publisher gave this receiver up: {error}")
        others = [m for m in update.members if m.engine == member.engine and m is not member]
        update.members = [m for m in update.members if m.engine != member.engine]
        self._waiting = [m.name for m in update.members]
        member.link.send(records.UpdateAborted(update.number, str(error)[:MAX_REASON_CHARACTERS]))
        for other in others:
            reason = f"{member.name}, of the same engine, was lost: {error}"
            self._failures.setdefault(other.name, UpdateAbortedError(reason))
            other.link.send(records.UpdateAborted(update.number, reason[:MAX_REASON_CHARACTERS]))
