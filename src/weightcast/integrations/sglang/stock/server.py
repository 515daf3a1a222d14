"""Client of stock SGLang servers, without weightcast's plugin, and the one sender for all of them: they use only the
servers' own routes.

Over `file://` a server loads a directory, like any stock server. Otherwise the client provides the sender, and the
server is paused for the whole transfer. The client makes the checks that stock SGLang lacks: SGLang ignores unknown
names, does not notice missing ones, and may end its process upon a wrong shape.

Invariants: only tensors with the names and shapes of the server's checkpoint are sent; before the first byte the server
is labelled as incomplete, so that no answer has the label of an incomplete version, even if another client resumes the
server; the server gets a version's label only after every bucket was loaded and the session has ended; a server without
a whole version is not resumed, until the next complete update. One bucket is sent while the next one is filled, and no
bucket is filled while it is sent; a server that fails is dropped, and the others go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from weightcast import registry
from weightcast.errors import (
    ClosedError,
    IncompleteUpdateError,
    UnsupportedError,
    UpdateAbortedError,
    WeightcastError,
    from_record,
    to_record,
)
from weightcast.format.bucket import BucketBuffer, slot_size_bytes
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.format.messages import InitInfo, Offer, UpdateInfo
from weightcast.host import device as host_device
from weightcast.host.memory import SharedMemory
from weightcast.integrations.sglang.stock.buckets import FlatBuckets
from weightcast.integrations.sglang.stock.route_distributed import DistributedRoute
from weightcast.integrations.sglang.stock.route_tensor import TensorRoute
from weightcast.integrations.sglang.stock.routes import MAX_PARALLEL, SglangRoutes
from weightcast.integrations.stock_directory import StockServer
from weightcast.links.watchdog import RecoveryRequest
from weightcast.seams.client import ClientSender, SenderContext
from weightcast.seams.transport import Sender

_ROUTES: Mapping[str, type[DistributedRoute | TensorRoute]] = {
    "gloo": DistributedRoute,
    "nccl": DistributedRoute,
    "ipc": TensorRoute,
}
logger = logging.getLogger(__name__)


class SglangStockServer(StockServer):
    """Client of one stock server. All such clients of a publisher share one sender."""

    abilities = ("adapters", "streaming")
    api: SglangRoutes

    def __init__(self, api: SglangRoutes) -> None:
        super().__init__(api)
        self.is_done = False
        """True once the sender has sent every bucket of the update in progress."""
        self._in_session = False
        logger.warning(
            "%s is stock SGLang: each update pauses it for the whole transfer, and can't be undone. To pause it only "
            "for the install, %s",
            self.name,
            api.remedy,
        )

    def init(self, info: InitInfo) -> None:
        """Begin a session. Stock SGLang has no sessions, so a second publisher of the server is not detected."""
        self._run, self._store = info.run, ""
        if registry.is_stored(info.transport):
            super().init(info)

    def sender(self, known: Sequence[ClientSender], context: SenderContext) -> ClientSender | None:
        if self._store:
            return None
        sender = next((other for other in known if isinstance(other, StockSender)), None) or StockSender(context)
        sender.add(self)
        return sender

    def update(self, info: UpdateInfo) -> None:
        """Check an offer. Without a store, nothing is sent to the server, also not for seals and aborts."""
        if self._store:
            super().update(info)
        elif isinstance(info, Offer):
            self.is_done = False
            if info.target:
                raise UnsupportedError(
                    f"{self.name} is stock SGLang, which loads adapters from a directory: publish with "
                    f"transport='file:///dir', a directory that the server sees too; or {self.api.remedy}"
                )
            self.check(info)

    def begin(self) -> None:
        """Mark the paused server as incomplete, and open a weight-update session."""
        self.mark()
        self.api.begin()
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
        self.api.require_alike(str(version))
        self.loaded(version)

    def resume(self, run: str) -> None:
        """End the session and resume the server, unless it has no whole version."""
        self._end_session()
        super().resume(run)

    def _end_session(self) -> None:
        if self._in_session:
            self.api.end()
            self._in_session = False

    def recovery_requests(self, run: str) -> list[RecoveryRequest]:
        return super().recovery_requests(run) if self._store else self.api.restoring_requests(self.former)

    def close(self) -> None:
        """Have the server leave its group, and close the connections. Idempotent."""
        self.api.leave_group()
        super().close()


class StockSender(Sender):
    """A `ClientSender`. Memory: one of the publisher's buckets, two flattened ones."""

    def __init__(self, context: SenderContext) -> None:
        """Raise UnsupportedError for a transport without an SGLang route."""
        scheme = registry.scheme(context.url)
        if scheme not in _ROUTES:
            raise UnsupportedError(
                f"stock SGLang can't receive weights over {scheme}://: use file, {', '.join(_ROUTES)}"
            )
        self.address = context.url
        self._has_several_ranks = context.has_several_ranks
        self._route = _ROUTES[scheme](context)
        self.is_staged = False
        self._by_name: dict[str, SglangStockServer] = {}
        self._pool = ThreadPoolExecutor(max_workers=MAX_PARALLEL, thread_name_prefix="weightcast-sglang")
        self._living: list[SglangStockServer] = []
        """Servers that take part in the update."""
        self._failures: dict[str, WeightcastError] = {}
        self._flat: FlatBuckets | None = None
        self._buffer: BucketBuffer | None = None
        self._flight: list[tuple[Future[object], SglangStockServer]] = []
        """The servers' calls for the bucket that is being sent."""
        self._current = 0
        """The flattened bucket that is being filled."""
        self._is_open = False
        self._closed = False

    def add(self, server: SglangStockServer) -> None:
        """Send to this server, too; it replaces a former one of its name."""
        former = self._by_name.get(server.name)
        if former is not None and former is not server:
            former.api.leave_group()
        self._by_name[server.name] = server

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        return self._failures

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Begin an update: open sessions, and mark the servers, which are paused, as incomplete."""
        if self._closed:
            raise ClosedError("this sender was closed: make another publisher")
        self.abort("the publisher began another update")
        self._living, self._failures = [self._by_name[name] for name in peers], {}
        names = frozenset(name for server in self._living for name in server.wanted_names)
        if self._flat is None or (self._flat.manifest, self._flat.names) != (manifest, names):
            self._flat = self._buffer = None
            size_bytes, device = slot_size_bytes(manifest), self._route.device
            if self._has_several_ranks:
                memory = SharedMemory.make(size_bytes, "a bucket for SGLang").map().tensor()
            else:
                memory = host_device.empty(size_bytes, device, "a bucket for SGLang", "use smaller buckets")
            self._buffer = BucketBuffer.of(memory)
            self._flat = FlatBuckets(manifest, names, self._route.allocate)
        self._begin(lambda server: self._route.open(server.api))
        self._land()
        self._begin(SglangStockServer.begin)
        self._land()
        self._current, self._is_open = 0, True
        return 0

    def buffer(self, index: int) -> BucketBuffer:
        """Return the buffer for the publisher's bucket; one serves for all buckets, since `send` copies from it."""
        return self._require_open()[1]

    def send(self, index: int, num_bytes: int) -> None:
        """Copy the bucket into flattened ones, and send those that are full. The last call waits for every server."""
        flat, buffer = self._require_open()
        for number in flat.parts[index]:
            while self._current < number:
                self._ship(self._current)
                self._current += 1
            flat.fill(number, index, buffer.payload)
        if index + 1 == len(flat.parts):
            for number in range(self._current, len(flat.places)):
                self._ship(number)
            self._land()
            for server in self._living:
                server.is_done = True

    def _ship(self, number: int) -> None:
        """Send a flattened bucket, after the former one has arrived."""
        self._land()
        flat, _ = self._require_open()
        device = self._route.device
        queued = host_device.recorded(device) if device.type == "cuda" else None
        places, bucket, is_last = flat.places[number], flat.bucket(number), number + 1 == len(flat.places)

        def ship(server: SglangStockServer) -> None:
            if queued is not None:
                queued.synchronize()
            self._route.ship(server.api, places, bucket, is_last=is_last)

        self._begin(ship)

    def _begin(self, call: Callable[[SglangStockServer], object]) -> None:
        self._flight = [(self._pool.submit(call, server), server) for server in self._living]

    def _land(self) -> None:
        """Wait for the calls in progress; a server that fails is dropped."""
        flight, self._flight = self._flight, []
        for future, server in flight:
            error = future.exception()
            if error is not None:
                self._failures[server.name] = from_record(to_record(error))
                self._living = [other for other in self._living if other is not server]

    def connected(self, peers: Sequence[str]) -> list[str]:
        """Return the peers that were added. Stock servers connect for each update."""
        return [name for name in peers if name in self._by_name]

    def abort(self, reason: str) -> None:
        """Send no further bucket; one that is being sent arrives. Idempotent."""
        self._is_open = False
        self._land()

    def close(self) -> None:
        """Have the servers leave their groups, and free everything. Idempotent."""
        if self._closed:
            return
        self.abort("the publisher was closed")
        self._closed = True
        for server in self._by_name.values():
            if server in self._living:
                server.api.leave_group()
            elif server.api.group is not None:
                server.api.group.close()
        self._route.close()
        self._pool.shutdown()
        self._flat = self._buffer = None

    def _require_open(self) -> tuple[FlatBuckets, BucketBuffer]:
        if not self._is_open or self._flat is None or self._buffer is None:
            raise UpdateAbortedError("no update is open: it was aborted, or open() was not called; publish again")
        return self._flat, self._buffer
