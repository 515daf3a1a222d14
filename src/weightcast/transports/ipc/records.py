"""Records of the ipc transport beside those of every transport: the memory in which its buckets lie.

They travel on the link, which is at a Unix socket, by which descriptors travel, too.

- `generation` counts up with every arena, from 1. A sender announces its arena, after `begin`, to each receiver
  that has not mapped it; a receiver drops an announcement outside of an update.
- Header and payload of a bucket lie in the arena from `offset_bytes` on, one behind the other. A receiver MUST
  check that `num_bytes` is at least a header and at most header and raw payload, and that both end inside the
  arena.
- The arena's descriptor MUST be sealed against resizing, and a receiver MUST check seals and size before it maps: a
  file that shrinks is a signal, not an error. A receiver maps privately, so that it can't change what others read.
- A sender MUST NOT rewrite bytes that were announced to a living receiver which has not released them. If it stalls
  past the deadline, the sender gives the arena up and announces another generation, also during an update.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from weightcast.format.messages import Count, ShortText
from weightcast.transports.records import BucketReady, FromPeer, FromSender, Released, Size


class SharedArena(msgspec.Struct, frozen=True, tag="shared_arena", tag_field="kind"):
    """Host memory, whose descriptor comes with this record."""

    generation: Count
    size_bytes: Size


class CudaArena(msgspec.Struct, frozen=True, tag="cuda_arena", tag_field="kind"):
    """Device memory, whose descriptor comes with this record; `device` is the UUID of the GPU."""

    generation: Count
    size_bytes: Size
    device: ShortText


ToReceiver: TypeAlias = SharedArena | CudaArena | BucketReady | FromSender
FromReceiver: TypeAlias = Released | FromPeer
