"""A worker's end of the ipc transport: maps the sender's arena once; records announce each complete bucket in it."""

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
    """Implements `Receiver`. Memory: none of its own, except copies of the pages that the engine writes to."""

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
        """Make a receiver. `device` is the GPU for which an arena on a GPU is mapped."""
        self._device = device
        super().__init__(run, link, deadline_seconds, records.ToReceiver)

    def read_together(self, manifest: Manifest, portion: Portion) -> bool:
        """Return True: all ranks read the sender's arena, which is the same memory for all."""
        return True

    def _map(self, record: Any, descriptor: int | None) -> MappedArena:
        if isinstance(record, records.CudaArena):
            # Imported here, since a host without a GPU does not need it.
            from weightcast.transports.ipc.cuda import MappedCudaArena

            try:
                return MappedCudaArena(record, descriptor, self._device)
            finally:
                if descriptor is not None:
                    os.close(descriptor)
        if descriptor is None:
            if short := shortage_now():
                raise WeightcastError(f"can't open the publisher's arena: {short}")
            raise ManifestError("the publisher announced an arena without its file descriptor", fault="type")
        return MappedSharedArena(record, descriptor)
