"""Records of the ipc transport's sender, beside those of every transport: the memory that buckets lie in."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from weightcast.format.messages import Count, ShortText
from weightcast.transports.linked import FromLinked, ToLinked
from weightcast.transports.records import BucketReady, Released, Size


class SharedArena(msgspec.Struct, frozen=True, tag="shared_arena", tag_field="kind"):
    """Host memory, whose descriptor comes with this record."""

    generation: Count
    size_bytes: Size


class CudaArena(msgspec.Struct, frozen=True, tag="cuda_arena", tag_field="kind"):
    """Device memory, whose descriptor comes with this record; `device` is the UUID of the GPU."""

    generation: Count
    size_bytes: Size
    device: ShortText


ToReceiver: TypeAlias = SharedArena | CudaArena | BucketReady | ToLinked
FromReceiver: TypeAlias = Released | FromLinked
