"""Signals to other processes: after SIGSTOP, none of their threads runs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from weightcast.host.deadline import Deadline

_PATIENCE_SECONDS = 60.0


def send_signal(pid: int, number: int) -> None:
    """Send a signal. Raises ProcessLookupError.

    One thread of a process takes SIGSTOP and stops the others. On a busy machine these run until that one is scheduled,
    and may answer a request: this waits until every thread has stopped.
    """
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        polls = Deadline(_PATIENCE_SECONDS).polls(0.001, 0.01)
        assert any(_states(pid) <= {"T"} for _ in polls), f"process {pid} has not stopped"


def _states(pid: int) -> set[str]:
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # a thread, or the process, has ended meanwhile
        return set() if not Path(f"/proc/{pid}").exists() else {"ended"}
    return {stat.rpartition(")")[2].split()[0] for stat in stats}
