"""The sender for stock SGLang servers: fills flattened buckets and sends each to all servers by a route.

Invariants: one bucket is sent while the next one is filled, and no bucket is filled while it is sent; a server is
marked as incomplete before its first bucket is sent; a server that fails is dropped, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from weightcast import registry
from weightcast.errors import ClosedError, UnsupportedError, UpdateAbortedError, WeightcastError, from_record, to_record
from weightcast.format.bucket import BucketBuffer, slot_size_bytes
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import device as host_device
from weightcast.host.memory import SharedMemory
from weightcast.integrations.sglang.stock.buckets import FlatBuckets
from weightcast.integrations.sglang.stock.route_distributed import DistributedRoute
from weightcast.integrations.sglang.stock.route_tensor import TensorRoute
from weightcast.integrations.sglang.stock.server import MAX_PARALLEL, SglangStockServer
from weightcast.seams.client import ClientSender, SenderContext
from weightcast.seams.transport import Sender

_ROUTES: Mapping[str, type[DistributedRoute | TensorRoute]] = {
    "gloo": DistributedRoute,
    "nccl": DistributedRoute,
    "ipc": TensorRoute,
}


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
        self._current = -1
        self._is_open = False
        self._closed = False

    @classmethod
    def joined(cls, server: SglangStockServer, known: Sequence[ClientSender], context: SenderContext) -> StockSender:
        """Return the one sender for all stock servers of a publisher; `server` replaces a former one of its name."""
        sender = next((other for other in known if isinstance(other, cls)), None) or cls(context)
        former = sender._by_name.get(server.name)
        if former is not None and former is not server:
            former.leave_group()
        sender._by_name[server.name] = server
        return sender

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        return dict(self._failures)

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
        for call in (self._route.open, SglangStockServer.begin):
            self._begin(call)
            self._land()
        self._current, self._is_open = -1, True
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
        if number < 0:
            return
        flat, _ = self._require_open()
        device = self._route.device
        queued = host_device.recorded(device) if device.type == "cuda" else None
        places, bucket, is_last = flat.places[number], flat.bucket(number), number + 1 == len(flat.places)

        def ship(server: SglangStockServer) -> None:
            if queued is not None:
                queued.synchronize()
            self._route.ship(server, places, bucket, is_last=is_last)

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
                server.leave_group()
            elif server.group is not None:
                server.group.close()
        self._route.close()
        self._pool.shutdown()
        self._flat = self._buffer = None

    def _require_open(self) -> tuple[FlatBuckets, BucketBuffer]:
        if not self._is_open or self._flat is None or self._buffer is None:
            raise UpdateAbortedError("no update is open: it was aborted, or open() was not called; publish again")
        return self._flat, self._buffer
