"""A connected local socket between the bench and one engine process: typed messages, and memory passed along.

One message is one packet. Every wait ends by the deadline that was given when the channel was made, which the kernel
keeps, so that waiting costs no call of its own.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
from typing import Any, TypeVar

import torch

from weightcast.errors import PeerDiedError, PeerTimeoutError
from weightcast.format.manifest import decode, encode

MAX_PACKET_BYTES = 1 << 16

T = TypeVar("T")


class BenchChannel:
    """One end. `peer` is what errors call the other one."""

    def __init__(self, connection: socket.socket, *, peer: str, deadline_seconds: float) -> None:
        self._socket, self._peer, self._deadline_seconds = connection, peer, deadline_seconds
        timeout = struct.pack("ll", int(deadline_seconds), int(deadline_seconds % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, timeout)

    def send(self, message: Any, fd: int | None = None) -> None:
        """Send one message, with a descriptor if given. Raises PeerDiedError or PeerTimeoutError."""
        try:
            if fd is None:
                self._socket.send(encode(message))
            else:
                socket.send_fds(self._socket, [encode(message)], [fd])
        except BlockingIOError as exc:
            raise self._late() from exc
        except OSError as exc:
            raise self._dead() from exc

    def receive(self, kind: type[T]) -> T:
        """The next message. Raises PeerDiedError at the end of the connection, PeerTimeoutError past the deadline."""
        try:
            data = self._socket.recv(MAX_PACKET_BYTES)
        except BlockingIOError as exc:
            raise self._late() from exc
        except OSError as exc:
            raise self._dead() from exc
        if not data:
            raise self._dead()
        return decode(data, kind)

    def receive_with_fd(self, kind: type[T]) -> tuple[T, int]:
        """The next message and the descriptor that came with it, which the caller closes."""
        message, fd = self.receive_command(kind)
        if fd is None:
            raise self._dead()
        return message, fd

    def receive_command(self, kind: Any) -> tuple[Any, int | None]:
        """The next message, and the descriptor if one came with it, which the caller closes."""
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, MAX_PACKET_BYTES, 1)
        except BlockingIOError as exc:
            raise self._late() from exc
        except OSError as exc:
            raise self._dead() from exc
        if not data:
            raise self._dead()
        return decode(data, kind), fds[0] if fds else None

    def close(self) -> None:
        self._socket.close()

    def _dead(self) -> PeerDiedError:
        return PeerDiedError(f"{self._peer} has ended its connection to the bench", peer=self._peer)

    def _late(self) -> PeerTimeoutError:
        return PeerTimeoutError(f"{self._peer} did not answer within {self._deadline_seconds:g} s", peer=self._peer)


def pair(peer: str, *, deadline_seconds: float) -> tuple[BenchChannel, socket.socket]:
    """A channel and the socket to hand to the other process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return BenchChannel(ours, peer=peer, deadline_seconds=deadline_seconds), theirs


class SharedBytes:
    """Anonymous shared memory as a uint8 tensor. Its descriptor can be sent to a peer, which maps it with `attach`."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.tensor = torch.frombuffer(mmap.mmap(fd, max(num_bytes, 1)), dtype=torch.uint8)

    @classmethod
    def create(cls, num_bytes: int) -> SharedBytes:
        fd = os.memfd_create("weightcast-bench")
        try:
            os.truncate(fd, max(num_bytes, 1))
            return cls(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last tensor of it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
