"""The records of the ipc transport: JSON by msgspec, one in each packet, none larger than MAX_RECORD_BYTES.

Invariants: whatever speaks of an update carries its `update`, a number that the sender counts up with every `open`, so
that nothing of an aborted update is taken for its successor, not even under the same version; whatever speaks of bytes
carries the `generation` of the arena they lie in.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from weightcast.errors import ErrorRecord
from weightcast.format.manifest import MAX_BYTES, PROTOCOL, RunId, VersionNumber
from weightcast.format.messages import Count, ShortText

MAX_RECORD_BYTES = 1 << 16

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
Handle = Annotated[str, msgspec.Meta(max_length=1 << 15)]


class IpcHello(msgspec.Struct, frozen=True, tag="hello", tag_field="kind"):
    """Receiver to sender, its first record: who it is, and which publisher it means."""

    run: RunId
    peer: ShortText
    protocol: int = PROTOCOL


class Awaiting(msgspec.Struct, frozen=True, tag="joined", tag_field="kind"):
    """Receiver to sender: it waits for this version."""

    version: VersionNumber


class Released(msgspec.Struct, frozen=True, tag="released", tag_field="kind"):
    """Receiver to sender: it has done with a bucket."""

    version: VersionNumber
    update: Count
    generation: Count
    index: Count


class IpcEnded(msgspec.Struct, frozen=True, tag="ended", tag_field="kind"):
    """Receiver to sender: it has done with every bucket of an update. `update` is 0 if it saw no Begin of it."""

    version: VersionNumber
    update: Count


ToSender: TypeAlias = IpcHello | Awaiting | Released | IpcEnded


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
    """Sender to receiver: device memory. The handles are base64; `device` is the UUID of the GPU.

    The fields are those of torch's `UntypedStorage._share_cuda_`.
    """

    generation: Count
    size_bytes: Size
    device: ShortText
    handle: Handle
    storage_size_bytes: Size
    storage_offset_bytes: Size
    ref_counter_handle: Handle
    ref_counter_offset: Size
    event_handle: Handle
    event_sync_required: bool


class IpcBegin(msgspec.Struct, frozen=True, tag="begin", tag_field="kind"):
    """Sender to receiver: an update that it takes part in."""

    version: VersionNumber
    update: Count
    staged: bool
    num_buckets: Count


class BucketReady(msgspec.Struct, frozen=True, tag="ready", tag_field="kind"):
    """Sender to receiver: a bucket is whole, `num_bytes` of header and encoded payload from `offset_bytes` on.

    `event`: base64 handle of the CUDA event that says so, or empty.
    """

    version: VersionNumber
    update: Count
    generation: Count
    index: Count
    offset_bytes: Size
    num_bytes: Size
    event: Handle = ""


class IpcWaiting(msgspec.Struct, frozen=True, tag="waiting", tag_field="kind"):
    """Sender to receiver: it is alive and waits for somebody else."""


class IpcAborted(msgspec.Struct, frozen=True, tag="aborted", tag_field="kind"):
    """Sender to receiver: the update was given up."""

    version: VersionNumber
    update: Count
    reason: ShortText


ToReceiver: TypeAlias = Welcome | Refused | SharedArena | CudaArena | IpcBegin | BucketReady | IpcWaiting | IpcAborted
