"""Ends the making of a torch.distributed group whose rank 0 is gone, for every rank that waits in it.

A rank waits half an hour in each of three places, unless somebody says that there will be no group: for the store to
listen, for a key of the store, and, with gloo, for a peer that was to connect. A dead rank 0 ends the second by itself.
So its store's listening socket is shared with the process that has this object, and `fail` ends the other two.
Standard library only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_PING = 13
_QUERY_BYTES = 5
_ATTEMPT_SECONDS = 10.0


class ExpectedPeer(NamedTuple):
    """A connection that a rank of gloo may wait for: where it listens, and the number by which it knows the peer."""

    host: str
    port: int
    number: int


class GroupJoin:
    """One group in the making. `listener`: its store's, which this object closes; another process serves it."""

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
            for connection in expected(member, len(members) + 1):
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
            except OSError:
                return
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


def expected(member: bytes, size: int) -> Iterator[ExpectedPeer]:
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
