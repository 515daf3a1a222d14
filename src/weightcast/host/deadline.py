"""How long a wait may take: one value for all of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Condition


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

    def wait_for(self, condition: Condition, predicate: Callable[[], bool]) -> bool:
        """Wait on a condition that is held, until `predicate` is true; False once the deadline has passed first."""
        return condition.wait_for(predicate, self.remaining_seconds)

    def polls(
        self, first_pause_seconds: float, max_pause_seconds: float, wait: Callable[[float], object] = time.sleep
    ) -> Iterator[None]:
        """Yield at once, then after pauses that double, and a last time once the deadline has passed."""
        pause_seconds = first_pause_seconds
        while not self.has_passed:
            yield
            wait(min(pause_seconds, self.remaining_seconds))
            pause_seconds = min(2 * pause_seconds, max_pause_seconds)
        yield
