"""Publishes the checkpoint directories that a training loop writes: each newest one, whole, to every engine.

Invariants: tensors are copies, read before anything is sent, and sent only if the directory has not changed meanwhile;
an engine that holds a directory's weights as that version is not sent them once more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from weightcast.checkpoint.directories import CheckpointDirectories, CompleteDirectory
from weightcast.checkpoint.files import INDEX_FILE, SINGLE_FILE
from weightcast.cli.verify import verify
from weightcast.errors import IntegrityError, PublishError, WeightcastError
from weightcast.host.closing import ClosedOnExit
from weightcast.host.deadline import Deadline
from weightcast.seams.source import Source
from weightcast.serving.follower import Followed
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.relay import Relay

logger = logging.getLogger(__name__)


class DirectoryFollower(ClosedOnExit):
    """Publishes a directory's new checkpoints to engines, as `Follower` does with a store's versions.

    Host memory: the transport's arena, and one checkpoint while it is published. A checkpoint that an engine has not
    installed is kept, also while a newer one is read.
    """

    def __init__(
        self,
        directories: CheckpointDirectories,
        read: Callable[[Path], Source],
        engines: Sequence[str],
        *,
        transport: str,
        token: str | None,
        options: PublishOptions,
    ) -> None:
        """`read` makes a source of copies of a directory's tensors, or raises OSError or ValueError.

        The other arguments are those of `Publisher`.
        """
        self._directories, self._read_copies = directories, read
        self._engines, self._token = engines, token
        self._deadline_seconds = options.deadline_seconds
        self._relay = Relay(engines, transport=transport, token=token, options=options)
        self._sent: CompleteDirectory | None = None

    def wait(self, timeout_seconds: float, *, stop: threading.Event) -> Followed | None:
        """Poll until there is news; None after the timeout, or soon after `stop` was set."""
        for _ in Deadline(timeout_seconds).polls(0.05, 1.0, stop.wait):
            followed = None if stop.is_set() else self.poll()
            if followed is not None or stop.is_set():
                return followed
        return None

    def poll(self) -> Followed | None:
        """Publish the newest complete directory if it was not sent, or what was sent to the engines that lack it.

        Of a version that all engines held before anything was sent: no run, no bytes.
        Raises PublishError if an engine did not take it, and sends it to that one when called again; IntegrityError for
        a directory that is marked as complete and is not, once until one of its files has changed.
        """
        start, found = time.perf_counter(), self._directories.newest(self._sent)
        if found is None:
            if self._sent is None or not self._relay.missing:
                return None
            found, report = self._sent, self._relay.catch_up()
        elif not self._read(found):
            return None
        elif self._sent is None and self._is_served(found):
            self._sent = found
            self._relay.discard()
            return Followed(found.number, "", 0, time.perf_counter() - start, install_seconds=0.0, lag_seconds=0.0)
        else:
            try:
                report = self._relay.publish(found.number)
            except PublishError:
                if self._relay.missing:
                    self._sent = found
                raise
        self._sent = found
        self._relay.discard()
        return Followed(
            report.version,
            report.run,
            num_bytes=report.num_bytes,
            seconds=time.perf_counter() - start,
            install_seconds=report.seconds.pause,
            lag_seconds=max(0.0, time.time() - found.completed_ns / 1e9),
        )

    def close(self) -> None:
        """Disconnect the engines; they keep what they have. Idempotent."""
        self._relay.close()

    def _read(self, found: CompleteDirectory) -> bool:
        """Read a directory; return whether all of it was read and nothing in it changed meanwhile."""
        names = {name for name, *_ in found.files}
        try:
            if not names & {INDEX_FILE, SINGLE_FILE}:
                what = "an adapter" if (found.path / "adapter_config.json").is_file() else "no weights"
                raise FileNotFoundError(f"it has {what}: neither {SINGLE_FILE} nor {INDEX_FILE}")
            source = self._read_copies(found.path)
        except (OSError, ValueError) as exc:
            if not self._directories.is_unchanged(found):
                return False
            self._directories.leave_out(found)
            raise IntegrityError(f"{found.path} is left out until it changes: {exc}") from exc
        if not self._directories.is_unchanged(found):
            return False
        self._relay.given.describe(source.specs())
        self._relay.given.held = source.regions()
        return True

    def _is_served(self, found: CompleteDirectory) -> bool:
        """Return whether every engine holds just these tensors as this version; False if an engine can't be asked."""
        try:
            verdict = verify(self._relay.given, self._engines, self._token, timeout_seconds=self._deadline_seconds)
        except WeightcastError as exc:
            logger.info("%s is published, since an engine can't be compared with it: %s", found.path, exc)
            return False
        return verdict.ok and all(
            engine.weight_version == str(found.number) and not engine.unproven for engine in verdict.engines
        )
