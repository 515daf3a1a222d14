"""`gloo://` and `nccl://`: flat broadcasts of whole buckets in a torch.distributed group of weightcast's own.

`sender` and `receiver` are the two ends, `group` the sender's groups, `buffers` the memory where buckets arrive and how
workers of one host share it, `records` the records that are sent beside the broadcasts.
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
    # Small, since each engine's GPU holds two or three buckets beside caches that leave little memory.
    default_bucket_size_bytes={"cpu": 64 << 20, "cuda": 64 << 20},
    origins="any",
)
GLOO = dataclasses.replace(NCCL, mappable_on_gpu="always")

__all__ = ["GLOO", "NCCL", "CollectiveReceiver", "CollectiveSender"]
