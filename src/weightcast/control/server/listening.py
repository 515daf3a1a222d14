"""Addresses that the package's servers listen on. Apart from the servers, whose library takes time to import."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

from weightcast.errors import WeightcastError
from weightcast.host.closing import close_in_child

_BACKLOG = 128


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this host. Raises WeightcastError; `port=0` takes a free one."""
    try:
        family, *_, address = _resolve(host, port)[0]
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as exc:
        what = f"can't listen on {host}:{port}: {exc}"
        raise WeightcastError(f"{what}; pass an address of this host, and a free port or 0") from exc
    # Accepted connections inherit the option, which asyncio does not set on this socket; without it the body of an
    # answer waits for the ACK of its header.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return close_in_child(listening)  # else a child that outlives the server keeps its port, and answers nobody


def _resolve(host: str, port: int) -> list[Any]:
    return socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """Return the URL at which this host reaches a server that listens on an address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def check_exposure(host: str, token: Any) -> None:
    """Raise ValueError for a token that can't be sent in a header, and for a reachable host without a token."""
    if token is not None:
        if not isinstance(token, str) or not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ValueError("a token must be text, printable ASCII without spaces, and not empty")
        return
    try:
        addresses = [str(address[0]).partition("%")[0] for *_, address in _resolve(host, 0)]
    except OSError as exc:
        raise ValueError(f"{host!r} is not an address of this machine: {exc}") from exc
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise ValueError(
            f"{host} can be reached from other machines, which could then replace the weights: "
            "pass token= (`--token-file`), or listen on 127.0.0.1"
        )
