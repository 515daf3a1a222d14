"""A worker's end of the ipc transport: maps the sender's arena once, and is told what in it is whole."""

from __future__ import annotations

import os
from typing import Any

import torch

from weightcast.errors import ManifestError, WeightcastError
from weightcast.format.manifest import Manifest
from weightcast.host.descriptors import shortage_now
from weightcast.links.link import WorkerLink
from weightcast.seams.transport import Portion
from weightcast.transports.ipc import records
from weightcast.transports.ipc.arena import MappedSharedArena
from weightcast.transports.receiving import ArenaReceiver, MappedArena


class IpcReceiver(ArenaReceiver):
    """Implements `Receiver`. Memory: none of its own, but for a bucket's pages that the engine writes to."""

    def __init__(
        self,
        url: str,
        *,
        peer: str,
        run: str,
        link: WorkerLink | None,
        deadline_seconds: float = 60.0,
        device: torch.device | None = None,
    ) -> None:
        """`device`: the GPU that reads an arena that lies on a GPU."""
        self._device = device
        super().__init__(run, link, deadline_seconds, records.ToReceiver)

    def read_together(self, manifest: Manifest, portion: Portion) -> bool:
        """The sender's arena is the same memory for all."""
        return True

    def _map(self, record: Any, descriptor: int | None) -> MappedArena:
        if isinstance(record, records.CudaArena):
            # Here: host memory needs none of it.
            from weightcast.transports.ipc.cuda import MappedCudaArena

            try:
                return MappedCudaArena(record, descriptor, self._device)
            finally:
                if descriptor is not None:
                    os.close(descriptor)
        if descriptor is None:
            if short := shortage_now():
                raise WeightcastError(f"the publisher's arena can't be opened: {short}")
            raise ManifestError("an arena was announced without its descriptor", fault="type")
        return MappedSharedArena(record, descriptor)
