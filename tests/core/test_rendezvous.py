"""Ranks whose rank 0 is gone: each place where torch makes them wait for half an hour ends at once."""

from __future__ import annotations

import contextlib
import datetime
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import DistNetworkError, PrefixStore, TCPStore  # type: ignore[attr-defined]

from weightcast.errors import PeerDiedError
from weightcast.links.watchdog import ExpectedPeer, GroupJoin, expected_peers
from weightcast.process_group import ProcessGroup, join_store, serve_store, translated

pytestmark = pytest.mark.usefixtures("leaves_nothing")
SECONDS = 60.0
"""Within which what is to end at once has ended; less than what torch is told to wait."""
TORCH_SECONDS = 1800.0


@contextlib.contextmanager
def listening(host: str) -> Iterator[tuple[GroupJoin, int]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    rendezvous = GroupJoin(listener)
    with contextlib.closing(rendezvous):
        yield rendezvous, listener.getsockname()[1]


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[type[BaseException] | None]]:
    """And how it ended: by an exception of this type, whose traceback would keep sockets."""
    ends: list[type[BaseException] | None] = []

    def run() -> None:
        try:
            call()
        except Exception as exc:
            ends.append(type(exc))
        else:
            ends.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ends


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("when", ["before it connects", "while it waits to be greeted"])
def test_a_client_of_the_store_gives_up_at_once(host: str, when: str) -> None:
    timeout = datetime.timedelta(seconds=TORCH_SECONDS)

    def join() -> None:
        with translated("the store"):
            TCPStore(host, port, 2, False, timeout).get("key")

    with listening(host) as (rendezvous, port):
        if when == "before it connects":
            rendezvous.fail([])
        thread, ends = in_thread(join)
        rendezvous.fail([])
        thread.join(SECONDS)
        assert ends == [PeerDiedError]


def test_clients_that_say_nothing_hold_up_nobody() -> None:
    with listening("127.0.0.1") as (rendezvous, port):
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        rendezvous.fail([])
        for _ in range(2):
            thread, ends = in_thread(lambda: join_store("127.0.0.1", port, TORCH_SECONDS).get("key"))
            thread.join(SECONDS)
            assert ends == [DistNetworkError]
        for sock in silent:
            sock.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("num_others", [1, 2])
def test_ranks_that_wait_for_a_connection_of_gloo_are_let_go(host: str, num_others: int) -> None:
    store, port = serve_store(host, SECONDS)
    size = 1 + num_others

    def join(rank: int) -> None:
        prefixed = PrefixStore("", join_store(host, port, SECONDS))
        ProcessGroup("gloo", prefixed, rank=rank, size=size, timeout_seconds=TORCH_SECONDS, host=host).close()

    # The last rank is missing as well: what the others wait for is not rank 0 alone.
    ranks = [in_thread(lambda rank=rank: join(rank)) for rank in range(1, size)]  # type: ignore[misc]
    prefixed = PrefixStore("", store)
    members = [prefixed.get(f"0/{rank}") for rank in range(1, size)]
    prefixed.set("0/0", higher(members[0]))
    with listening(host) as (rendezvous, _):
        rendezvous.fail(members)
        for thread, _ends in ranks:
            thread.join(SECONDS)
            assert not thread.is_alive()


def higher(member: bytes) -> bytes:
    """The address of a rank that is to connect to this one, and never does."""
    (name_bytes,) = struct.unpack_from("=Q", member)
    start = 16 + name_bytes
    (family,) = struct.unpack_from("=H", member, start)
    changed = bytearray(member)
    offset, num_bytes = (8, 16) if family == socket.AF_INET6 else (4, 4)
    changed[start + offset : start + offset + num_bytes] = b"\xff" * num_bytes
    return bytes(changed)


def test_addresses_are_read_as_gloo_writes_them() -> None:
    def member(family: int, host: str, numbers: list[int]) -> bytes:
        raw = socket.inet_pton(family, host)
        head = struct.pack("=H", family) + struct.pack(">H", 7) + (b"" if family == socket.AF_INET else bytes(4)) + raw
        address = struct.pack("=Q", 136) + head.ljust(136, b"\xee")
        return struct.pack("=Q", 4) + b"name" + address + struct.pack(f"={len(numbers)}q", *numbers)

    assert list(expected_peers(member(socket.AF_INET, "192.0.2.7", [4, 9]), 2)) == [
        ExpectedPeer("192.0.2.7", 7, 4),
        ExpectedPeer("192.0.2.7", 7, 9),
    ]
    assert list(expected_peers(member(socket.AF_INET6, "2001:db8::1", []), 2)) == [
        ExpectedPeer("2001:db8::1", 7, 0),
        ExpectedPeer("2001:db8::1", 7, 1),
    ]
    assert not list(expected_peers(b"something else", 2))
    assert not list(expected_peers(b"", 2))
