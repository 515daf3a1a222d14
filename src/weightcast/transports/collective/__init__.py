"""`gloo://` and `nccl://`: flat broadcasts of whole buckets in a torch.distributed group of our own.

`collective_sender` and `collective_receiver` are the two ends, `collective_members` who is there and what they say,
`collective_epoch` the sender's group, `collective_stream` a receiver's, `collective_memory` where buckets arrive,
`collective_records` the messages beside the broadcasts.
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
