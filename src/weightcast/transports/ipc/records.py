"""Records of the ipc transport beside those of every transport: what its buckets lie in."""

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
