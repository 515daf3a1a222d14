"""The demo's processes: started with a pipe that tells them when their starter is gone, ended one by one by their pid.

Invariants: every child has a session of its own, so that a Ctrl-C on the terminal reaches the starter only; each
holds the reading end of a pipe as stdin, whose end means that the starter has gone, however that happened; after
`close` none runs, and each has been waited for.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

TERMINATION_SECONDS = 8.0
NUM_LOG_LINES = 15


class Child:
    """A running process. `fileno()` becomes readable when it has ended; `log` is where its stderr goes."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._descriptor = os.pidfd_open(process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def fileno(self) -> int:
        return self._descriptor

    def tell(self, line: bytes) -> None:
        """Write one line to its stdin; a child that has ended is not told."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def status(self) -> int:
        """Its exit status, -n after signal n. Waits for it."""
        return self._process.wait(TERMINATION_SECONDS)

    def last_words(self) -> str:
        """How it ended, with the end of its log. Waits for it."""
        status = self.status()
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        lines = self.log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
        return "\n  | ".join([f"{self.name} {how}" + (", its last words:" if lines else ""), *lines])

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, deadline: float) -> None:
        """Wait for its end until time.monotonic() is `deadline`, then kill it."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Close what is open of a child that has been waited for. Its stdin goes last: it means our own end."""
        os.close(self._descriptor)
        if self._process.stdout is not None:
            self._process.stdout.close()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()


class Children:
    """Starts children and ends all of them."""

    def __init__(self, log_directory: Path, environment: Mapping[str, str]) -> None:
        self._log_directory = log_directory
        self._environment = environment
        self._children: list[Child] = []

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        pass_descriptors: Sequence[int] = (),
        read_stdout: bool = False,
    ) -> Child:
        """Its stderr, and its stdout unless that is to be read, goes to a log file."""
        log = self._log_directory / f"{name.replace(' ', '-')}.log"
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if read_stdout else stderr,
                stderr=stderr,
                env=self._environment,
                pass_fds=tuple(pass_descriptors),
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def close(self) -> None:
        """End every child: SIGTERM, then SIGKILL for those that are there after TERMINATION_SECONDS. Idempotent."""
        children, self._children = self._children, []
        for child in children:
            child.terminate()
        deadline = time.monotonic() + TERMINATION_SECONDS
        for child in children:
            child.wait(deadline)
            child.close()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
