"""Records that trainer ranks exchange: one for each phase of a publish.

A publish begins with `Start`. If anything has changed on any rank, `Settings`, `Held`, `Mappable` and `Agreed` follow.
Then the publishing rank sends one instruction after another (`Check` to `End`); in the same exchange every other rank
sends its `RankStatus`. A round, which is the next bucket of each origin, is `Pack` and `Packed`. Ranks send `Nothing`
to wait for each other, or for the report of one of them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from weightcast.errors import (
    MAX_TEXT_CHARACTERS,
    ErrorRecord,
    PublishReport,
    from_record,
    to_record,
)
from weightcast.format.geometry import Region
from weightcast.format.manifest import RunId, TensorSpec
from weightcast.trainer.background import Overlap
from weightcast.trainer.packer import HeldRegion

Content: TypeAlias = Literal["weights", "deltas", "base"]
"""Content of an update: weights that ranks pack in rounds, their deltas, or the buckets of the base."""


class _Record(msgspec.Struct, frozen=True, tag=True, omit_defaults=True): ...


class Nothing(_Record, frozen=True):
    """An empty record; from the publishing rank a keep-alive."""


class Start(_Record, frozen=True):
    """Every rank's first record. `is_changed`: regions or settings have changed since the ranks last agreed.

    `specs`: digest of the specs. `num_gathers`: number of the source's gathers, see `CollectiveSource`.
    """

    is_changed: bool
    specs: str
    num_gathers: int


class Specs(_Record, frozen=True):
    """The specs of the publishing rank, and of each rank whose specs differ."""

    specs: list[TensorSpec]


# --- who packs what ---


class Settings(_Record, frozen=True):
    """The publishing rank's settings, from which every rank makes the same plan and sends to the same workers.

    `url`: its transport. `secret`, `lease_seconds`: of the workers' links.

    `maps_buckets`: ranks may pack into each other's buckets. `dtypes`: by name, the dtype that a tensor is cast to.
    """

    run: RunId
    url: str
    secret: str
    lease_seconds: float
    bucket_size_bytes: int
    maps_buckets: bool
    dtypes: dict[str, str] = {}


class Held(_Record, frozen=True):
    """A rank's regions, by index of the specs; its host; the location of a page that the other ranks try to map."""

    parts: list[HeldRegion]
    host: str
    probe: str


class Mappable(_Record, frozen=True):
    """The lower group ranks whose memory this rank can map."""

    ranks: tuple[int, ...]


class Agreed(_Record, frozen=True):
    """Digest of the plan that a rank has made, and the address of its links, if it sends to workers."""

    manifest_digest: str
    address: str = ""


class HeldParts(_Record, frozen=True):
    """The tensors that a rank gathers whole (see `whole_tensors`); which regions of each it holds, and their bytes."""

    specs: list[TensorSpec]
    regions: list[list[Region]]
    num_bytes: int


# --- the publishing rank's instructions ---


class Check(_Record, frozen=True):
    """Instruction: check the weights for NaN and infinity."""


class Encode(_Record, frozen=True):
    """Instruction: do not send the buckets of the rounds that follow, but encode them; the base becomes theirs."""


class Open(_Record, frozen=True):
    """Instruction: open the update, or open it again, for these peers. `join_at`: see `Sender.begin_together`.

    `sends`: anything but weights was encoded before. `keeps_base`: the base becomes the weights that are packed.
    """

    peers: tuple[str, ...]
    staged: bool
    join_at: str = ""
    sends: Content = "weights"
    keeps_base: bool = False


class NextBucket(msgspec.Struct, frozen=True):
    """The next bucket of an origin: location of its memory, and the first byte of its payload there."""

    offset_bytes: int
    memory: str


class Pack(_Record, frozen=True):
    """Instruction: pack your parts of round `number`.

    `bucket`: the publishing rank's own next bucket. `proves`: compute digests of tensors, too.
    """

    number: int
    bucket: NextBucket | None = None
    proves: bool = False


class Packed(_Record, frozen=True):
    """The publishing rank has packed its part of the round. After this exchange all ranks have."""


class AskSenders(_Record, frozen=True):
    """Instruction: send an `OriginReport`, on these peers. `keeps_base`: first have memory for a base of your origin's
    buckets.
    """

    peers: tuple[str, ...] = ()
    keeps_base: bool = False


class AllPacked(_Record, frozen=True):
    """No rank reads its weights any more: they may change on every rank."""


class Declined(_Record, frozen=True):
    """Instruction: let your next `Publisher.start` end without a publish, since this one is in flight."""

    overlap: Overlap


class End(_Record, frozen=True):
    """The publish has ended with this report."""

    report: PublishReport


# --- the others' answers ---


class RankStatus(_Record, frozen=True):
    """A rank's status. `sums`: partial digest of the last bucket, of the chunks that this rank alone has filled.

    Of a rank that leads an origin: `is_busy` with an earlier instruction; `bucket`: its next bucket, None if all were
    sent or peers were lost; `failures`: its sender's errors by peer; `survivors`: after a loss, the peers for which the
    update can be opened again, else None.
    """

    sums: tuple[int, int] = (0, 0)
    is_busy: bool = False
    bucket: NextBucket | None = None
    failures: dict[str, ErrorRecord] = {}
    survivors: tuple[str, ...] | None = None


class Failure(_Record, frozen=True):
    """An error of one rank, sent in place of its record. Its kind may be ValueError or TypeError, too."""

    record: ErrorRecord

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        record = to_record(error)
        for kind in (ValueError, TypeError):
            if isinstance(error, kind):
                record = msgspec.structs.replace(record, kind=kind.__name__, message=str(error)[:MAX_TEXT_CHARACTERS])
        return cls(record)

    def error(self, trainer_rank: int) -> Exception:
        """Return the error as the other ranks raise it. `trainer_rank`: the rank on which it happened."""
        record = msgspec.structs.replace(self.record, message=f"trainer rank {trainer_rank}: {self.record.message}")
        builtin = {"ValueError": ValueError, "TypeError": TypeError}.get(record.kind)
        return from_record(record) if builtin is None else builtin(record.message)


class OriginReport(_Record, frozen=True):
    """State of another origin's sender, from the rank that leads that origin.

    `connected`: peers with a connection. Of this publish, as far as it is: `digests` of the sent or encoded buckets;
    `sent`, digests of tensors, by bucket; `encoded_bytes`, lengths of the encoded buckets, in which `num_changed` words
    have changed. `base`: number of the version of the origin's base, -1 for none; `problem`: why it has no memory.
    """

    connected: tuple[str, ...]
    digests: list[str]
    sent: dict[int, list[str]]
    encoded_bytes: list[int] = []
    num_changed: int = 0
    base: int = -1
    problem: str = ""


Agreement: TypeAlias = Start | Specs | Settings | Held | Mappable | Agreed | HeldParts
Instruction: TypeAlias = Check | Encode | Open | Pack | Packed | AskSenders | AllPacked | Declined | End
Answer: TypeAlias = Nothing | RankStatus | OriginReport | Failure
Record: TypeAlias = Agreement | Instruction | Answer


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of an exchange. `version`: number of the publishing rank's last version."""

    version: int
    record: Record
