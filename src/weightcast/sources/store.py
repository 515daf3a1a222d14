"""Publishes what a store holds: the newest version or the one before, read and checked as a whole when it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from weightcast import host_memory
from weightcast.assemble import LoadPlan
from weightcast.bucket import Layout
from weightcast.errors import InsufficientMemoryError
from weightcast.interfaces import Bucket, Regions
from weightcast.manifest import TensorSpec, WeightVersion
from weightcast.places import Buffers, place
from weightcast.plan import whole
from weightcast.store.address import StoreAddress
from weightcast.store.reading import PinnedVersion, pinned


class StoreSource:
    """A `Source` of one version of a store, which may go on meanwhile: nothing is held there after it was read.

    Host memory: the version.
    """

    def __init__(self, url: str, *, previous: bool = False, version: WeightVersion | None = None) -> None:
        """`previous`: the version before the newest, which is there until the next but one is begun, at least.

        `version`: this one, which is the newest, or is to be when an engine of its publish has installed it.
        Raises ClosedError if there is no such version, IntegrityError, InsufficientMemoryError.
        """
        directory = StoreAddress.parse(url).directory
        with pinned(directory, previous=previous, version=version, label="source") as found:
            self.version: WeightVersion = found.stored.version
            self.committed_at = found.stored.committed_at
            records = found.manifest.tensors
            tensors = _read(found)
        self._specs = tuple(TensorSpec(r.name, r.dtype, r.shape, aliases=r.aliases, group=r.group) for r in records)
        self._regions = {spec.name: ((whole(spec.shape), tensors[spec.name]),) for spec in self._specs}

    def specs(self) -> Sequence[TensorSpec]:
        """Every tensor, in the order in which it was published."""
        return self._specs

    def regions(self) -> Regions:
        """Every tensor whole, in memory of this object."""
        return self._regions


def _read(version: PinnedVersion) -> dict[str, torch.Tensor]:
    manifest = version.manifest
    places = place(manifest, num_slots=1, staged=True, adjoining=True)
    needed, available = places.size_bytes, host_memory.available_bytes()
    if needed > available:
        raise InsufficientMemoryError(
            f"version {version.stored.number} needs {needed} bytes, this host has {available}"
        )
    buffers, buckets, digests = Buffers(torch.empty(needed, dtype=torch.uint8)), [], []
    for index in range(len(manifest.buckets)):
        buffer = buffers.get(index, places.offsets[index], places.sizes_bytes[index])
        digests.append(version.read_checked(index, buffer))
        buckets.append(Bucket(index, buffer))
    version.check_root(digests)
    keeper = _Keeper()
    LoadPlan(Layout(manifest), keeper, None).load_all(buckets)
    return keeper.tensors


class _Keeper:
    """Takes what an engine would be given, and keeps it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def specs(self) -> None:
        return None

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.tensors.update(tensors)

    def commit(self, version: WeightVersion) -> None:
        """Nothing is served here."""

    def discard(self) -> None:
        """Nothing is served here."""
