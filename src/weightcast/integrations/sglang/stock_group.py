"""A torch.distributed group with the ranks of stock SGLang servers, made as SGLang makes its own; we are rank 0.

Invariants: the group has a fresh name and a store of its own; a group in which anything went wrong is cut, never
mended. SGLang waits in a broadcast without a deadline, and its whole server stands still meanwhile: `cut` ends the
group's connections, whatever is under way, so that every rank's wait ends with an error at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time

import torch
from torch.distributed import PrefixStore, Work  # type: ignore[attr-defined]

from weightcast.errors import PeerDiedError, PeerTimeoutError, WeightcastError, from_record, to_record
from weightcast.process_group import ProcessGroup, Store, in_background, serve_store, wait

_POLL_SECONDS = 0.0002


class StockGroup:
    """Rank 0's end of the group `name`, of `size` members. `connect` once every other has been told to join."""

    def __init__(self, name: str, backend: str, host: str, size: int, deadline_seconds: float) -> None:
        """Serve the store; `port` is where the others find it. Raises PeerError."""
        self.name = name
        self.size = size
        self.backend = backend
        self.host = host
        self._deadline_seconds = deadline_seconds
        self._store: Store | None
        self._store, self.port = serve_store(host, deadline_seconds)
        self._group: ProcessGroup | None = None

    def connect(self) -> None:
        """Blocks until all members are there, at most for the deadline. Raises PeerError."""
        error = self._connect()
        if error is not None:
            raise error

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send `flat` to every member; blocks until it has gone, at most for the deadline. Raises PeerError."""
        error = self._broadcast(flat)
        if error is not None:
            raise error

    def _connect(self) -> WeightcastError | None:
        """What went wrong, as a copy: a traceback would keep the group, and with it whoever waits for it."""
        store: Store = self._store
        # The prefixes are those of torch's own helper inside SGLang's `init_custom_process_group`.
        device = "cpu" if self.backend == "gloo" else "cuda"
        prefixed = PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, store)))
        try:
            # No device: with NCCL the members connect at their first broadcast, and nobody may wait for them before.
            self._group = ProcessGroup(
                self.backend,
                prefixed,
                rank=0,
                size=self.size,
                timeout_seconds=self._deadline_seconds,
                host=self.host if self.backend == "gloo" else "",
            )
        except WeightcastError as exc:
            return from_record(to_record(exc))
        if self._store is None:
            self.cut()
        return None

    def _broadcast(self, flat: torch.Tensor) -> WeightcastError | None:
        group = self._group
        try:
            if group is None:
                raise PeerDiedError(f"the group {self.name} was cut")
            work = group.broadcast(flat, root=0)
            if flat.is_cuda:
                self._poll(work)
            else:
                wait(work)
        except WeightcastError as exc:
            return from_record(to_record(exc))
        return None

    def _poll(self, work: Work) -> None:
        """NCCL's own wait has no deadline on the host."""
        end = time.monotonic() + self._deadline_seconds
        while not work.is_completed():
            if self._group is None:
                raise PeerDiedError(f"the group {self.name} was cut")
            if time.monotonic() > end:
                raise PeerTimeoutError(f"a broadcast in {self.name} was not over within {self._deadline_seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def cut(self) -> None:
        """End the group at once: whoever waits in it is woken. Idempotent."""
        group, self._group = self._group, None
        store, self._store = self._store, None
        if store is not None:
            _shut_down(store, self.port)
        if group is not None:
            # With gloo this may wait for a broadcast of ours that a peer has kept busy.
            in_background(group.close, "weightcast-stock-group")


def _shut_down(store: Store, port: int) -> None:
    """Shut down every connection of this process that belongs to a group: to its store, and to its members.

    gloo tells nobody which sockets are its own, but each member's address is in the group's store. NCCL's are ended by
    its abort.
    """
    blobs: list[bytes] = []
    with contextlib.suppress(RuntimeError, AttributeError):
        blobs = [store.get(key) for key in store.list_keys()]
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                _shut_down_if_member(descriptor, blobs, port)


def _shut_down_if_member(descriptor: int, blobs: list[bytes], port: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return
        here, there = sock.getsockname(), sock.getpeername()
        ends = [_raw(sock.family, here), _raw(sock.family, there)]
        if here[1] == port or any(end in blob for end in ends for blob in blobs):
            sock.shutdown(socket.SHUT_RDWR)


def _raw(family: int, address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """An address as the kernel lays it out, as far as it names a host and a port."""
    host, port = address[:2]
    start = struct.pack("=H", family) + struct.pack(">H", port)
    if family == socket.AF_INET:
        return start + socket.inet_pton(family, host)
    return start + struct.pack(">I", address[2] if len(address) > 2 else 0) + socket.inet_pton(family, host)
