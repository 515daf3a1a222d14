"""Groups of the trainer ranks that publish together, one after the other; the ranks meet by way of the trainer's store.

Invariants: all ranks of a group have met in one epoch, and an epoch that broke on any rank is over for all, so ranks
that fell out of step meet again in the next; nothing waits for the store without a deadline, as the process that
serves it may be the one that stands still.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from weightcast.errors import PeerDiedError, PeerTimeoutError
from weightcast.process_group import ProcessGroup, Store, translated

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 0.5
_num_publishers: Counter[tuple[int, ...]] = Counter()
T = TypeVar("T")


class Rendezvous:
    """Where the ranks of one publisher meet, epoch after epoch. For use by one thread at a time."""

    def __init__(self, trainer_group: Any, deadline_seconds: float) -> None:
        """`trainer_group`: a ProcessGroup of torch, None for the default one. All ranks make these in one order."""
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(trainer_group or dist.group.WORLD))
        self.group_rank: int = dist.get_rank(trainer_group)
        number = _num_publishers[self.ranks]
        _num_publishers[self.ranks] += 1
        where = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:16]
        self._store = PrefixStore(f"weightcast/{where}/{number}", _default_store())
        self._deadline_seconds = deadline_seconds
        self._epoch = 0
        self._announced = -1
        self._has_left = False
        self._is_unwanted = False
        self._background: threading.Thread | None = None

    def join(self) -> ProcessGroup:
        """Connect with all other ranks; waits for them, at most for two deadlines.

        Raises PeerTimeoutError that names the ranks which did not come.
        """
        arrived = threading.Event()
        try:
            return self._within(lambda: self._connect(arrived), arrived, ProcessGroup.close, self._deadline_seconds)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """This rank's group is broken: never come back to it. Nothing waits; the others learn it at the next `join`."""
        self._has_left = True

    def missing(self, patience_seconds: float) -> tuple[int, ...] | None:
        """Which ranks give no sign that they know of this epoch's end; None if the store does not answer either."""
        arrived = threading.Event()
        with contextlib.suppress(PeerTimeoutError, PeerDiedError):
            return self._within(
                lambda: self._roll_call(patience_seconds), arrived, lambda ranks: None, patience_seconds
            )
        return None

    def nccl(self, device: torch.device) -> ProcessGroup:
        """A second group of the same ranks for bytes on GPUs. Every rank calls it."""
        store = PrefixStore(f"{self._announced}/nccl", self._store)
        return self._made("nccl", store, device)

    def part(self, group_ranks: Sequence[int], name: str, device: torch.device) -> ProcessGroup:
        """A group of some of these ranks, for bytes on `device`. Each of them calls it; a name serves once an epoch."""
        store, seconds = PrefixStore(f"{self._announced}/{name}", self._store), self._deadline_seconds
        backend, size = ("nccl" if device.type == "cuda" else "gloo"), len(group_ranks)
        rank = group_ranks.index(self.group_rank)

        def make() -> ProcessGroup:
            return ProcessGroup(backend, store, rank=rank, size=size, timeout_seconds=seconds, device=device)

        arrived = threading.Event()
        arrived.set()
        return self._within(make, arrived, ProcessGroup.close, seconds)

    def _connect(self, arrived: threading.Event) -> ProcessGroup:
        with translated("the trainer's store"):
            epoch = self._arrive()
        arrived.set()
        return self._made("gloo", PrefixStore(f"{epoch}/gloo", self._store), None)

    def _made(self, backend: str, store: Store, device: torch.device | None) -> ProcessGroup:
        size, seconds = len(self.ranks), self._deadline_seconds
        return ProcessGroup(backend, store, rank=self.group_rank, size=size, timeout_seconds=seconds, device=device)

    def _arrive(self) -> int:
        """Be in the first epoch that has not broken, until all are; return its number."""
        if self._has_left and self._announced >= 0:
            self._store.set(f"{self._announced}/broken", "1")
        self._has_left = False
        end = time.monotonic() + self._deadline_seconds
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
            if time.monotonic() > end or self._is_unwanted:
                self._store.set(f"{self._epoch}/broken", "1")
                raise self._nobody_came(attended)
            time.sleep(_POLL_SECONDS)

    def _nobody_came(self, attended: list[int]) -> PeerTimeoutError:
        # Another rank may have given up just before, and so have moved this one on: it was here all the same.
        absences = [self._absent(epoch, "here") for epoch in attended]
        absent = [rank for rank in self.ranks if all(rank in each for each in absences)]
        return late(absent, self._deadline_seconds)

    def _sign(self, word: str) -> None:
        self._store.set(f"{self._announced}/{word}/{self.group_rank}", "1")
        if self._store.add(f"{self._announced}/{word}", 1) == len(self.ranks):
            self._store.set(f"{self._announced}/all {word}", "1")

    def _absent(self, epoch: int, word: str) -> tuple[int, ...]:
        signs = [f"{epoch}/{word}/{group_rank}" for group_rank in range(len(self.ranks))]
        return tuple(rank for rank, sign in zip(self.ranks, signs, strict=True) if not self._store.check([sign]))

    def _roll_call(self, patience_seconds: float) -> tuple[int, ...]:
        with translated("the trainer's store"):
            self._sign("left")
            end = time.monotonic() + patience_seconds
            while not self._store.check([f"{self._announced}/all left"]) and time.monotonic() < end:
                time.sleep(_POLL_SECONDS)
            return self._absent(self._announced, "left")

    def _within(
        self, call: Callable[[], T], arrived: threading.Event, discard: Callable[[T], None], seconds: float
    ) -> T:
        """Run `call` in a thread: a store that does not answer blocks whoever asks it for many minutes.

        It has `seconds` until `arrived` is set, and as many again after that.
        """
        patience = seconds + _GRACE_SECONDS
        if self._background is not None:
            self._background.join(patience)
            if self._background.is_alive():
                raise PeerTimeoutError(_SILENT_STORE, peer="trainer")
        self._is_unwanted = False
        task = _Task(call, discard)
        self._background = threading.Thread(target=task.run, args=(arrived,), name="weightcast-meeting", daemon=True)
        self._background.start()
        try:
            if not (arrived.wait(patience) and task.over.wait(patience)):
                raise PeerTimeoutError(_SILENT_STORE, peer="trainer")
        except BaseException:
            self._is_unwanted = True
            task.abandon()
            raise
        return cast(T, task.result())


_SILENT_STORE = (
    "the store of torch.distributed does not answer: the process that serves it, usually trainer rank 0, stands still"
)


class _Task:
    """A call in another thread, whose result may come when nobody wants it any more."""

    def __init__(self, call: Callable[[], T], discard: Callable[[T], None]) -> None:
        self.over = threading.Event()
        self._call, self._discard = call, discard
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, arrived: threading.Event) -> None:
        try:
            self._result = self._call()
        except BaseException as exc:
            self._error = exc
        with self._lock:
            if self._is_abandoned and self._error is None:
                self._discard(self._result)
            self.over.set()
        arrived.set()

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            if self.over.is_set() and self._error is None:
                self._discard(self._result)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def late(ranks: Sequence[int], seconds: float) -> PeerTimeoutError:
    who = f"{named(ranks)} did not publish" if ranks else "the trainer ranks did not publish at one time"
    advice = "call publish on every trainer rank, or pass trainer_group=None to publish from one rank alone"
    return PeerTimeoutError(f"{who} within {seconds:g} s: {advice}", peer=named(ranks))


def named(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    return f"trainer rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _default_store() -> Store:
    # Private, and the only way to the store that every trainer rank has already.
    return cast(Any, dist.distributed_c10d)._get_default_store()
