"""A connected local socket between the bench and one of its workers: one packet for each record, both ends waiting.

The ipc transport's channel, which never waits, is not used: a poll before each read would more than double a bare round
trip, and thereby flatter a publish beside the round trips per tensor that it is measured against.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from weightcast.errors import PeerDiedError, PeerError, PeerTimeoutError
from weightcast.format.manifest import decode, encode

ANSWER_SECONDS = 600.0
MAX_PACKET_BYTES = 1 << 16


class BenchChannel:
    """One end. `peer` is what errors call the other one. Without a deadline, it may be silent while it lives.

    Raises PeerDiedError at the end of the connection, PeerTimeoutError past the deadline.
    """

    def __init__(self, connection: socket.socket, *, peer: str, deadline_seconds: float = 0.0) -> None:
        self.peer = peer
        self._socket, self._deadline_seconds = connection, deadline_seconds
        # Kept by the kernel, so that waiting costs no call of its own.
        timeout = struct.pack("ll", int(deadline_seconds), int(deadline_seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, timeout)

    def send(self, record: msgspec.Struct) -> None:
        try:
            self._socket.send(encode(record))
        except OSError as exc:
            raise self._error(exc) from exc

    def receive(self, kind: Any) -> Any:
        """The next record, of this class or union."""
        try:
            data = self._socket.recv(MAX_PACKET_BYTES)
            if not data:
                raise ConnectionResetError
        except OSError as exc:
            raise self._error(exc) from exc
        return decode(data, kind)

    def close(self) -> None:
        self._socket.close()

    def _error(self, exc: OSError) -> PeerError:
        if isinstance(exc, BlockingIOError):
            return PeerTimeoutError(f"{self.peer} did not answer within {self._deadline_seconds:g} s", peer=self.peer)
        return PeerDiedError(f"{self.peer} has ended its connection to the bench", peer=self.peer)


class Done(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker has done the last command. `error`: how it failed. `url`: an engine's control routes, at its start."""

    error: str = ""
    url: str = ""


def send_all(workers: Sequence[BenchChannel], record: msgspec.Struct) -> None:
    for worker in workers:
        worker.send(record)


def await_done(workers: Sequence[BenchChannel]) -> list[Done]:
    """What every worker answers. Raises PeerDiedError if one has failed."""
    answers = []
    for worker in workers:
        answers.append(answer := worker.receive(Done))
        if answer.error:
            raise PeerDiedError(f"{worker.peer} failed: {answer.error}", peer=worker.peer)
    return answers
