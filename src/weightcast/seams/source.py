"""The seam of sources: a trainer rank's weights, as views of its memory, each with its region in a global tensor.

Source.regions(), then .specs()      at each publish; specs only when regions returned another object
CollectiveSource.complete(gather)    after that, on every trainer rank, if num_gathers is not 0
StreamSource.stream(), then .specs() at each publish, if tensors exist only one at a time
RevisedSource.revisions()            right after regions() at each publish that may send deltas, by a rank that is alone
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec

Held: TypeAlias = tuple[Region, torch.Tensor]
"""A region of the global tensor, and a view of this trainer rank's memory with the region's sizes.

The view may split the last dim in two, for interleaved layouts such as gate and up: shape (..., n // k, k) stands for
(..., n). k divides 16, so that no bucket boundary falls inside.
"""

Regions: TypeAlias = Mapping[str, Sequence[Held]]
"""A trainer rank's parts of each tensor, by name. Tensors of which it has no part may be absent."""


class LookedAtRegions(Mapping[str, Sequence[Held]]):
    """Regions of a source that itself checks that its tensors have not moved before it returns the same object again.

    For other mappings the publisher makes this check.
    """


class Source(Protocol):
    """A source of weights: one trainer rank's part of a model in checkpoint form."""

    def specs(self) -> Sequence[TensorSpec]:
        """Return names, dtypes and global shapes of the whole model, equal on all trainer ranks.

        Return the same object as long as nothing has changed, so that a publisher can keep its plan.
        """

    def regions(self) -> Regions:
        """Return this rank's views, each with its region in the global tensor. No copy and no communication.

        Include all regions that the rank has, replicas too; the publisher assigns each region to one rank.

        Return the same object as long as all views have the same memory and the specs are the same; then the publisher
        does not call `specs` again.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPart:
    """A tensor that is sharded over the trainer ranks: its global spec, and this rank's parts of it on `device`."""

    spec: TensorSpec
    device: torch.device
    held: Sequence[Held]


Gather: TypeAlias = Callable[[Sequence[TensorPart]], Sequence[torch.Tensor]]
"""Returns the whole tensors, each on its device, in new memory. Every trainer rank calls it, for the same tensors.

Raises PeerError if a rank was lost, and on every rank the error that another rank has raised instead of the call.
"""


@runtime_checkable
class EngineTyped(Protocol):
    """A source that can be cast to the engines' dtypes; its specs have the dtypes of its memory.

    If `casts_to_engines`, the publisher asks the engines for their dtypes, and casts each tensor while it is packed.
    """

    @property
    def casts_to_engines(self) -> bool: ...


def casts_to_engines(source: object) -> bool:
    return isinstance(source, EngineTyped) and source.casts_to_engines


@runtime_checkable
class CollectiveSource(Protocol):
    """A source with tensors that are computed from other trainer ranks' shards, such as merged adapters.

    The views of `regions` have the values of this version only after `complete`.
    """

    @property
    def num_gathers(self) -> int:
        """Number of gathers in the next `complete`, equal on all ranks; with 0 it need not be called."""

    def complete(self, gather: Gather) -> None:
        """Compute these tensors. Called on every rank; all ranks must make the same gathers."""


@runtime_checkable
class RevisedSource(Protocol):
    """A source that knows which tensors may have changed, so that a publish of deltas need not read the others.

    A bucket in which no tensor has a new revision is not packed, and the last version's is taken in its place. Each
    publish compares a random sixteenth of these buckets, at least one, with the source: a difference is a ValueError
    that names the tensors, before anything is sent, and the next publish is full. A change that the sample misses stays
    out of the engines until a full update, or until a publish that finds it.
    """

    def revisions(self) -> Mapping[str, int]:
        """Return by name a number that differs from all former ones if the tensor's values may have changed.

        A frozen tensor has the same number each time. Tensors that are absent are always packed and compared.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class TensorStream:
    """Whole tensors with their names, in the order of the specs, each valid until the next is requested.

    `device`: the tensors' device.
    """

    device: torch.device
    tensors: Iterator[tuple[str, torch.Tensor]]


@runtime_checkable
class StreamSource(Protocol):
    """A source of tensors that exist only one at a time, since an exporter gathers or converts each on request.

    It is published by one rank, and each stream only once: a lost bucket can't be packed again.
    """

    def specs(self) -> Sequence[TensorSpec]:
        """Return the specs of the last stream; see `Source.specs`."""

    def stream(self) -> TensorStream:
        """Return the tensors of the next version. The publisher reads them to the end, unless the publish fails."""
