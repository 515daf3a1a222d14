"""`gloo://` and `nccl://`: flat broadcasts of whole buckets in a torch.distributed group of our own.

`sender` and `receiver` are the two ends, `membership` who takes the update in progress, `broadcast_group` the sender's
group, `broadcast_reader` a receiver's, `receive_buffers` where buckets arrive and how workers of one host share them,
`records` the messages beside the broadcasts.
"""

from __future__ import annotations

from weightcast.seams.transport import Transport
from weightcast.transports.collective.receiver import CollectiveReceiver
from weightcast.transports.collective.sender import CollectiveSender

TRANSPORT = Transport(
    sender=CollectiveSender,
    receiver=CollectiveReceiver,
    default_bucket_size_bytes={"cpu": 64 << 20, "cuda": 512 << 20},
    same_host=False,
)

__all__ = ["TRANSPORT", "CollectiveReceiver", "CollectiveSender"]
