"""An engine that only keeps the received tensors, for tools, relays and tests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from weightcast.format.manifest import TensorSpec, WeightVersion


class TensorSink:
    """An `Engine` that keeps copies of the tensors: `held` has those of the committed `version`, by name.

    Host memory: one model; two while an update is installed.
    """

    def __init__(self, specs: Sequence[TensorSpec] | None = None) -> None:
        """`specs`: the tensors that it accepts; None accepts all."""
        self.held: dict[str, torch.Tensor] = {}
        self.version: WeightVersion | None = None
        self._specs = specs
        self._loaded: dict[str, torch.Tensor] = {}

    def specs(self) -> Sequence[TensorSpec] | None:
        return self._specs

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the kept tensors, so that a publisher can compare them with the sent ones."""
        return iter(self.held.items())

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors, which are valid only during this call."""
        self._loaded.update((name, tensor.clone()) for name, tensor in tensors)

    def commit(self, version: WeightVersion) -> None:
        self.held, self._loaded, self.version = self._loaded, {}, version

    def discard(self) -> None:
        self._loaded = {}
