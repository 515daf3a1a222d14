"""`memory://`: sender and receivers in one process hand each other references. The reference for every contract."""

from __future__ import annotations

from weightcast.seams.transport import Transport
from weightcast.transports.memory.receiver import MemoryReceiver
from weightcast.transports.memory.sender import MemorySender

TRANSPORT = Transport(
    sender=MemorySender,
    receiver=MemoryReceiver,
    default_bucket_size_bytes={"cpu": 64 << 20, "cuda": 512 << 20},
    same_host=True,
)

__all__ = ["TRANSPORT", "MemoryReceiver", "MemorySender"]
