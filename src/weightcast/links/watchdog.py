"""A small process that resumes paused engines if the publisher dies.

Engines without the plugin need it: their stock routes know no lease that would end a pause. The publisher keeps a
connection to the watchdog, and writes one JSON line for each change of the requests that are to be sent if it dies,
with those of the engine that changed. When the connection closes, for any reason, the watchdog sends each engine its
requests, and repeats them for a while if they fail. Imports only the standard library and two small modules of this
package.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from weightcast.host.closing import close_in_child, on_failure
from weightcast.host.deadline import POLL_SECONDS, Deadline

_MAX_REPLY_BYTES = 1 << 24


class RecoveryRequest(NamedTuple):
    """One POST request.

    `expected` are items that its reply, a JSON object, must have; if one is missing, the requests after it are not
    sent. `timeout_seconds` limits the wait for the reply; None: the watchdog's deadline does.
    """

    url: str
    headers: Mapping[str, str] = {}
    body: str = ""
    expected: Mapping[str, Any] = {}
    timeout_seconds: float | None = None


class Watchdog:
    """The publisher's handle on its watchdog process, which starts when it is first needed. Thread-safe."""

    def __init__(self, deadline_seconds: float = 60.0) -> None:
        """`deadline_seconds`: limit for each request to an engine after this process's death, and of each wait."""
        self._deadline_seconds = deadline_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._kept: dict[str, Sequence[RecoveryRequest]] = {}
        self._lock = threading.Lock()

    def keep(self, engine: str, requests: Sequence[RecoveryRequest]) -> None:
        """Have these requests sent to the engine if this process dies. Returns once they are written to the watchdog.

        Raises OSError if the watchdog does not read them in time.
        """
        with self._lock:
            self._kept[engine] = requests
            self._write({engine: requests})

    def release(self, engine: str) -> None:
        """Forget the engine's requests. Idempotent."""
        with self._lock:
            if self._kept.pop(engine, None) is not None:
                self._write({engine: []})

    def close(self) -> None:
        """Have the watchdog send the requests that are left, and wait until its process has ended. Idempotent."""
        with self._lock:
            process, self._process = self._process, None
            if self._socket is not None:
                self._socket.close()
        if process is None:
            return
        try:
            process.wait(timeout=2 * self._deadline_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _write(self, changed: Mapping[str, Sequence[RecoveryRequest]]) -> None:
        """Write the changed requests to the watchdog; start it, with all, if it does not run or was killed."""
        if self._socket is None or self._process is None or self._process.poll() is not None:
            if self._socket is not None:
                self._socket.close()
            ours, theirs = socket.socketpair()
            self._socket = close_in_child(ours)
            ours.settimeout(self._deadline_seconds)
            with theirs:
                # A session of its own: a Ctrl-C that ends the trainer must not end the watchdog.
                command = [sys.executable, "-m", "weightcast.links.watchdog", str(self._deadline_seconds)]
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)
            changed = self._kept
        # A watchdog that does not read, or has read half a line, is useless: the next call starts another.
        with on_failure(self._process.kill):
            self._socket.sendall(json.dumps(changed).encode() + b"\n")


def requests_of(lines: Iterable[bytes]) -> dict[str, list[RecoveryRequest]]:
    """Return each engine's requests, as the publisher has written them last. Only complete lines count."""
    requests: dict[str, list[RecoveryRequest]] = {}
    for line in lines:
        if line.endswith(b"\n"):
            requests |= {name: [RecoveryRequest(*each) for each in of_it] for name, of_it in json.loads(line).items()}
    return requests


def rescue(requests: Sequence[RecoveryRequest], give_up_seconds: float) -> bool:
    """Send the requests in order, each again until it is answered; return False if time is up before the last one.

    Each has this time from the answer to the one before it: a reload may take longer, and a resume follows it. A
    request whose reply lacks an `expected` item ends the list, too.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    pending, deadline = list(requests), Deadline(give_up_seconds)
    while pending and not deadline.has_passed:
        url, headers, body, expected, timeout_seconds = pending[0]
        request = urllib.request.Request(url, data=body.encode(), headers=dict(headers), method="POST")
        try:
            timeout_seconds = timeout_seconds or max(POLL_SECONDS, deadline.remaining_seconds)
            with opener.open(request, timeout=timeout_seconds) as reply:
                found = reply.read(_MAX_REPLY_BYTES)
                if reply.length and len(found) < _MAX_REPLY_BYTES:  # `read` returns what came before the end
                    raise http.client.IncompleteRead(found, reply.length)
        except urllib.error.HTTPError as exc:
            exc.close()
            found = b""
        except (OSError, http.client.HTTPException):
            time.sleep(POLL_SECONDS)
            continue
        pending, deadline = pending[1:] if _has(found, expected) else [], Deadline(give_up_seconds)
    return not pending


def _has(reply: bytes, expected: Mapping[str, Any]) -> bool:
    if not expected:
        return True
    try:
        found = json.loads(reply)
    except ValueError:
        return False
    return isinstance(found, dict) and all(name in found and found[name] == expected[name] for name in expected)


def main() -> int:
    """Wait until the publisher's connection closes, then send every engine its requests, all engines at once."""
    watched, seconds = requests_of(sys.stdin.buffer), float(sys.argv[1])
    threads = [threading.Thread(target=rescue, args=(requests, seconds)) for requests in watched.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
