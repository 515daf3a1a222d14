"""Deadlines of waits, and background threads for calls that can't be ended.

Each wait for a peer has the user's deadline, or a part of it. All other waits have one of the times below.
"""

from __future__ import annotations

import numbers
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")

MAX_SECONDS = 864_000
"""Ten days, since poll(2), on which waits for sockets and pipes rely, has a timeout of 31 bits of milliseconds."""

POLL_SECONDS = 0.05
"""Longest interval for polling a condition without a notification."""
GRACE_SECONDS = 5.0
"""Limit for operations that take milliseconds unless something is broken, such as the end of a thread."""
LOAD_SECONDS = 600.0
"""Limit for an engine's operations on a whole model: start, load, install."""


def number_of_seconds(name: str, value: Any) -> float:
    """Return a caller's time as a float. Raises TypeError unless it is a number, ValueError for an invalid duration."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r:.80}; it must be a number of seconds, such as 60.0")
    if value <= 0 or not value <= MAX_SECONDS:
        raise ValueError(f"{name} is {value}; it must be positive and finite, at most {MAX_SECONDS} seconds")
    return float(value)


class Deadline:
    """A limit of a wait, `seconds` after the creation of this object."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float:
        """Remaining time, never negative."""
        return max(0.0, self._end - time.monotonic())

    def require_seconds(self) -> float:
        """Return the remaining time for a socket, to which 0 means not to wait. Raises TimeoutError if none is left."""
        seconds = self._end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("timed out")
        return seconds

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._end

    def polls(
        self,
        first_pause_seconds: float = 0.001,
        max_pause_seconds: float = POLL_SECONDS,
        wait: Callable[[float], object] = time.sleep,
    ) -> Iterator[None]:
        """Yield at once, then after pauses that double, and a last time once the deadline has passed."""
        pause_seconds = first_pause_seconds
        while not self.has_passed:
            yield
            wait(min(pause_seconds, self.remaining_seconds))
            pause_seconds = min(2 * pause_seconds, max_pause_seconds)
        yield


def in_background(call: Callable[[], T], *, name: str) -> Future[T]:
    """Run `call`, which has no deadline, in a daemon thread, which does not keep the process from exiting."""
    future: Future[T] = Future()
    threading.Thread(target=run_into, args=(future, call), name=name, daemon=True).start()
    return future


def to_its_end(call: Callable[[], T], *, name: str) -> T:
    """Run `call` to its end. A Ctrl-C meanwhile is raised afterwards, a second one at once."""
    future: Future[T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            run_into(future, call)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
        return future.result()
    finally:
        if future.cancel():
            call()  # the Ctrl-C came before the thread had begun
        else:
            wait([future])


def run_into(future: Future[T], call: Callable[[], T]) -> None:
    """Run `call`, and set the future to its result or exception."""
    try:
        future.set_result(call())
    except BaseException as exc:
        future.set_exception(exc)
    del future  # the error's traceback refers to this frame, and the future to the error: a cycle
