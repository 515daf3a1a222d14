"""What has to be closed when something ends early: a call that fails, or a child that was forked.

A dead process is noticed by the end of its sockets and pipes. A child that a program forks (a DataLoader's worker)
inherits them, and would keep a dead trainer alive in the eyes of its engines.
"""

from __future__ import annotations

import abc
import contextlib
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Protocol, Self, TypeVar


class Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closeable)
_ours: weakref.WeakSet[Closeable] = weakref.WeakSet()


class ClosedOnExit(abc.ABC):
    """Leaving the `with` block of one closes it."""

    @abc.abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


@contextlib.contextmanager
def on_failure(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call `clean_up` if the body raises anything, KeyboardInterrupt included; the body's exception goes on."""
    with contextlib.ExitStack() as stack:
        stack.callback(clean_up)
        yield
        stack.pop_all()


def close_in_child(thing: C) -> C:
    """Have every child that is forked from now on close this socket or file; returns it."""
    _ours.add(thing)
    return thing


def _close_inherited() -> None:
    for thing in list(_ours):
        with contextlib.suppress(OSError):
            thing.close()


os.register_at_fork(after_in_child=_close_inherited)
