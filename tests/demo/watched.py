"""The demo as a process, watched from outside: its lines, its children, and what is left when it has ended."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_SECONDS = 90.0
EXAMPLES = str(Path(__file__).parents[2] / "examples")
SOCKET = re.compile(r"socket:\[(\d+)\]")


class Demo:
    """`scripts/demo --quick`, with a temporary directory of its own, by which its processes are known."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.temporary, self.output = directory / "tmp", directory / "output"
        self.temporary.mkdir()
        self.text = ""
        self._sockets: set[str] = set()
        self._shared_memory: set[Path] = set()
        path = os.pathsep.join(filter(None, [EXAMPLES, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rl_demo", "--quick", "--output", str(self.output), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": path},
            start_new_session=True,
        )

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Read output until `condition`, which is tried again with each line and every 50 ms."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + DEADLINE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not condition():
                assert time.monotonic() < deadline, f"{what} did not come; so far:\n{self.text}"
                if selector.select(0.05):
                    data = os.read(self._process.stdout.fileno(), 65536)
                    assert data or condition(), f"it ended before {what}:\n{self.text}"
                    self.text += data.decode()

    def wait_for_line(self, pattern: str) -> None:
        self.wait_for(lambda: re.search(pattern, self.text, re.MULTILINE) is not None, repr(pattern))

    def send(self, number: signal.Signals) -> None:
        """Signal the process that was started, after a look at what all of the demo's processes hold."""
        self.look()
        self._process.send_signal(number)

    def look(self) -> None:
        """Note the sockets and the shared memory that the demo's processes hold now."""
        for pid in self.pids():
            self._sockets |= _sockets(pid)
            self._shared_memory |= _shared_memory(pid)

    def pids(self, *words: str) -> list[int]:
        """Processes of this demo, the first one too, whose command line has all of the words."""
        return [pid for pid in _all_pids() if self._is_ours(pid) and all(word in _command(pid) for word in words)]

    def _is_ours(self, pid: int) -> bool:
        return f"TMPDIR={self.temporary}".encode() in _read(pid, "environ")

    def end(self) -> int:
        """Wait for the end, read the rest; return the exit status."""
        rest, _ = self._process.communicate(timeout=DEADLINE_SECONDS)
        self.text += rest.decode()
        return self._process.returncode

    def assert_nothing_left(self) -> None:
        """No process, socket, shared memory or temporary file of this demo stays, after ten seconds at the latest."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (left := self._left()) and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        assert not left, f"left behind: {left}\n{self.text}"

    def _left(self) -> list[str]:
        processes = [f"process {pid}: {_command(pid)}" for pid in self.pids()]
        # What goes away meanwhile is no error to os.walk.
        found = os.walk(self.temporary)
        files = [os.path.join(place, name) for place, folders, names in found for name in folders + names]
        shared = [str(path) for path in self._shared_memory if path.exists()]
        lines = Path("/proc/net/unix").read_text().splitlines()[1:]
        sockets = [line for line in lines if line.split()[6] in self._sockets]
        return [*processes, *files, *shared, *sockets]

    def close(self) -> None:
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)
        self._process.communicate()


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def _sockets(pid: int) -> set[str]:
    found = set()
    for entry in _descriptors(pid):
        match = SOCKET.fullmatch(entry)
        if match:
            found.add(match.group(1))
    return found


def _descriptors(pid: int) -> list[str]:
    targets = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            targets.append(os.readlink(entry))
    except OSError:
        pass
    return targets


def _shared_memory(pid: int) -> set[Path]:
    lines = _read(pid, "maps").decode(errors="replace").splitlines()
    return {Path(line.split(maxsplit=5)[5]) for line in lines if " /dev/shm/" in line and "(deleted)" not in line}
