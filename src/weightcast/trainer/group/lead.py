"""Several trainer ranks as one publisher: one rank leads a publish, the others follow, all end alike.

Invariants: an error on any rank, the publishing one's engines included, ends the publish on every rank; the publishing
rank is never silent for longer than a deadline; whichever way a publish ends, the ranks are in step for the next, or
have disconnected and meet again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from weightcast.engines.gate import require_no_step
from weightcast.errors import PublishReport
from weightcast.format.bucket import Layout
from weightcast.format.manifest import decode
from weightcast.host.closing import Closeable
from weightcast.seams.source import Source
from weightcast.trainer.group.exchange import Instruction, RankStatus, TrainerRanks, in_round
from weightcast.trainer.group.gather import mapped_again
from weightcast.trainer.group.origins import Opening, OriginsSender, Question
from weightcast.trainer.group.shares import Settings, Shares
from weightcast.trainer.publish_run import PublishInputs, PublishRun

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class TrainerGroup:
    """One rank's part in publishing together: the first rank leads, the others follow."""

    def __init__(
        self, group: ProcessGroup | None, source: Source, deadline_seconds: float, *, check_finite: bool = False
    ) -> None:
        """`group`: None is the default one. `check_finite`: the publishing rank's option; the others are asked."""
        self._checks_finite = check_finite
        self._ranks = TrainerRanks(group, deadline_seconds)
        self._source = source
        self._shares = Shares(self._ranks, deadline_seconds)
        self._origins_sender: OriginsSender | None = None
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
            status = shares.status()
            if prepared is not None:
                status = shares.status(prepared.pack_plan.layout, _settings(run, prepared))
            statuses = ranks.start(status)
            assert prepared is not None
            self._use(shares.lead(statuses, prepared.pack_plan.layout, _settings(run, prepared)), prepared)
            shares.complete(statuses)

            def engines_known() -> None:
                """Which kind of server an engine is, and so what it takes, may be known only now."""
                if prepared.engine_dtypes is not None:
                    specs = self._source.specs()
                    prepared.engine_dtypes.ask(prepared.fleet, specs, is_again=prepared.again is not None)
                    prepared.pack_plan.specs = prepared.engine_dtypes.cast(specs)
                self._use(shares.settle(prepared.pack_plan.layout, _settings(run, prepared)), prepared)
                if self._checks_finite and prepared.again is None:
                    with ranks.uninterrupted():
                        ranks.announce_when_idle(Instruction.CHECK)
                        shares.check_finite()

            with ranks.error_at_next_exchange(), ranks.keeping_alive():
                try:
                    report = publish_run.run(prepared, engines_known)
                finally:
                    ranks.version = max(version, publish_run.number)
            error, data = ranks.error, b"" if report is None else report.to_json()
            try:
                ranks.announce(Instruction.END, len(data))
                assert report is not None, "an exchange with an error raises"
            finally:
                if error is not None and not isinstance(error, Exception):
                    raise error
            ranks.broadcast(data, len(data))
            return report

    def _use(self, layout: Layout, prepared: PublishInputs) -> None:
        """Pack by this layout, and send from the origins that were agreed on."""
        packer, connections = self._shares.packer(), prepared.connections
        if layout is not prepared.pack_plan.layout:
            prepared.pack_plan.lay_out(layout)
        prepared.pack_plan.use(prepared.regions, packer)
        connections.origins = self._shares.addresses
        if layout.manifest.origins and self._origins_sender is None:
            # The first publish that has more than one origin: from now on one sender speaks for all.
            self._origins_sender = connections.sender = OriginsSender(connections.sender)
        if self._origins_sender is not None:
            self._origins_sender.use(packer)

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Ranks that have lost each other in between agree again when they meet again."""
        try:
            yield
        except BaseException as exc:
            if self._shares.own is not None:
                self._shares.own.abort(f"{type(exc).__name__}: {exc}")
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
            require_no_step("publish or sync")
            shares.look(self._source, self._source.regions())
        with self._in_step():
            first = ranks.start(shares.status())
            shares.follow(first)
            shares.complete(first)
            status, in_hand = RankStatus(), list[RankStatus]()
            while True:
                own, contribution = shares.own, shares.contribution
                if own is not None:
                    with ranks.error_at_next_exchange():
                        status = own.status()
                if contribution is not None:
                    status = contribution.status()
                command, argument, is_ready, statuses = ranks.next_instruction(status)
                match command:
                    case Instruction.END:
                        report: PublishReport = decode(ranks.broadcast(b"", argument), PublishReport)
                        if own is not None:
                            own.end()
                        return report
                    case Instruction.SETTLE if is_ready:
                        shares.agree(argument)
                        status = RankStatus()
                    case Instruction.CHECK if is_ready:
                        shares.check_finite()
                    case Instruction.BUCKET if is_ready and not any(each.is_lost for each in statuses):
                        in_hand = in_round(statuses, argument)
                        shared = None if own is None else own.shared(in_hand)
                        in_hand = mapped_again(ranks, in_hand, shared=shared, contribution=contribution)
                        if own is not None:
                            with ranks.error_at_next_exchange():
                                own.pack(argument, in_hand)
                        if contribution is not None:
                            contribution.bring(argument, in_hand)
                    case Instruction.PACKED:
                        if own is not None:
                            own.send(argument, in_hand, statuses)
                    case Instruction.OPEN if is_ready:
                        opening: Opening = decode(ranks.broadcast(b"", argument), Opening)
                        if own is not None:
                            own.open(opening)
                    case Instruction.ASK if is_ready:
                        question: Question = decode(ranks.broadcast(b"", argument), Question)
                        if own is not None:
                            own.report(question.peers)
                    case _ if not is_ready and own is not None:
                        own.wait()

    @property
    def owned(self) -> list[Closeable]:
        """What `close` closes, without what the caller gave."""
        return [self._ranks, self._shares]

    def release(self) -> None:
        """Give back the transport's memory of the origin that this rank leads, if it leads another than the first."""
        if self._shares.own is not None:
            self._shares.own.release()

    def close(self) -> None:
        """Disconnect from the other ranks, without a word, and free this rank's origin. Idempotent."""
        self._ranks.close()
        self._shares.close()


def _settings(run: str, prepared: PublishInputs) -> Settings:
    dtypes = {} if prepared.engine_dtypes is None else dict(prepared.engine_dtypes.by_name)
    size = prepared.pack_plan.bucket_size_bytes
    return Settings(run, prepared.url, size, "gloo", prepared.spread(), prepared.num_origins, dtypes)
