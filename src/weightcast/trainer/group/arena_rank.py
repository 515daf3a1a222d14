"""Another trainer rank's arena: a sender for the workers on this rank's device, driven by the publishing rank.

Invariants: the sender's calls, which may wait for workers, are made in a thread of their own, one after the other, so
that this rank takes part in every exchange meanwhile and only says that it is busy; what goes wrong here is brought to
the next exchange, and so ends the publish on every rank; which worker reads which arena is for the worker to choose.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent import futures

import torch

from weightcast.errors import WeightcastError, to_record
from weightcast.format.manifest import Manifest, WeightVersion, decode
from weightcast.seams.transport import Sender
from weightcast.trainer.group.exchange import TrainerRanks
from weightcast.trainer.group.records import ConnectedPeers, LostPeers, Opening, RankStatus


class RankArena:
    """This rank's sender, and what it is busy with. One thread calls it.

    Memory: the sender's slots, of device memory on a GPU, and nothing besides: buckets arrive in their places.
    """

    def __init__(self, ranks: TrainerRanks, sender: Sender, *, run: str, device: torch.device, deadline_seconds: float):
        self.run = run
        self.device = device
        self.address = sender.address
        self._ranks = ranks
        self._sender = sender
        self._deadline_seconds = deadline_seconds
        self._pool = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightcast-arena")
        self._task: futures.Future[None] | None = None
        self._error: BaseException | None = None
        self._is_open = False
        self._failures: dict[str, WeightcastError] = {}
        self._num_buckets = 0
        self._buffer: torch.Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    # --- exchanges ---

    @property
    def error(self) -> BaseException | None:
        """What went wrong in the update in progress, once that has ended."""
        return self._error if self._is_open and not self._is_busy else None

    def status(self) -> RankStatus:
        """What this rank brings to an exchange. If it is not busy, its workers are given a sign of life."""
        if self._is_busy:
            return RankStatus(is_busy=True)
        self._failures = dict(self._sender.failures)
        return RankStatus(num_failures=len(self._failures))

    def wait(self) -> None:
        """Wait until this rank is not busy, at most for a quarter of the deadline: the others wait meanwhile."""
        if self._task is not None:
            futures.wait([self._task], self._deadline_seconds / 4)

    @property
    def _is_busy(self) -> bool:
        return self._task is not None and not self._task.done()

    # --- commands, given when no rank is busy ---

    def open(self, manifest: Manifest, data: bytes) -> None:
        """Say which peers are here, be told which of them to serve, and begin the update. Raises PeerError."""
        opening: Opening = decode(data, Opening)
        self._is_open, self._error, self._num_buckets = True, None, len(manifest.buckets)
        self._ranks.send_message(ConnectedPeers(tuple(self._sender.connected(opening.peers))), 0)
        peers: ConnectedPeers = self._ranks.receive_message(ConnectedPeers, 0)
        version = WeightVersion(self.run, opening.version)
        self._begin(functools.partial(self._open, manifest, version, peers.names, staged=opening.staged))

    def take(self, index: int) -> None:
        """Take bucket `index` from the publishing rank, and have it read."""
        self._begin(functools.partial(self._take, index))

    def announce_failures(self) -> None:
        """Raises PeerError."""
        self._ranks.send_message(LostPeers({name: to_record(error) for name, error in self._failures.items()}), 0)

    def abort(self, reason: str) -> None:
        """The publish has failed: end the update, after what is under way."""
        self._is_open = False
        self._begin(functools.partial(self._abort, reason))

    def close(self) -> None:
        """Free everything; waits for what is under way."""
        self._pool.shutdown(wait=True)
        self._buffer = None
        self._sender.close()

    # --- in the thread ---

    def _begin(self, call: Callable[[], None]) -> None:
        self._task = self._pool.submit(self._run, call)

    def _run(self, call: Callable[[], None]) -> None:
        try:
            with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
                call()
        except BaseException as exc:
            self._error = exc

    def _open(self, manifest: Manifest, version: WeightVersion, peers: tuple[str, ...], *, staged: bool) -> None:
        self._buffer = None
        self._sender.open(manifest, version, peers=peers, staged=staged)
        self._ready(0)

    def _take(self, index: int) -> None:
        buffer, self._buffer = self._buffer, None
        assert buffer is not None
        self._ranks.receive_bucket(buffer)
        self._sender.send(index)
        self._ready(index + 1)

    def _abort(self, reason: str) -> None:
        self._buffer = None
        self._sender.abort(reason)

    def _ready(self, index: int) -> None:
        """Wait already for the place of the next bucket, while it is being gathered."""
        if index < self._num_buckets:
            self._buffer = self._sender.buffer(index)
