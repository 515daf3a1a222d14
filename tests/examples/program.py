"""A program and everything that it starts, as one thing that is watched from outside and ended by pid."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

MARK = "WEIGHTCAST_TEST_PROGRAM"
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class Program:
    """Started at once; use it in a `with`, after which no process of it runs.

    Its processes inherit a mark in their environment. Those that write over it, to have a title, are known by what they
    have open in `directory`.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, *, directory: str | None = None
    ) -> None:
        self._directory = directory
        self._text = ""
        self._mark = f"{MARK}={secrets.token_hex(8)}".encode()
        name, _, value = self._mark.decode().partition("=")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **LOOPBACK, **(environment or {}), name: value},
            start_new_session=True,
        )

    def read_until(self, pattern: str, timeout_seconds: float) -> str:
        """Its stdout up to and with the first line that matches. Raises AssertionError if it ends before."""
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_seconds, self._kill_all)
        timer.start()
        try:
            for line in self._process.stdout:
                self._text += line
                if re.search(pattern, line):
                    return self._text
        finally:
            timer.cancel()
            timer.join()
        raise AssertionError(f"no line was {pattern!r}: {self._text}\n{self._process.communicate()[1]}")

    def end(self, timeout_seconds: float) -> str:
        """End its stdin, wait for its end; return its stdout.

        Raises AssertionError if it failed, or if a process is still there.
        """
        out, err = self._process.communicate("", timeout=timeout_seconds)
        self._text += out
        assert self._process.returncode == 0, f"{self._text}\n{err}"
        deadline = time.monotonic() + 60
        while (left := self.pids()) and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        assert not left, f"still there: {left}"
        return self._text

    def pids(self) -> list[int]:
        """What runs of it now. A zombie, which somebody else has to wait for, does not."""
        return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and self._is_ours(path)]

    def _is_ours(self, path: Path) -> bool:
        with contextlib.suppress(OSError):
            if self._mark in (path / "environ").read_bytes():
                return True
            if self._directory is not None:
                return any(os.readlink(entry).startswith(self._directory) for entry in (path / "fd").iterdir())
        return False

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._kill_all()
        self._process.communicate()

    def _kill_all(self) -> None:
        while pids := self.pids():  # what one of them starts in the meantime has the mark too
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
