"""The trainer ranks that publish together: what they send each other, and how one's failure becomes everyone's.

Invariants: every rank makes the same exchanges in the same order; an error that one rank brings to an exchange is
raised there by all; a rank that loses another closes its group at once, which ends the others' waits; nothing but typed
records and raw bytes travels. Group rank 0 is the publishing rank, which says what is done next.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import torch

from weightcast.errors import (
    MAX_TEXT_CHARACTERS,
    ErrorRecord,
    ManifestError,
    PeerDiedError,
    PeerError,
    from_record,
    thrown,
    to_record,
)
from weightcast.format.manifest import MAX_MESSAGE_BYTES, decode, encode
from weightcast.host.closing import awaited_at_exit
from weightcast.process_group import ProcessGroup, wait
from weightcast.trainer.group.rendezvous import Rendezvous, named

_MAX_FAILURE_BYTES = 4 << 20
_ROLL_CALL_SECONDS = 2.0
_MAX_SILENCE_SECONDS = 10.0
"""The longest time that the publishing rank sends nothing.

Other ranks of origins give their receivers a sign of life only when they hear from it: this is well below the
receivers' deadlines.
"""

Arrival: TypeAlias = Callable[[], None]
"""Waits for what was begun to be received. Raises PeerError."""


class Instruction(enum.IntEnum):
    """What an exchange is about; the publishing rank says it.

    A round, which is the next bucket of each origin, is BUCKET (pack it) and PACKED: see `gather`. OPEN and ASK
    are for the ranks that lead an origin: see `origins`. CHECK: look for NaN, see `shares`.
    """

    START = 1
    SETTLE = 2
    WAIT = 3
    BUCKET = 4
    PACKED = 5
    OPEN = 6
    ASK = 7
    END = 8
    CHECK = 9


class RankStatus(NamedTuple):
    """What one rank brings to an exchange: fixed numbers. `num_error_bytes` of its failure's record, or 0.

    `argument`, `version`: the publishing rank's. `news`, `digest_low`, `digest_high`, `device`: see `shares`.
    `is_mapped`: this rank packs into its origin's memory; `sum_low`, `sum_high`: what it fills alone there brings to
    the bucket's digest. Of a rank that leads an origin: `is_busy`, `is_lost`, `num_failures`: see `origins`;
    `next_round` is that of its next bucket, `offset_bytes` where the payload begins in its memory, -1 if it has none;
    `is_moved`: that memory must be mapped again. `num_gathers`: of its source, see `CollectiveSource`.
    """

    num_error_bytes: int = 0
    command: int = 0
    argument: int = 0
    version: int = -1
    news: int = 0
    digest_low: int = 0
    digest_high: int = 0
    device: int = 0
    is_mapped: int = 0
    sum_low: int = 0
    sum_high: int = 0
    is_busy: int = 0
    is_lost: int = 0
    num_failures: int = 0
    next_round: int = 0
    offset_bytes: int = -1
    is_moved: int = 0
    num_gathers: int = 0


def in_round(statuses: Sequence[RankStatus], number: int) -> list[RankStatus]:
    """What ranks have brought to the exchange that begins a round, in which an origin that is ahead has no bucket."""
    return [each if each.next_round == number else each._replace(offset_bytes=-1, is_moved=0) for each in statuses]


class NextInstruction(NamedTuple):
    """What the publishing rank said at an exchange. `is_ready`: no rank was busy with what it had said before."""

    command: Instruction
    argument: int
    is_ready: bool
    statuses: Sequence[RankStatus]


class Failure(msgspec.Struct, frozen=True):
    """An error of one rank, on its way to the others. `is_named`: its text says itself which ranks it is about."""

    record: ErrorRecord
    builtin: Literal["", "ValueError", "TypeError"] = ""
    is_named: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        record, is_named = to_record(error), bool(getattr(error, "names_trainer_ranks", False))
        if not isinstance(error, (ValueError, TypeError)):
            return cls(record, "", is_named)
        record = msgspec.structs.replace(record, message=str(error)[:MAX_TEXT_CHARACTERS])
        return cls(record, "ValueError" if isinstance(error, ValueError) else "TypeError", is_named)

    def error(self, trainer_rank: int) -> Exception:
        """The error as the other ranks raise it; `trainer_rank` is where it happened."""
        record = self.record
        if not self.is_named:
            record = msgspec.structs.replace(record, message=f"trainer rank {trainer_rank}: {record.message}")
        match self.builtin:
            case "ValueError":
                return ValueError(record.message)
            case "TypeError":
                return TypeError(record.message)
        return from_record(record)


class _GivenUpError(PeerDiedError):
    """Another rank had closed its side of the group before this publish began."""


class _ErrorAtNextExchange:
    def __init__(self, ranks: TrainerRanks) -> None:
        self._ranks = ranks

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if error is None:
            return False
        self._ranks.error = error
        return True


class TrainerRanks:
    """This rank's connections to the others. One thread calls it, besides `keeping_alive`."""

    def __init__(self, trainer_group: Any, deadline_seconds: float) -> None:
        """`trainer_group` as for `Rendezvous`. Nothing is connected before the first `start`."""
        self._rendezvous = Rendezvous(trainer_group, deadline_seconds)
        self.ranks = self._rendezvous.ranks
        self.group_rank = self._rendezvous.group_rank
        self.size = len(self.ranks)
        self.is_publishing = self.group_rank == 0
        self.version = -1
        """On the publishing rank: what it says at each exchange. On the others: what it said last."""
        self.error: BaseException | None = None
        """This rank's, which it brings to its next exchange."""
        self._deadline_seconds = deadline_seconds
        self._lock = threading.RLock()
        self._groups: dict[Literal["gloo", "nccl"], ProcessGroup] = {}
        """All ranks, for host memory and for GPUs."""
        self._verdict: BaseException | None = None
        self._is_kept = False
        self._last_exchange = 0.0
        self._status = torch.zeros(len(RankStatus._fields), dtype=torch.int64)
        self._statuses = torch.zeros(self.size, len(RankStatus._fields), dtype=torch.int64)

    @property
    def is_connected(self) -> bool:
        """Whether this rank has a group that has not broken."""
        return "gloo" in self._groups

    # --- exchanges ---

    def error_at_next_exchange(self) -> _ErrorAtNextExchange:
        """An error inside is not raised there: this rank's next exchange raises it, on every rank."""
        return _ErrorAtNextExchange(self)

    def start(self, status: RankStatus) -> list[RankStatus]:
        """The first exchange of a publish; connects where there is no group. Blocks until all ranks publish.

        A group that another rank has given up before is replaced, once.
        """
        with self._lock:
            self._verdict, error = None, self.error
            if self.is_connected:
                self._is_kept = True
                try:
                    return self.exchange(status)
                except _GivenUpError:
                    self._verdict, self.error = None, error
                finally:
                    self._is_kept = False
            self._groups["gloo"] = self._rendezvous.join()
            return self.exchange(status)

    def exchange(self, status: RankStatus) -> list[RankStatus]:
        """Every rank's row, by group rank; blocks until all have come.

        Raises on every rank the error that a rank has brought: there its own, elsewhere one that names that rank.
        Raises PeerError if a rank dies or stalls; the ranks connect again at the next `start`.
        """
        with self._lock:
            error, self.error = self.error, None
            if self._verdict is not None:
                raise self._verdict
            with self._unbroken() as group:
                failure = b"" if error is None else encode(Failure.of(error))
                self._status.copy_(torch.tensor(status._replace(num_error_bytes=len(failure))))
                # By way of the publishing rank: gloo's all-gather goes from rank to rank and takes three times as long.
                if self.is_publishing:
                    self._statuses[0] = self._status
                    works = [group.receive(self._statuses[rank], rank) for rank in range(1, self.size)]
                    try:
                        while works:
                            wait(works.pop())
                    finally:
                        works.clear()
                else:
                    wait(group.send(self._status, 0))
                wait(group.broadcast(self._statuses, root=0))
                statuses = [RankStatus(*numbers) for numbers in self._statuses.tolist()]
                if not self.is_publishing:
                    self.version = statuses[0].version
                self._last_exchange = time.monotonic()
                failing = next((g for g, each in enumerate(statuses) if each.num_error_bytes), None)
                if failing is None:
                    return statuses
                data = self._broadcast(group, failure, failing, statuses[failing].num_error_bytes)
                if error is not None and failing == self.group_rank:
                    verdict = error
                else:
                    told: Failure = decode(data, Failure, max_bytes=_MAX_FAILURE_BYTES)
                    verdict = told.error(self.ranks[failing])
                self._verdict = verdict
            if error is None or error is verdict:
                raise verdict
            raise verdict from error

    def announce(self, command: Instruction, argument: int = 0) -> list[RankStatus]:
        """The publishing rank's exchange: what all do next."""
        return self.exchange(RankStatus(command=command, argument=argument, version=self.version))

    def uninterrupted(self) -> contextlib.AbstractContextManager[Any]:
        """Held for exchanges that follow one another without a sign of life from `keeping_alive` between them."""
        return self._lock

    def announce_when_idle(
        self, command: Instruction, argument: int = 0, data: bytes = b"", status: RankStatus | None = None
    ) -> list[RankStatus]:
        """`announce`, repeated until no rank is busy: only then the command counts. Returns the rows of that exchange.

        `data`, if there is any, is broadcast with it; `argument` is then its length. `status`: what this rank brings
        besides. Blocks as long as a rank is busy: whatever it is busy with has deadlines of its own.
        """
        status = (status or RankStatus())._replace(command=command, argument=len(data) or argument)
        while True:
            with self._lock:
                statuses = self.exchange(status._replace(version=self.version))
                if not any(each.is_busy for each in statuses):
                    if data:
                        self.broadcast(data, len(data))
                    return statuses

    def next_instruction(self, status: RankStatus | None = None) -> NextInstruction:
        """Another rank's exchange: bring `status`, and be told what to do next."""
        statuses = self.exchange(RankStatus() if status is None else status)
        is_ready = not any(each.is_busy for each in statuses)
        return NextInstruction(Instruction(statuses[0].command), statuses[0].argument, is_ready, statuses)

    @contextlib.contextmanager
    def keeping_alive(self) -> Iterator[None]:
        """On the publishing rank: tell the others to wait on, as often as it takes, in a thread of its own."""
        over = threading.Event()
        interval = min(self._deadline_seconds / 3, _MAX_SILENCE_SECONDS)

        def keep_alive() -> None:
            # What fails here fails the caller's next exchange.
            with self.error_at_next_exchange():
                while not over.wait(max(0.0, self._last_exchange + interval - time.monotonic())):
                    with self._lock:
                        if not over.is_set() and self._last_exchange + interval <= time.monotonic():
                            self.announce(Instruction.WAIT)

        thread = threading.Thread(target=keep_alive, name="weightcast-ranks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    # --- bytes ---

    def broadcast(self, data: bytes, num_bytes: int) -> bytes:
        """`num_bytes` of the publishing rank's `data`, on every rank."""
        with self._lock, self._unbroken() as group:
            return self._broadcast(group, data, 0, num_bytes)

    def _broadcast(self, group: ProcessGroup, data: bytes, root: int, num_bytes: int) -> bytes:
        if not 0 < num_bytes <= MAX_MESSAGE_BYTES:
            raise ManifestError(f"a message of {num_bytes} bytes from trainer rank {self.ranks[root]}")
        is_root = root == self.group_rank
        tensor = _bytes_tensor(data) if is_root else torch.empty(num_bytes, dtype=torch.uint8)
        wait(group.broadcast(tensor, root=root))
        return data if is_root else tensor.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, by group rank, on every rank. Raises ManifestError for too much of it."""
        with self._lock:
            statuses = self.exchange(RankStatus(command=Instruction.SETTLE, argument=len(data), version=self.version))
            sizes = [status.argument for status in statuses]
            if not all(0 < size <= MAX_MESSAGE_BYTES for size in sizes):
                raise ManifestError(f"messages of {sizes} bytes from the trainer ranks")
            rows = torch.zeros(self.size, max(sizes), dtype=torch.uint8)
            own = rows[self.group_rank].clone()
            own[: len(data)] = _bytes_tensor(data)
            self.all_gather(rows, own)
            return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]

    def all_gather(self, rows: torch.Tensor, own: torch.Tensor) -> None:
        """Every rank's bytes, each a row by group rank; `own` is this rank's, and as long as a row on every rank."""
        with self._lock, self._unbroken() as group:
            wait(group.all_gather(list(rows.unbind()), own))

    def send_message(self, message: msgspec.Struct, group_rank: int) -> None:
        data = encode(message)
        with self._unbroken() as group:
            wait(group.send(torch.tensor([len(data)]), group_rank))
            wait(group.send(_bytes_tensor(data), group_rank))

    def receive_message(self, kind: type[Any], group_rank: int) -> Any:
        """Raises ManifestError for what is no such message; the ranks have then lost each other."""
        with self._unbroken() as group:
            size = torch.zeros(1, dtype=torch.int64)
            wait(group.receive(size, group_rank))
            if not 0 < int(size) <= MAX_MESSAGE_BYTES:
                raise ManifestError(f"a message of {int(size)} bytes from trainer rank {self.ranks[group_rank]}")
            data = torch.empty(int(size), dtype=torch.uint8)
            wait(group.receive(data, group_rank))
            return decode(data.numpy().data, kind)

    def connect_nccl(self, device: torch.device) -> None:
        """A group for bytes on GPUs, for `send` and `receive` of CUDA tensors. Every rank calls it."""
        with self._unbroken():
            if "nccl" not in self._groups:
                self._groups["nccl"] = self._rendezvous.nccl(device)

    def send(self, tensor: torch.Tensor, group_rank: int) -> None:
        """Send a contiguous tensor; blocks until it has gone."""
        with self._unbroken() as gloo:
            group = self._groups["nccl"] if tensor.is_cuda else gloo
            group.wait(group.send(tensor, group_rank))

    def receive(self, tensor: torch.Tensor, group_rank: int) -> Arrival:
        """Begin to receive into a contiguous tensor; see `arrived`."""
        with self._unbroken() as gloo:
            group = self._groups["nccl"] if tensor.is_cuda else gloo
            return functools.partial(group.wait, group.receive(tensor, group_rank))

    def arrived(self, arrivals: list[Arrival]) -> None:
        """Wait for what `receive` has begun, and empty the list."""
        try:
            with self._unbroken():
                while arrivals:
                    arrivals.pop()()
        finally:
            arrivals.clear()

    # --- the end ---

    def give_up(self) -> None:
        """This rank can't go on, and can't say why: disconnect, unless all know already how the publish has ended."""
        self.error = None
        if self._verdict is None and self.is_connected:
            self.close()
            self._rendezvous.leave()

    def close(self) -> None:
        """Disconnect, without a word. Idempotent."""
        for backend, group in self._groups.items():
            # An abort of NCCL's may wait for its watchdog.
            group.close() if backend == "gloo" else awaited_at_exit(group.close, "weightcast-group-end")
        self._groups.clear()

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[ProcessGroup]:
        """Whatever goes wrong inside leaves the ranks out of step: the group is closed; the next `start` mends it."""
        group = self._groups.get("gloo")
        if group is None:
            raise self._verdict or PeerError("the trainer ranks are not connected")
        try:
            yield group
        except BaseException as exc:
            self.close()
            self._rendezvous.leave()
            self._verdict = self._explained(exc) if isinstance(exc, PeerError) else exc
            if self._verdict is exc:
                raise
            raise self._verdict from thrown(exc)

    def _explained(self, exc: PeerError) -> PeerError:
        """The loss of another rank, with who that was, as far as the others' signs say it."""
        if self._is_kept and isinstance(exc, PeerDiedError):
            return _GivenUpError(str(exc))
        missing = self._rendezvous.missing(min(_ROLL_CALL_SECONDS, self._deadline_seconds / 4))
        if missing and self._is_kept:
            return self._rendezvous.late(missing)
        names = named(missing or ())
        sign = f"no sign of life from {names}" if missing else "all ranks are alive"
        lost = "the rendezvous store, usually on trainer rank 0, does not answer" if missing is None else sign
        return type(exc)(f"connection between trainer ranks lost ({lost}): {exc}", peer=names or "trainer")


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
