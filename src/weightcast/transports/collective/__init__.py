"""`gloo://` and `nccl://`: each bucket is one flat broadcast in a torch.distributed group of weightcast's own.

`sender` and `receiver` are the two ends, `group` the sender's groups, `buffers` the memory that buckets are received
into and that workers of one host share, `records` the records that are sent over the link beside the broadcasts.
"""

from __future__ import annotations

import dataclasses

from weightcast.seams.transport import Transport
from weightcast.transports.collective.receiver import CollectiveReceiver
from weightcast.transports.collective.sender import CollectiveSender

NCCL = Transport(
    sender=CollectiveSender,
    receiver=CollectiveReceiver,
    same_host=False,
    # Small, since each engine's GPU has two or three buckets beside its KV cache, which leaves little memory.
    default_bucket_size_bytes={"cpu": 64 << 20, "cuda": 64 << 20},
    origins="any",
)
GLOO = dataclasses.replace(NCCL, mappable_on_gpu="always")

__all__ = ["GLOO", "NCCL", "CollectiveReceiver", "CollectiveSender"]
