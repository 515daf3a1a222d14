"""Shared state of the API servers in front of one vLLM: a mutex for changing the engine, and an in-doubt flag.

vLLM starts as many API servers as it has data-parallel engines on the host (`--api-server-count`); all listen on one
port, and each controls all engines. Invariants: one server holds the mutex at a time; the mutex is released when the
process that holds it ends; nothing stays on disk once all servers are up.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from weightcast.errors import ControlError, PeerTimeoutError
from weightcast.host.closing import on_failure

_NUM_SERVERS, _IN_DOUBT = 0, 1
"""Offsets of two bytes in the file: the number of servers that have opened it, and the in-doubt flag."""


class ServerMutex:
    """One API server's handle on a private file that all of them have open. For one event loop."""

    def __init__(self, fd: int) -> None:
        """`fd`: closed by this object."""
        self._fd = fd
        self._lock = asyncio.Lock()

    @classmethod
    def of_one(cls) -> ServerMutex:
        """Return a mutex for a single API server."""
        with tempfile.TemporaryFile() as file:
            return cls(os.dup(file.fileno()))

    @classmethod
    def of_several(cls, num_servers: int, *, launcher: int, folder: str | None = None) -> ServerMutex:
        """Return the mutex shared with the other servers that process `launcher` started; the last one unlinks the
        file.

        Raises ControlError if another user's file has that name.
        """
        path = Path(folder or tempfile.gettempdir(), f"weightcast-vllm-{launcher}-{_started_at(launcher)}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ControlError(f"the API servers of this vLLM can't share {path}: {exc}") from exc
        with on_failure(lambda: os.close(fd)):
            # Another lock than the mutex, which may be held for a whole install.
            fcntl.lockf(fd, fcntl.LOCK_EX)
            status = os.fstat(fd)
            if status.st_uid != os.geteuid() or not status.st_nlink:
                raise ControlError(
                    f"the API servers of this vLLM can't share {path}: it belongs to another user or program; remove it"
                )
            num_come = _byte(fd, _NUM_SERVERS) + 1
            os.pwrite(fd, bytes([num_come]), _NUM_SERVERS)
            if num_come >= num_servers:
                path.unlink()
            fcntl.lockf(fd, fcntl.LOCK_UN)
        return cls(fd)

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def in_doubt(self) -> bool:
        """True if an install is in progress or may have left the engine torn, so that the ranks must be asked."""
        return _byte(self._fd, _IN_DOUBT) != 0

    @in_doubt.setter
    def in_doubt(self, value: bool) -> None:
        os.pwrite(self._fd, bytes([value]), _IN_DOUBT)

    @contextlib.asynccontextmanager
    async def turn(self, deadline_seconds: float) -> AsyncIterator[None]:
        """Hold the mutex, alone among all requests of all servers. Raises PeerTimeoutError after the deadline."""
        with contextlib.ExitStack() as turn:
            try:
                async with asyncio.timeout(deadline_seconds):
                    await self._lock.acquire()
                    turn.callback(self._lock.release)
                    # flock has no asynchronous notification: poll.
                    while True:
                        with contextlib.suppress(BlockingIOError):
                            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            break
                        await asyncio.sleep(0.005)
            except TimeoutError as exc:
                text = f"another weight request has held this vLLM for {deadline_seconds:g} s: send the request again"
                raise PeerTimeoutError(text, peer="engine") from exc
            turn.callback(fcntl.flock, self._fd, fcntl.LOCK_UN)
            yield


def _byte(fd: int, offset: int) -> int:
    return (os.pread(fd, 1, offset) or b"\0")[0]


def _started_at(pid: int) -> str:
    """Return the process's start time, which differs for processes with a reused pid. Empty without /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
