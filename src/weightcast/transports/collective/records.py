"""What sender and receivers of the collective transport say beside the broadcasts and the records of every transport.

Nothing is said per bucket: the plan of the offer says what is broadcast.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from weightcast.format.messages import MAX_DEADLINE_SECONDS, Count, ShortText
from weightcast.transports.linked import FromLinked, ToLinked

Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


# --- sender -> receiver -----------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag="join", tag_field="kind"):
    """Be of group `epoch`, whose store is at `host` and `port`, and connect when told to; leave the former group.

    `readers`: the workers of the same engine and host that read along, from memory that this one shares with them.
    """

    epoch: Count
    group_rank: Rank
    group_size: Rank
    host: ShortText
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_SECONDS)]
    readers: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=1 << 12)] = ()


class Connect(msgspec.Struct, frozen=True, tag="connect", tag_field="kind"):
    """Everybody has answered the invitation: connect to the others of group `epoch` now."""

    epoch: Count


class ReadAlong(msgspec.Struct, frozen=True, tag="read_along", tag_field="kind"):
    """Join no group: another worker of this host receives for both, and shares its memory at `address`."""

    epoch: Count
    address: ShortText


class ProgressQuestion(msgspec.Struct, frozen=True, tag="ask", tag_field="kind"):
    """How far are you?"""

    question: Count


ToReceiver: TypeAlias = Join | Connect | ReadAlong | ProgressQuestion | ToLinked


# --- receiver -> sender -----------------------------------------------------------------------


class Joining(msgspec.Struct, frozen=True, tag="joining", tag_field="kind"):
    """The receiver is ready to connect to group `epoch`, or reads along with one that is.

    Of `update` it has the first `num_received` buckets. `shared`: where others read along, if they were named.
    """

    epoch: Count
    update: Count = 0
    num_received: Count = 0
    shared: ShortText = ""


class JoinFailed(msgspec.Struct, frozen=True, tag="join_failed", tag_field="kind"):
    """The receiver could not connect to group `epoch`, or is in it no more. `is_own`: by a failure of its own."""

    epoch: Count
    reason: ShortText
    is_own: bool = False


class AllReceived(msgspec.Struct, frozen=True, tag="whole", tag_field="kind"):
    """Every bucket of `update` has arrived here."""

    update: Count


class Progress(msgspec.Struct, frozen=True, tag="answer", tag_field="kind"):
    """To `ProgressQuestion`. `is_waiting`: it waits for its next bucket, and is not itself what the others wait for."""

    question: Count
    update: Count
    num_received: Count
    is_waiting: bool


FromReceiver: TypeAlias = Joining | JoinFailed | AllReceived | Progress | FromLinked
