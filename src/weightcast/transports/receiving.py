"""What the workers' ends of all transports have in common: the update that is wanted, its wait, what ends it.

Invariants: a bucket is handed out only in its turn, and only while the sender lives; what comes of a former update is
never taken for the present one. `end` and `close` may be called from any thread and wake an iteration that waits.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from weightcast.errors import ClosedError, ManifestError, PeerDiedError, PeerTimeoutError, UpdateAbortedError
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.seams.transport import Bucket, Receiver

PUBLISHER = "trainer"
CONNECT_SECONDS = 15.0


B = TypeVar("B")


@dataclasses.dataclass(slots=True, eq=False)
class WantedUpdate(Generic[B]):
    """An update that the worker waits for. `begun`: what the sender has begun of it. `is_whole`: all was iterated."""

    manifest: Manifest
    version: WeightVersion
    staged: bool
    begun: B | None = None
    num_taken: int = 0
    is_whole: bool = False
    aborted: str | None = None

    @property
    def num_buckets(self) -> int:
        return len(self.manifest.buckets)

    def check_begun(self, num_buckets: int, staged: bool) -> None:
        """Raises ManifestError unless what the sender has begun is what was offered."""
        found, expected = (num_buckets, staged), (self.num_buckets, self.staged)
        if found != expected:
            raise ManifestError(f"the publisher sends (buckets, staged) = {found}, the offer said {expected}")


W = TypeVar("W", bound=WantedUpdate[Any])
T = TypeVar("T")


class ReceivingEnd(Receiver, abc.ABC, Generic[W]):
    """Iterates, ends and closes. A transport says how it hears of buckets and how it releases them."""

    def __init__(self, run: str | None, deadline_seconds: float, condition: threading.Condition | None = None) -> None:
        """`run`: the only one to be received, or None for all. The condition guards all state and is notified."""
        self._run = run
        self._deadline_seconds = deadline_seconds
        self._condition = condition or threading.Condition()
        self._publisher = "the publisher"
        self._wanted: W | None = None
        self._ended = ""
        """Why the connection is of no more use."""
        self._heard_at = 0.0
        self._closed = False

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket in order, once."""
        with self._condition:
            self._require_open()
            wanted = self._wanted
        if wanted is None:
            raise UpdateAbortedError("no update is open: it was ended, or open() was not called")
        yield from self._buckets(wanted)
        wanted.is_whole = True

    def end(self) -> None:
        """Release every bucket and wake an iteration, which raises UpdateAbortedError. Idempotent, from any thread."""
        with self._condition:
            wanted, self._wanted = self._wanted, None
            if wanted is not None:
                self._leave(wanted)
                self._condition.notify_all()

    def close(self) -> None:
        """Disconnect; wakes an iteration, which raises ClosedError. Idempotent, from any thread."""
        with self._condition:
            if not self._closed:
                self._closed, self._wanted = True, None
                self._disconnect()
                self._condition.notify_all()

    # --- what a transport adds; but for `_release`, the caller holds the condition ---

    @abc.abstractmethod
    def _next_bucket(self, wanted: W) -> Bucket | None:
        """Bucket `wanted.num_taken`, if it is here."""

    def _release(self, wanted: W, index: int) -> None:
        """The bucket after `index` was asked for."""
        return

    @abc.abstractmethod
    def _leave(self, wanted: W) -> None:
        """The update has ended here, in whichever way."""

    @abc.abstractmethod
    def _disconnect(self) -> None: ...

    def _listen(self) -> None:
        """Take in what the sender has done by now, where no thread does. Does not wait."""
        return

    def _wait(self, wanted: W, seconds: float) -> None:
        """Let go of the condition until something happens, at most that long."""
        self._condition.wait(seconds)

    # --- for transports ---

    def _buckets(self, wanted: W) -> Iterator[Bucket]:
        find = functools.partial(self._next_bucket, wanted)
        while wanted.num_taken < wanted.num_buckets:
            with self._condition:
                bucket = self._await(wanted, find)
                wanted.num_taken += 1
            index = bucket.index
            yield bucket
            del bucket
            if index + 1 == wanted.num_buckets:
                with self._condition:
                    self._check_live(wanted)
            self._release(wanted, index)

    def _await(self, wanted: W, find: Callable[[], T | None]) -> T:
        """Wait until something is found. Raises whatever ends the update, PeerTimeoutError if nothing is heard."""
        start = time.monotonic()
        while True:
            self._check_live(wanted)
            found = find()
            if found is not None:
                return found
            patience = self._patience_seconds(wanted)
            remaining = max(start, self._heard_at) + patience - time.monotonic()
            if remaining <= 0:
                raise PeerTimeoutError(self._silence(wanted, patience), peer=PUBLISHER)
            self._wait(wanted, remaining)

    def _patience_seconds(self, wanted: W) -> float:
        """Before an update begins the sender may itself wait for somebody else, up to its deadline."""
        return self._deadline_seconds * (2 if wanted.begun is None else 1)

    def _silence(self, wanted: W, seconds: float) -> str:
        return f"nothing was heard of the publisher for {seconds:g} s"

    def _check_run(self, version: WeightVersion) -> None:
        if self._run is not None and version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this receiver of run {self._run}")

    def _check_live(self, wanted: W) -> None:
        """Raises if the update is over for any reason."""
        self._require_open()
        if self._wanted is not wanted:
            raise UpdateAbortedError(f"version {wanted.version.number} was ended on this side")
        self._listen()
        if wanted.aborted is not None:
            raise UpdateAbortedError(wanted.aborted)
        self._require_connection()

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this receiver was closed")

    def _require_connection(self) -> None:
        self._require_open()
        if self._ended:
            what = f"{self._publisher} has gone or dropped this receiver: {self._ended}"
            raise PeerDiedError(what, peer=PUBLISHER)
