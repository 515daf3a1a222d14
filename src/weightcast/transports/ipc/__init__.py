"""`ipc://`: publisher and engines on one host map the same memory. Bytes are copied into it once, and once out of it.

`arena` and `cuda` are the memory, `ends` the sender and the receiver, `records` the records that announce the memory.
"""

from __future__ import annotations

from weightcast.seams.transport import Transport
from weightcast.transports.ipc.ends import IpcReceiver, IpcSender

TRANSPORT = Transport(
    sender=IpcSender,
    receiver=IpcReceiver,
    same_host=True,
    default_bucket_size_bytes={"cpu": 64 << 20, "cuda": 512 << 20, "cache": 8 << 20},
    origins="host",
    mappable_on_gpu="staged",
)

__all__ = ["TRANSPORT", "IpcReceiver", "IpcSender"]
