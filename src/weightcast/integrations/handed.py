"""The way from an iterator of (name, tensor) to a publish, for frameworks that hand their weights over as one."""

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
    """Publishes one version for each iterator, on the one rank that publishes; on the others call `exhaust`.

    Invariant: an iterator is taken to its end, whatever fails: a framework's ranks gather each of its tensors together.
    """

    def __init__(
        self,
        source: IteratorSource | TensorSource,
        make_publisher: Callable[[], Publisher],
        *,
        forget: Callable[[], object] = lambda: None,
    ) -> None:
        """`source`: an `IteratorSource` if a tensor is valid only until the next one is asked for, a `TensorSource` if
        all of them keep their memory until the next publish. `make_publisher`: of this source, with trainer_group=None;
        called when the source has its first tensors, by `open`, and again after `close`. `forget`: called when a
        publish fails, before the rest of the iterator is taken.
        """
        self._source = source
        self._make_publisher = make_publisher
        self._forget = forget
        self._publisher: Publisher | None = None

    def open(self) -> Publisher:
        """Make the publisher, if there is none: it raises for wrong arguments, and connects nothing yet."""
        if self._publisher is None:
            self._publisher = self._make_publisher()
        return self._publisher

    @torch.no_grad()
    def publish(
        self, weights: Iterable[Named], version: int | None = None, *, wait_ready_seconds: float = 0.0
    ) -> PublishReport:
        """Make every engine serve these tensors; blocks. Raises as `Publisher.publish`, and what the iterator raises.

        A version that is not above the last one is published by a new publisher, as another run: the trainer went back
        to an earlier step.
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
        """Disconnect the engines, which keep what they have; keep no tensor. Idempotent; `publish` connects again."""
        publisher, self._publisher = self._publisher, None
        if isinstance(self._source, TensorSource):
            self._source.replace({})
        if publisher is not None:
            publisher.close()


@torch.no_grad()
def exhaust(weights: Iterable[Named]) -> None:
    """Take an iterator to its end, whose tensors this rank gathers with the one that publishes them."""
    for _ in weights:
        pass
