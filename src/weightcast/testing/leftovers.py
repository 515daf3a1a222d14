"""Leftovers of a test in this process: threads, children, sockets, pipes, shared memory. Linux only."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from weightcast.host.deadline import Deadline

_KINDS = ("socket:", "/memfd:", "/dev/shm", "pipe:", "anon_inode:[eventfd]", "anon_inode:[eventpoll]")
_NUM_POLLS_BEFORE_COLLECTING = 50
"""Most leftovers end within a few polls, and a collection is slow in a process that has torch's models."""


def leftovers() -> set[str]:
    """Return the present threads, children, descriptors and shared mappings of this process, each with its number."""
    found = {f"thread {t.ident} {t.name}" for t in threading.enumerate() if t is not threading.main_thread()}
    with open("/proc/self/maps") as lines:
        shared = [line.split() for line in lines if "/memfd:" in line or "/dev/shm" in line]
    found |= {f"mapping {words[-1]} {words[4]}" for words in shared}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith(_KINDS):
                found.add(f"descriptor {entry.name} {target}")
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {f"process {pid}" for pid in (task / "children").read_text().split()}
    return found


@contextlib.contextmanager
def nothing_left(patience_seconds: float = 30.0) -> Iterator[None]:
    """Raise AssertionError, naming them, if new leftovers are still there `patience_seconds` after the block.

    Reference cycles are collected meanwhile: an error that a test has caught is in a cycle with the test's own frame,
    and its traceback refers to the objects of the frames below.
    """
    before = leftovers()
    yield
    for number, _ in enumerate(Deadline(patience_seconds).polls(0.01, 0.01)):
        if not (left := leftovers() - before):
            return
        if number == _NUM_POLLS_BEFORE_COLLECTING:
            gc.collect()
    raise AssertionError(f"left behind: {sorted(left)}")
