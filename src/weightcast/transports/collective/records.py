"""Records of the collective transport, which sender and receivers exchange over the link beside the broadcasts.

The link listens at the URL's HOST:PORT; the rendezvous stores of groups listen on the same host.

- After `begin`, group rank 0 broadcasts buckets 0, 1, ... of the offered plan, each as one flat broadcast of header and
  payload, and each only when every receiver has sent that it waits for it. Receivers post the length that the plan has
  for codec `raw`: a sender MUST NOT broadcast another length. A receiver posts broadcast k + 1 as soon as it has room
  for that bucket.
- A broken group is not repaired. After any loss the sender closes it. When the publisher has opened the update again
  for the survivors, the sender invites them to the next `epoch`, which has a store of its own; then it sends `begin` of
  the same `version` and all buckets again. A receiver that already has a bucket MUST receive its broadcast and drop it.
- A receiver MUST NOT use memory for a bucket while a broadcast of a closed group may still write to it.
- In a staged update several workers of one engine on one host read the memory of one of them (`ReadAlong`). `memory` is
  `PID/DESCRIPTOR/NAME`: anonymous memory of that process, sealed against shrinking, which the others map privately.

The store and the data connections of torch.distributed are neither authenticated nor encrypted. The store listens on
the sender's address only, while its group lives. Any process that can connect to it can corrupt a broadcast; the
bucket's digest detects that unless the corruption was computed to match it. Use a network that you trust.
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
    """Leave the former group and prepare to join group `epoch`, whose store is at `host` and `port`.

    The receiver connects at `Connect`. `deadline_seconds`: the sender's limit for waiting for a member.
    `is_read_along`: other workers of the same engine and host read the memory that this one receives into.
    """

    epoch: Count
    group_rank: Rank
    group_size: Rank
    host: ShortText
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    deadline_seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_DEADLINE_SECONDS)]
    is_read_along: bool = False


class Connect(msgspec.Struct, frozen=True, tag="connect", tag_field="kind"):
    """Connect to the other members of group `epoch` now: all have answered the invitation."""

    epoch: Count


class ReadAlong(msgspec.Struct, frozen=True, tag="read_along", tag_field="kind"):
    """Read the memory at `memory`, which a worker of this host receives into, instead of joining group `epoch`."""

    epoch: Count
    memory: ShortText


class Arrived(msgspec.Struct, frozen=True, tag="arrived", tag_field="kind"):
    """The first `num_buckets` of the update are in the memory that this worker reads along."""

    version: VersionNumber
    num_buckets: Count


ToReceiver: TypeAlias = Join | Connect | ReadAlong | Arrived | FromSender


# --- receiver -> sender -----------------------------------------------------------------------


class Joining(msgspec.Struct, frozen=True, tag="joining", tag_field="kind"):
    """The receiver is ready to connect to group `epoch`, or has mapped the memory of a worker that is.

    `memory`: the location of the memory that other workers of its host are to read; empty if there are none.
    """

    epoch: Count
    memory: ShortText = ""


class JoinFailed(msgspec.Struct, frozen=True, tag="join_failed", tag_field="kind"):
    """The receiver could not join group `epoch`, or has left it. `is_own`: because of a failure of its own."""

    epoch: Count
    reason: ShortText
    is_own: bool = False


class Progress(msgspec.Struct, frozen=True, tag="progress", tag_field="kind"):
    """The receiver has received the update's first `num_received` buckets in group `epoch`.

    It waits for the buckets before `num_awaited`, which may be broadcast.
    """

    epoch: Count = 0
    version: VersionNumber = 0
    num_received: Count = 0
    num_awaited: Count = 0


FromReceiver: TypeAlias = Joining | JoinFailed | Progress | FromPeer
