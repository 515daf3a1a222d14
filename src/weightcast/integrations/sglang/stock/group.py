"""A torch.distributed group with the ranks of stock SGLang servers, made as SGLang makes its own; we are rank 0.

Invariants: the group has a fresh name and a store of its own; a group in which anything went wrong is cut, never
mended. SGLang waits in a join for half an hour and in a broadcast without a deadline, and its whole server waits
meanwhile: `cut` ends the group's connections, whatever is under way, so that every rank's wait ends with an error at
once. The watchdog process shares the store's port and does the same if this process dies.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from weightcast.errors import PeerDiedError, WeightcastError, from_record, to_record
from weightcast.host.closing import awaited_at_exit, close_in_child
from weightcast.links.watchdog import Watchdog
from weightcast.process_group import ProcessGroup, Store, in_time, serve_shared_store, translated, wait

P = ParamSpec("P")
T = TypeVar("T")


def _without_traceback(call: Callable[P, None]) -> Callable[P, None]:
    """Raise its errors as copies: a traceback would keep the group, and with it every member that waits in it."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            return call(*args, **kwargs)
        except WeightcastError as exc:
            error = to_record(exc)
        raise from_record(error)

    return wrapped


class StockGroup:
    """Rank 0's end of the group `name`, of `size` members. `connect` once every other has been asked to join."""

    def __init__(
        self, name: str, backend: str, host: str, size: int, deadline_seconds: float, watchdog: Watchdog
    ) -> None:
        """Serve the store; `port` is where the others find it. Raises PeerError."""
        self.name = name
        self.size = size
        self.backend = backend
        self.host = host
        self._deadline_seconds = deadline_seconds
        self._watchdog = watchdog
        store, listener = serve_shared_store(host, deadline_seconds)
        with listener:
            self.port: int = listener.getsockname()[1]
            watchdog.share(name, listener)
        # The prefixes are those of torch's own helper inside SGLang's `init_custom_process_group`.
        device = "cpu" if backend == "gloo" else "cuda"
        self._store: Store | None = PrefixStore(f"{device}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        self._sockets = close_in_child(_Sockets(self.port))
        self._group: ProcessGroup | None = None

    @_without_traceback
    def connect(self) -> None:
        """Blocks until all members are there, at most for the deadline. Raises PeerError."""
        store = self._require(self._store)
        if self.backend == "gloo":
            # The watchdog knows every member before one of them can wait for a connection of ours.
            members: list[bytes] = []
            for rank in range(1, self.size):
                with translated(f"rank {rank} of the group {self.name}"):
                    members.append(store.get(_key(rank)))
            self._sockets.addresses = members
            self._watchdog.joining(self.name, members)
        # No device: with NCCL the members connect at their first broadcast, and rank 0 must not wait for them before.
        self._group = ProcessGroup(
            self.backend,
            store,
            rank=0,
            size=self.size,
            timeout_seconds=self._deadline_seconds,
            host=self.host if self.backend == "gloo" else "",
            # SGLang sets no limit, and NCCL applies each member's own after all have agreed on their channels.
            max_ctas=None,
            is_left=lambda: self._store is None,
        )
        if self._store is None:
            self.cut()

    @_without_traceback
    def broadcast(self, flat: torch.Tensor) -> None:
        """Send `flat` to every member; blocks until it has gone, at most for the deadline. Raises PeerError."""
        group = self._require(self._group)
        if not flat.is_cuda:
            wait(group.broadcast(flat, root=0))
            return
        # The first one connects the members, which NCCL waits for without a deadline.
        begin = functools.partial(group.broadcast, flat, root=0)
        what = f"a broadcast in {self.name}"
        group.wait(in_time(begin, flat.device, self._deadline_seconds, what, self._was_cut), self._was_cut)

    def _was_cut(self) -> bool:
        return self._group is None

    def _require(self, part: T | None) -> T:
        if part is None:
            raise PeerDiedError(f"the group {self.name} was cut")
        return part

    def cut(self) -> None:
        """End the group at once: ranks that wait in it wake, and those that join later fail until `end`. Idempotent."""
        group, self._group = self._group, None
        store, self._store = self._store, None
        if store is not None:
            self._sockets.shut_down(store)
            self._watchdog.fail(self.name)
        if group is not None:
            # With gloo this may wait for a broadcast of ours that a peer has kept busy.
            awaited_at_exit(group.close, "weightcast-stock-group")

    def end(self) -> None:
        """The same, where every member has answered: no rank joins it any more. Idempotent."""
        self.cut()
        self._watchdog.forget(self.name)


class _Sockets:
    """The connections of this process that belong to a group: to its store, at `port`, and to its members.

    gloo does not say which sockets are its own, but `addresses`, from the group's store, have each member's. NCCL's are
    ended by its abort.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.addresses: list[bytes] = []

    def shut_down(self, store: Store) -> None:
        """End them all, for other processes that have them as well; the store's port stays open for these."""
        with contextlib.suppress(RuntimeError):
            # Before we have answered the members there is no connection to one, and the store may be busy.
            if self.addresses and store.check([_key(0)]):
                self.addresses = [*self.addresses, store.get(_key(0))]
        for descriptor in self._descriptors():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as sock:
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """In a forked child: keep none of them open. Their numbers stay taken, since torch's objects close them too."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._descriptors():
            os.dup2(nothing, descriptor, inheritable=False)
        os.close(nothing)

    def _descriptors(self) -> Iterator[int]:
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and self._has(descriptor):
                    yield descriptor

    def _has(self, descriptor: int) -> bool:
        with socket.socket(fileno=os.dup(descriptor)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                return False
            ends = [sock.getsockname()]
            with contextlib.suppress(OSError):
                ends.append(sock.getpeername())
            raw = [_raw(sock.family, end) for end in ends if end[1]]
            is_members = any(end in held for end in raw for held in self.addresses)
            return is_members or any(end[1] == self.port for end in ends)


def _key(rank: int) -> str:
    """Where gloo puts a rank's address in the store, in torch's first (and only) context of a group."""
    return f"0/{rank}"


def _raw(family: int, address: tuple[str, int] | tuple[str, int, int, int]) -> bytes:
    """An address as the kernel lays it out, as far as it names a host and a port."""
    host, port = address[:2]
    start = struct.pack("=H", family) + struct.pack(">H", port)
    if family == socket.AF_INET:
        return start + socket.inet_pton(family, host)
    return start + struct.pack(">I", address[2] if len(address) > 2 else 0) + socket.inet_pton(family, host)
