"""How long a wait may take: one value for all of its parts; calls that nothing can end run in the background.

Each wait for a peer has the deadline that the user named, or a part of it. The others have one of the times below.
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
"""Ten days: poll(2), which sockets and pipes wait with, counts milliseconds in 31 bits."""

POLL_SECONDS = 0.05
"""The longest pause between two looks at what wakes nobody."""
GRACE_SECONDS = 5.0
"""For what takes milliseconds unless something is broken: a thread's end, a last word, a slot that changes hands."""
LOAD_SECONDS = 600.0
"""For what an engine does with a whole model: start, load, install."""


def number_of_seconds(name: str, value: Any) -> float:
    """Return a caller's time as a float. Raises TypeError unless it is a number, ValueError for an invalid duration."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r:.80}; it must be a number of seconds, such as 60.0")
    if value <= 0 or not value <= MAX_SECONDS:
        raise ValueError(f"{name} is {value}; it must be positive and finite, at most {MAX_SECONDS}")
    return float(value)


class Deadline:
    """A time, `seconds` after this was made, that a wait may not outlast."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float:
        """Never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self._end

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool]) -> bool:
        """Wait on a condition that is held, until `predicate` is true; False once the deadline has passed first."""
        return condition.wait_for(predicate, self.remaining_seconds)

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
    """Run `call` in a thread that does not keep the process from ending: for a wait that has no deadline of its own."""
    future: Future[T] = Future()
    threading.Thread(target=run_into, args=(future, call), name=name, daemon=True).start()
    return future


def to_its_end(call: Callable[[], T], *, name: str) -> T:
    """Run `call` to its end. A Ctrl-C meanwhile is raised once it is done, a second one at once."""
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
    """Run `call`, and have the future end as it does."""
    try:
        future.set_result(call())
    except BaseException as exc:
        future.set_exception(exc)
    del future  # the error's traceback has this frame, which would keep the error
