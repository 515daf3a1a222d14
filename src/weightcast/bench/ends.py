"""The meters of a whole run: the publisher's end (this process, its guard, other trainer ranks), the engines' end."""

from __future__ import annotations

import os
from collections.abc import Sequence

from weightcast.bench.meters import ProcessMeter, children
from weightcast.bench.result import Bytes, Ends


class UsageMeters:
    """Meters of this process and of the others; of this one alone where it holds the engines too."""

    def __init__(self, engine_pids: Sequence[int], other_rank_pids: Sequence[int] = ()) -> None:
        self._own = ProcessMeter(os.getpid())
        self._engines = [ProcessMeter(pid) for pid in engine_pids]
        self._ranks = [ProcessMeter(pid) for pid in other_rank_pids]
        self._strangers = set(children(os.getpid()))

    def begin_memory(self) -> None:
        """Take what is resident now as the baseline. Call before the publisher is made."""
        for meter in (self._own, *self._engines, *self._ranks):
            meter.begin()

    def cpu(self) -> Ends:
        """CPU seconds so far."""
        publisher = sum(meter.cpu_seconds() for meter in (self._own, *self._ranks, *self._helpers()))
        return Ends(publisher, sum(meter.cpu_seconds() for meter in self._engines))

    def extra(self) -> tuple[Bytes, int]:
        """Peak extra memory at each end, and of the host with shared memory counted once; without other ranks."""
        helpers = sum(meter.private_bytes() for meter in self._helpers())
        publisher = self._own.extra_bytes() + helpers
        engines = [meter.extra_bytes() for meter in self._engines]
        shared = [meter.shared_bytes() for meter in (self._own, *self._engines)]
        host = publisher + sum(engines) - sum(shared) + max(shared)
        return Bytes(publisher, max(engines, default=0)), host

    def other_ranks_extra(self) -> int | None:
        """Peak extra memory of the other trainer rank that has the highest; None if there is none."""
        return max((meter.extra_bytes() for meter in self._ranks), default=None)

    def _helpers(self) -> list[ProcessMeter]:
        """Processes that the publisher has started."""
        return [ProcessMeter(pid) for pid in children(self._own.pid) if pid not in self._strangers]


def difference(after: Ends, before: Ends) -> Ends:
    return Ends(after.publisher - before.publisher, after.engine - before.engine)
