"""Publishes an iterator of (name, tensor), for frameworks that provide their weights in this form."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from weightcast.errors import PublishReport
from weightcast.host.closing import on_failure
from weightcast.sources.stream import IteratorSource
from weightcast.sources.tensors import TensorSource
from weightcast.trainer.publisher import Publisher

Named: TypeAlias = tuple[str, torch.Tensor]


class HandedPublisher:
    """Publishes one version for each iterator, on the publishing rank; on the other ranks call `exhaust`.

    Invariant: every iterator is read to its end, also after an error, since all ranks gather its tensors together.
    """

    def __init__(
        self,
        source: IteratorSource | TensorSource,
        make_publisher: Callable[[], Publisher],
        *,
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        """`source`: an `IteratorSource` if a tensor is valid only until the next one is requested, a `TensorSource` if
        all tensors keep their memory until the next publish. `make_publisher`: returns a publisher of this source with
        trainer_group=None; called when the source has its first tensors, by `open`, and again after `close`. `forget`:
        called when a publish fails, before the rest of the iterator is read.
        """
        self._source = source
        self._make_publisher = make_publisher
        self._forget = forget
        self._publisher: Publisher | None = None

    def open(self) -> Publisher:
        """Make the publisher if there is none. Raises for wrong arguments; connects nothing."""
        if self._publisher is None:
            self._publisher = self._make_publisher()
        return self._publisher

    @torch.no_grad()
    def publish(
        self, weights: Iterable[Named], version: int | None = None, *, wait_ready_seconds: float = 0.0
    ) -> PublishReport:
        """Make every engine serve these tensors; block until they do.

        Raises what `Publisher.publish` and the iterator raise. A version that is not above the last one is published by
        a new publisher, as another run, since the trainer has gone back to an earlier step.
        """
        tensors = iter(weights)
        try:
            with on_failure(self._forget):
                last = None if self._publisher is None else self._publisher.version
                if version is not None and last is not None and version <= last:
                    self.close()
                if isinstance(self._source, IteratorSource):
                    self._source.use(tensors)
                else:
                    self._source.replace(dict(tensors))
                return self.open().publish(version, wait_ready_seconds=wait_ready_seconds)
        finally:
            exhaust(tensors)

    def close(self) -> None:
        """Disconnect the engines, which keep their versions, and free all tensors. Idempotent; `publish` reconnects."""
        publisher, self._publisher = self._publisher, None
        if isinstance(self._source, TensorSource):
            self._source.replace({})
        if publisher is not None:
            publisher.close()


@torch.no_grad()
def exhaust(weights: Iterable[Named]) -> None:
    """Read an iterator to its end, on a rank that only takes part in gathering its tensors."""
    for _ in weights:
        pass
