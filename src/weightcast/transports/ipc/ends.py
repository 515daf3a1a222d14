"""Both ends of the ipc transport: a sender packs buckets into an arena, which each receiver maps once.

Records announce the arena, and then each complete bucket in it. The links are at a Unix socket, over which the file
descriptors of arenas are sent. Invariant: buckets that are streamed from a GPU stay on it; all others are in host
memory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from weightcast.errors import ManifestError, WeightcastError
from weightcast.format.manifest import Manifest, decoder
from weightcast.format.messages import LinkMessage
from weightcast.host.descriptors import shortage_now
from weightcast.seams.transport import Portion
from weightcast.transports.ipc import records
from weightcast.transports.ipc.arena import MappedSharedArena, OwnedSharedArena
from weightcast.transports.receiving import ArenaReceiver, MappedArena
from weightcast.transports.records import FromArena
from weightcast.transports.sending import ArenaSender

if TYPE_CHECKING:
    from weightcast.transports.ipc.cuda import OwnedCudaArena

IpcArena: TypeAlias = "OwnedSharedArena | OwnedCudaArena"


class IpcSender(ArenaSender[IpcArena]):
    """Implements `Sender`; see `ArenaSender`."""

    only_url = "ipc://"

    def _make_arena(self, generation: int, size_bytes: int, device: torch.device) -> IpcArena:
        if device.type == "cuda":
            # Imported here, since a host without a GPU does not need it.
            from weightcast.transports.ipc.cuda import OwnedCudaArena

            return OwnedCudaArena(generation, size_bytes, device)
        return OwnedSharedArena(generation, size_bytes)


class IpcReceiver(ArenaReceiver):
    """Implements `Receiver`. Memory: none of its own, except copies of the pages that the engine writes to."""

    announcements = records.SharedArena | records.CudaArena

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


for _records in (IpcSender.messages, IpcReceiver.announcements | FromArena):
    decoder(LinkMessage | _records)
