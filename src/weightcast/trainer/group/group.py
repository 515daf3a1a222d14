"""Exchanges among the trainer ranks that publish together; an error on one rank is raised on all of them.

Invariants: every rank makes the same exchanges in the same order; an error that one rank puts into an exchange is
raised by that exchange on all ranks; a rank that loses another closes its group at once, which ends the others' waits;
only typed records and raw bytes are sent. Group rank 0 is the publishing rank, which gives the instructions.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weightcast.errors import ManifestError, PeerDiedError, PeerError, Translated
from weightcast.format.manifest import MAX_MESSAGE_BYTES, decode, encode
from weightcast.host.deadline import GRACE_SECONDS
from weightcast.process_group import ProcessGroup, wait
from weightcast.trainer.group.records import Failure, Nothing, RankStatus, Record, Row
from weightcast.trainer.group.rendezvous import Rendezvous, named

_ROW_BYTES = 512
"""Size of one rank's row in an exchange; a longer record is sent again, whole, in a second step."""
_SIZE_BYTES = 4


class _ErrorAtNextExchange:
    def __init__(self, group: Group) -> None:
        self._group = group

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> bool:
        if error is not None:
            self._group.error = error
        return error is not None


class Group:
    """This rank's connections to the others. One thread calls it, besides `keeping_alive`."""

    def __init__(self, trainer_group: Any, deadline_seconds: float) -> None:
        """`trainer_group` as for `Rendezvous`. Nothing is connected before the first `start`."""
        self._rendezvous = Rendezvous(trainer_group, deadline_seconds)
        self.ranks = self._rendezvous.ranks
        self.group_rank = self._rendezvous.group_rank
        self.size = len(self.ranks)
        self.is_publishing = self.group_rank == 0
        self.version = -1
        """The publisher's version number, sent with each exchange. On the other ranks: the last one received."""
        self.error: BaseException | None = None
        """This rank's error, which its next exchange raises on all ranks."""
        self._deadline_seconds = deadline_seconds
        self._lock = threading.RLock()
        self._group: ProcessGroup | None = None
        self._verdict: BaseException | None = None
        """The error with which this publish has failed on every rank."""
        self._is_kept = False
        self._last_exchange = 0.0
        self._rows = torch.zeros(self.size, _ROW_BYTES, dtype=torch.uint8)

    @property
    def is_connected(self) -> bool:
        """True while this rank has a group that has not broken."""
        return self._group is not None

    # --- agree ---

    def error_at_next_exchange(self) -> _ErrorAtNextExchange:
        """Catch an error of the block; this rank's next exchange raises it on every rank."""
        return _ErrorAtNextExchange(self)

    def start(self, record: Record) -> list[Any]:
        """Make the first exchange of a publish; connect if there is no group. Blocks until all ranks publish.

        A group that another rank has closed before is replaced, once.
        """
        with self._lock:
            self._verdict = None
            if self.is_connected:
                self._is_kept = True
                try:
                    return self.exchange(record)
                except PeerDiedError:
                    if self.is_connected:  # the error is another rank's, of something else
                        raise
                finally:
                    self._is_kept = False
            self._group = self._rendezvous.join()
            return self.exchange(record)

    def exchange(self, record: Record) -> list[Any]:
        """Return every rank's record, by group rank; block until all have come.

        If a rank has an error, it is raised on every rank: unchanged on that rank, elsewhere with that rank's name. An
        error that all ranks have alike is raised unchanged. Raises PeerError if a rank dies or stalls; the ranks
        connect again at the next `start`.
        """
        with self._lock:
            if self._verdict is not None:
                self.error = None
                raise self._verdict
            group = self._connected()
            with Translated(BaseException, self._break):
                data = encode(Row(self.version, record if self.error is None else Failure.of(self.error)))
                rows: list[Row] = [decode(row, Row) for row in self._all(group, data)]
                if not self.is_publishing:
                    self.version = rows[0].version
                self._last_exchange = time.monotonic()
                records = [row.record for row in rows]
                failing, failure = next(((n, r) for n, r in enumerate(records) if isinstance(r, Failure)), (0, None))
                if failure is None:
                    return records
            # No local variable may refer to the raised error: its traceback refers to this frame, which is a cycle.
            if self.error is not None and (failing == self.group_rank or str(self.error) == failure.record.message):
                self._verdict, self.error = self.error, None
                raise self._verdict
            self._verdict = failure.error(self.ranks[failing])
            cause, self.error = self.error, None
            raise self._verdict from cause

    def _all(self, group: ProcessGroup, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by group rank, sent by way of the publishing rank.

        gloo's own all-gather is a ring, whose latency grows with the number of ranks.
        """
        head = len(data).to_bytes(_SIZE_BYTES, "little") + data[: _ROW_BYTES - _SIZE_BYTES]
        self._rows[self.group_rank, : len(head)] = _tensor(head)
        self._collect(group, self._rows.unbind(), self._rows)
        rows = [row.tobytes() for row in self._rows.numpy()]
        sizes = [int.from_bytes(row[:_SIZE_BYTES], "little") for row in rows]
        if max(sizes) > MAX_MESSAGE_BYTES:
            raise ManifestError(
                f"trainer ranks sent records of {sizes} bytes, the limit is {MAX_MESSAGE_BYTES} bytes: publish fewer "
                "tensors, or from fewer regions per rank"
            )
        again = [size if size > _ROW_BYTES - _SIZE_BYTES else 0 for size in sizes]
        whole = torch.empty(sum(again), dtype=torch.uint8)
        parts = whole.split_with_sizes(again)
        if whole.numel():
            if again[self.group_rank]:
                parts[self.group_rank].copy_(_tensor(data))
            self._collect(group, parts, whole)
        return [
            part.numpy().tobytes() or row[_SIZE_BYTES : _SIZE_BYTES + size]
            for part, row, size in zip(parts, rows, sizes, strict=True)
        ]

    def _collect(self, group: ProcessGroup, parts: Sequence[torch.Tensor], whole: torch.Tensor) -> None:
        """Gather the parts of `whole` that are not empty, one of each rank, on rank 0; broadcast all of it."""
        if self.is_publishing:
            works = [group.receive(part, rank) for rank, part in enumerate(parts) if rank and part.numel()]
            try:
                while works:
                    wait(works.pop())
            finally:
                works.clear()
        elif parts[self.group_rank].numel():
            wait(group.send(parts[self.group_rank], 0))
        wait(group.broadcast(whole, root=0))

    def exchange_when_idle(self, instruction: Record) -> list[Any]:
        """Repeat the publishing rank's exchange until no rank is busy; only then the instruction counts.

        Returns the records of that exchange. Blocks as long as a rank is busy, which that rank's own deadlines limit.
        """
        while True:
            records = self.exchange(instruction)
            if not is_any_busy(records):
                return records

    def all_gather(self, rows: torch.Tensor, own: torch.Tensor) -> None:
        """Fill `rows` with every rank's bytes, one row by group rank. `own`: this rank's row, equally long on all."""
        with self._lock:
            group = self._connected()
            with Translated(BaseException, self._break):
                wait(group.all_gather(list(rows.unbind()), own))

    # --- the publishing rank's signs of life ---

    def uninterrupted(self) -> contextlib.AbstractContextManager[Any]:
        """Keep `keeping_alive` from making an exchange between those of this block."""
        return self._lock

    @contextlib.contextmanager
    def keeping_alive(self) -> Iterator[None]:
        """On the publishing rank: during the block, a thread makes keep-alive exchanges, so that the others wait."""
        over = threading.Event()
        # A rank that leads another origin sends keep-alives to its receivers only upon an exchange.
        interval = min(self._deadline_seconds / 3, GRACE_SECONDS)

        def keep_alive() -> None:
            # An error here is raised by the caller's next exchange.
            with self.error_at_next_exchange():
                while not over.wait(max(0.0, self._last_exchange + interval - time.monotonic())):
                    with self._lock:
                        if not over.is_set() and self._last_exchange + interval <= time.monotonic():
                            self.exchange(Nothing())

        thread = threading.Thread(target=keep_alive, name="weightcast-ranks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    # --- the end ---

    def give_up(self) -> None:
        """Disconnect after a failure that can't be reported to the other ranks, unless all have failed already."""
        if self._verdict is None and self.is_connected:
            self.close()
            self._rendezvous.leave()
        self.error = self._verdict = None

    def close(self) -> None:
        """Disconnect without notifying the other ranks. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _connected(self) -> ProcessGroup:
        if self._group is None:
            raise self._verdict or PeerError("the trainer ranks are not connected: call publish again on every rank")
        return self._group

    def _break(self, error: BaseException) -> None:
        """After any exception, close the group: ranks may disagree on the next message. `start` connects again."""
        self.close()
        self._rendezvous.leave()
        if self._is_kept and isinstance(error, PeerDiedError):
            return
        self._verdict = self._explained(error) if isinstance(error, PeerError) else error
        self.error = None
        if self._verdict is not error:
            raise self._verdict from error

    def _explained(self, exc: PeerError) -> PeerError:
        """Return the error with the names of the lost ranks, as far as the rendezvous store shows them."""
        missing = self._rendezvous.missing(min(GRACE_SECONDS, self._deadline_seconds / 4))
        if missing and self._is_kept:
            return self._rendezvous.late(missing)
        names = named(missing or ())
        sign = f"no sign of life from {names}" if missing else "all ranks are alive"
        lost = "the rendezvous store, usually served by trainer rank 0, does not answer" if missing is None else sign
        return type(exc)(f"connection between trainer ranks lost ({lost}): {exc}", peer=names or "trainer")


def is_any_busy(records: Sequence[Record]) -> bool:
    return any(isinstance(record, RankStatus) and record.is_busy for record in records)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
