"""A publish in the background: its progress, its handle, and the lock that lets one thread at a time use a publisher.

Invariants: one thread at a time uses a publisher; on every trainer rank, weights may change once `Flight.packed` has
been called; a publish is cancelled before its first install or not at all.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from concurrent import futures
from typing import Any, Literal

from weightcast.errors import PublishReport, UpdateAbortedError

Overlap = Literal["wait", "skip", "raise"]


class Flight:
    """Progress of one publish, for the thread that waits for it or cancels it. Thread-safe."""

    def __init__(self, *, is_background: bool = False, can_cancel: bool = False) -> None:
        """`is_background`: the caller waits only until all is packed. `can_cancel`: until engines install."""
        self.is_background = is_background
        self.began_at = time.perf_counter()
        self.version: int | None = None
        """The version's number, once it is known."""
        self.stall_seconds = 0.0
        """Time from the call until all was packed, during which the weights must not change; 0 before that."""
        self.is_packed = False
        self._can_cancel = can_cancel
        self._is_cancelled = False
        self._may_return = threading.Event()
        """Set once all is packed or the publish has ended."""
        self._lock = threading.Lock()

    # --- the publish ---

    def packed(self) -> None:
        """Mark the end of packing: the source is not read any more. Idempotent."""
        with self._lock:
            if not self.is_packed:
                self.is_packed, self.stall_seconds = True, time.perf_counter() - self.began_at
        self._may_return.set()

    def over(self) -> None:
        with self._lock:
            self._can_cancel = False
        self._may_return.set()

    def require_wanted(self, *, installs: bool = False) -> None:
        """Raise UpdateAbortedError if the publish was cancelled. `installs`: refuse to cancel it from now on."""
        with self._lock:
            if self._is_cancelled:
                raise UpdateAbortedError("the publish was cancelled before any engine had installed the version")
            self._can_cancel = self._can_cancel and not installs

    # --- its caller ---

    def wait_until_packed(self) -> bool:
        """Wait until the weights may change again; False if the publish has ended before all was packed."""
        self._may_return.wait()
        return self.is_packed

    def cancel(self) -> bool:
        with self._lock:
            self._is_cancelled = self._is_cancelled or self._can_cancel
            return self._can_cancel


class PublishHandle:
    """A publish that goes on in the background, made by `Publisher.start`. Thread-safe; can be awaited."""

    def __init__(self, flight: Flight, future: futures.Future[PublishReport | None]) -> None:
        self._flight = flight
        self._future = future

    @property
    def version(self) -> int | None:
        """The version's number; None before the publisher has chosen it."""
        return self._flight.version

    @property
    def stall_seconds(self) -> float:
        """Time that `start` blocked the trainer: until all was packed, including the wait for an earlier publish."""
        return self._flight.stall_seconds

    def packed(self) -> bool:
        """Return True once the weights may change again, which is the case when `start` returns the handle."""
        return self._flight.is_packed

    def done(self) -> bool:
        """Return True once the publish has ended, so that `result` does not block."""
        return self._future.done()

    def result(self, timeout_seconds: float | None = None) -> PublishReport:
        """Wait until every engine serves the version; return the report, or raise what `Publisher.publish` raises.

        Raises TimeoutError after `timeout_seconds`; the publish goes on. Without a timeout it blocks until the publish
        ends; each wait inside the publish is limited by `PublishOptions.deadline_seconds`.
        """
        report = self._future.result(timeout_seconds)
        assert report is not None, "a handle is of a publish that was not skipped"
        return report

    def cancel(self) -> bool:
        """Cancel the publish unless engines have begun to install it; return whether it is cancelled.

        Does not wait: the publish ends after its present step, at most one deadline later, and then `result` raises
        UpdateAbortedError. Every engine keeps its version. With several trainer ranks the publishing rank cancels
        for all; on the other ranks this returns False.
        """
        return self._flight.cancel()

    def add_done_callback(self, call: Callable[[PublishHandle], object]) -> None:
        """Call `call(handle)` in the publish's thread when the publish has ended; at once if it has ended already."""
        self._future.add_done_callback(lambda _: call(self))

    def __await__(self) -> Generator[Any, None, PublishReport]:
        """Wait as `result` does, without blocking the event loop. Cancelling the wait does not cancel the publish."""
        yield from asyncio.wrap_future(self._future).__await__()
        return self.result()


class Turn:
    """A lock that lets one thread at a time use a publisher, and that knows whether that thread publishes."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._thread = 0
        self._publishes = False
        self._declined: list[Overlap] = []

    def acquire(self, *, publishes: bool, waits: bool = True) -> bool:
        """Acquire the lock. `publishes`: others may decline to wait. Without `waits`, return False while another thread
        publishes. Raises ValueError if this thread has the lock already.
        """
        with self._condition:
            if self._thread == threading.get_ident():
                raise ValueError(
                    "this thread is publishing: on_progress, a source or a signal handler can't call this publisher "
                    "in between; call it afterwards, or raise an exception, which ends the publish"
                )
            while self._thread:
                if self._publishes and not waits:
                    return False
                self._condition.wait()
            self._thread, self._publishes = threading.get_ident(), publishes
            return True

    def acquire_unless_declined(self) -> Overlap | None:
        """On a following rank: acquire the lock, or return the `overlap` for which rank 0 has declined this publish."""
        with self._condition:
            self._condition.wait_for(lambda: self._declined or not self._thread)
            if self._declined:
                return self._declined.pop(0)
            self._thread, self._publishes = threading.get_ident(), True
            return None

    def decline(self, overlap: Overlap) -> None:
        """On a following rank: note that the publishing rank has declined one more publish."""
        with self._condition:
            self._declined.append(overlap)
            self._condition.notify_all()

    def release(self) -> None:
        with self._condition:
            self._thread = 0
            self._condition.notify_all()
