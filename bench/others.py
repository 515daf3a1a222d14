"""What other work takes of the machine's cores while something is measured."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from publishing.meters import ProcessMeter, children

QUIET_CORES = 0.15
"""What others may take of all cores for a measurement to count as quiet."""


class Others:
    """How many cores other processes of this machine take, while it is entered."""

    cores = 0.0

    def __enter__(self) -> Others:
        self._start = (time.perf_counter(), *self._cpu())
        return self

    def __exit__(self, *_: object) -> None:
        start, all_before, own_before = self._start
        seconds, (all_now, own_now) = time.perf_counter() - start, self._cpu()
        self.cores = max(0.0, (all_now - all_before - own_now + own_before) / seconds)

    @staticmethod
    def _cpu() -> tuple[float, float]:
        user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        live = sum(cpu_seconds(pid) for pid in _descendants(os.getpid()))
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        return busy, live + sum(it.ru_utime + it.ru_stime for it in times)


def cpu_seconds(pid: int) -> float:
    """What a process has taken so far; 0 if it has ended since its id was found."""
    with contextlib.suppress(ProcessLookupError):
        return ProcessMeter(pid).cpu_seconds()
    return 0.0


def _descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _descendants(child)
