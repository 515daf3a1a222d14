"""Passes a store's versions on to running engines, over another transport: one reader of the store for many engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from weightcast.format.geometry import whole
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.format.messages import InstallMode
from weightcast.host.closing import on_failure
from weightcast.seams.client import EngineClient
from weightcast.seams.source import Regions
from weightcast.trainer.publisher import Publisher
from weightcast.trainer.report import PublishReport


class _RelayedTensors:
    """A `Source` of the tensors that the relay was given last."""

    def __init__(self) -> None:
        self._specs: tuple[TensorSpec, ...] = ()
        self.held: Regions = {}

    def use(self, specs: tuple[TensorSpec, ...]) -> None:
        if specs != self._specs:
            self._specs = specs

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self.held


class Relay:
    """An `Engine` for a `Follower`, which publishes what it is given.

    A version keeps its number; the run is the relay's own. Host memory besides the follower's: the transport's arena.
    """

    def __init__(
        self,
        engines: Sequence[str | EngineClient],
        *,
        transport: str = "ipc://",
        token: str | None = None,
        install: InstallMode = "staged",
        undo: bool = False,
        takeover: bool = False,
        deadline_seconds: float = 60.0,
    ) -> None:
        """The arguments are those of `Publisher`."""
        self.report: PublishReport | None = None
        self._engines = engines
        self._transport = transport
        self._token = token
        self._install: InstallMode = install
        self._undo = undo
        self._takeover = takeover
        self._deadline_seconds = deadline_seconds
        self._given = _RelayedTensors()
        self._publisher: Publisher | None = None

    def specs(self) -> None:
        """Whatever comes is passed on."""
        return

    def validate(self, manifest: Manifest) -> None:
        """Nothing to refuse here: the engines are asked when it is published."""
        records = manifest.tensors
        self._given.use(tuple(record.spec for record in records))

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = dict(tensors)
        self._given.held = {spec.name: ((whole(spec.shape), found[spec.name]),) for spec in self._given.specs()}

    def commit(self, version: WeightVersion) -> None:
        """Publish it. Raises PublishError if an engine did not take it; it is offered anew to all then."""
        if self._publisher is not None and version.number <= self._publisher.version:
            self.close()  # the store has another writer, who counts from below
        if self._publisher is None:
            self._publisher = Publisher(
                self._given,
                transport=self._transport,
                engines=self._engines,
                token=self._token,
                install=self._install,
                undo=self._undo,
                takeover=self._takeover,
                deadline_seconds=self._deadline_seconds,
                trainer_group=None,
            )
        try:
            with on_failure(self.close):
                self.report = self._publisher.publish(version.number)
        finally:
            self._given.held = {}

    def discard(self) -> None:
        self._given.held = {}

    def close(self) -> None:
        """Let the engines go; they keep what they have. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
