"""Several trainer ranks as one publisher: one rank leads a publish, the others follow, all end alike.

Invariants: an error on any rank, the publishing one's engines included, ends the publish on every rank; the publishing
rank is never silent for longer than a deadline; whichever way a publish ends, the ranks are in step for the next, or
have disconnected and meet again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from weightcast.format.manifest import decode
from weightcast.process_group import Closable
from weightcast.seams.source import Source
from weightcast.trainer.group.exchange import TrainerRanks
from weightcast.trainer.group.gather import Contribution
from weightcast.trainer.group.multi_device_sender import MultiDeviceSender
from weightcast.trainer.group.records import Instruction, RankStatus
from weightcast.trainer.group.sender_assignment import SenderFactory
from weightcast.trainer.group.shares import Shares
from weightcast.trainer.publish_run import Connections, PublishInputs, PublishRun
from weightcast.trainer.report import PublishReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def trainer_group_of(
    trainer_group: ProcessGroup | Literal["auto"] | None,
    source: Source,
    deadline_seconds: float,
    sender_factory: SenderFactory | None,
) -> TrainerGroup | None:
    """The ranks of `trainer_group`, "auto" for the default group; None if this rank is alone.

    `sender_factory` makes senders on other ranks than the publishing one; None: they have none. Raises ValueError if
    this rank is not in that group.
    """
    if trainer_group is None or not (dist.is_available() and dist.is_initialized()):
        return None
    group = None if trainer_group == "auto" else trainer_group
    if dist.get_rank(group) < 0:
        raise ValueError("this rank is not in trainer_group: make the publisher on its ranks only")
    if dist.get_world_size(group) == 1:
        return None
    return TrainerGroup(TrainerRanks(group, deadline_seconds), source, sender_factory)


class TrainerGroup:
    """One rank's part in publishing together: the first rank leads, the others follow."""

    def __init__(self, ranks: TrainerRanks, source: Source, sender_factory: SenderFactory | None) -> None:
        self._ranks = ranks
        self._source = source
        self._sender_factory = sender_factory
        self._shares = Shares(ranks, sender_factory)
        self._device_sender: MultiDeviceSender | None = None
        self.is_publishing = ranks.is_publishing

    @property
    def run(self) -> str:
        """The publishing rank's run, once it was told; empty before."""
        return self._shares.run

    @property
    def version(self) -> int:
        """The last version of the publishing rank, as far as this rank was told."""
        return self._ranks.version

    def lead(
        self, run: str, version: int, inputs: Callable[[], PublishInputs], publish_run: PublishRun
    ) -> PublishReport:
        """The publishing rank's publish. `run` is its run, `version` its last; `inputs` are made on this rank alone.

        The publish run packs by `PackPlan.packer`, and knows nothing of other ranks.
        """
        self._ranks.version = version
        error: BaseException | None = None
        prepared: PublishInputs | None = None
        try:
            prepared = inputs()
            self._shares.look(self._source, prepared.regions)
        except BaseException as exc:
            error = exc
        with self._in_step():
            statuses = self._ranks.start(self._shares.status(prepared.pack_plan.layout if prepared else None), error)
            assert prepared is not None
            pack_plan, connections = prepared.pack_plan, prepared.connections
            self._shares.lead(statuses, pack_plan.layout, pack_plan.bucket_size_bytes, run, connections.device)
            self._send_from_all_devices(connections)
            report: PublishReport | None = None
            with self._ranks.keeping_alive():
                try:
                    pack_plan.use(prepared.regions, self._shares.packer())
                    report = publish_run.run(prepared)
                except BaseException as exc:
                    error = exc
                self._ranks.version = max(version, publish_run.number)
                with contextlib.suppress(Exception):
                    # If this fails, so does the last exchange.
                    self._shares.drain()
            return self._end(report, error)

    def _send_from_all_devices(self, connections: Connections) -> None:
        """Replace the sender by one that serves all device arenas, at the first publish that has more than one."""
        arenas = self._shares.arenas.others
        if arenas and self._device_sender is None:
            assert self._sender_factory is not None
            self._device_sender = connections.sender = MultiDeviceSender(
                connections.sender, self._ranks, self._sender_factory.per_device
            )
        if self._device_sender is not None:
            self._device_sender.use(arenas)

    def _end(self, report: PublishReport | None, error: BaseException | None) -> PublishReport:
        """Tell the others how the publish ended, and end it so here."""
        if report is not None:
            data = report.to_json()
            self._ranks.announce(Instruction.END, len(data))
            self._ranks.broadcast(data, len(data))
            return report
        assert error is not None
        try:
            self._ranks.announce(Instruction.END, error=error)
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
                self._shares.forget()

    def follow(self, version: int) -> PublishReport:
        """Another rank's publish: bring what is asked for, until the publishing rank says how it ended."""
        self._ranks.version = version
        error: BaseException | None = None
        try:
            self._shares.look(self._source, self._source.regions())
        except BaseException as exc:
            error = exc
        with self._in_step():
            statuses = self._ranks.start(self._shares.status(None), error)
            contribution, error = self._shares.follow(statuses)
            try:
                return self._follow(contribution, error)
            except BaseException as exc:
                if self._shares.arenas.own is not None:
                    self._shares.arenas.own.abort(f"{type(exc).__name__}: {exc}")
                    # The group of arenas may have broken, and this rank alone know it.
                    self._shares.forget()
                raise

    def _follow(self, contribution: Contribution | None, error: BaseException | None) -> PublishReport:
        arena = self._shares.arenas.own
        while True:
            if error is None and arena is not None:
                error = arena.error
            command, argument, is_ready = self._ranks.next_instruction(
                error, RankStatus() if arena is None else arena.status()
            )
            match command:
                case Instruction.END:
                    report: PublishReport = decode(self._ranks.broadcast(b"", argument), PublishReport)
                    return report
                case Instruction.BUCKET if contribution is not None:
                    error = contribution.send(argument)
                case Instruction.OPEN if is_ready:
                    opening = self._ranks.broadcast(b"", argument)
                    if arena is not None:
                        arena.open(self._shares.manifest, opening)
                case Instruction.SPREAD if is_ready and arena is not None:
                    arena.take(argument)
                case Instruction.ASK if is_ready and arena is not None:
                    arena.announce_failures()
                case _ if not is_ready and arena is not None:
                    arena.wait()

    @property
    def owned(self) -> list[Closable]:
        """What `close` closes, without what the caller gave."""
        return [self._ranks, self._shares.arenas]

    def close(self) -> None:
        """Disconnect from the other ranks, without a word, and free this rank's arena. Idempotent."""
        self._ranks.close()
        self._shares.close()
