"""A small process that resumes paused engines in the publisher's place, woken by the end of a connection.

Needed where only stock routes exist, whose pauses no lease ends. The publisher writes one JSON line for each change of
what must be done if it dies: the requests to send, and the groups that are being made, whose listening sockets travel
with the line that first names them. When its end of the connection closes, however that happened, the watchdog ends the
groups, for which engines may wait, and sends each engine its requests, again for a while where that failed. Standard
library only.
"""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import json
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from weightcast.host.closing import close_in_child, on_failure
from weightcast.host.deadline import Deadline
from weightcast.host.descriptors import ACCEPT_RETRY_SECONDS, shortage

_ATTEMPT_SECONDS = 10.0
_GIVE_UP_SECONDS = 60.0
_RETRY_SECONDS = 0.2
_MAX_REPLY_BYTES = 1 << 24
_READ_BYTES = 1 << 16
_PING = 13
_QUERY_BYTES = 5


class RecoveryRequest(NamedTuple):
    """One POST. `stop_if`, a regular expression: if the reply has it, or is an error, nothing is sent after it.

    `timeout_seconds` is how long its reply is waited for.
    """

    url: str
    headers: Mapping[str, str] = {}
    body: str = ""
    stop_if: str = ""
    timeout_seconds: float = _ATTEMPT_SECONDS


class ExpectedPeer(NamedTuple):
    """A connection that a rank of gloo may wait for: where it listens, and the number by which it knows the peer."""

    host: str
    port: int
    number: int


class GroupJoin:
    """Ends the making of a torch.distributed group whose rank 0 is gone, for every rank that waits in it.

    A rank waits half an hour in each of three places, unless it learns that there will be no group: for the store to
    listen, for a key of the store, and, with gloo, for a peer that was to connect. A dead rank 0 ends the second by
    itself; `fail` ends the other two. `listener`: the store's listening socket, which rank 0 serves while it lives, and
    this object closes.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._is_failing = False

    def fail(self, members: Sequence[bytes]) -> None:
        """Have every rank's join fail, also of those that begin to join later. Idempotent.

        `members`: what the other ranks have put into the store, if rank 0 has answered them. Returns at once.
        """
        if self._is_failing:
            return
        self._is_failing = True
        threading.Thread(target=self._serve, name="weightcast-rendezvous", daemon=True).start()
        for member in members:
            for connection in expected_peers(member, len(members) + 1):
                threading.Thread(target=_stand_in, args=(connection,), daemon=True).start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._is_failing:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends the accept
        self._listener.close()

    def _serve(self) -> None:
        # The process that served it before may have left it in non-blocking mode.
        self._listener.setblocking(True)
        while True:
            try:
                client, _ = self._listener.accept()
            except ConnectionAbortedError:
                continue
            except OSError as exc:
                if not shortage(exc):  # `close` has ended it
                    return
                time.sleep(ACCEPT_RETRY_SECONDS)
                continue
            threading.Thread(target=_refuse, args=(client,), daemon=True).start()


def _refuse(client: socket.socket) -> None:
    """Greet torch's client as its store does, and hang up at its first request: only that ends its attempts."""
    client.settimeout(_ATTEMPT_SECONDS)
    with contextlib.suppress(OSError), client, client.makefile("rb") as requests:
        requests.read(_QUERY_BYTES)
        request = requests.read(_QUERY_BYTES)
        if request[:1] == bytes([_PING]):
            client.sendall(request[1:])
            requests.read(1)


def _stand_in(connection: ExpectedPeer) -> None:
    """Connect in a peer's place, and hang up."""
    address = connection.host, connection.port
    with contextlib.suppress(OSError), socket.create_connection(address, _ATTEMPT_SECONDS) as sock:
        sock.sendall(struct.pack("=q", connection.number))


def expected_peers(member: bytes, size: int) -> Iterator[ExpectedPeer]:
    """The connections that a rank may wait for, by what it has put into the store of a group of `size`.

    gloo writes its host's name and its address, each after its length, and a number for each peer unless those are the
    peers' ranks. Yields nothing for what was written otherwise.
    """
    try:
        (name_bytes,) = struct.unpack_from("=Q", member, 0)
        (address_bytes,) = struct.unpack_from("=Q", member, 8 + name_bytes)
        start = 16 + name_bytes
        family, port = struct.unpack_from("=H", member, start)[0], struct.unpack_from(">H", member, start + 2)[0]
        is_ipv6 = family == socket.AF_INET6
        raw = struct.unpack_from("16s" if is_ipv6 else "4s", member, start + (8 if is_ipv6 else 4))[0]
        numbers = struct.iter_unpack("=q", member[start + address_bytes :])
        for number in [number for (number,) in numbers] or range(size):
            yield ExpectedPeer(str(ipaddress.ip_address(raw)), port, number)
    except struct.error:
        return


class Watchdog:
    """The publisher's handle on its watchdog process, which is started when it is first needed. Thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._held: dict[str, Sequence[RecoveryRequest]] = {}
        self._groups: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def hold(self, engine: str, requests: Sequence[RecoveryRequest]) -> None:
        """From now on, send these if this process dies. Returns when the watchdog has them in its connection.

        Raises OSError if it does not read them in time.
        """
        with self._lock:
            self._held[engine] = requests
            self._write()

    def release(self, engine: str) -> None:
        """The engine needs no rescue any more. Idempotent."""
        with self._lock:
            if self._held.pop(engine, None) is not None:
                self._write()

    # --- groups, by name ---

    def share(self, group: str, listener: socket.socket) -> None:
        """From now on, fail ranks that join it if this process dies. `listener`: its store's; it stays the caller's."""
        with self._lock:
            self._start()
            self._groups[group] = {"members": [], "is_failing": False}
            self._write(listener)

    def joining(self, group: str, members: Sequence[bytes]) -> None:
        """What its other ranks have put into the store: to be said before rank 0 answers them."""
        with self._lock:
            if group in self._groups:
                self._groups[group]["members"] = [member.hex() for member in members]
                self._write()

    def fail(self, group: str) -> None:
        """Fail every rank that joins it, from now on until it is forgotten. Idempotent."""
        with self._lock:
            if group in self._groups:
                self._groups[group]["is_failing"] = True
                self._write()

    def forget(self, group: str) -> None:
        """No rank joins it any more. Idempotent."""
        with self._lock:
            if self._groups.pop(group, None) is not None:
                self._write()

    def close(self) -> None:
        """Have the watchdog do what is still to be done, and end it. Idempotent."""
        with self._lock:
            process, self._process = self._process, None
            self._groups.clear()
            if self._socket is not None:
                self._socket.close()
        if process is None:
            return
        try:
            process.wait(timeout=_GIVE_UP_SECONDS + _ATTEMPT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        """Start it, unless it runs; one that was killed is replaced, and knows none of the groups' sockets."""
        if self._socket is not None and self._process is not None and self._process.poll() is None:
            return
        if self._socket is not None:
            self._socket.close()
        self._groups.clear()
        ours, theirs = socket.socketpair()
        self._socket = close_in_child(ours)
        ours.settimeout(_ATTEMPT_SECONDS)
        with theirs:
            # A session of its own: a Ctrl-C that ends the trainer must not end its watchdog first.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "weightcast.links.watchdog"], stdin=theirs.fileno(), start_new_session=True
            )

    def _write(self, listener: socket.socket | None = None) -> None:
        """Send what is held. With `listener`, the last group's socket, the caller has called `_start` before."""
        if listener is None:
            self._start()
        assert self._socket is not None
        assert self._process is not None
        line = json.dumps({"held": self._held, "groups": self._groups}).encode() + b"\n"
        # One that does not read, or has read half a line, is of no more use: the next call starts another.
        with on_failure(self._process.kill):
            if listener is not None:
                socket.send_fds(self._socket, [line[:1]], [listener.fileno()])
                line = line[1:]
            self._socket.sendall(line)


class WatchedEngines:
    """The watchdog's side: what the publisher has written so far. Only whole lines count."""

    def __init__(self) -> None:
        self.held: dict[str, list[RecoveryRequest]] = {}
        self._groups: dict[str, GroupJoin] = {}
        self._members: dict[str, list[bytes]] = {}
        self._text = b""
        self._descriptors: collections.deque[int] = collections.deque()

    def read(self, text: bytes, descriptors: Sequence[int] = ()) -> None:
        self._descriptors += descriptors
        *lines, self._text = (self._text + text).split(b"\n")
        for state in map(json.loads, lines):
            self.held = {
                name: [RecoveryRequest(*each) for each in requests] for name, requests in state["held"].items()
            }
            for name in self._groups.keys() - state["groups"].keys():
                self._groups.pop(name).close()
            for name, group in state["groups"].items():
                if name not in self._groups:
                    self._groups[name] = GroupJoin(socket.socket(fileno=self._descriptors.popleft()))
                self._members[name] = [bytes.fromhex(member) for member in group["members"]]
                if group["is_failing"]:
                    self._groups[name].fail(self._members[name])

    def fail_groups(self) -> None:
        for name, group in self._groups.items():
            group.fail(self._members[name])


def rescue(requests: Sequence[RecoveryRequest], give_up_seconds: float = _GIVE_UP_SECONDS) -> bool:
    """Send the requests in order; try again until each got an answer or time is up. True if all did."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    pending, deadline = list(requests), Deadline(give_up_seconds)
    while pending and not deadline.has_passed:
        url, headers, body, stop_if, timeout_seconds = pending[0]
        request = urllib.request.Request(url, data=body.encode(), headers=dict(headers), method="POST")
        try:
            with opener.open(request, timeout=timeout_seconds) as reply:
                text = reply.read(_MAX_REPLY_BYTES).decode("utf-8", "replace")
            is_end = bool(stop_if and re.search(stop_if, text))
        except urllib.error.HTTPError as exc:
            exc.close()
            is_end = bool(stop_if)
        except OSError:
            time.sleep(_RETRY_SECONDS)
            continue
        pending = [] if is_end else pending[1:]
    return not pending


def main() -> int:
    """Wait for the publisher's end, then end the groups it was making and rescue every engine it held, all at once."""
    watched = WatchedEngines()
    with socket.socket(fileno=sys.stdin.fileno()) as publisher:
        while True:
            text, descriptors, _, _ = socket.recv_fds(publisher, _READ_BYTES, 1)
            if not text:
                break
            watched.read(text, descriptors)
    watched.fail_groups()
    threads = [threading.Thread(target=rescue, args=(requests,)) for requests in watched.held.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
