"""The trainer ranks that publish together: what they tell each other, and how one's failure becomes everyone's.

Invariants: every rank makes the same exchanges in the same order; an error that one rank brings to an exchange is
raised there by all; whoever loses another closes its group at once, which ends the others' waits; nothing but typed
records and raw bytes travels. Group rank 0 is the publishing rank: what is done next is for it to say.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed import Work

from weightcast.errors import ManifestError, PeerDiedError, PeerError, PeerTimeoutError
from weightcast.format.manifest import MAX_MESSAGE_BYTES, decode, encode
from weightcast.process_group import ProcessGroup, wait
from weightcast.trainer.group.records import MAX_RECORD_BYTES, Failure, Instruction, NextInstruction, RankStatus
from weightcast.trainer.group.rendezvous import Rendezvous, late, named

_ROLL_CALL_SECONDS = 2.0
_MAX_SILENCE_SECONDS = 10.0
"""The longest time that the publishing rank sends nothing.

Other ranks pass a sign of life on to their receivers only when they hear from it: this is well below those deadlines.
"""


_NOTHING = RankStatus()


class _GivenUpError(PeerDiedError):
    """Another rank had closed its side of the group before this publish began."""


class TrainerRanks:
    """This rank's connections to the others. One thread calls it, besides `keeping_alive` and `receive_bucket`."""

    def __init__(self, trainer_group: Any, deadline_seconds: float) -> None:
        """`trainer_group` as for `Rendezvous`. Nothing is connected before the first `start`."""
        self._rendezvous = Rendezvous(trainer_group, deadline_seconds)
        self.ranks = self._rendezvous.ranks
        self.group_rank = self._rendezvous.group_rank
        self.size = len(self.ranks)
        self.is_publishing = self.group_rank == 0
        self.version = -1
        """On the publishing rank: what it tells at each exchange. On the others: what they were told last."""
        self._deadline_seconds = deadline_seconds
        self._lock = threading.RLock()
        self._group: ProcessGroup | None = None
        self._nccl: ProcessGroup | None = None
        self._arenas: ProcessGroup | None = None
        self._verdict: BaseException | None = None
        self._is_kept = False
        self._last_exchange = 0.0
        self._status = torch.zeros(len(RankStatus._fields), dtype=torch.int64)
        self._statuses = torch.zeros(self.size, len(RankStatus._fields), dtype=torch.int64)

    @property
    def is_connected(self) -> bool:
        """Whether this rank has a group that has not broken."""
        return self._group is not None

    # --- exchanges ---

    def start(self, status: RankStatus, error: BaseException | None) -> list[RankStatus]:
        """The first exchange of a publish; connects where there is no group. Blocks until all ranks publish.

        A group that another rank has given up before is replaced, once.
        """
        with self._lock:
            if self._group is not None:
                with contextlib.suppress(_GivenUpError):
                    return self._start(status, error, is_kept=True)
            self._group = self._rendezvous.join()
            return self._start(status, error, is_kept=False)

    def _start(self, status: RankStatus, error: BaseException | None, *, is_kept: bool) -> list[RankStatus]:
        self._verdict, self._is_kept = None, is_kept
        try:
            return self.exchange(status, error)
        finally:
            self._is_kept = False

    def exchange(self, status: RankStatus, error: BaseException | None = None) -> list[RankStatus]:
        """Every rank's row, by group rank; blocks until all have come. One collective.

        Raises on every rank the error that a rank has brought: there its own, elsewhere one that names that rank.
        Raises PeerError if a rank dies or stands still; the ranks connect again at the next `start`.
        """
        with self._lock:
            if self._verdict is not None:
                raise self._verdict
            with self._unbroken() as group:
                failure = b"" if error is None else encode(Failure.of(error))
                statuses = self._exchanged(group, status._replace(num_error_bytes=len(failure)))
                self._last_exchange = time.monotonic()
                failing = next((g for g, each in enumerate(statuses) if each.num_error_bytes), None)
                if failing is None:
                    return statuses
                data = self._broadcast(group, failure, failing, statuses[failing].num_error_bytes)
                is_own = failing == self.group_rank
                self._verdict = error if error is not None and is_own else _error_of(data, self.ranks[failing])
            if error is None or error is self._verdict:
                raise self._verdict
            raise self._verdict from error

    def announce(self, command: Instruction, argument: int = 0, *, error: BaseException | None = None) -> None:
        """The publishing rank's exchange: what all do next."""
        self.exchange(RankStatus(command=command, argument=argument, version=self.version), error)

    def announce_when_idle(self, command: Instruction, argument: int = 0, data: bytes = b"") -> list[RankStatus]:
        """`announce`, repeated until no rank is busy: only then the command counts. Returns the rows of that exchange.

        `data`, if there is any, is broadcast with it; `argument` is then its length. Blocks as long as a rank is busy:
        whatever it is busy with has deadlines of its own.
        """
        status = RankStatus(command=command, argument=len(data) or argument)
        while True:
            with self._lock:
                statuses = self.exchange(status._replace(version=self.version))
                if not any(each.is_busy for each in statuses):
                    if data:
                        self.broadcast(data, len(data))
                    return statuses

    def next_instruction(self, error: BaseException | None = None, status: RankStatus = _NOTHING) -> NextInstruction:
        """Another rank's exchange: bring `status` and `error`, and be told what to do next."""
        statuses = self.exchange(status, error)
        return NextInstruction(
            Instruction(statuses[0].command), statuses[0].argument, not any(each.is_busy for each in statuses)
        )

    @contextlib.contextmanager
    def keeping_alive(self) -> Iterator[None]:
        """On the publishing rank: tell the others to wait on, as often as it takes, in a thread of its own."""
        over = threading.Event()
        thread = threading.Thread(target=self._keep_alive, args=(over,), name="weightcast-ranks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _keep_alive(self, over: threading.Event) -> None:
        interval = min(self._deadline_seconds / 3, _MAX_SILENCE_SECONDS)
        while not over.wait(max(0.0, self._last_exchange + interval - time.monotonic())):
            with self._lock:
                if over.is_set() or self._last_exchange + interval > time.monotonic():
                    continue
                try:
                    self.announce(Instruction.WAIT)
                except BaseException:
                    # The next exchange of the caller raises it.
                    return

    # --- bytes ---

    def broadcast(self, data: bytes, num_bytes: int) -> bytes:
        """`num_bytes` of the publishing rank's `data`, on every rank."""
        with self._lock, self._unbroken() as group:
            return self._broadcast(group, data, 0, num_bytes)

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
            if self._nccl is None:
                self._nccl = self._rendezvous.nccl(device)

    def send(self, tensor: torch.Tensor, group_rank: int) -> None:
        """Send a contiguous tensor; blocks until it has gone."""
        with self._unbroken() as group:
            if tensor.is_cuda:
                assert self._nccl is not None
                wait(self._nccl.send(tensor, group_rank))
                self._wait_for_device(tensor.device)
            else:
                wait(group.send(tensor, group_rank))

    def receive(self, tensor: torch.Tensor, group_rank: int) -> Work:
        """Begin to receive into a contiguous tensor; see `arrived`."""
        with self._unbroken() as group:
            if tensor.is_cuda:
                assert self._nccl is not None
                return self._nccl.receive(tensor, group_rank)
            return group.receive(tensor, group_rank)

    def arrived(self, works: list[Work]) -> None:
        """Wait for what `receive` has begun, and empty the list; on a GPU the current stream waits."""
        try:
            with self._unbroken():
                while works:
                    wait(works.pop())
        finally:
            works.clear()

    def connect_arenas(self, group_ranks: Sequence[int], number: int, device: torch.device) -> None:
        """Connect a group of these ranks alone for `broadcast_bucket` and `receive_bucket`; it replaces the former one.

        The buckets are on `device`. Every rank calls it. `number`: another one for each such group.
        """
        with self._unbroken():
            self._close_arenas()
            if self.group_rank in group_ranks:
                self._arenas = self._rendezvous.part(group_ranks, f"arenas/{number}", device)

    def broadcast_bucket(self, tensor: torch.Tensor) -> None:
        """The publishing rank: give a contiguous tensor to every arena rank. Blocks until it has gone, or is queued."""
        with self._lock, self._unbroken():
            assert self._arenas is not None
            wait(self._arenas.broadcast(tensor, root=0))

    def receive_bucket(self, tensor: torch.Tensor) -> None:
        """Another arena rank: take what is spread; blocks until it is there. For a thread of its own.

        Raises PeerError, which leaves this rank's other groups as they are: the group of arenas is of no more use.
        """
        arenas = self._arenas
        if arenas is None:
            raise PeerDiedError("the trainer ranks lost each other", peer="trainer")
        wait(arenas.broadcast(tensor, root=0))
        if tensor.is_cuda:
            self._wait_for_device(tensor.device)

    def give_up(self) -> None:
        """This rank can't go on, and can't say why: disconnect, unless all know already how the publish has ended."""
        if self._verdict is None and self._group is not None:
            self.close()
            self._rendezvous.leave()

    def close(self) -> None:
        """Disconnect, without a word. Idempotent."""
        for group in (self._group, self._nccl):
            if group is not None:
                group.close()
        self._group = self._nccl = None
        self._close_arenas()

    # --- inside ---

    def _close_arenas(self) -> None:
        if self._arenas is not None:
            self._arenas.close()
            self._arenas = None

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[ProcessGroup]:
        """Whatever goes wrong inside leaves the ranks out of step: the group is closed; the next `start` mends it."""
        if self._group is None:
            raise self._verdict or PeerError("the trainer ranks are not connected")
        try:
            yield self._group
        except BaseException as exc:
            self._verdict = self._broken(exc)
            if self._verdict is exc:
                raise
            raise self._verdict from exc

    def _broken(self, exc: BaseException) -> BaseException:
        self.close()
        self._rendezvous.leave()
        if not isinstance(exc, PeerError):
            return exc
        if self._is_kept and isinstance(exc, PeerDiedError):
            return _GivenUpError(str(exc))
        missing = self._rendezvous.missing(min(_ROLL_CALL_SECONDS, self._deadline_seconds / 4))
        if missing and self._is_kept:
            return late(missing, self._deadline_seconds)
        names = named(missing or ())
        sign = f"no sign of life from {names}" if missing else "all ranks are alive"
        lost = "the rendezvous store, usually on trainer rank 0, does not answer" if missing is None else sign
        return type(exc)(f"connection between trainer ranks lost ({lost}): {exc}", peer=names or "trainer")

    def _exchanged(self, group: ProcessGroup, status: RankStatus) -> list[RankStatus]:
        self._status.copy_(torch.tensor(status))
        wait(group.all_gather(list(self._statuses.unbind()), self._status))
        statuses = [RankStatus(*numbers) for numbers in self._statuses.tolist()]
        if not self.is_publishing:
            self.version = statuses[0].version
        return statuses

    def _broadcast(self, group: ProcessGroup, data: bytes, root: int, num_bytes: int) -> bytes:
        if not 0 < num_bytes <= MAX_MESSAGE_BYTES:
            raise ManifestError(f"a message of {num_bytes} bytes from trainer rank {self.ranks[root]}")
        is_root = root == self.group_rank
        tensor = _bytes_tensor(data) if is_root else torch.empty(num_bytes, dtype=torch.uint8)
        wait(group.broadcast(tensor, root=root))
        return data if is_root else tensor.numpy().tobytes()

    def _wait_for_device(self, device: torch.device) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        end = time.monotonic() + self._deadline_seconds
        while not event.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > end:
                raise PeerTimeoutError(f"a transfer over NCCL was not over within {self._deadline_seconds:g} s")
            time.sleep(0.0002)


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _error_of(data: bytes, trainer_rank: int) -> Exception:
    failure: Failure = decode(data, Failure, max_bytes=MAX_RECORD_BYTES)
    return failure.error(trainer_rank)
