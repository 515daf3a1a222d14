"""Source of one version of a store, by default the newest, which is read and checked on creation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast.format.bucket import TORCH_DTYPES, Layout, narrow
from weightcast.format.geometry import whole
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.host import memory as host_memory
from weightcast.host.copy import copy_all
from weightcast.seams.source import Regions
from weightcast.store.address import StoreAddress
from weightcast.store.reading import pinned


class StoreSource:
    """A `Source` of one version of a store. The version is read on creation; the store is not used afterwards.

    Host memory: the version, and one more bucket while it is read.
    """

    def __init__(self, url: str, *, previous: bool = False, version: WeightVersion | int | None = None) -> None:
        """`previous`: read the version before the newest, which the store keeps at least until the next one is begun.

        `version`: number of a version in the store (if several runs have it, of the one that was committed last); or a
        WeightVersion, which may also be sealed but not committed yet.
        Raises VersionNotFoundError if the store lacks the version, IntegrityError, InsufficientMemoryError.
        """
        address = StoreAddress.parse(url)
        if not isinstance(version, WeightVersion | int | None):
            raise TypeError(f"version is {version!r:.80}; it must be a number, or a WeightVersion(run, number)")
        with pinned(address, previous=previous, version=version, label="source") as found:
            self.version: WeightVersion = found.stored.version
            self.committed_at = found.stored.committed_at
            manifest, layout = found.manifest, Layout(found.manifest)
            host_memory.require(manifest.num_bytes, f"reading version {found.stored.number}", "free memory")
            tensors = {r.name: torch.empty(r.shape, dtype=TORCH_DTYPES[r.dtype]) for r in manifest.tensors}
            for index, payload in enumerate(found.payloads()):
                targets = [narrow(tensors[entry.record.name], entry.piece.region) for entry in layout.entries[index]]
                copy_all(targets, layout.views(index, payload))
        self._specs = tuple(record.spec for record in manifest.tensors)
        self._regions = {spec.name: ((whole(spec.shape), tensors[spec.name]),) for spec in self._specs}

    def specs(self) -> Sequence[TensorSpec]:
        """Return every tensor's spec, in the order of publishing."""
        return self._specs

    def regions(self) -> Regions:
        """Return every tensor, in this object's memory."""
        return self._regions
