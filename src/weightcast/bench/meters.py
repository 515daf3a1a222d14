"""CPU time and peak memory of a process, as the kernel counts them: nothing samples, so nothing is disturbed.

Linux only. CPU time is the process's clock: every thread, those that have ended included, in nanoseconds. Memory is
the resident set: private pages and the shared ones that the process has touched, an arena's included.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

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
        """From now on `extra_bytes` speaks of this moment's resident set and later peaks.

        Where the kernel refuses to reset the peak, an earlier one counts: the figure may be too high, never too low.
        """
        with contextlib.suppress(PermissionError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        self._baseline_bytes = self._status_bytes("VmRSS")

    def extra_bytes(self) -> int:
        """Peak resident bytes since `begin`, beyond what was resident then."""
        return max(self._status_bytes("VmHWM") - self._baseline_bytes, 0)

    def shared_bytes(self) -> int:
        """Shared-memory pages that are resident now."""
        return self._status_bytes("RssShmem")

    def private_bytes(self) -> int:
        """Anonymous pages that are resident now."""
        return self._status_bytes("RssAnon")

    def _status_bytes(self, field: str) -> int:
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except FileNotFoundError as exc:
            raise ProcessLookupError(f"process {self.pid} has ended") from exc
        for line in status.splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
        raise ProcessLookupError(f"process {self.pid} has ended")


def children(pid: int) -> Iterator[int]:
    """The ids of a process's living children."""
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield from map(int, tasks.read_text().split())
