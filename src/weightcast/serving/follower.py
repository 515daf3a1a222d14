"""Follows a store: the newest version, whole and checked, into an engine of this process; no publisher is asked.

Invariants: every version is taken once, older ones that were missed never; the engine is touched only after every byte
was checked, and serves the former version whatever is wrong with a newer one. An `Update` installs each version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Literal

import msgspec
import torch

from weightcast import registry
from weightcast.engines.gate import Gate
from weightcast.errors import PeerTimeoutError, WeightcastError
from weightcast.format.manifest import WeightVersion
from weightcast.format.messages import Offer, Seal
from weightcast.host.closing import ClosedOnExit
from weightcast.host.deadline import MAX_SECONDS, Deadline, number_of_seconds
from weightcast.seams.engine import Engine
from weightcast.seams.versions import StoredVersion
from weightcast.serving.admission import admit, check_undo, require_engine
from weightcast.serving.install import Install
from weightcast.serving.update import Update

OnError = Literal["raise", "skip"]
logger = logging.getLogger(__name__)


class Followed(msgspec.Struct, frozen=True):
    """A version that the engine serves now.

    `seconds`: from finding it until it served; `install_seconds`: how long the engine was paused; `lag_seconds`: from
    its commit until it served, by the clocks of both hosts.
    """

    version: int
    run: str
    num_bytes: int
    seconds: float
    install_seconds: float
    lag_seconds: float


class Follower(ClosedOnExit):
    """Takes versions from a store into one engine. Calls come from one thread at a time; `close` from any.

    Host memory, kept between versions: one version in each process that follows; with `undo` a copy of the live
    weights during an install.
    """

    def __init__(
        self,
        url: str,
        engine: Engine,
        *,
        gate: Gate | None = None,
        undo: bool = False,
        on_error: OnError = "raise",
        label: str = "follower",
        install_deadline_seconds: float = 60.0,
    ) -> None:
        """The store need not be there yet. `gate`: what generation's steps go through; default: nothing generates.

        `on_error="skip"`: a version that can't be read or installed is logged, and left for the next one. `label`:
        what a publisher that waits for this reader calls it. Raises ValueError if `url` is of no store,
        TypeError for what is no engine.
        """
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error is {on_error!r}; it must be 'raise' or 'skip'")
        require_engine(engine)
        transport = registry.transport(url)
        if not transport.keeps_versions:
            raise ValueError(f"{url} keeps no versions to follow: give a store, file:///dir")
        self.gate = gate or Gate()
        self._url = url
        self._engine = engine
        # Versions are staged, in host memory.
        device, deadline_seconds = torch.device("cpu"), install_deadline_seconds
        self._receiver = transport.receiver(
            url, run="", peer=label, link=None, device=device, deadline_seconds=deadline_seconds
        )
        self._undo = undo
        self._on_error = on_error
        self._install_deadline_seconds = install_deadline_seconds
        self._seen: WeightVersion | None = None
        self._install: Install | None = None
        self._num_bytes = 0

    def poll(self) -> Followed | None:
        """Take the newest version, if it is not the last one that was taken. Waits for no publisher.

        Raises, with `on_error="raise"` and for the same version again when asked again: IntegrityError,
        IncompatibleWeightsError, InsufficientMemoryError, InstallError.
        """
        try:
            start, kept = time.perf_counter(), self._receiver.newest(self._seen)
            if kept is None:
                return None
            if self._on_error == "skip":
                self._seen = kept.version
            try:
                install_seconds = self._install_version(kept)
            finally:
                self._receiver.end()
        except WeightcastError as exc:
            if self._on_error == "raise":
                raise
            logger.warning("a version of %s was left out: %s", self._url, exc)
            return None
        self._seen = kept.version
        return Followed(
            kept.version.number,
            kept.version.run,
            num_bytes=self._num_bytes,
            seconds=time.perf_counter() - start,
            install_seconds=install_seconds,
            lag_seconds=max(0.0, time.time() - kept.committed_at),
        )

    def wait(self, timeout_seconds: float, *, stop: threading.Event | None = None) -> Followed | None:
        """Poll until there is news; None after the timeout (0: one poll), or soon after `stop` was set."""
        stop = stop or threading.Event()
        if timeout_seconds != 0:
            number_of_seconds("timeout_seconds", timeout_seconds)
        for _ in Deadline(timeout_seconds).polls(max_pause_seconds=0.25, wait=stop.wait):
            followed = None if stop.is_set() else self.poll()
            if followed is not None or stop.is_set():
                return followed
        return None

    def close(self) -> None:
        """Close the store; a poll that is under way fails. Idempotent, from any thread."""
        self._receiver.close()
        if self._install is not None:
            self._install.forget_views()

    def _install_version(self, kept: StoredVersion) -> float:
        version, manifest, specs = kept.version, kept.manifest, self._engine.specs()
        install, digest = self._install, kept.manifest_digest
        if install is None or install.manifest_digest != digest or install.specs is not specs or not install.is_current:
            install = self._install = admit(manifest, digest, self._engine, specs)
            self._num_bytes = manifest.num_bytes
        if self._undo:
            check_undo(manifest, self._engine)
        update = Update(
            Offer(version.run, version.number, digest, undo=self._undo),
            install,
            receiver=self._receiver,
            gate=self.gate,
            deadline_seconds=self._install_deadline_seconds,
        )
        with update.aborted_on_failure():
            update.open()
            update.receive()
            update.seal(Seal(version.run, version.number, len(manifest.buckets), kept.root))
            seconds = update.install()
        logger.info("%s", update.describe(seconds))
        return seconds


def follow(
    url: str,
    engine: Engine,
    *,
    gate: Gate | None = None,
    undo: bool = False,
    on_error: OnError = "raise",
    label: str = "follower",
    deadline_seconds: float | None = None,
    install_deadline_seconds: float = 60.0,
    stop: threading.Event | None = None,
) -> Iterator[Followed]:
    """Every version that comes into a store, as it is installed; ends when `stop` is set.

    A late joiner begins with the newest. `deadline_seconds`: raise PeerTimeoutError if nothing new comes for so long;
    None: wait for as long as it takes. Other arguments and errors as of `Follower`.
    """
    stop = stop or threading.Event()
    timeout_seconds = float(MAX_SECONDS)
    if deadline_seconds is not None:
        timeout_seconds = number_of_seconds("deadline_seconds", deadline_seconds)
    follower = Follower(
        url,
        engine,
        gate=gate,
        undo=undo,
        on_error=on_error,
        label=label,
        install_deadline_seconds=install_deadline_seconds,
    )
    with follower:
        while not stop.is_set():
            followed = follower.wait(timeout_seconds, stop=stop)
            if followed is not None:
                yield followed
            elif deadline_seconds is not None and not stop.is_set():
                raise PeerTimeoutError(f"nothing new came into {url} for {timeout_seconds:g} s", peer="trainer")
