"""`memory://`: sender and receivers in one process, which read the sender's memory in place.

It is the reference implementation that other transports are tested against.
"""

from __future__ import annotations

import secrets
import weakref
from typing import Any

import msgspec
import torch

from weightcast.errors import PeerDiedError
from weightcast.format.messages import Count, ShortText
from weightcast.host import device as host_device
from weightcast.seams.transport import Transport
from weightcast.transports.kept_memory import MemoryToSend
from weightcast.transports.receiving import PUBLISHER, ArenaReceiver, MappedArena
from weightcast.transports.sending import ArenaSender, OwnedArena


class ReferredArena(msgspec.Struct, frozen=True, tag="referred_arena", tag_field="kind"):
    """Memory of this process, which `_arenas` finds by `key`."""

    generation: Count
    key: ShortText


class MemoryArena(OwnedArena, MappedArena):
    """An arena that serves as the sender's and as the receiver's end."""

    def __init__(self, generation: int, size_bytes: int, device: torch.device) -> None:
        super().__init__(generation, MemoryToSend(device, "sending this update").allocate(size_bytes), device)
        self._key = secrets.token_hex(16)
        _arenas[self._key] = self

    def announcement(self) -> tuple[ReferredArena, None]:
        return ReferredArena(self.generation, self._key), None

    def reset(self) -> None:
        """Wait for the device: operations that an aborted update queued may still read the arena."""
        host_device.synchronize(self.device)

    def close(self, *, free: bool = False) -> None:
        """Do nothing: the memory is freed with the last tensor that refers to it."""


_arenas: weakref.WeakValueDictionary[str, MemoryArena] = weakref.WeakValueDictionary()
"""Arenas of this process that a sender or a receiver uses, by key."""


class MemorySender(ArenaSender[MemoryArena]):
    """Implements `Sender`; see `ArenaSender`."""

    only_url = "memory://"

    def _make_arena(self, generation: int, size_bytes: int, device: torch.device) -> MemoryArena:
        return MemoryArena(generation, size_bytes, device)


class MemoryReceiver(ArenaReceiver):
    """Implements `Receiver`; see `ArenaReceiver`. Buckets are the sender's own memory, on its device."""

    announcements = ReferredArena

    def _map(self, record: Any, descriptor: int | None) -> MappedArena:
        arena = _arenas.get(record.key)
        if arena is None:
            what = "the publisher is in another process, and memory:// works within one process only: use ipc://"
            raise PeerDiedError(what, peer=PUBLISHER)
        return arena


TRANSPORT = Transport(
    sender=MemorySender,
    receiver=MemoryReceiver,
    same_host=True,
    default_bucket_size_bytes={"cpu": 64 << 20, "cuda": 512 << 20, "cache": 8 << 20},
    mappable_on_gpu="staged",
)
