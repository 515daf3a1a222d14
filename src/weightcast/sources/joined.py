"""Several sources as one: what a trainer trains, and what belongs to the model and is not in the trainer's model."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from weightcast.errors import listed
from weightcast.format.manifest import TensorSpec
from weightcast.seams.source import CollectiveSource, Gather, Regions, Source, StreamSource, casts_to_engines


class JoinedSource:
    """A `Source` of all tensors of several sources, those of the first one first. Nothing is copied.

    With several trainer ranks make one of the same sources on every rank. Raises TypeError for a source that streams
    its tensors; ValueError, here and when a source has other tensors than before, for a name that two of them have.
    """

    def __init__(self, *sources: Source) -> None:
        streams = [type(source).__name__ for source in sources if isinstance(source, StreamSource)]
        if streams:
            raise TypeError(f"{', '.join(streams)} streams its tensors, and can't be joined with others")
        self.casts_to_engines = any(map(casts_to_engines, sources))
        if not all(casts_to_engines(source) is self.casts_to_engines for source in sources):
            raise ValueError("of joined sources all are cast to the engines' dtypes (dtype='engine'), or none")
        self._sources = sources
        self._each_specs: list[Sequence[TensorSpec]] = []
        self._specs: tuple[TensorSpec, ...] = ()
        self._regions: Regions = {}
        self.specs()

    def specs(self) -> Sequence[TensorSpec]:
        """Those of all sources; the same object as long as each of them returns its own."""
        found = [source.specs() for source in self._sources]
        if not _are_same(found, self._each_specs):
            specs = tuple(spec for each in found for spec in each)
            counts = collections.Counter(name for spec in specs for name in spec.names)
            repeated = [name for name, count in counts.items() if count > 1]
            if repeated:
                raise ValueError(f"{len(repeated)} names are those of two of the joined sources: {listed(repeated)}")
            self._each_specs, self._specs = found, specs
        return self._specs

    def regions(self) -> Regions:
        """Those of all sources; the same object as long as each of them holds the same objects."""
        found = {name: held for source in self._sources for name, held in source.regions().items()}
        # One by one: a source may have put others into the mapping that it gave before.
        is_same = found.keys() == self._regions.keys() and _are_same([*found.values()], [*self._regions.values()])
        if not is_same:
            self._regions = found
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
