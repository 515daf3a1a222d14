"""What a test could leave behind in this process: threads, children, sockets, pipes, shared memory. Linux only."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_KINDS = ("socket:", "/memfd:", "/dev/shm", "pipe:", "anon_inode:[eventfd]", "anon_inode:[eventpoll]")
_PATIENCE_SECONDS = 5.0


def leftovers() -> set[str]:
    """Everything of these kinds that there is now, told apart by its number."""
    found = {f"thread {t.ident} {t.name}" for t in threading.enumerate() if t is not threading.main_thread()}
    found |= {f"mapping {line.split()[-1]} {line.split()[4]}" for line in _mappings()}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith(_KINDS):
                found.add(f"descriptor {entry.name} {target}")
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {f"process {pid}" for pid in (task / "children").read_text().split()}
    return found


def _mappings() -> Iterator[str]:
    with open("/proc/self/maps") as lines:
        yield from (line for line in lines if "/memfd:" in line or "/dev/shm" in line)


@contextlib.contextmanager
def nothing_left(patience_seconds: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Raises AssertionError, naming them, if things that were not there before are there `patience_seconds` after."""
    before = leftovers()
    yield
    deadline = time.monotonic() + patience_seconds
    while (left := leftovers() - before) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert not left, f"left behind: {sorted(left)}"
