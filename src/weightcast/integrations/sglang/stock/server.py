"""Client of a stock SGLang server, without weightcast's plugin: it uses only the server's own routes.

Over `file://` the server loads a directory, like any stock server. Otherwise the client provides a sender, and the
server is paused for the whole transfer. The client makes the checks that stock SGLang lacks: SGLang ignores unknown
names, does not notice missing ones, and may end its process upon a wrong shape.

Invariants: only tensors with the names and shapes of the server's checkpoint are sent; before the first byte the server
is labelled as incomplete, so that no answer has the label of an incomplete version, even if another client resumes the
server; the server gets a version's label only after every bucket was loaded and the session has ended; a server without
a whole version is not resumed, until the next complete update.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

from weightcast import registry
from weightcast.errors import IncompleteUpdateError, UnsupportedError, WeightcastError
from weightcast.format.messages import InitInfo, Offer, UpdateInfo
from weightcast.integrations.sglang.stock.group import StockGroup
from weightcast.integrations.sglang.stock.routes import SglangRoutes
from weightcast.integrations.stock_directory import StockServer
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import ClientSender, SenderContext

MAX_PARALLEL = 64
"""Limit on the servers that are called concurrently."""
logger = logging.getLogger(__name__)


class SglangStockServer(StockServer):
    """Client of one stock server. All such clients share one sender (see `join`)."""

    abilities = ("adapters", "streaming")

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
        self.group: StockGroup | None = None
        """The group that its ranks have joined, if any."""
        self._join = join
        self._in_session = False
        logger.warning(
            "%s is stock SGLang: each update pauses it for the whole transfer, and can't be undone. To pause it only "
            "for the install, %s",
            self.name,
            routes.remedy,
        )

    def init(self, info: InitInfo) -> None:
        """Begin a session. Stock SGLang has no sessions, so a second publisher of the server is not detected."""
        self._run, self._store = info.run, ""
        if registry.is_stored(info.transport):
            super().init(info)

    def sender(self, known: Sequence[ClientSender], context: SenderContext) -> ClientSender | None:
        return None if self._store else self._join(self, known, context)

    def update(self, info: UpdateInfo) -> None:
        """Check an offer. Without a store, nothing is sent to the server, also not for seals and aborts."""
        if self._store:
            super().update(info)
        elif isinstance(info, Offer):
            self.is_done = False
            if info.target:
                raise UnsupportedError(
                    f"{self.name} is stock SGLang, which loads adapters from a directory: publish with "
                    f"transport='file:///dir', a directory that the server sees too; or {self.routes.remedy}"
                )
            self.check(info)

    def begin(self) -> None:
        """Mark the paused server as incomplete, and open a weight-update session."""
        self.mark()
        self.routes.begin()
        self._in_session = True

    def finish(self, version: int) -> None:
        """End the session after every bucket was loaded, and label the weights. The server is paused until `resume`.

        Raises IncompleteUpdateError if the sender has not sent everything, InstallError if ranks have different
        weights.
        """
        if self._store:
            super().finish(version)
            return
        if not self.is_done:
            raise IncompleteUpdateError(
                f"{self.name} has not received every bucket of version {version}: publish again"
            )
        self._end_session()
        self.routes.require_alike(str(version))
        self.loaded(version)

    def resume(self, run: str) -> None:
        """End the session and resume the server, unless it has no whole version."""
        self._end_session()
        super().resume(run)

    def _end_session(self) -> None:
        if self._in_session:
            self.routes.end()
            self._in_session = False

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        return super().recovery_requests(run) if self._store else self.routes.restoring_requests(self.former)

    def close(self) -> None:
        """Have the server leave its group, and close the connections. Idempotent."""
        self.leave_group()
        super().close()

    def leave_group(self) -> None:
        """Have the server leave its group, if it still answers, and close the group."""
        group, self.group = self.group, None
        if group is not None:
            with contextlib.suppress(WeightcastError):
                self.routes.leave_group(group.name)
            group.close()
