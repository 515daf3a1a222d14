"""Records that both ends of every transport with peers send each other; a transport adds records of its own.

Invariants: whatever speaks of an update carries its `update`, a number that the sender counts up with every update, so
that nothing of an aborted one is taken for its successor, not even under the same version; whatever speaks of bytes in
an arena carries the arena's `generation`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from weightcast.format.manifest import MAX_BYTES, VersionNumber
from weightcast.format.messages import Count, ShortText

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
"""In base64, as JSON has no bytes."""


# --- sender -> receiver -----------------------------------------------------------------------


class BeginUpdate(msgspec.Struct, frozen=True, tag="begin", tag_field="kind"):
    """An update that the receiver takes part in. The same `update` again: after a loss all buckets come once more.

    `opening`: that of `Opened`, which it answers.
    """

    version: VersionNumber
    update: Count
    staged: bool
    num_buckets: Count
    opening: Count = 0


class BucketReady(msgspec.Struct, frozen=True, tag="ready", tag_field="kind"):
    """A bucket is whole in the sender's arena: `num_bytes` of header and encoded payload, from `offset_bytes` on."""

    update: Count
    generation: Count
    index: Count
    offset_bytes: Size
    num_bytes: Size


class ArenaClosed(msgspec.Struct, frozen=True, tag="arena_closed", tag_field="kind"):
    """The sender has no use for that arena any more."""

    generation: Count


class UpdateAborted(msgspec.Struct, frozen=True, tag="aborted", tag_field="kind"):
    """The update is over for this receiver."""

    update: Count
    reason: ShortText


class KeepAlive(msgspec.Struct, frozen=True, tag="waiting", tag_field="kind"):
    """The sender waits for another peer."""


# --- receiver -> sender -----------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag="opened", tag_field="kind"):
    """The receiver waits for this version. `opening`: how many updates it has opened by now."""

    version: VersionNumber
    opening: Count


class Released(msgspec.Struct, frozen=True, tag="released", tag_field="kind"):
    """The receiver reads a bucket of the arena no more."""

    update: Count
    generation: Count
    index: Count


class UpdateEnded(msgspec.Struct, frozen=True, tag="ended", tag_field="kind"):
    """The receiver takes no more of an update, and reads none of its buckets. `update` is 0 if it saw none begin."""

    version: VersionNumber
    update: Count


FromSender: TypeAlias = BeginUpdate | ArenaClosed | UpdateAborted | KeepAlive
FromPeer: TypeAlias = Opened | UpdateEnded
