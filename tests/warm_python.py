"""A Python that has imported, once, what scripts of tests need: each script runs in a process forked from it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping

_PR_SET_PDEATHSIG = 1


class WarmPython:
    """The test's handle on it, which imports while its maker goes on. It ends with its stdin, and so with the test."""

    def __init__(self, *modules: str, environment: Mapping[str, str], executable: str = sys.executable) -> None:
        command = [executable, __file__, *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def run(self, script: str, *arguments: str, seconds: float = 120.0) -> int:
        """Run a script's text with these arguments to its end; return its exit status, negative for a signal."""
        return self._ask(script, *arguments, is_awaited=True, seconds=seconds)

    def start(self, script: str, *arguments: str, seconds: float = 120.0) -> Forked:
        """Run a script without waiting for its end: it ends by itself, or with this Python."""
        return Forked(self._ask(script, *arguments, is_awaited=False, seconds=seconds))

    def _ask(self, script: str, *arguments: str, is_awaited: bool, seconds: float) -> int:
        assert self.process.stdin is not None
        print(json.dumps([is_awaited, script, *arguments]), file=self.process.stdin, flush=True)
        stdout = self.process.stdout
        assert stdout is not None
        assert select.select([stdout], [], [], seconds)[0], f"nothing of the script after {seconds} s"
        return int(stdout.readline())

    def close(self) -> None:
        """What has not ended by itself is killed. Idempotent."""
        with self.process:  # closes its pipes
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=10)
            self.process.kill()


class Forked:
    """A script's process, which is no child of the test's: what `subprocess.Popen` offers, but for the exit status."""

    returncode = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._descriptor: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended already
            self._descriptor = None

    def wait(self, timeout: float | None = None) -> None:
        """Return when it has ended. Raises `subprocess.TimeoutExpired`."""
        if self._descriptor is None:
            return
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        os.close(self._descriptor)
        self._descriptor = None

    def poll(self) -> bool | None:
        """Something but None once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
            return True
        return None


def main(*modules: str) -> None:
    for name in modules:
        importlib.import_module(name)
    started: set[int] = set()

    def bury(*of_signal: object) -> None:
        """What was started and has ended leaves no zombie, which its test would still see."""
        started.difference_update([pid for pid in started if os.waitpid(pid, os.WNOHANG)[0]])

    signal.signal(signal.SIGCHLD, bury)
    for line in sys.stdin:
        is_awaited, script, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if not is_awaited:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(2, 1)  # stdout is for exit statuses
            sys.argv[1:] = arguments
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
            os._exit(0)
        if is_awaited:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        else:
            print(pid, flush=True)
            started.add(pid)
            bury()  # if it has ended before it was in the set


if __name__ == "__main__":
    main(*sys.argv[1:])
