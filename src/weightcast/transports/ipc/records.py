"""What the ends of the ipc transport say beside the records of every transport, and how large a packet may be."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from weightcast.errors import ErrorRecord
from weightcast.format.manifest import PROTOCOL, RunId
from weightcast.format.messages import Count, ShortText
from weightcast.transports.records import BucketReady, FromPeer, FromSender, Released, Size

MAX_RECORD_BYTES = 1 << 16


class IpcHello(msgspec.Struct, frozen=True, tag="hello", tag_field="kind"):
    """Receiver to sender, its first record: who it is, and which publisher it means."""

    run: RunId
    peer: ShortText
    protocol: int = PROTOCOL


ToSender: TypeAlias = IpcHello | Released | FromPeer


class Welcome(msgspec.Struct, frozen=True, tag="welcome", tag_field="kind"):
    """Sender to receiver: the hello was accepted."""


class Refused(msgspec.Struct, frozen=True, tag="refused", tag_field="kind"):
    """Sender to receiver: the hello was not accepted; the connection ends."""

    error: ErrorRecord


class SharedArena(msgspec.Struct, frozen=True, tag="shared_arena", tag_field="kind"):
    """Sender to receiver: host memory, whose descriptor comes with this packet."""

    generation: Count
    size_bytes: Size


class CudaArena(msgspec.Struct, frozen=True, tag="cuda_arena", tag_field="kind"):
    """Sender to receiver: device memory, whose descriptor comes with this packet; `device` is the UUID of the GPU."""

    generation: Count
    size_bytes: Size
    device: ShortText


ToReceiver: TypeAlias = Welcome | Refused | SharedArena | CudaArena | BucketReady | FromSender
