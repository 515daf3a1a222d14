"""Several sources as one, for a model of which the trainer's module has only a part."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from weightcast.errors import listed
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import (
    CollectiveSource,
    Gather,
    LookedAtRegions,
    Regions,
    Source,
    StreamSource,
    casts_to_engines,
)


class JoinedSource:
    """A `Source` of all tensors of several sources, in their order. Nothing is copied.

    With several trainer ranks, join the same sources on every rank. Raises TypeError for a source that streams its
    tensors; ValueError, here and when a source's tensors change, for a name that two sources have.
    """

    def __init__(self, *sources: Source) -> None:
        streams = [type(source).__name__ for source in sources if isinstance(source, StreamSource)]
        if streams:
            raise TypeError(
                f"{', '.join(streams)} streams its tensors and can't be joined with other sources: yield all tensors "
                "from one stream"
            )
        self.casts_to_engines = any(map(casts_to_engines, sources))
        if not all(casts_to_engines(source) is self.casts_to_engines for source in sources):
            raise ValueError("only some of the joined sources have dtype='engine': give it to all of them or to none")
        self._sources = sources
        self._each_specs: list[Sequence[TensorSpec]] = []
        self._specs: tuple[TensorSpec, ...] = ()
        self._regions: Regions = {}
        self._names: list[str] = []
        self._values: list[object] = []
        """The regions of each name, or a source's whole mapping, of which `_regions` were made."""
        self.specs()

    def specs(self) -> Sequence[TensorSpec]:
        """Return the specs of all sources; the same object while each source returns the same object."""
        found = [source.specs() for source in self._sources]
        if not _are_same(found, self._each_specs):
            specs = tuple(spec for each in found for spec in each)
            counts = collections.Counter(name for spec in specs for name in spec.names)
            repeated = [name for name, count in counts.items() if count > 1]
            if repeated:
                raise ValueError(
                    f"two of the joined sources have {len(repeated)} names in common, {listed(repeated)}: leave these "
                    "out of one source, or rename them"
                )
            self._each_specs, self._specs = found, specs
        return self._specs

    def regions(self) -> Regions:
        """Return the regions of all sources; the same object while each source's mapping has the same values."""
        found = [source.regions() for source in self._sources]
        names, values = list[str](), list[object]()
        for each in found:
            # Value by value, since a source may have changed the mapping that it returned before. Regions that the
            # source has looked at are made when they are asked for, and unchanged in the same mapping.
            is_looked_at = isinstance(each, LookedAtRegions)
            names += [] if is_looked_at else each.keys()
            values += [each] if is_looked_at else each.values()
        if names != self._names or not _are_same(values, self._values):
            self._names, self._values = names, values
            self._regions = {name: held for each in found for name, held in each.items()}
        return self._regions

    @property
    def num_gathers(self) -> int:
        return sum(source.num_gathers for source in self._collective)

    def complete(self, gather: Gather) -> None:
        for source in self._collective:
            source.complete(gather)

    @property
    def _collective(self) -> list[CollectiveSource]:
        return [source for source in self._sources if isinstance(source, CollectiveSource)]


def _are_same(found: Sequence[object], known: Sequence[object]) -> bool:
    return len(found) == len(known) and all(a is b for a, b in zip(found, known, strict=True))
