"""A small process that resumes paused engines in the publisher's place, woken by the end of a pipe.

Needed where only stock routes exist, whose pauses no lease ends. The publisher writes one JSON line for each change of
what must be sent if it dies ({engine: [requests]}); when its end of the pipe closes, however that happened, whatever
was written last is sent, once to each engine and again for a while where that failed. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from weightcast.forked import close_in_child

_ATTEMPT_SECONDS = 10.0
_GIVE_UP_SECONDS = 60.0
_RETRY_SECONDS = 0.2
_MAX_REPLY_BYTES = 1 << 24


class RescueRequest(NamedTuple):
    """One POST. `stop_if`, a regular expression: if the reply has it, or is an error, nothing is sent after it.

    `timeout_seconds` is how long its reply is waited for.
    """

    url: str
    headers: Mapping[str, str] = {}
    body: str = ""
    stop_if: str = ""
    timeout_seconds: float = _ATTEMPT_SECONDS


class Guard:
    """The publisher's handle on its guard process, which is started at the first `hold`. Thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._held: dict[str, Sequence[RescueRequest]] = {}
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def hold(self, engine: str, requests: Sequence[RescueRequest]) -> None:
        """From now on, send these if this process dies. Returns when the guard has them in its pipe."""
        with self._lock:
            self._held[engine] = requests
            self._write()

    def release(self, engine: str) -> None:
        """The engine needs no rescue any more. Idempotent."""
        with self._lock:
            if self._held.pop(engine, None) is not None:
                self._write()

    def close(self) -> None:
        """Let the guard send what is still held, and end it. Idempotent."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=_GIVE_UP_SECONDS + _ATTEMPT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _write(self) -> None:
        if self._process is None:
            # A session of its own: a Ctrl-C that ends the trainer must not end its guard first.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weightcast.guard"], stdin=subprocess.PIPE, start_new_session=True
            )
            assert self._process.stdin is not None
            close_in_child(self._process.stdin)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(self._held).encode() + b"\n")
        self._process.stdin.flush()


def watch(lines: Iterable[bytes]) -> dict[str, list[RescueRequest]]:
    """Read to the end of the pipe; return what was held at the last whole line."""
    held: dict[str, list[RescueRequest]] = {}
    for line in lines:
        if line.endswith(b"\n"):
            held = {
                name: [RescueRequest(*request) for request in requests] for name, requests in json.loads(line).items()
            }
    return held


def rescue(requests: Sequence[RescueRequest], give_up_seconds: float = _GIVE_UP_SECONDS) -> bool:
    """Send the requests in order; try again until each got an answer or time is up. True if all did."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    pending, end = list(requests), time.monotonic() + give_up_seconds
    while pending and time.monotonic() < end:
        try:
            request = urllib.request.Request(
                pending[0].url, data=pending[0].body.encode(), headers=dict(pending[0].headers), method="POST"
            )
            with opener.open(request, timeout=pending[0].timeout_seconds) as reply:
                text = reply.read(_MAX_REPLY_BYTES).decode("utf-8", "replace")
            is_end = bool(pending[0].stop_if and re.search(pending[0].stop_if, text))
        except urllib.error.HTTPError as exc:
            exc.close()
            is_end = bool(pending[0].stop_if)
        except OSError:
            time.sleep(_RETRY_SECONDS)
            continue
        pending = [] if is_end else pending[1:]
    return not pending


def main() -> int:
    """Wait for the publisher's end, then rescue every engine it held, all at once."""
    held = watch(sys.stdin.buffer)
    threads = [threading.Thread(target=rescue, args=(requests,)) for requests in held.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
