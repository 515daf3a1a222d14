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

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, __file__, *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def run(self, script: str, *arguments: str, seconds: float = 120.0) -> int:
        """Run a script's text with these arguments to its end; return its exit status, negative for a signal."""
        self._send(script, *arguments, is_awaited=True)
        stdout = self.process.stdout
        assert stdout is not None
        assert select.select([stdout], [], [], seconds)[0], f"no end of the script after {seconds} s"
        return int(stdout.readline())

    def start(self, script: str, *arguments: str) -> None:
        """Run a script without waiting for it: it ends by itself, or with this Python."""
        self._send(script, *arguments, is_awaited=False)

    def _send(self, script: str, *arguments: str, is_awaited: bool) -> None:
        assert self.process.stdin is not None
        print(json.dumps([is_awaited, script, *arguments]), file=self.process.stdin, flush=True)

    def close(self) -> None:
        """What has not ended by itself is killed. Idempotent."""
        with self.process:  # closes its pipes
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=10)
            self.process.kill()


def main(*modules: str) -> None:
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        is_awaited, script, *arguments = json.loads(line)
        pid = os.fork()
        if pid == 0:
            if not is_awaited:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.dup2(2, 1)  # stdout is for exit statuses
            sys.argv[1:] = arguments
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
            os._exit(0)
        if is_awaited:
            print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
