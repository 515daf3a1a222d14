"""The seam of sources: what a trainer rank publishes, as views of its memory, each with its place in a global tensor.

Source.regions(), then .specs()      at each publish; specs only when regions gave another object
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from weightcast.format.geometry import Region
from weightcast.format.manifest import TensorSpec

Held: TypeAlias = tuple[Region, torch.Tensor]
"""A view of memory of this trainer rank, and its place in the global tensor; the view has the region's sizes."""

Regions: TypeAlias = Mapping[str, Sequence[Held]]
"""What a trainer rank holds of each tensor, by its record's name. What it holds nothing of may be absent."""


class Source(Protocol):
    """Where weights come from: one trainer rank's share of a model in checkpoint form."""

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
