"""Follower of a store: installs the newest version into an engine of this process, without contacting a publisher.

Invariants: every version is installed at most once, and older versions that were missed never; the engine is changed
only after every byte was checked, and serves the former version if the newer one is bad. An `Update` installs each
version.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

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

OnFailure = Literal["raise", "report"]
logger = logging.getLogger(__name__)


class Followed(msgspec.Struct, frozen=True):
    """A version that the engine now serves.

    `seconds`: time from finding it until the engine served it. `install_seconds`: pause of the engine. `lag_seconds`:
    time from its commit until the engine served it, by the clocks of both hosts.
    """

    version: int
    run: str
    num_bytes: int
    seconds: float
    install_seconds: float
    lag_seconds: float


@runtime_checkable
class PassesOn(Protocol):
    """An engine that passes versions on to others; its `commit` returns once one of them has installed the version.

    It keeps the tensors for `catch_up` until `discard`, so that the version is not read again.
    """

    def require_all(self) -> object:
        """Raise WeightcastError that names the engines that did not install the last version."""

    def catch_up(self) -> object:
        """Send the last version to these engines. Raises WeightcastError that names those that fail again."""


class Follower(ClosedOnExit):
    """Installs versions from a store into one engine. Call it from one thread at a time; `close` from any.

    Host memory, kept between versions: one version in each following process; with `undo` also a copy of the live
    weights during an install.
    """

    def __init__(
        self,
        url: str,
        engine: Engine,
        *,
        gate: Gate | None = None,
        undo: bool = False,
        on_failure: OnFailure = "raise",
        label: str = "follower",
        install_deadline_seconds: float = 60.0,
    ) -> None:
        """Create a follower. The store may not exist yet. `gate`: the gate that generation's steps enter, if any.

        `on_failure`: if a version can't be read or installed, "raise" raises the error, "report" logs a warning and
        waits for the next version. `label`: name of this reader in the publisher's messages. Raises ValueError if `url`
        is not a store's, TypeError if `engine` is not an engine.
        """
        if on_failure not in ("raise", "report"):
            raise ValueError(f"on_failure is {on_failure!r}; it must be 'raise' or 'report'")
        require_engine(engine)
        transport = registry.readable_transport(url)
        if not transport.keeps_versions:
            raise ValueError(f"{url} keeps no versions to follow: give the URL of a store, file:///DIR")
        self.gate = gate or Gate()
        self._url = url
        self._engine = engine
        # Versions are staged in host memory, also for an engine on a GPU.
        device, deadline_seconds = torch.device("cpu"), install_deadline_seconds
        self._receiver = transport.receiver(
            url, run="", peer=label, link=None, device=device, deadline_seconds=deadline_seconds
        )
        self._undo = undo
        self._on_failure = on_failure
        self._install_deadline_seconds = install_deadline_seconds
        self._seen: WeightVersion | None = None
        self._relay = engine if isinstance(engine, PassesOn) else None
        self._partial: StoredVersion | None = None
        """A version that some of the relay's engines have not installed yet."""
        self._install: Install | None = None

    def poll(self) -> Followed | None:
        """Install the newest version, if it is newer than the last one that was read; return None if there is none.

        Does not wait for a publisher. With `on_failure="raise"`, raises IntegrityError, IncompatibleWeightsError,
        InsufficientMemoryError or InstallError, also at the next call for the same version. If some of a relay's
        engines lack a version, raises the relay's error; the next call sends it to these without reading it again.
        """
        try:
            start, kept = time.perf_counter(), self._receiver.newest(self._seen)
            if kept is not None:
                if self._partial is not None:
                    # The memory of its tensors gets the newer version's.
                    self._partial = None
                    self._engine.discard()
                if self._on_failure == "report":
                    self._seen = kept.version
                try:
                    install_seconds = self._install_version(kept)
                finally:
                    self._receiver.end()
                self._seen = kept.version
                if self._relay is not None:
                    self._partial = kept if self._on_failure == "raise" else None
                    self._relay.require_all()
            elif self._relay is not None and self._partial is not None:
                kept = self._partial
                self._relay.catch_up()
                install_seconds = time.perf_counter() - start
            else:
                return None
            self._partial = None
        except WeightcastError as exc:
            if self._on_failure == "raise":
                raise
            logger.warning("a version of %s was not installed: %s", self._url, exc)
            return None
        return Followed(
            kept.version.number,
            kept.version.run,
            num_bytes=kept.manifest.num_bytes,
            seconds=time.perf_counter() - start,
            install_seconds=install_seconds,
            lag_seconds=max(0.0, time.time() - kept.committed_at),
        )

    def wait(self, timeout_seconds: float, *, stop: threading.Event | None = None) -> Followed | None:
        """Poll until a version was installed; return None after the timeout (0: one poll) or once `stop` is set."""
        stop = stop or threading.Event()
        if timeout_seconds != 0:
            number_of_seconds("timeout_seconds", timeout_seconds)
        for _ in Deadline(timeout_seconds).polls(max_pause_seconds=0.25, wait=stop.wait):
            followed = None if stop.is_set() else self.poll()
            if followed is not None or stop.is_set():
                return followed
        return None

    def close(self) -> None:
        """Close the store; a poll in progress fails. Idempotent; may be called from any thread."""
        self._receiver.close()
        if self._install is not None:
            self._install.forget_views()

    def _install_version(self, kept: StoredVersion) -> float:
        version, manifest = kept.version, kept.manifest
        install, digest = self._install, kept.manifest_digest
        if install is None or not install.is_for(digest, self._engine):
            install = self._install = admit(manifest, digest, self._engine)
        if self._undo:
            check_undo(manifest, self._engine)
        update = Update(
            Offer(version.run, version.number, digest, undo=self._undo),
            install,
            receiver=self._receiver,
            gate=self.gate,
            deadline_seconds=self._install_deadline_seconds,
        )
        try:
            update.open()
            update.receive()
            update.seal(Seal(version.run, version.number, len(manifest.buckets), kept.root))
            seconds = update.install()
        except BaseException as exc:
            update.abort(exc)
            raise
        logger.info("%s", update.describe(seconds))
        return seconds


def follow(
    url: str,
    engine: Engine,
    *,
    gate: Gate | None = None,
    undo: bool = False,
    on_failure: OnFailure = "raise",
    label: str = "follower",
    deadline_seconds: float | None = None,
    install_deadline_seconds: float = 60.0,
    stop: threading.Event | None = None,
) -> Iterator[Followed]:
    """Install every new version of a store, beginning with the newest, and yield each; end when `stop` is set.

    `deadline_seconds`: raise PeerTimeoutError if no new version comes for this long; None: wait without limit. The
    other arguments and the errors are those of `Follower`.
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
        on_failure=on_failure,
        label=label,
        install_deadline_seconds=install_deadline_seconds,
    )
    with follower:
        while not stop.is_set():
            followed = follower.wait(timeout_seconds, stop=stop)
            if followed is not None:
                yield followed
            elif deadline_seconds is not None and not stop.is_set():
                raise PeerTimeoutError(
                    f"no new version came into {url} for {timeout_seconds:g} s: check that the trainer still publishes "
                    "there",
                    peer="trainer",
                )
