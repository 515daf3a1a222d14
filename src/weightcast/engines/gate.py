"""Gate between generation and installs: generation runs in steps, an install runs only between two steps.

Invariants: no step runs while the gate is paused, torn or held for an install; `exclusive` waits until a running step
has ended, and raises in a thread that is in a step; a run's pause ends with that run's session (`resume`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from weightcast.errors import ClosedError, EngineTornError, PeerTimeoutError
from weightcast.format.manifest import WeightVersion
from weightcast.host.deadline import Deadline

Drain = Callable[[str, float], None]
_threads_in_steps: list[int] = []
"""The threads of the running steps, of every gate of this process."""


def require_no_step(what: str) -> None:
    """Raise ValueError if this thread is in a step of any gate: `what` would wait for the end of that step."""
    if threading.get_ident() in _threads_in_steps:
        raise ValueError(
            f"{what} was called inside `with step():` of this thread, and waits until that step has ended: "
            "call it after the `with` block"
        )


class Gate:
    """Lets an install run only between steps of generation; one per engine process. Thread-safe."""

    def __init__(self) -> None:
        self.drain: Drain | None = None
        """`drain(mode, deadline_seconds)` is called by `pause` for "wait" or "abort", before the gate closes."""
        self._condition = threading.Condition()
        self._owners: set[str] = set()
        self._writers: set[str] = set()
        self._num_drains = 0
        self._step_threads: list[int] = []
        self._exclusive = False
        self._is_closed = False
        self.torn = ""
        """Reason why the engine must not serve, or empty; set by `tear`."""
        self.version: WeightVersion | None = None
        """The version that the engine serves, set by `set_version`; None before the first update."""

    @property
    def is_paused(self) -> bool:
        return bool(self._owners or self._writers)

    @property
    def is_writing(self) -> bool:
        """True while an update writes into the model part by part."""
        return bool(self._writers)

    @property
    def is_draining(self) -> bool:
        """True during a pause with "wait" or "abort": begin no new request."""
        return self._num_drains > 0

    @property
    def is_open(self) -> bool:
        """True if a step could begin now."""
        return not (self.is_paused or self._exclusive or self.torn)

    @contextlib.contextmanager
    def step(self, *, timeout_seconds: float | None = None) -> Iterator[WeightVersion | None]:
        """Run one step of generation under one version. No install happens during the block.

        Waits while the gate is paused, and while the engine is torn, until a complete update. Raises ClosedError if the
        gate is closed, so that the wait can't end; after `timeout_seconds` EngineTornError if the engine is torn, else
        PeerTimeoutError.
        """
        with self._condition:
            self._condition.wait_for(lambda: self.is_open or self._is_closed, timeout_seconds)
            if not self.is_open:
                if self._is_closed:
                    state = f"torn ({self.torn})" if self.torn else "paused"
                    raise ClosedError(f"the engine was closed while it was {state}, so no update can come any more")
                if self.torn:
                    raise EngineTornError(self.torn)
                raise PeerTimeoutError(
                    f"the engine was still paused after {timeout_seconds:g} s: try again, or resume it", peer="engine"
                )
            thread = threading.get_ident()
            self._step_threads.append(thread)
            _threads_in_steps.append(thread)
        try:
            yield self.version
        finally:
            _threads_in_steps.remove(thread)
            with self._condition:
                self._step_threads.remove(thread)
                self._condition.notify_all()

    def close(self) -> None:
        """End every wait: steps that wait, or would have to wait, raise ClosedError from now on. Idempotent."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def pause(self, mode: str = "keep", *, owner: str = "", deadline_seconds: float = 60.0) -> None:
        """Close the gate. "keep": after the current step; "wait": after the running requests; "abort": end these first.

        `owner`: the run that pauses, or empty for a person, whose pause only `resume()` ends. Idempotent per owner.
        Raises PeerTimeoutError, with the gate unchanged, if it can't be paused by the deadline; ValueError inside a
        step of this thread.
        """
        if mode == "keep" or self.drain is None:
            self._add_owner(self._owners, owner, deadline_seconds)
            return
        deadline = Deadline(deadline_seconds)
        with self._condition:
            self._num_drains += 1
        try:
            self.drain(mode, deadline_seconds)
            self._add_owner(self._owners, owner, deadline.remaining_seconds)
        finally:
            with self._condition:
                self._num_drains -= 1
                self._condition.notify_all()

    def _add_owner(self, holders: set[str], name: str, seconds: float) -> None:
        if threading.get_ident() in self._step_threads:
            require_no_step("a pause")
        with self._condition:
            was_holder = name in holders
            holders.add(name)
            if not self._condition.wait_for(lambda: not self._step_threads, seconds):
                if not was_holder:
                    holders.discard(name)
                    self._condition.notify_all()
                raise PeerTimeoutError(
                    "the current step of generation did not end by the deadline: use a longer one", peer="engine"
                )
            holders.add(name)  # added again: another pause of this owner that timed out may have removed it

    def resume(self, *, owner: str = "") -> None:
        """End the pause of `owner`; a person's resume (empty) ends all pauses, but no `begin_writing`. Idempotent."""
        with self._condition:
            if owner:
                self._owners.discard(owner)
            else:
                self._owners.clear()
            self._condition.notify_all()

    def begin_writing(self, writer: str, *, deadline_seconds: float = 60.0) -> None:
        """Let no step begin while a streaming update writes into the model; only its own `end_writing` ends that.

        Raises PeerTimeoutError, with nothing changed, if the current step does not end by the deadline.
        """
        self._add_owner(self._writers, writer, deadline_seconds)

    def end_writing(self, writer: str) -> None:
        """End the update's writing, after success or failure. Idempotent."""
        with self._condition:
            self._writers.discard(writer)
            self._condition.notify_all()

    @contextlib.contextmanager
    def exclusive(self, *, deadline_seconds: float = 60.0) -> Iterator[None]:
        """Run an install, or a read of all weights, while no step runs. Steps wait for the end of the block.

        Raises PeerTimeoutError if a step or another exclusive block does not end by the deadline, ValueError inside a
        step of this thread.
        """
        if threading.get_ident() in self._step_threads:
            require_no_step("an install")
        deadline = Deadline(deadline_seconds)
        with self._condition:
            if not self._condition.wait_for(lambda: not self._exclusive, deadline_seconds):
                raise PeerTimeoutError("another install did not end by the deadline: use a longer one", peer="engine")
            self._exclusive = True
        try:
            with self._condition:
                if not self._condition.wait_for(lambda: not self._step_threads, deadline.remaining_seconds):
                    raise PeerTimeoutError(
                        "the current step of generation did not end by the deadline: use a longer one", peer="engine"
                    )
            yield
        finally:
            with self._condition:
                self._exclusive = False
                self._condition.notify_all()

    def set_version(self, version: WeightVersion | None) -> None:
        """Note that a whole version is installed: it is served from the next step on, and the engine is not torn.

        None: the engine has again the weights from before the first update.
        """
        with self._condition:
            self.version, self.torn = version, ""
            self._condition.notify_all()

    def tear(self, reason: str) -> None:
        """Note that the engine has parts of two versions: let no step begin until `set_version`."""
        with self._condition:
            self.torn = reason
            self._condition.notify_all()
