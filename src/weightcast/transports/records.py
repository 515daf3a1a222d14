"""Records that sender and receivers of every transport with peers exchange; a transport adds records of its own.

They are sent over the session's link. A link belongs to one run, and a version is offered over it once. Every record
about an update has the update's `version`, so that a late record of a former update can't be taken for one of the
present update; every record about bytes in an arena has the arena's `generation`, which counts from 1.

A sender MUST NOT begin a version before a receiver has opened it, and each end MUST ignore records about another
version than its present one. A receiver aborts an update if neither a record of it nor a heartbeat with `waits` arrives
for the publisher's deadline plus a lease, so that a publisher that hangs can't keep an engine paused.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from weightcast.format.manifest import MAX_BYTES, VersionNumber
from weightcast.format.messages import Count, ShortText

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


# --- sender -> receiver -----------------------------------------------------------------------


class BeginUpdate(msgspec.Struct, frozen=True, tag="begin", tag_field="kind"):
    """The sender begins an update that the receiver has opened. Sent again after a loss: all buckets follow again."""

    version: VersionNumber
    staged: bool
    num_buckets: Count


class BucketReady(msgspec.Struct, frozen=True, tag="ready", tag_field="kind"):
    """A bucket is complete in the sender's arena: `num_bytes` of header and encoded payload, from `offset_bytes` on."""

    version: VersionNumber
    generation: Count
    index: Count
    offset_bytes: Size
    num_bytes: Size


class UpdateAborted(msgspec.Struct, frozen=True, tag="aborted", tag_field="kind"):
    """The sender has aborted the update for this receiver."""

    version: VersionNumber
    reason: ShortText


# --- receiver -> sender -----------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag="opened", tag_field="kind"):
    """The receiver waits for this version. `generation` is that of the arena that it has mapped; 0 for none."""

    version: VersionNumber
    generation: Count = 0


class Released(msgspec.Struct, frozen=True, tag="released", tag_field="kind"):
    """The receiver has finished reading a bucket of the arena, which may be overwritten."""

    version: VersionNumber
    generation: Count
    index: Count


class UpdateEnded(msgspec.Struct, frozen=True, tag="ended", tag_field="kind"):
    """The receiver has ended the update, whether installed or aborted, and reads none of its buckets any more."""

    version: VersionNumber


FromSender: TypeAlias = BeginUpdate | UpdateAborted
FromArena: TypeAlias = BucketReady | FromSender
FromPeer: TypeAlias = Opened | UpdateEnded
