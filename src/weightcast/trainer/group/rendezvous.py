"""Rendezvous of the trainer ranks that publish together, over torch.distributed's store; one group per epoch.

Invariants: all ranks of a group have joined in one epoch; if an epoch's group breaks on any rank, the epoch is over for
all, and the ranks join again in the next; every wait for the store has a deadline, since the process that serves it may
be the one that stalls.
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
    "is blocked; see that process's log"
)
_num_publishers: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""Number of publishers made so far, by store and ranks; a default group that is made again has another store."""
T = TypeVar("T")


class Rendezvous:
    """Rendezvous of the ranks of one publisher, epoch after epoch. Not thread-safe."""

    def __init__(self, trainer_group: Any, deadline_seconds: float) -> None:
        """`trainer_group`: a torch ProcessGroup, None for the default one. All ranks create publishers in one order."""
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(trainer_group or dist.group.WORLD))
        self.group_rank: int = dist.get_rank(trainer_group)
        # A private function, but the only access to the store that every trainer rank has already.
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
        """A call to the store that has passed its deadline and may still be running."""

    def join(self) -> ProcessGroup:
        """Connect with all other ranks; wait for them for at most two deadlines.

        Raises PeerTimeoutError that names the missing ranks.
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
        """End this rank's epoch, after its group broke. Does not wait; the others notice at their next `join`."""
        self._has_left = True

    def missing(self, patience_seconds: float) -> tuple[int, ...] | None:
        """Return the ranks that have not acknowledged the end of this epoch; None if the store does not answer."""

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
        """Return the error for the ranks that did not publish, to be raised on those that waited."""
        who = f"{named(ranks)} did not publish" if ranks else "the trainer ranks did not publish at the same time"
        what = "call publish on every trainer rank, or pass trainer_group=None to publish from one rank alone"
        if self._has_met:
            each = "each of them" if len(ranks) != 1 else "it"
            what = f"{each} has published before, and has died, stalled or left the training loop since; see its log"
        return PeerTimeoutError(f"{who} within {self._deadline_seconds:g} s: {what}", peer=named(ranks))

    def _arrive(self) -> int:
        """Enter the first epoch that has not broken, wait until all ranks have, return the epoch's number."""
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
                # A rank that gave up just now has moved this rank to a later epoch: any epoch that it entered counts.
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
        """Run `call` in a thread and wait `seconds` for it: a store that does not answer blocks for many minutes.

        A later result is passed to `discard`.
        """
        former = self._background
        if former is not None and not futures.wait([former], seconds).done:
            raise PeerTimeoutError(_SILENT_STORE, peer="trainer")
        self._is_unwanted = False
        future = in_background(call, name="weightcast-meeting")

        def discard_result(done: futures.Future[T]) -> None:
            self._background = None  # its error's traceback refers to this object
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
