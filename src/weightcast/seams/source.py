"""The seam of sources: what a trainer rank publishes, as views of its memory, each with its place in a global tensor.

Source.regions(), then .specs()      at each publish; specs only when regions gave another object
CollectiveSource.complete(gather)    after that, on every trainer rank, where num_gathers is not 0
StreamSource.stream(), then .specs() at each publish, where tensors exist one at a time only
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec

Held: TypeAlias = tuple[Region, torch.Tensor]
"""A view of memory of this trainer rank, and its place in the global tensor; the view has the region's sizes.

In place of the last of these it may have two dims, of as many elements: rows or columns that alternate in the global
tensor, and lie in blocks here. The second of the two has a size that divides 16, so that no bucket cuts through it.
"""

Regions: TypeAlias = Mapping[str, Sequence[Held]]
"""A trainer rank's parts of each tensor, by its record's name. Tensors of which it holds no part may be absent."""


class LookedAtRegions(dict[str, Sequence[Held]]):
    """Regions of a source that looks at all its tensors before it gives the same object again: each has its memory.

    Others are looked at by the publisher, which costs as much a second time.
    """


class Source(Protocol):
    """A source of weights: one trainer rank's share of a model in checkpoint form."""

    def specs(self) -> Sequence[TensorSpec]:
        """Names, dtypes and global shapes of the whole model; the same on all trainer ranks.

        Returns the same object as long as nothing has changed, so that a publisher can keep its plan.
        """

    def regions(self) -> Regions:
        """This rank's views, each with its region in the global tensor. No copy and no communication.

        A rank reports everything that it holds, replicas too: `gather` has one rank contribute each region.

        Returns the same object as long as every view is still of the same memory, of the same specs: a publisher then
        does not ask for the specs again.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor that the trainer ranks hold together: the global one, and what this rank holds of it on `device`."""

    spec: TensorSpec
    device: torch.device
    held: Sequence[Held]


Gather: TypeAlias = Callable[[Sequence[TensorPart]], Sequence[torch.Tensor]]
"""Return the tensors whole, each on its device, in new memory. Every trainer rank calls it, for the same tensors.

Raises PeerError if a rank was lost, and on every rank the error that a rank has raised instead of the call.
"""


@runtime_checkable
class EngineTyped(Protocol):
    """A source that can be cast to what engines have: then its specs have the dtypes of its own memory.

    If `casts_to_engines`, the publisher asks the engines, and has each tensor cast while it is packed.
    """

    @property
    def casts_to_engines(self) -> bool: ...


def casts_to_engines(source: object) -> bool:
    return isinstance(source, EngineTyped) and source.casts_to_engines


@runtime_checkable
class CollectiveSource(Protocol):
    """A source some of whose values are computed from what other trainer ranks hold, such as merged adapters.

    The views of `regions` have no values of this version before `complete`.
    """

    @property
    def num_gathers(self) -> int:
        """How often `complete` gathers now, the same on all ranks; 0: it need not be called."""

    def complete(self, gather: Gather) -> None:
        """Compute them. Called on every rank, which all gather as often and the same tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorStream:
    """Whole tensors with their names, in the order of the specs, each valid until the next is asked for.

    `device`: where they are.
    """

    device: torch.device
    tensors: Iterator[tuple[str, torch.Tensor]]


@runtime_checkable
class StreamSource(Protocol):
    """A source of tensors that exist one at a time: an exporter gathers or converts each when it is asked for.

    It is published by one rank, and each stream once: a bucket that was lost on its way can't be packed again.
    """

    def specs(self) -> Sequence[TensorSpec]:
        """Names, dtypes and shapes, as of `Source`, of the stream that was asked for last."""

    def stream(self) -> TensorStream:
        """The tensors of the next version. The publisher takes them to their end, unless the publish fails."""
