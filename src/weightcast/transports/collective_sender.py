"""The publisher's end of the collective transport: one flat broadcast per bucket to every receiver at once.

Invariants: a slot is rewritten only when its former broadcast is over, and never while a broken group may still read
it; a group in which anything went wrong is left, and made anew without whoever was lost, within the same update; the
others then go on from the first bucket that one of them lacks. All calls come from one thread.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from weightcast import process_group
from weightcast.bucket import TRAILER_BYTES
from weightcast.errors import (
    ClosedError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    UnsupportedError,
    UpdateAbortedError,
    WeightcastError,
)
from weightcast.manifest import Manifest, WeightVersion
from weightcast.places import Buffers, Places, place
from weightcast.transports.collective_epoch import Epoch
from weightcast.transports.collective_members import Member, Members
from weightcast.transports.collective_records import (
    MAX_REASON_CHARACTERS,
    Aborted,
    Address,
    Ask,
    Begin,
    parse_endpoint,
)

logger = logging.getLogger(__name__)

_NUM_SLOTS = 2
_SIGNS_PER_DEADLINE = 4
_MAX_SIGN_SECONDS = 5.0
_MAX_ANSWER_SECONDS = 5.0
_MAX_NEWS_SECONDS = 1.0
_POLL_SECONDS = 0.002
"""How often a GPU is asked whether a broadcast is over; on a CPU it says so itself."""


@dataclasses.dataclass(slots=True, eq=False)
class _Update:
    number: int
    version: WeightVersion
    manifest: Manifest
    staged: bool
    places: Places
    members: list[Member]
    next: int = 0
    is_open: bool = True
    is_rewound: bool = False
    num_fruitless: int = 0

    @property
    def num_buckets(self) -> int:
        return len(self.manifest.buckets)

    @property
    def is_whole(self) -> bool:
        return self.next >= self.num_buckets


class CollectiveSender:
    """Implements `interfaces.Sender`. Memory: two buckets, on the GPU with NCCL, kept for the next update.

    `deadline_seconds` bounds each wait, and each broadcast from its beginning to its end.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        deadline_seconds: float = 60.0,
        device: torch.device | str | None = None,
    ) -> None:
        """Listen at the URL's host and port. Raises ValueError, UnsupportedError, OSError."""
        self._backend, self._host, port = parse_endpoint(url)
        process_group.require(self._backend)
        self._device = torch.device((device or "cuda") if self._backend == "nccl" else "cpu")
        if self._device.type != ("cuda" if self._backend == "nccl" else "cpu"):
            raise UnsupportedError(f"{self._backend} moves no memory of {self._device}: use gloo:// or ipc://")
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._sign_seconds = min(deadline_seconds / _SIGNS_PER_DEADLINE, _MAX_SIGN_SECONDS)
        self._members = _listen(url, run, self._host, port, self._sign_seconds)
        self._condition = self._members.condition
        secret = self._members.listener.secret
        self.address = Address(self._backend, self._host, self._members.listener.port, secret).url
        self._slots: Buffers | None = None
        self._slots_bytes = 0
        self._epoch: Epoch | None = None
        self._num_epochs = 0
        self._update: _Update | None = None
        self._num_updates = 0
        self._num_questions = 0
        self._failures: dict[str, WeightcastError] = {}
        self._closed = False

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        return dict(self._failures)

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        """Begin an update: wait for `peers` to be connected, and for their group, which is kept while they stay."""
        self._require_open()
        if version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this sender of run {self._run}")
        self.abort("the publisher began another update")
        self._failures = {}
        self._num_updates += 1
        places = place(manifest, num_slots=_NUM_SLOTS, staged=False)
        members = self._connected(peers)
        self._update = update = _Update(self._num_updates, version, manifest, staged, places, members)
        self._drop_lost(update)
        self._prepare_slots(places)
        self._form(update)

    def buffer(self, index: int) -> torch.Tensor:
        """Where bucket `index` is to be packed. Waits until the broadcast of its slot's former content is over."""
        update = self._require_update(index)
        epoch = self._epoch
        if update.members and epoch is not None:
            is_late = not self._wait(update, lambda: epoch.is_quiet(index - _NUM_SLOTS + 1))
            if is_late or self._trouble(update):
                self._recover(update, is_late=is_late)
            else:
                epoch.land(index - _NUM_SLOTS + 1)
        return self._slot(update, index)

    def send(self, index: int) -> int:
        """Begin to broadcast the bucket. The last waits until everybody has all of them."""
        update = self._require_update(index)
        if update.is_rewound:
            update.is_rewound = False
            return update.next
        update.next = index + 1
        if not update.members:
            return update.next
        epoch, is_late = self._epoch, False
        assert epoch is not None
        try:
            num_bytes = update.manifest.buckets[index] + TRAILER_BYTES
            epoch.send(index, self._slot(update, index)[:num_bytes], self._condition)
            if update.is_whole:
                is_late = not self._wait(update, lambda: self._is_over(update, epoch))
            is_lost = is_late or self._trouble(update)
            if update.is_whole and not is_lost:
                epoch.land(update.num_buckets)
        except PeerError:
            is_lost = True
        if is_lost:
            self._recover(update, is_late=is_late)
            update.is_rewound = False
        return update.next

    def abort(self, reason: str) -> None:
        """End the update for every receiver; its group is closed, since some may be waiting in it. Does not wait."""
        update = self._update
        if update is None or not update.is_open or self._closed:
            return
        update.is_open = False
        if update.is_whole or not update.members:
            return
        self._members.tell(update.members, Aborted(update.number, reason[:MAX_REASON_CHARACTERS]))
        self._leave_epoch()

    def close(self) -> None:
        """Disconnect everybody and free everything. Idempotent."""
        if self._closed:
            return
        self.abort("the publisher was closed")
        self._closed = True
        self._leave_epoch()
        self._members.close()
        self._slots = None

    # --- members ---

    def _connected(self, names: Sequence[str]) -> list[Member]:
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
                self._failures[name] = PeerDiedError(f"the receiver of {name} has gone and is not back", peer=name)
            elif member is None:
                waited = f"{self._deadline_seconds:g} s"
                self._failures[name] = PeerTimeoutError(f"{name} did not connect within {waited}", peer=name)
        return [member for _, member in sorted(found.items()) if member is not None]

    def _drop_lost(self, update: _Update) -> None:
        """Note who has gone, or takes no more of it."""
        for member in update.members:
            member.hear()
            loss = member.loss(update.number, update.version.number)
            if loss is not None:
                self._lose(update, member, loss)

    def _lose(self, update: _Update, member: Member, error: WeightcastError) -> None:
        logger.warning("%s", error)
        self._failures[member.name] = error
        update.members = [other for other in update.members if other is not member]
        if isinstance(error, PeerTimeoutError):
            member.link.end(f"the publisher gave this receiver up: {error}")

    # --- the group ---

    def _form(self, update: _Update) -> None:
        """Have a group of exactly the update's members, and tell them where the update goes on."""
        while update.members and not (self._epoch is not None and self._epoch.is_of(update.members)):
            self._leave_epoch()
            self._make_epoch(update)
        if not update.members:
            self._leave_epoch()
            return
        have = [m.joining.num_received if m.joining.update == update.number else 0 for m in update.members]
        update.next = min(have) if update.next else 0
        assert self._epoch is not None
        begin = Begin(
            epoch=self._epoch.number,
            update=update.number,
            version=update.version.number,
            staged=update.staged,
            num_buckets=update.num_buckets,
            first=update.next,
        )
        self._members.tell(update.members, begin)

    def _make_epoch(self, update: _Update) -> None:
        """Invite everybody; connect if all answer, else drop who does not."""
        self._num_epochs += 1
        epoch = Epoch(self._num_epochs, self._backend, self._host, update.members, self._deadline_seconds)
        for position, member in enumerate(epoch.members):
            member.link.send(epoch.join(position))
        is_late = not self._wait(update, lambda: all(m.joining.epoch == epoch.number for m in epoch.members))
        if is_late or self._trouble(update):
            epoch.close()
            silent = [m for m in update.members if m.joining.epoch != epoch.number] if is_late else []
            self._drop_lost(update)
            for member in silent:
                if member in update.members:
                    self._lose(update, member, self._timed_out(member, "did not answer an invitation to a new group"))
            return
        try:
            epoch.connect(self._device)
            self._epoch = epoch
        except PeerError as exc:
            epoch.close()
            self._drop_lost(update)
            for member in update.members:
                if member.has_left(epoch.number):
                    self._lose(update, member, PeerDiedError(_cannot_join(member), peer=member.name))
            self._count_fruitless(update, epoch.members, exc)

    def _leave_epoch(self) -> None:
        """Close the group. Its broadcasts may still read the slots, which are then left to them."""
        epoch, self._epoch = self._epoch, None
        if epoch is None:
            return
        if not epoch.is_quiet(1 << 62):
            self._slots = None
        epoch.close()

    # --- trouble ---

    def _trouble(self, update: _Update) -> bool:
        """Whether the group can't go on as it is."""
        epoch = self._epoch
        if epoch is not None and (epoch.error() is not None or any(m.has_left(epoch.number) for m in update.members)):
            return True
        return any(m.loss(update.number, update.version.number) is not None for m in update.members)

    def _recover(self, update: _Update, *, is_late: bool) -> None:
        """Find out who was lost, and go on without them in a new group: `update.next` is what comes then."""
        before, error = tuple(update.members), self._epoch and self._epoch.error()
        self._find_lost(update, is_late=is_late)
        self._leave_epoch()
        if update.members:
            cause = error or PeerTimeoutError(f"no progress for {self._deadline_seconds:g} s")
            self._count_fruitless(update, before, cause)
        self._prepare_slots(update.places)
        update.is_rewound = True
        self._form(update)

    def _count_fruitless(self, update: _Update, before: Sequence[Member], cause: WeightcastError) -> None:
        """A group that failed twice with nobody to blame is given up, so that this ends."""
        if len(before) > len(update.members):
            return
        update.num_fruitless += 1
        if update.num_fruitless > 1:
            for member in list(update.members):
                self._lose(update, member, PeerDiedError(f"{member.name}: {cause}", peer=member.name))

    def _find_lost(self, update: _Update, *, is_late: bool) -> None:
        """Drop whoever has gone or left; if nobody has, whoever does not answer or holds the others up."""
        if not is_late:
            # The end of a broadcast may be seen before the end of the link of the one who caused it.
            self._wait(update, lambda: False, seconds=min(_MAX_NEWS_SECONDS, self._deadline_seconds), quiet=True)
        num_before = len(update.members)
        self._drop_lost(update)
        if len(update.members) < num_before or not update.members:
            return
        for member in self._slow(update, is_late=is_late):
            self._lose(update, member, self._timed_out(member, "took no bucket"))

    def _slow(self, update: _Update, *, is_late: bool) -> list[Member]:
        """Ask everybody how far they are: those who don't answer, else those who don't wait for a bucket."""
        self._num_questions += 1
        question = self._num_questions
        self._members.tell(update.members, Ask(question))

        def answered(member: Member) -> bool:
            member.hear()
            return member.answer is not None and member.answer.question == question

        patience = min(_MAX_ANSWER_SECONDS, self._deadline_seconds)
        self._wait(update, lambda: all(map(answered, update.members)), seconds=patience, quiet=True)
        silent = [member for member in update.members if not answered(member)]
        if silent or not is_late:
            return silent
        answers = {m: m.answer for m in update.members if m.answer is not None and m.answer.update == update.number}
        busy = [m for m in update.members if m not in answers or not answers[m].is_waiting]
        if busy:
            return busy
        furthest = max(answer.num_received for answer in answers.values())
        return [m for m, answer in answers.items() if answer.num_received < furthest]

    def _timed_out(self, member: Member, what: str) -> PeerTimeoutError:
        text = f"{member.name} {what} for {self._deadline_seconds:g} s and was dropped"
        return PeerTimeoutError(text, peer=member.name)

    # --- waiting ---

    def _wait(
        self, update: _Update, is_done: Callable[[], bool], *, seconds: float | None = None, quiet: bool = False
    ) -> bool:
        """Wait until it is done or there is trouble; False at the deadline. `quiet`: there is trouble already."""
        end = time.monotonic() + (self._deadline_seconds if seconds is None else seconds)
        next_sign = time.monotonic() + self._sign_seconds
        tick = _POLL_SECONDS if self._backend == "nccl" else self._sign_seconds
        with self._condition:
            while True:
                for member in update.members:
                    member.hear()
                if is_done() or (self._trouble(update) and not quiet):
                    return True
                if quiet and any(m.loss(update.number, update.version.number) is not None for m in update.members):
                    return True
                now = time.monotonic()
                if now >= end:
                    return False
                if now >= next_sign:
                    next_sign = now + self._sign_seconds
                    self._members.give_sign(update.members)
                self._condition.wait(min(end - now, tick))

    def _is_over(self, update: _Update, epoch: Epoch) -> bool:
        """Whether everybody has everything, and no broadcast is left of this update."""
        return epoch.is_quiet(update.num_buckets) and all(m.whole_update == update.number for m in update.members)

    # --- slots ---

    def _prepare_slots(self, places: Places) -> None:
        if self._slots is not None and self._slots_bytes >= places.size_bytes:
            self._slots.forget_above(len(places.slots))
            return
        self._slots_bytes = places.size_bytes
        self._slots = Buffers(torch.empty(places.size_bytes, dtype=torch.uint8, device=self._device))

    def _slot(self, update: _Update, index: int) -> torch.Tensor:
        assert self._slots is not None
        return self._slots.get(index, update.places.offsets[index], update.places.sizes_bytes[index])

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this sender was closed")

    def _require_update(self, index: int) -> _Update:
        self._require_open()
        update = self._update
        if update is None or not update.is_open:
            raise UpdateAbortedError("no update is open: it was aborted, or open() was not called")
        if not update.is_rewound and (index != update.next or update.is_whole):
            raise ValueError(f"bucket {index} of {update.num_buckets}: bucket {update.next} is the next")
        return update


def _cannot_join(member: Member) -> str:
    assert member.join_failed is not None
    return f"{member.name} could not connect to the group: {member.join_failed.reason}"


def _listen(url: str, run: str, host: str, port: int, heartbeat_seconds: float) -> Members:
    try:
        return Members(run, host, port, heartbeat_seconds)
    except OSError as exc:
        raise OSError(
            exc.errno,
            f"{url!r} can't be listened at: {exc.strerror}; write an address of this host and a free port, or 0",
        ) from exc
