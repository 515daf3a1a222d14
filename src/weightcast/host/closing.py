"""Closing of resources when a call fails, in a forked child, and at the interpreter's exit.

A process's death is detected by the end of its sockets and pipes. A forked child (a DataLoader's worker) inherits them,
and would make a dead trainer look alive to its engines.

A thread that is in torch when the interpreter exits, even only to free a tensor, aborts the process (exit status 134):
Python ends the thread when it takes the GIL back, inside C++ code that does not allow this. So objects with such
threads are closed before.
"""

from __future__ import annotations

import abc
import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol, Self, TypeVar

from weightcast.host.deadline import GRACE_SECONDS, Deadline


class Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)
_ours: weakref.WeakSet[Closeable] = weakref.WeakSet()
_open: weakref.WeakSet[Closeable] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class ClosedOnExit(abc.ABC):
    """Base of objects that are closed at the end of a `with` block."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


@contextlib.contextmanager
def on_failure(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` if the block raises anything, including KeyboardInterrupt; the exception is raised on."""
    with contextlib.ExitStack() as stack:
        stack.callback(clean_up)
        yield
        stack.pop_all()


def close_in_child(thing: C) -> C:
    """Have every child that is forked from now on close this socket or file; return it."""
    _ours.add(thing)
    return thing


def _close_inherited() -> None:
    for thing in list(_ours):
        with contextlib.suppress(OSError):
            thing.close()


os.register_at_fork(after_in_child=_close_inherited)
os.register_at_fork(after_in_child=_open.clear)


def close_at_exit(thing: Closeable) -> None:
    """Close this object at the interpreter's exit, if it still exists, since its threads may be in torch then."""
    _open.add(thing)


def awaited_at_exit(call: Callable[[], None], name: str) -> threading.Thread:
    """Run a call that may be in torch in a thread, which is joined, for a limited time, at the interpreter's exit."""
    thread = threading.Thread(target=call, name=name, daemon=True)
    thread.start()
    _threads.add(thread)
    return thread


@atexit.register
def _close_all() -> None:
    deadline = Deadline(GRACE_SECONDS)
    for thing in list(_open):
        if not deadline.has_passed:
            with contextlib.suppress(Exception):
                thing.close()
    for thread in list(_threads):
        thread.join(max(0.0, deadline.remaining_seconds))
