"""Follower of the checkpoint directories that a training loop writes: publishes each newest one to every engine.

Invariants: tensors are copied before any byte is sent, and sent only if the directory has not changed meanwhile; an
engine that has a directory's weights as that version already is not sent them again.
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

    Host memory: the transport's arena, and one checkpoint while it is published. A checkpoint that an engine did not
    install is kept, also while a newer one is read.
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
        """`read`: returns a source with copies of a directory's tensors, or raises OSError or ValueError.

        The other arguments are those of `Publisher`.
        """
        self._directories, self._read_copies = directories, read
        self._engines, self._token = engines, token
        self._deadline_seconds = options.deadline_seconds
        self._relay = Relay(engines, transport=transport, token=token, options=options)
        self._sent: CompleteDirectory | None = None

    def wait(self, timeout_seconds: float, *, stop: threading.Event) -> Followed | None:
        """Poll until a version was published; return None after the timeout, or once `stop` is set."""
        for _ in Deadline(timeout_seconds).polls(0.05, 1.0, stop.wait):
            followed = None if stop.is_set() else self.poll()
            if followed is not None or stop.is_set():
                return followed
        return None

    def poll(self) -> Followed | None:
        """Publish the newest complete directory if it was not sent, or send the last one to the engines that lack it.

        If all engines had the version already, the result has an empty run and 0 bytes. Raises PublishError if an
        engine did not install it (the next call sends it to that engine again); IntegrityError for a directory that is
        marked as complete but is not, once until one of its files changes.
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
        """Disconnect the engines; they keep their versions. Idempotent."""
        self._relay.close()

    def _read(self, found: CompleteDirectory) -> bool:
        """Read a directory; return whether it was read completely and did not change meanwhile."""
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
        """Return whether every engine has exactly these tensors as this version; False if one can't be compared."""
        try:
            verdict = verify(self._relay.given, self._engines, self._token, timeout_seconds=self._deadline_seconds)
        except WeightcastError as exc:
            logger.info("publishing %s, since an engine's weights can't be compared with it: %s", found.path, exc)
            return False
        return verdict.ok and all(
            engine.weight_version == str(found.number) and not engine.unproven for engine in verdict.engines
        )
