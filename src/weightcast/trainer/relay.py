"""Passes a store's versions on to running engines, over another transport: one reader of the store for many engines."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from weightcast.format.geometry import whole
from weightcast.format.manifest import Manifest, TensorSpec, WeightVersion
from weightcast.host.closing import on_failure
from weightcast.seams.client import EngineClient
from weightcast.seams.source import Regions
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher
from weightcast.trainer.report import PublishReport


class _RelayedTensors:
    """A `Source` of the tensors that the relay was given last."""

    def __init__(self) -> None:
        self.known_specs: Sequence[TensorSpec] = ()
        self.held: Regions = {}

    def specs(self) -> Sequence[TensorSpec]:
        return self.known_specs

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
        options: PublishOptions | None = None,
    ) -> None:
        """The arguments are those of `Publisher`, which is made here; it connects at the first version."""
        self.report: PublishReport | None = None
        self._given = _RelayedTensors()
        self._make_publisher = functools.partial(
            Publisher,
            self._given,
            transport=transport,
            engines=engines,
            token=token,
            trainer_group=None,
            options=options,
        )
        self._publisher: Publisher | None = self._make_publisher()

    def specs(self) -> None:
        """Whatever comes is passed on."""
        return

    def validate(self, manifest: Manifest) -> None:
        """Nothing to refuse here: the engines are asked when it is published."""
        specs = tuple(record.spec for record in manifest.tensors)
        if specs != self._given.known_specs:
            self._given.known_specs = specs

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        found = dict(tensors)
        self._given.held = {spec.name: ((whole(spec.shape), found[spec.name]),) for spec in self._given.specs()}

    def commit(self, version: WeightVersion) -> None:
        """Publish it. Raises PublishError if an engine did not take it; it is offered again to all then."""
        if self._publisher is not None and version.number <= self._publisher.version:
            self.close()  # the store has another writer, who counts from below
        if self._publisher is None:
            self._publisher = self._make_publisher()
        try:
            with on_failure(self.close):
                self.report = self._publisher.publish(version.number)
        finally:
            self._given.held = {}

    def discard(self) -> None:
        self._given.held = {}

    def close(self) -> None:
        """Disconnect the engines; they keep what they have. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
