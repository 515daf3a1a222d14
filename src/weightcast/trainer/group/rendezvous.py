"""Groups of the trainer ranks that publish together, one after the other; the ranks meet by way of the trainer's store.

Invariants: all ranks of a group have met in one epoch, and an epoch that broke on any rank is over for all, so ranks
that fell out of step meet again in the next; nothing waits for the store without a deadline, as the process that
serves it may be the one that stalls.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from weightcast.errors import PeerDiedError, PeerTimeoutError
from weightcast.host.closing import on_failure
from weightcast.host.deadline import GRACE_SECONDS, POLL_SECONDS, Deadline, in_background
from weightcast.process_group import ProcessGroup, translated

_SILENT_STORE = (
    "the store of torch.distributed does not answer: the process that serves it, usually trainer rank 0, has ended or "
    "is blocked; see its log"
)
_num_publishers: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""By the trainer's store: a process has another store once it has made its default group again."""
T = TypeVar("T")


class Rendezvous:
    """Meeting point of the ranks of one publisher, epoch after epoch. For use by one thread at a time."""

    def __init__(self, trainer_group: Any, deadline_seconds: float) -> None:
        """`trainer_group`: a ProcessGroup of torch, None for the default one. All ranks make these in one order."""
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(trainer_group or dist.group.WORLD))
        self.group_rank: int = dist.get_rank(trainer_group)
        # Private, and the only way to the store that every trainer rank has already.
        default_store = cast(Any, dist.distributed_c10d)._get_default_store()
        counts = _num_publishers.setdefault(default_store, Counter())
        number = counts[self.ranks]
        counts[self.ranks] += 1
        where = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        self._store = PrefixStore(f"weightcast/{where}/{number}", default_store)
        self._deadline_seconds = deadline_seconds
        self._epoch = 0
        self._announced = -1
        self._has_left = False
        self._has_met = False
        self._is_unwanted = False
        self._background: futures.Future[Any] | None = None
        """A call whose result nobody waits for any more."""

    def join(self) -> ProcessGroup:
        """Connect with all other ranks; waits for them, at most for two deadlines.

        Raises PeerTimeoutError that names the ranks which did not come.
        """

        def connect() -> ProcessGroup:
            with translated("the trainer's store"):
                epoch = self._arrive()
            return ProcessGroup(
                "gloo",
                PrefixStore(f"{epoch}/gloo", self._store),
                rank=self.group_rank,
                size=len(self.ranks),
                timeout_seconds=self._deadline_seconds,
            )

        with on_failure(self.leave):
            group = self._within(2 * self._deadline_seconds + GRACE_SECONDS, connect, ProcessGroup.close)
        self._has_met = True
        return group

    def leave(self) -> None:
        """This rank's group is broken: never come back to it. Nothing waits; the others learn it at the next `join`."""
        self._has_left = True

    def missing(self, patience_seconds: float) -> tuple[int, ...] | None:
        """Which ranks give no sign that they know of this epoch's end; None if the store does not answer either."""

        def call_roll() -> tuple[int, ...]:
            with translated("the trainer's store"):
                self._sign("left")
                deadline = Deadline(patience_seconds)
                while not (self._store.check([f"{self._announced}/all left"]) or deadline.has_passed):
                    time.sleep(POLL_SECONDS)
                return self._absent(self._announced, "left")

        with contextlib.suppress(PeerTimeoutError, PeerDiedError):
            return self._within(2 * patience_seconds, call_roll, lambda ranks: None)
        return None

    def late(self, ranks: Sequence[int]) -> PeerTimeoutError:
        """The error for ranks that did not come, for those that wait for them."""
        who = f"{named(ranks)} did not publish" if ranks else "the trainer ranks did not publish at one time"
        what = "call publish on every trainer rank, or pass trainer_group=None to publish from one rank alone"
        if self._has_met:
            each = "each of them" if len(ranks) != 1 else "it"
            what = f"{each} has published before, and has ended or stalled since, or left the loop; see its log"
        return PeerTimeoutError(f"{who} within {self._deadline_seconds:g} s: {what}", peer=named(ranks))

    def _arrive(self) -> int:
        """Be in the first epoch that has not broken, until all are; return its number."""
        if self._has_left and self._announced >= 0:
            self._store.set(f"{self._announced}/broken", "1")
        self._has_left = False
        deadline = Deadline(self._deadline_seconds)
        attended: list[int] = []
        while True:
            while self._store.check([f"{self._epoch}/broken"]):
                self._epoch += 1
            if self._announced < self._epoch:
                self._announced = self._epoch
                self._sign("here")
                attended.append(self._epoch)
            if self._store.check([f"{self._epoch}/all here"]):
                return self._epoch
            if deadline.has_passed or self._is_unwanted:
                self._store.set(f"{self._epoch}/broken", "1")
                # Another rank may have given up just before, and so have moved this one on: it was here all the same.
                absences = [self._absent(epoch, "here") for epoch in attended]
                absent = [rank for rank in self.ranks if all(rank in each for each in absences)]
                raise self.late(absent)
            time.sleep(POLL_SECONDS)

    def _sign(self, word: str) -> None:
        self._store.set(f"{self._announced}/{word}/{self.group_rank}", "1")
        if self._store.add(f"{self._announced}/{word}", 1) == len(self.ranks):
            self._store.set(f"{self._announced}/all {word}", "1")

    def _absent(self, epoch: int, word: str) -> tuple[int, ...]:
        signs = [f"{epoch}/{word}/{group_rank}" for group_rank in range(len(self.ranks))]
        return tuple(rank for rank, sign in zip(self.ranks, signs, strict=True) if not self._store.check([sign]))

    def _within(self, seconds: float, call: Callable[[], T], discard: Callable[[T], None]) -> T:
        """Run `call` in a thread, for `seconds`: a store that does not answer blocks its caller for many minutes.

        A later result is discarded.
        """
        former = self._background
        if former is not None and not futures.wait([former], seconds).done:
            raise PeerTimeoutError(_SILENT_STORE, peer="trainer")
        self._is_unwanted = False
        future = in_background(call, name="weightcast-meeting")

        def discard_result(done: futures.Future[T]) -> None:
            self._background = None  # its error's traceback has frames of this object's
            if done.exception() is None:
                discard(done.result())

        def abandon() -> None:
            self._is_unwanted, self._background = True, future
            future.add_done_callback(discard_result)

        with on_failure(abandon):
            if not futures.wait([future], seconds).done:
                raise PeerTimeoutError(_SILENT_STORE, peer="trainer")
        return future.result()


def named(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"trainer rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
