"""Records that both ends of every transport with peers send each other; a transport adds records of its own.

They travel on the session's link, which is of one run, and in which a version is offered once: whatever speaks of an
update carries its `version`, so that nothing of a former one is taken for its successor; whatever speaks of bytes in an
arena carries the arena's `generation`, which counts from 1.

A sender MUST NOT begin a version before a receiver has opened it, and each end MUST ignore what is about another
version than the one it is at. A receiver gives an update up if nothing of it comes for the publisher's deadline and a
lease: neither a record, nor a heartbeat with `waits`. So an engine does not stay paused for a publisher that hangs.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from weightcast.format.manifest import MAX_BYTES, VersionNumber
from weightcast.format.messages import Count, ShortText

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


# --- sender -> receiver -----------------------------------------------------------------------


class BeginUpdate(msgspec.Struct, frozen=True, tag="begin", tag_field="kind"):
    """An update that the receiver has opened and takes part in. Once more: after a loss all buckets come again."""

    version: VersionNumber
    staged: bool
    num_buckets: Count


class BucketReady(msgspec.Struct, frozen=True, tag="ready", tag_field="kind"):
    """A bucket is whole in the sender's arena: `num_bytes` of header and encoded payload, from `offset_bytes` on."""

    version: VersionNumber
    generation: Count
    index: Count
    offset_bytes: Size
    num_bytes: Size


class UpdateAborted(msgspec.Struct, frozen=True, tag="aborted", tag_field="kind"):
    """The update is over for this receiver."""

    version: VersionNumber
    reason: ShortText


# --- receiver -> sender -----------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag="opened", tag_field="kind"):
    """The receiver waits for this version. `generation`: of the arena that it has mapped; 0 for none."""

    version: VersionNumber
    generation: Count = 0


class Released(msgspec.Struct, frozen=True, tag="released", tag_field="kind"):
    """The receiver reads a bucket of the arena no more."""

    version: VersionNumber
    generation: Count
    index: Count


class UpdateEnded(msgspec.Struct, frozen=True, tag="ended", tag_field="kind"):
    """The receiver takes no more of an update, and reads none of its buckets."""

    version: VersionNumber


FromSender: TypeAlias = BeginUpdate | UpdateAborted
FromPeer: TypeAlias = Opened | UpdateEnded
