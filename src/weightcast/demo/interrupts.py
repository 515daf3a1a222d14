"""Signals as something to wait for: no exception can strike between two lines, so nothing is ever left half-made."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType, TracebackType
from typing import Any

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While entered, SIGINT, SIGTERM and SIGHUP make `fileno()` readable and are remembered. For the main thread."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._reader, self._writer = socket.socketpair()
        self._former: dict[signal.Signals, Any] = {}
        self._former_descriptor = -1

    def fileno(self) -> int:
        return self._reader.fileno()

    def __enter__(self) -> Interrupts:
        self._writer.setblocking(False)
        self._former_descriptor = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._note) for number in NUMBERS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_descriptor)
        with contextlib.closing(self._reader), contextlib.closing(self._writer):
            pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number)
