"""A rollout worker's end: an `Engine` whose model a framework loads.

Invariants: the framework gets no tensor of a staged update before all rollout workers have received all of it; an
update that is aborted after that raises InstallError; every wait ends by its deadline, and when the trainer is lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterable, Iterator

import torch

from weightcast.engines.gate import Gate
from weightcast.errors import (
    InstallError,
    PeerDiedError,
    PeerTimeoutError,
    StaleVersionError,
    UpdateAbortedError,
    WeightcastError,
    from_record,
    to_record,
)
from weightcast.format.manifest import WeightVersion
from weightcast.host import device as host_device
from weightcast.host.deadline import GRACE_SECONDS, POLL_SECONDS, Deadline
from weightcast.integrations.handed import Named
from weightcast.integrations.rollout.threads import in_thread
from weightcast.serving.worker import Worker


class RolloutEngine:
    """An `Engine` whose `load` passes the tensors to the framework, for which `receive` yields them.

    `load` waits until the framework has read every tensor, for at most `deadline_seconds` per batch. The worker's
    threads call it; call `expect` and `receive` from the thread of the framework's event loop.
    """

    def __init__(
        self, *, device: torch.device, deadline_seconds: float, batch_bytes: int = 0, deadline_option: str
    ) -> None:
        """`batch_bytes`: smallest size of a batch, except the last; 0: one tensor each. `deadline_option`: name of the
        option that sets `deadline_seconds`, for errors.
        """
        self.devices = [device]
        self._device = device
        self._batch_bytes, self._deadline_option = batch_bytes, deadline_option
        self.worker = RolloutWorker(self, gate=Gate(), install_deadline_seconds=deadline_seconds)
        self._deadline_seconds = deadline_seconds
        self._condition = threading.Condition()
        self._tensors: Iterable[Named] | None = None
        """The tensors that the framework must load now; None between loads."""
        self._error: WeightcastError | None = None
        """The error for which the last offered update was not installed."""
        self._is_offered = False
        self._is_committed = False
        self._expected: int | None = None
        self._progress_at = 0.0

    # --- the worker's calls ---

    def specs(self) -> None:
        """Note that a version is offered. Returns None, since only the framework's loader knows its tensors."""
        self._change(offered=True)

    def load(self, tensors: Iterable[Named]) -> None:
        """Pass the tensors to the framework. Raises PeerTimeoutError, or the error with which the update was aborted.

        On a GPU the framework uses another stream than the worker: each waits for the other's queued work.
        """
        host_device.synchronize_stream(self._device)
        with self._condition:
            self._tensors, self._progress_at = tensors, time.monotonic()
            self._condition.notify_all()
            while self._error is None and self._tensors is not None:
                remaining_seconds = self._progress_at + self._deadline_seconds - time.monotonic()
                if remaining_seconds <= 0:
                    self._tensors = None
                    raise PeerTimeoutError(
                        f"the rollout read no tensor for {self._deadline_seconds:g} s; if its loading takes longer, "
                        f"set a larger {self._deadline_option}"
                    )
                self._condition.wait(remaining_seconds)
            if self._error is not None:
                raise from_record(to_record(self._error))

    def commit(self, version: WeightVersion) -> None:
        """Complete the update. Raises StaleVersionError if the framework expects another step."""
        if self._expected is not None and self._expected != version.number:
            raise StaleVersionError(
                f"version {version.number} was sent, but the rollout expects step {self._expected}: start both from "
                "the same step"
            )
        self._change(committed=True)

    def discard(self) -> None:
        if self._is_offered:
            self._change(error=self.worker.failure or UpdateAbortedError("the update was aborted"))

    def give_up(self, error: WeightcastError) -> None:
        """Fail `receive` with this error, unless the version is complete or the update has failed already."""
        if not self._is_committed:
            self._change(error=self._error or error)

    def cancel(self) -> None:
        """Fail `receive`, since the framework no longer waits for the update."""
        self.give_up(UpdateAbortedError("the rollout's task was cancelled while it waited"))

    def _change(self, *, offered: bool = True, committed: bool = False, error: WeightcastError | None = None) -> None:
        with self._condition:
            self._is_offered, self._is_committed, self._error = offered, committed, error
            if not committed:
                self._tensors = None
            self._condition.notify_all()

    # --- the framework's calls ---

    def expect(self) -> None:
        """Forget the former update."""
        self._change(offered=False)

    def receive(self, number: int | None) -> AsyncIterator[list[Named]]:
        """Return the tensors of the next update in batches, each valid until the next is requested.

        Waits until all have arrived (streaming: those of the first bucket). If this call raises, nothing was loaded; it
        raises the error with which the update was aborted, PeerDiedError, or PeerTimeoutError if nothing is offered by
        the deadline. The iteration, during which a part of the version may have been loaded, raises InstallError.
        """
        self._expected = number
        first = self._next()
        assert first is not None, "an update has at least one bucket"
        return self._batches_from(first)

    async def _batches_from(self, tensors: Iterable[Named] | None) -> AsyncIterator[list[Named]]:
        try:
            while tensors is not None:
                for batch in self._batches(tensors):
                    if self._tensors is None:
                        raise UpdateAbortedError("the update was aborted while the rollout was reading its tensors")
                    self._progress_at = time.monotonic()
                    yield batch
                host_device.synchronize(self._device)
                with self._condition:
                    self._tensors = None
                    self._condition.notify_all()
                tensors = await in_thread(self._next, on_cancel=self.cancel)
        except WeightcastError as exc:
            raise InstallError(f"the rollout holds parts of two versions: {exc}", torn=True) from exc
        finally:
            self.give_up(InstallError("the rollout failed while it took the weights"))

    def _batches(self, tensors: Iterable[Named]) -> Iterator[list[Named]]:
        batch: list[Named] = []
        num_bytes = 0
        for name, tensor in tensors:
            batch.append((name, tensor if tensor.device == self._device else tensor.to(self._device)))
            num_bytes += tensor.nbytes
            if num_bytes >= self._batch_bytes:
                yield batch
                batch, num_bytes = [], 0
        if batch:
            yield batch

    def _next(self) -> Iterable[Named] | None:
        """Wait for what is to be loaded; None once the version is installed."""
        deadline, rejoin = Deadline(self._deadline_seconds), None
        with self._condition:
            while self._tensors is None and not self._is_committed:
                if self._error is not None:
                    raise from_record(to_record(self._error))
                if self.worker.info().holder:
                    # A trainer that has closed its publisher may connect with another one.
                    rejoin = Deadline(2 * GRACE_SECONDS)
                elif rejoin is not None and rejoin.has_passed:
                    raise PeerDiedError("the trainer's connection ended before all weights were sent", peer="trainer")
                if not self._is_offered and deadline.has_passed:
                    raise PeerTimeoutError(
                        f"the trainer offered no weights within {self._deadline_seconds:g} s; if it exports them for "
                        "longer than that (the first time: all of them), set a larger "
                        f"{self._deadline_option}",
                        peer="trainer",
                    )
                self._condition.wait(POLL_SECONDS)
            return None if self._is_committed else self._tensors


class RolloutWorker(Worker):
    """A worker that notifies its engine when a trainer ends the transfer, whether it had begun or not."""

    engine: RolloutEngine

    def shutdown(self) -> None:
        super().shutdown()
        self.engine.give_up(UpdateAbortedError("the trainer aborted the update: see its error"))
