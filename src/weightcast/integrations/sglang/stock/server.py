"""A stock SGLang server as an engine of a fleet: no code of ours on its side, only its own routes.

Over `file://` it loads a directory, like any stock server. Otherwise it provides a sender and is paused for the whole
transfer. The client makes the checks that stock SGLang lacks: SGLang drops names that it does not know, does not notice
what is missing, and may end its process over a wrong shape. Invariants: nothing is sent that the server's checkpoint
does not have in that very shape; before the first byte the server is labelled as incomplete, so that no answer ever
carries a version that is not whole, even if another client resumes the server; the server gets a version's label only
when every bucket was loaded and the session has ended; a server without a whole version is not resumed, and the next
complete update heals it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from weightcast import registry
from weightcast.errors import IncompleteUpdateError, WeightcastError, from_record, to_record
from weightcast.format.messages import InitInfo, Offer, UpdateInfo, WeightInfo
from weightcast.integrations.sglang.stock.routes import SglangRoutes
from weightcast.integrations.stock_directory import StockServer
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import ClientSender, SenderContext

MAX_PARALLEL = 64
"""How many servers are called at once."""
logger = logging.getLogger(__name__)


class SglangStockServer(StockServer):
    """The client for one stock server. All clients share one sender, which `join` finds or makes."""

    def __init__(
        self,
        routes: SglangRoutes,
        *,
        join: Callable[[SglangStockServer, Sequence[ClientSender], SenderContext], ClientSender],
    ) -> None:
        super().__init__(routes)
        self.routes = routes
        self.num_ranks = routes.num_ranks
        self.is_done = False
        """True once the sender has sent every bucket of the update in progress."""
        self.group_name = ""
        """The group that its ranks have joined, if any."""
        self._join = join
        self._in_session = False
        logger.warning(
            "%s is stock SGLang: each update pauses it for the whole transfer, and has no undo. For a pause of the "
            "install alone, %s",
            self.name,
            routes.remedy,
        )

    def info(self) -> WeightInfo:
        return msgspec.structs.replace(super().info(), abilities=("streaming",))

    def init(self, info: InitInfo) -> None:
        """Stock SGLang knows no holders: two publishers of one server are not kept apart."""
        self._run, self._store = info.run, info.transport if registry.is_stored(info.transport) else ""

    def sender(self, known: Sequence[ClientSender], context: SenderContext) -> ClientSender | None:
        return None if self._store else self._join(self, known, context)

    def update(self, info: UpdateInfo) -> None:
        """Start an update. Without a store, only an offer is checked; seals and aborts need no call to the server."""
        if self._store:
            super().update(info)
        elif isinstance(info, Offer):
            self.is_done = False
            self.check(info)

    def begin(self) -> None:
        """Mark the server, which is paused, as incomplete, and open a session."""
        self.mark()
        self.routes.begin()
        self._in_session = True

    def finish(self, version: int) -> None:
        """Every bucket was loaded: end the session, and label the weights. It is paused until `resume`.

        Raises IncompleteUpdateError if the sender has not sent everything, InstallError if ranks hold different
        weights.
        """
        if self._store:
            super().finish(version)
            return
        if not self.is_done:
            raise IncompleteUpdateError(f"{self.name} has not got every bucket of version {version}")
        self._end_session()
        self.routes.require_alike(str(version))
        self.loaded(version)

    def resume(self, run: str) -> None:
        """End the session and have it serve; but not if it holds no whole version."""
        self._end_session()
        super().resume(run)

    def _end_session(self) -> None:
        if self._in_session:
            self.routes.end()
            self._in_session = False

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        return super().recovery_requests(run) if self._store else self.routes.restoring_requests(self.former)

    def close(self) -> None:
        """Have the server forget a group that it is still in, and close the connections. Idempotent."""
        self.leave_group()
        super().close()

    def leave_group(self) -> None:
        """Have the server drop its part of the group, if it still answers."""
        name, self.group_name = self.group_name, ""
        if name:
            with contextlib.suppress(WeightcastError):
                self.routes.leave_group(name)


class Servers:
    """The servers of one update, called all at once. `living` are still in it; `failures` says why others are not."""

    def __init__(self, servers: Iterable[SglangStockServer], pool: ThreadPoolExecutor) -> None:
        self.living = list(servers)
        self.failures: dict[str, WeightcastError] = {}
        self._pool = pool

    def each(self, call: Callable[[SglangStockServer], object]) -> None:
        """Call each that lives, and wait; a server that fails is dropped."""
        calls = [(self._pool.submit(call, server), server) for server in self.living]
        for future, server in calls:
            error = future.exception()
            if error is not None:
                self.failures[server.name] = from_record(to_record(error))
                self.living = [other for other in self.living if other is not server]
