"""The publisher's end of the ipc transport: buckets are packed into an arena, and each complete one is announced.

Invariant: buckets that are streamed from a GPU stay on it (`device`); all others are in host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from weightcast.links.link import LinkListener
from weightcast.transports.ipc import records
from weightcast.transports.ipc.arena import OwnedSharedArena
from weightcast.transports.sending import ArenaSender

if TYPE_CHECKING:
    from weightcast.transports.ipc.cuda import OwnedCudaArena

IpcArena: TypeAlias = "OwnedSharedArena | OwnedCudaArena"

SCHEME = "ipc://"


class IpcSender(ArenaSender[IpcArena]):
    """Implements `Sender`; see `ArenaSender`."""

    def __init__(
        self,
        url: str = SCHEME,
        *,
        run: str,
        listener: LinkListener,
        deadline_seconds: float = 60.0,
        device: torch.device | str | None = None,
    ) -> None:
        """Make a sender. `listener` is at a Unix socket, over which file descriptors of memory are sent."""
        if url != SCHEME:
            raise ValueError(f"{url!r} has an address, and ipc:// takes none: pass {SCHEME!r}")
        super().__init__(run, listener, deadline_seconds, records.FromReceiver, device)

    def _make_arena(self, generation: int, size_bytes: int, device: torch.device) -> IpcArena:
        if device.type == "cuda":
            # Imported here, since a host without a GPU does not need it.
            from weightcast.transports.ipc.cuda import OwnedCudaArena

            return OwnedCudaArena(generation, size_bytes, device)
        return OwnedSharedArena(generation, size_bytes)
