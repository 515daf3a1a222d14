"""Records of the ipc transport, which announce the memory that its buckets are in.

They are sent over the link, which is a Unix socket and also carries file descriptors.

- `generation` counts the sender's arenas from 1. After `begin` a sender announces its arena to each receiver that has
  not mapped it; a receiver drops an announcement outside of an update.
- Header and payload of a bucket follow each other in the arena, from `offset_bytes` on. A receiver MUST check that
  `num_bytes` is at least a header and at most header and raw payload, and that both end inside the arena.
- The arena's descriptor MUST be sealed against resizing, and a receiver MUST check seals and size before it maps the
  memory: reading a file that shrank raises SIGBUS, which no error handling catches. A receiver maps it privately, so
  that it can't change the bytes that others read.
- A sender MUST NOT rewrite bytes that were announced to a living receiver which has not released them. If a receiver
  stalls past the deadline, the sender abandons the arena and announces another generation, also during an update.
"""

from __future__ import annotations

import msgspec

from weightcast.format.messages import Count, ShortText
from weightcast.transports.records import Size


class SharedArena(msgspec.Struct, frozen=True, tag="shared_arena", tag_field="kind"):
    """Host memory, whose file descriptor is sent with this record."""

    generation: Count
    size_bytes: Size


class CudaArena(msgspec.Struct, frozen=True, tag="cuda_arena", tag_field="kind"):
    """Device memory, whose file descriptor is sent with this record. `device` is the UUID of the GPU."""

    generation: Count
    size_bytes: Size
    device: ShortText
