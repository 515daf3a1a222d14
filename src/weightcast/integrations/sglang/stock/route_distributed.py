"""Flattened buckets over torch.distributed groups: one request and one broadcast for each bucket and server.

Each server has its own group, of its ranks and us: in a group of several servers, a silent one would block the others
that it forwards data to, and nothing could end their waits. Invariants: after any error a group is closed at once, and
made again for the same bucket; the reply for a broken broadcast is ignored, since one rank may have loaded the bucket
and another not. A join and a broadcast have half of the deadline, so that every living server has replied before the
request itself times out.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from weightcast import registry
from weightcast.errors import ControlError, PeerDiedError, PeerError, UnsupportedError
from weightcast.host import device as host_device
from weightcast.host.closing import on_failure
from weightcast.integrations.sglang.stock.buckets import FlatTensor
from weightcast.integrations.sglang.stock.group import StockGroup
from weightcast.integrations.sglang.stock.routes import MAX_PARALLEL, SglangRoutes
from weightcast.process_group import require
from weightcast.seams.client import SenderContext

_MAX_TRIES = 3
_OF_GROUPS = ("Failed to receive weights", "Failed to initialize custom process group")
"""Beginnings of SGLang's messages that a group broke, or could not be made; the weights are unchanged then."""


class DistributedRoute:
    """`gloo://` and `nccl://`."""

    def __init__(self, context: SenderContext) -> None:
        """Raise UnsupportedError if torch lacks the backend."""
        self._backend, self._host = registry.scheme(context.url), registry.host(context.url)
        require(self._backend)
        if self._backend == "nccl" and context.device.type != "cuda":
            raise UnsupportedError(f"nccl can't send memory of {context.device}: use gloo:// or ipc://")
        self.device = context.device if self._backend == "nccl" else torch.device("cpu")
        self._deadline_seconds = context.deadline_seconds / 2
        # For our part of each server's calls; a failed one may run until its deadline.
        self._pool = ThreadPoolExecutor(max_workers=2 * MAX_PARALLEL, thread_name_prefix="weightcast-stock")

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return host_device.empty(num_bytes, self.device, "a flattened bucket", "use smaller buckets")

    def open(self, server: SglangRoutes) -> None:
        """Have the server join a group, unless it is in one already."""
        self._send(server)

    def ship(self, server: SglangRoutes, places: Sequence[FlatTensor], flat: torch.Tensor, *, is_last: bool) -> None:
        """Send one bucket to a server; return when it has loaded it."""
        self._send(server, lambda group: server.receive(places, group, is_last=is_last), flat)

    def _send(
        self,
        server: SglangRoutes,
        receive: Callable[[StockGroup], None] | None = None,
        flat: torch.Tensor | None = None,
    ) -> None:
        """Have the server join a group, unless it is in one, and then receive `flat` in it, if that is given.

        Both are tried again if only the group broke. Raises PeerError.
        """
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                group = server.group
                if group is None:
                    name, size = f"weightcast-{secrets.token_hex(8)}", 1 + server.num_ranks
                    group = StockGroup(name, self._backend, self._host, size, self._deadline_seconds)
                    server.group = group
                    self._both(server, group, server.join, group.connect)
                if receive is not None and flat is not None:
                    self._both(server, group, receive, functools.partial(group.broadcast, flat))
                return
            except _Broken as exc:
                if not tries_left:
                    versions = " and has this process's version of NCCL" if self._backend == "nccl" else ""
                    raise PeerDiedError(
                        f"{server.name} lost its group {_MAX_TRIES} times ({exc}): check that it can reach this "
                        f"host{versions}",
                        peer=server.name,
                    ) from exc

    def _both(
        self, server: SglangRoutes, group: StockGroup, ask: Callable[[StockGroup], None], beside: Callable[[], None]
    ) -> None:
        """Make a request and, at the same time, our part of it. Raises _Broken, or the server's error.

        Unless both succeed, the group is closed.
        """
        own = self._pool.submit(beside)
        try:
            with on_failure(group.close):
                ask(group)
        except PeerError as exc:
            if not isinstance(exc, ControlError):
                server.group = None  # it does not answer, or may still be joining
                raise
            server.leave_group()
            if any(text in str(exc) for text in _OF_GROUPS):
                raise _Broken(str(exc)) from exc
            raise
        try:
            own.result()
        except PeerError as exc:
            server.leave_group()
            raise _Broken(str(exc)) from exc

    def close(self) -> None:
        """Call it when all groups were closed."""
        self._pool.shutdown()


class _Broken(Exception):
    """A group broke; the server itself may be fine."""
