"""Several trainer ranks as one publisher: one rank leads a publish, the others follow, all end alike.

Invariants: an error on any rank, the publishing one's engines included, ends the publish on every rank; the publishing
rank is never silent for longer than a deadline; whichever way a publish ends, the ranks are in step for the next, or
have disconnected and meet again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from weightcast.agreement import Agreement
from weightcast.interfaces import Regions, Source
from weightcast.manifest import decode
from weightcast.publication import Packing, Wire
from weightcast.report import PublishReport
from weightcast.trainer_ranks import TrainerRanks
from weightcast.trainer_records import Command

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """What the publishing rank's own part of a publish is made of."""

    start: float
    version: int | None
    regions: Regions
    wire: Wire
    packing: Packing


def ensemble_of(
    trainer_group: ProcessGroup | Literal["auto"] | None, source: Source, deadline_seconds: float
) -> Ensemble | None:
    """The ranks of `trainer_group`, "auto" for the default group; None if this rank is alone.

    Raises ValueError if this rank is not of that group.
    """
    if trainer_group is None or not (dist.is_available() and dist.is_initialized()):
        return None
    group = None if trainer_group == "auto" else trainer_group
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in trainer_group: make the publisher on its ranks only")
    return Ensemble(TrainerRanks(group, deadline_seconds), source) if dist.get_world_size(group) > 1 else None


class Ensemble:
    """This rank's side."""

    def __init__(self, ranks: TrainerRanks, source: Source) -> None:
        self._ranks = ranks
        self._source = source
        self._agreement = Agreement(ranks)
        self.is_publishing = ranks.is_publishing

    @property
    def run(self) -> str:
        """The publishing rank's run, once it was told; empty before."""
        return self._agreement.run

    @property
    def version(self) -> int:
        """The last version of the publishing rank, as far as this rank was told."""
        return self._ranks.version

    @version.setter
    def version(self, version: int) -> None:
        self._ranks.version = version

    def lead(
        self, run: str, prepare: Callable[[], Prepared], publish: Callable[[Prepared], PublishReport]
    ) -> PublishReport:
        """The publishing rank's publish. `publish` packs by `Packing.packer`, and need not know of other ranks."""
        error: BaseException | None = None
        prepared: Prepared | None = None
        try:
            prepared = prepare()
            self._agreement.look(self._source, prepared.regions)
        except BaseException as exc:
            error = exc
        with self._in_step():
            rows = self._ranks.start(self._agreement.row(prepared.packing.layout if prepared else None), error)
            assert prepared is not None
            packing = prepared.packing
            self._agreement.lead(rows, packing.layout, packing.bucket_size_bytes, run)
            report: PublishReport | None = None
            with self._ranks.kept_waiting():
                try:
                    packing.use(prepared.regions, self._agreement.packer())
                    report = publish(prepared)
                except BaseException as exc:
                    error = exc
                with contextlib.suppress(Exception):
                    # If this fails, so does the last exchange.
                    self._agreement.drain()
            return self._end(report, error)

    def _end(self, report: PublishReport | None, error: BaseException | None) -> PublishReport:
        """Tell the others how the publish ended, and end it so here."""
        if report is not None:
            data = report.to_json()
            self._ranks.say(Command.END, len(data))
            self._ranks.broadcast(data, len(data))
            return report
        assert error is not None
        try:
            self._ranks.say(Command.END, error=error)
        finally:
            if not isinstance(error, Exception):
                raise error
        raise AssertionError("an exchange with an error raises")

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Ranks that have lost each other in between agree anew when they meet again."""
        try:
            yield
        except BaseException:
            self._ranks.give_up()
            raise
        finally:
            if not self._ranks.is_connected:
                self._agreement.forget()

    def follow(self) -> PublishReport:
        """Another rank's publish: bring what is asked for, until the publishing rank says how it ended."""
        error: BaseException | None = None
        try:
            self._agreement.look(self._source, self._source.regions())
        except BaseException as exc:
            error = exc
        with self._in_step():
            rows = self._ranks.start(self._agreement.row(None), error)
            contribution, error = self._agreement.follow(rows)
            while True:
                command, argument = self._ranks.hear(error)
                if command is Command.END:
                    report: PublishReport = decode(self._ranks.broadcast(b"", argument), PublishReport)
                    return report
                if command is Command.BUCKET and contribution is not None:
                    error = contribution.send(argument)

    def close(self) -> None:
        """Disconnect from the other ranks, without a word. Idempotent."""
        self._ranks.close()
        self._agreement.close()
