"""Ports for servers that are started later, or again."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """Not one that the kernel gives to connections, of which one might have it before a server has started."""
    while True:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", random.randrange(16384, 32768)))
            return int(sock.getsockname()[1])
