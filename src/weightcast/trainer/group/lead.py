"""Several trainer ranks as one publisher: one rank leads a publish, the others follow, all end alike.

Invariants: an error on any rank, the publishing one's engines included, ends the publish on every rank; the publishing
rank is never silent for longer than a deadline; whichever way a publish ends, the ranks are in step for the next, or
have disconnected and meet again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from weightcast.format.manifest import decode
from weightcast.process_group import Closable
from weightcast.seams.source import Source
from weightcast.trainer.group.device_senders import MultiDeviceSender, Opening, SenderFactory
from weightcast.trainer.group.exchange import Instruction, RankStatus, TrainerRanks
from weightcast.trainer.group.gather import SharedBuffers
from weightcast.trainer.group.shares import Shares
from weightcast.trainer.publish_run import PublishInputs, PublishRun
from weightcast.trainer.report import PublishReport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TrainerGroup:
    """One rank's part in publishing together: the first rank leads, the others follow."""

    def __init__(
        self, group: ProcessGroup | None, source: Source, deadline_seconds: float, sender_factory: SenderFactory | None
    ) -> None:
        """`group`: None is the default one. `sender_factory`: for senders on other ranks than the publishing one."""
        self._ranks = TrainerRanks(group, deadline_seconds)
        self._source = source
        self._sender_factory = sender_factory
        self._shares = Shares(self._ranks, sender_factory)
        self._device_sender: MultiDeviceSender | None = None
        self.is_publishing = self._ranks.is_publishing

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
        ranks, shares = self._ranks, self._shares
        ranks.version = version
        prepared: PublishInputs | None = None
        report: PublishReport | None = None
        with ranks.error_at_next_exchange():
            prepared = inputs()
            shares.look(self._source, prepared.regions)
        with self._in_step():
            statuses = ranks.start(shares.status(None if prepared is None else prepared.pack_plan.layout))
            assert prepared is not None
            pack_plan, connections = prepared.pack_plan, prepared.connections
            shares.lead(statuses, pack_plan.layout, pack_plan.bucket_size_bytes, run, connections.device)
            if shares.arenas.others and self._device_sender is None:
                # The first publish that has more than one arena: from now on one sender serves all of them.
                assert self._sender_factory is not None
                per_device = self._sender_factory.per_device
                self._device_sender = connections.sender = MultiDeviceSender(connections.sender, ranks, per_device)
            if self._device_sender is not None:
                self._device_sender.use(shares.arenas.others)
            with ranks.error_at_next_exchange(), ranks.keeping_alive():
                try:
                    pack_plan.use(prepared.regions, shares.packer())
                    report = publish_run.run(prepared)
                finally:
                    ranks.version = max(version, publish_run.number)
                    with ranks.error_at_next_exchange():
                        shares.drain()
            error, data = ranks.error, b"" if report is None else report.to_json()
            try:
                ranks.announce(Instruction.END, len(data))
                assert report is not None, "an exchange with an error raises"
            finally:
                if error is not None and not isinstance(error, Exception):
                    raise error
            ranks.broadcast(data, len(data))
            return report

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Ranks that have lost each other in between agree again when they meet again."""
        try:
            yield
        except BaseException as exc:
            arena = self._shares.arenas.own
            if arena is not None and arena.abort(f"{type(exc).__name__}: {exc}"):
                # The group of arenas may have broken, and this rank alone know it.
                self._shares.forget()
            self._ranks.give_up()
            raise
        finally:
            if not self._ranks.is_connected:
                self._shares.forget()

    def follow(self, version: int) -> PublishReport:
        """Another rank's publish: bring what is asked for, until the publishing rank says how it ended."""
        ranks, shares = self._ranks, self._shares
        ranks.version = version
        with ranks.error_at_next_exchange():
            shares.look(self._source, self._source.regions())
        with self._in_step():
            contribution = shares.follow(ranks.start(shares.status(None)))
            arena, status = shares.arenas.own, RankStatus()
            while True:
                if arena is not None:
                    with ranks.error_at_next_exchange():
                        status = arena.status()
                is_mapped = contribution is not None and contribution.is_mapped
                command, argument, is_ready, statuses = ranks.next_instruction(status._replace(is_mapped=is_mapped))
                match command:
                    case Instruction.END:
                        report: PublishReport = decode(ranks.broadcast(b"", argument), PublishReport)
                        if arena is not None:
                            arena.end()
                        return report
                    case Instruction.MAP if is_ready:
                        buffers: SharedBuffers = decode(ranks.broadcast(b"", argument), SharedBuffers)
                        if contribution is not None:
                            contribution.map(buffers)
                    case Instruction.BUCKET if contribution is not None:
                        contribution.bring(argument, statuses[0].offset_bytes)
                    case Instruction.DIGEST if contribution is not None:
                        contribution.digest(argument, statuses[0].offset_bytes, statuses)
                    case Instruction.OPEN if is_ready:
                        opening: Opening = decode(ranks.broadcast(b"", argument), Opening)
                        if arena is not None:
                            arena.open(shares.manifest, opening)
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
