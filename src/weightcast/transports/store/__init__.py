"""`file:///dir`: a directory of versions, written by one publisher and followed by whoever can read it.

`sender` and `receiver` are the two ends; the directory itself is the package `weightcast.store`.
"""

from __future__ import annotations

from weightcast.seams.transport import Transport
from weightcast.transports.store.receiver import StoreReceiver
from weightcast.transports.store.sender import StoreSender

TRANSPORT = Transport(
    sender=StoreSender,
    receiver=StoreReceiver,
    # Packed, digested and written while it is in a core's cache.
    default_bucket_size_bytes={"cpu": 2 << 20, "cuda": 64 << 20},
    same_host=False,
)

__all__ = ["TRANSPORT", "StoreReceiver", "StoreSender"]
