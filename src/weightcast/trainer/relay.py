"""Relay: publishes to running engines what a follower has read from a store or a directory, once for all of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import msgspec
import torch

from weightcast.errors import EngineResult, PublishError, PublishReport, publish_error
from weightcast.format.geometry import whole
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.host.closing import on_failure
from weightcast.seams.client import EngineClient
from weightcast.seams.source import Regions
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher


class RelayedTensors:
    """A `Source` of the tensors that the relay received last."""

    def __init__(self) -> None:
        self._specs: Sequence[TensorSpec] = ()
        self.held: Regions = {}

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self.held

    def describe(self, specs: Sequence[TensorSpec]) -> None:
        """Set the specs. Equal specs keep the present object, so that the publisher keeps its plan."""
        self._specs = self._specs if tuple(specs) == tuple(self._specs) else specs


class Relay:
    """An `Engine` for a `Follower` that publishes each version to other engines.

    A version keeps its number; the run is the relay's. Extra host memory: the transport's arena. `missing`: names of
    the engines that did not install the last version although others did.
    """

    def __init__(
        self,
        engines: Sequence[str | EngineClient],
        *,
        transport: str = "ipc://",
        token: str | None = None,
        options: PublishOptions | None = None,
    ) -> None:
        """Create the relay's `Publisher` with these arguments. It connects at the first version.

        If an engine does not install a version, PublishError is raised, whatever `options.on_failure` is.
        """
        self.report: PublishReport | None = None
        self.given = RelayedTensors()
        self.missing: list[str] = []
        self._engines = {engine.rstrip("/") if isinstance(engine, str) else engine.name: engine for engine in engines}
        self._is_streaming = options is not None and options.install == "streaming"
        self._make_publisher = functools.partial(
            Publisher,
            self.given,
            transport=transport,
            engines=engines,
            token=token,
            trainer_group=None,
            options=dataclasses.replace(options or PublishOptions(), on_failure="report"),
        )
        self._publisher: Publisher | None = self._make_publisher()

    def publish(self, number: int) -> PublishReport:
        """Publish the loaded tensors as version `number`. Raises PublishError if an engine did not install it."""
        last = None if self._publisher is None else self._publisher.version
        if last is not None and number <= last:
            self.close()  # the followed store or directory has begun again with lower numbers
        if self._publisher is None:
            self._publisher = self._make_publisher()
        self.missing = []
        with on_failure(self._release):
            report = self._publisher.publish(number)
            failed = [name for name, result in report.engines.items() if not result.ok]
            if len(failed) < len(report.engines):
                self.missing = failed
            return _whole(report)

    def catch_up(self) -> PublishReport:
        """Send the last version to the `missing` engines. Raises PublishError that names those that fail again."""
        assert self._publisher is not None
        engines: dict[str, EngineResult] = {}
        if self._is_streaming:
            # With install="streaming" the publisher can't send a version again: use a new publisher.
            with self._make_publisher(engines=[self._engines[name] for name in self.missing]) as publisher:
                report = publisher.publish(self._publisher.version)
            engines = report.engines
        else:
            for name in self.missing:
                report = self._publisher.sync(name)
                engines |= report.engines
        self.missing = [name for name, result in engines.items() if not result.ok]
        if not self.missing:
            self.given.held = {}
        return _whole(msgspec.structs.replace(report, engines=engines))

    def _release(self) -> None:
        """Close the publisher, and so free the engines, unless some of them have the version."""
        if not self.missing:
            self.close()

    # --- as an `Engine` ---

    def specs(self) -> None:
        """Declare no specs, so that every tensor is passed on."""
        return

    def validate(self, manifest: Manifest) -> None:
        """Accept every manifest; the engines validate it when it is published."""
        self.given.describe(tuple(record.spec for record in manifest.tensors))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = dict(tensors)
        self.given.held = {spec.name: ((whole(spec.shape), found[spec.name]),) for spec in self.given.specs()}

    def commit(self, version: WeightVersion) -> None:
        """Publish the version. Raises PublishError if no engine has installed it; offer it again then.

        If some have, the tensors are kept for `catch_up`, until `discard`.
        """
        try:
            self.report = self.publish(version.number)
        except PublishError as exc:
            self.report = exc.report
            if not self.missing:
                raise
        finally:
            if not self.missing:
                self.given.held = {}

    def require_all(self) -> None:
        """Raise PublishError that names the engines that did not install the last version."""
        if self.report is not None:
            _whole(self.report)

    def discard(self) -> None:
        self.given.held = {}

    def close(self) -> None:
        """Disconnect the engines; they keep their versions. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


def _whole(report: PublishReport) -> PublishReport:
    if not report.ok:
        raise publish_error(report)
    return report
