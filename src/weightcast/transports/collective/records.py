"""Records of the collective transport's sender and receivers, beside the broadcasts and every transport's records.

A bucket is broadcast only once every receiver has said that it waits for it, so that a receiver that keeps the others
waiting is known. The plan of the offer lists what is broadcast.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from weightcast.format.manifest import VersionNumber
from weightcast.format.messages import MAX_DEADLINE_SECONDS, Count, ShortText
from weightcast.transports.records import FromPeer, FromSender

Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


# --- sender -> receiver -----------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag="join", tag_field="kind"):
    """Be of group `epoch`, whose store is at `host` and `port`, and connect when told to; leave the former group.

    `deadline_seconds`: for so long the sender waits for another member, at most. `is_read_along`: other workers of the
    same engine and host read what this one receives.
    """

    epoch: Count
    group_rank: Rank
    group_size: Rank
    host: ShortText
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    deadline_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_SECONDS)]
    is_read_along: bool = False


class Connect(msgspec.Struct, frozen=True, tag="connect", tag_field="kind"):
    """Everybody has answered the invitation: connect to the others of group `epoch` now."""

    epoch: Count


class ReadAlong(msgspec.Struct, frozen=True, tag="read_along", tag_field="kind"):
    """Join no group: another worker of this host receives for both, into memory that is found at `memory`."""

    epoch: Count
    memory: ShortText


class Arrived(msgspec.Struct, frozen=True, tag="arrived", tag_field="kind"):
    """To those who read along: the first `num_buckets` of the update lie in the memory."""

    version: VersionNumber
    num_buckets: Count


ToReceiver: TypeAlias = Join | Connect | ReadAlong | Arrived | FromSender


# --- receiver -> sender -----------------------------------------------------------------------


class Joining(msgspec.Struct, frozen=True, tag="joining", tag_field="kind"):
    """The receiver is ready to connect to group `epoch`, or reads along with one that is.

    `memory`: where others of its host find what it receives, if they are to read along.
    """

    epoch: Count
    memory: ShortText = ""


class JoinFailed(msgspec.Struct, frozen=True, tag="join_failed", tag_field="kind"):
    """The receiver could not connect to group `epoch`, or is in it no more. `is_own`: by a failure of its own."""

    epoch: Count
    reason: ShortText
    is_own: bool = False


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="kind"):
    """Of the update the first `num_received` buckets have come in group `epoch`, and it waits for all before
    `num_awaited`: those may be broadcast.
    """

    epoch: Count = 0
    version: VersionNumber = 0
    num_received: Count = 0
    num_awaited: Count = 0


FromReceiver: TypeAlias = Joining | JoinFailed | Progress | FromPeer
