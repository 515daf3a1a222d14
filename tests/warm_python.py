"""A Python that has imported, once, what scripts of tests need: each script runs in a process forked from it."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping


class WarmPython:
    """The test's handle on it, which imports while its maker goes on. It ends with its stdin, and so with the test."""

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        command = [sys.executable, __file__, *modules]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def run(self, script: str, *arguments: str, seconds: float = 120.0) -> int:
        """Run a script's text with these arguments to its end; return its exit status, negative for a signal."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps([script, *arguments]), file=stdin, flush=True)
        assert select.select([stdout], [], [], seconds)[0], f"no end of the script after {seconds} s"
        return int(stdout.readline())

    def close(self) -> None:
        """What has not ended by itself is killed. Idempotent."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=10)
        self._process.kill()
        self._process.wait()


def main(*modules: str) -> None:
    for name in modules:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)  # stdout is for exit statuses
            script, *sys.argv[1:] = json.loads(line)
            exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
