"""The wait for messages of links, by which a thread that waits for one reads it from the socket itself.

A thread that only reads, for others that wait, would cost a switch of threads for every record of a transport, and take
the interpreter's lock from the thread that packs or installs meanwhile.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection

from weightcast.host.closing import on_failure

_LINGER_SECONDS = 0.1
"""For so long after a wait the background thread leaves the sockets to the thread that waited: it comes back for the
next bucket, and reads what has come by then."""


def _ignore(ready: Collection[int]) -> None:
    """Read nothing: the sockets were closed."""


class ReadingCondition(threading.Condition):
    """A condition whose waiters read sockets. It guards them, and all that is made of what they bring.

    Register sockets in `poller`; `on_ready(descriptors)` reads those that may have something. It is called with the
    condition held, by any thread that waits; it must neither wait nor raise. One waiter polls at a time. The others
    wait to be notified, and one of them polls once that waiter has left. A background thread polls in
    `wait_unattended`, while nobody else waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.on_ready: Callable[[Collection[int]], None] = _ignore
        self.poller = select.epoll()
        with on_failure(self.poller.close):
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.poller.register(self._wake, select.EPOLLIN)
        self._is_polled = False
        self._is_polled_in_background = False
        self._is_closed = False
        self._waited_at = 0.0
        """When a thread other than the background one waited last."""
        self._alert = threading.Event()

    def read(self) -> None:
        """Read what has come by now. Does not wait; the caller holds the condition."""
        if not self._is_closed:
            # The wake-up is left for the thread that polls.
            self.on_ready([descriptor for descriptor, _ in self.poller.poll(0) if descriptor != self._wake])

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until something is read, or to be notified; may return earlier. The caller holds the condition once."""
        self._waited_at = time.monotonic()
        if self._is_closed or self._is_polled:
            if self._is_polled_in_background:
                os.eventfd_write(self._wake, 1)
            return super().wait(timeout)
        try:
            self._poll(timeout)
        finally:
            self._waited_at = time.monotonic()
        return True

    def wait_unattended(self, seconds: float) -> None:
        """Wait in the one background thread, at most that long. The caller holds the condition once."""
        if self._is_polled or time.monotonic() < self._waited_at + _LINGER_SECONDS:
            # Not on the condition, which is notified of every record.
            self.release()
            try:
                self._alert.wait(min(seconds, _LINGER_SECONDS))
            finally:
                self.acquire()
            return
        self._is_polled_in_background = True
        try:
            self._poll(seconds)
        finally:
            self._is_polled_in_background = False

    def notify_all(self) -> None:
        """Wake all waiters, also the one that polls."""
        super().notify_all()
        if self._is_polled:
            os.eventfd_write(self._wake, 1)

    def alert(self) -> None:
        """Wake all waiters and, from now on, the background thread: it has to end. The caller holds the condition."""
        self._alert.set()
        self.notify_all()

    def close(self) -> None:
        """Stop reading and free everything: from now on this is a condition like any other. Idempotent."""
        with self:
            if self._is_closed:
                return
            self._is_closed = True
            self.notify_all()
            while self._is_polled:
                super().wait()
            self.on_ready = _ignore
            self.poller.close()
            os.close(self._wake)

    def _poll(self, seconds: float | None) -> None:
        """Let go of the condition until a socket has something or this is woken, then read what is there."""
        events: list[tuple[int, int]] = []
        self._is_polled = True
        self.release()
        try:
            events = self.poller.poll(seconds)
        finally:
            self.acquire()
            self._is_polled = False
            # Another waiter polls from now on, also if this one was interrupted.
            super().notify_all()
        if (self._wake, select.EPOLLIN) in events:
            os.eventfd_read(self._wake)
        if not self._is_closed:
            self.on_ready([descriptor for descriptor, _ in events if descriptor != self._wake])
