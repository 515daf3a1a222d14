"""CPU time and peak memory of processes, as the kernel counts them: nothing samples, so nothing is disturbed.

Linux only. CPU time is the process's clock: every thread, those that have ended included, in nanoseconds. Memory is
the resident set: private pages and the shared ones that the process has touched, an arena's included.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from publishing.result import Bytes, Ends

_CPUCLOCK_SCHED = 2


class ProcessMeter:
    """One process of this user, by its id. Raises ProcessLookupError once it has ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # The id that clock_getcpuclockid(3) gives; Python has that call for threads only.
        self._clock = (~pid << 3) | _CPUCLOCK_SCHED
        self._baseline_bytes = 0

    def cpu_seconds(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError as exc:
            raise ProcessLookupError(f"process {self.pid} has ended") from exc

    def begin(self) -> None:
        """Make this moment's resident set the baseline of `extra_bytes`, and forget earlier peaks.

        Where the kernel refuses to reset the peak, an earlier one counts: the figure may be too high, never too low.
        """
        with contextlib.suppress(PermissionError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self._baseline_bytes = self.status_bytes("VmRSS")

    def extra_bytes(self) -> int:
        """Peak resident bytes since `begin`, beyond what was resident then."""
        return max(self.status_bytes("VmHWM") - self._baseline_bytes, 0)

    def status_bytes(self, field: str) -> int:
        """What the kernel says now: RssShmem, the shared-memory pages that are resident; RssAnon, private ones; ..."""
        with contextlib.suppress(FileNotFoundError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith(f"{field}:"):
                    return int(line.split()[1]) << 10
        raise ProcessLookupError(f"process {self.pid} has ended")


def children(pid: int) -> Iterator[int]:
    """The ids of a process's living children."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield from map(int, tasks.read_text().split())


class UsageMeters:
    """Meters of a whole run: the publisher's end (this process, its watchdog, other trainer ranks) and the engines'.

    Memory is counted from the construction on: make it before the publisher.
    """

    def __init__(self, engine_pids: Iterable[int], other_rank_pids: Iterable[int]) -> None:
        self._own = ProcessMeter(os.getpid())
        self._engines = [ProcessMeter(pid) for pid in engine_pids]
        self._ranks = [ProcessMeter(pid) for pid in other_rank_pids]
        self._workers = set(children(os.getpid()))
        for meter in (self._own, *self._engines, *self._ranks):
            meter.begin()

    def cpu(self) -> Ends:
        """CPU seconds so far."""
        publisher = sum(meter.cpu_seconds() for meter in (self._own, *self._ranks, *self._helpers()))
        return Ends(publisher, sum(meter.cpu_seconds() for meter in self._engines))

    def extra(self) -> dict[str, Bytes | int | None]:
        """Peak extra memory: the fields of `BenchResult`, of both ends, of the host and of other trainer ranks."""
        publisher = self._own.extra_bytes() + sum(meter.status_bytes("RssAnon") for meter in self._helpers())
        engines = [meter.extra_bytes() for meter in self._engines]
        shared = [meter.status_bytes("RssShmem") for meter in (self._own, *self._engines)]
        return {
            "extra_bytes": Bytes(publisher, max(engines, default=0)),
            "host_extra_bytes": publisher + sum(engines) - sum(shared) + max(shared),
            "other_ranks_extra_bytes": max((meter.extra_bytes() for meter in self._ranks), default=None),
        }

    def _helpers(self) -> list[ProcessMeter]:
        """Processes that the publisher has started."""
        return [ProcessMeter(pid) for pid in children(self._own.pid) if pid not in self._workers]
