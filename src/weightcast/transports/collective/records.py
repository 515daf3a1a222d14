"""Records of the collective transport's sender and receivers, beside the broadcasts and every transport's records.

The link listens at the URL's HOST:PORT, at which groups meet, too.

- After `begin`, group rank 0 broadcasts buckets 0, 1, ... of the offered plan, each one flat broadcast of header
  and payload, and each only once every receiver has said that it waits for it. Its length is what the plan says,
  which is that of codec `raw`: a sender MUST NOT broadcast another, since receivers wait for that many bytes. A
  receiver posts broadcast k + 1 as soon as it has room for it.
- A group is never mended. After any loss the sender closes it; when the publisher has opened the update again for
  the survivors, they are invited to the next `epoch`, with a store of its own; then comes `begin` of the same
  `version`, and all buckets once more. A receiver that has a bucket MUST take its broadcast and drop it.
- A receiver MUST NOT hand out memory that a broadcast of a closed group may still write to.
- Those who read along are workers of one engine on one host in a staged update. `memory` is `PID/DESCRIPTOR/NAME`:
  anonymous memory of that process, sealed against shrinking, which they map privately.

The store and the data connections of torch.distributed are neither authenticated nor encrypted. The store listens on
the sender's address only, while its group lives. Who can reach it can spoil a broadcast, which the bucket's digest
finds unless the damage was made to match it: use a network that you trust.
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
