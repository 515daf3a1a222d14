"""Records that trainer ranks exchange: one for each phase of a publish.

A publish begins with `Start`. If anything has changed on any rank, `Settings`, `Held`, `Mappable` and `Agreed` follow.
Then the publishing rank gives one instruction after the other (`Check` to `End`), to each of which every other rank
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


class _Record(msgspec.Struct, frozen=True, tag=True, omit_defaults=True): ...


class Nothing(_Record, frozen=True):
    """Nothing to say, or of the publishing rank: nothing to do."""


class Start(_Record, frozen=True):
    """Every rank's first. `is_changed`: since the ranks have agreed. `specs`: their digest.

    `num_gathers`: of its source, see `CollectiveSource`.
    """

    is_changed: bool
    specs: str
    num_gathers: int


class Specs(_Record, frozen=True):
    """The specs of the publishing rank, and of each rank whose specs are others."""

    specs: list[TensorSpec]


# --- who packs what ---


class Settings(_Record, frozen=True):
    """The publishing rank's: what it takes to make the same plan, and to send to the same workers. `url`: of its
    transport. `secret`, `lease_seconds`: of the workers' links.

    `maps_buckets`: ranks may pack into each other's buckets. `dtypes`: what tensors are cast to, by name, in the place
    of the specs' dtypes.
    """

    run: RunId
    url: str
    secret: str
    lease_seconds: float
    bucket_size_bytes: int
    maps_buckets: bool
    dtypes: dict[str, str] = {}


class Held(_Record, frozen=True):
    """Every rank's regions, by number of the specs; its host; the location of memory that others try to map."""

    parts: list[HeldRegion]
    host: str
    probe: str


class Mappable(_Record, frozen=True):
    """The group ranks before this one whose memory it can map."""

    ranks: tuple[int, ...]


class Agreed(_Record, frozen=True):
    """Every rank's: the digest of the plan that it has made, and the address of its links if it sends to workers."""

    manifest_digest: str
    address: str = ""


class HeldParts(_Record, frozen=True):
    """The tensors that a rank gathers whole (see `whole_tensors`), and which regions of each it holds."""

    specs: list[TensorSpec]
    regions: list[list[Region]]


# --- the publishing rank's instructions ---


class Check(_Record, frozen=True):
    """Look for NaN and infinity."""


class Open(_Record, frozen=True):
    """An update begins, or begins again, for these peers. `join_at`: see `Sender.begin_together`."""

    peers: tuple[str, ...]
    staged: bool
    join_at: str = ""


class NextBucket(msgspec.Struct, frozen=True):
    """First byte of the payload of an origin's next bucket in the memory at this location, if any."""

    offset_bytes: int
    memory: str


class Pack(_Record, frozen=True):
    """Pack your parts of round `number`. `bucket`: the publishing rank's own. `proves`: digest tensors, too."""

    number: int
    bucket: NextBucket | None = None
    proves: bool = False


class Packed(_Record, frozen=True):
    """The publishing rank has packed its part; all have, once all have brought a status to this."""


class AskSenders(_Record, frozen=True):
    """Report what your sender knows, also of these peers; with `digests`, those of the buckets that it has sent."""

    peers: tuple[str, ...]
    digests: bool


class AllPacked(_Record, frozen=True):
    """No rank reads its weights any more: they may change."""


class Declined(_Record, frozen=True):
    """Every rank's next `Publisher.start` ends without a publish, since this one is in flight."""

    overlap: Overlap


class End(_Record, frozen=True):
    """The publish is over."""

    report: PublishReport


# --- the others' answers ---


class RankStatus(_Record, frozen=True):
    """`sums`: digest of the chunks that this rank alone has filled of the bucket that it packed last.

    Of a rank that leads an origin: `is_busy` with what it was told before; `is_lost`: its sender has lost peers;
    `num_failures` of its sender; `bucket`: its next one, None if all were sent or peers were lost.
    """

    sums: tuple[int, int] = (0, 0)
    is_busy: bool = False
    is_lost: bool = False
    num_failures: int = 0
    bucket: NextBucket | None = None


class OriginReport(_Record, frozen=True):
    """State of another origin's sender, from the rank that leads that origin.

    `connected`: the peers that are. `failures`: by peer. `survivors`: those for whom an update that has lost peers can
    go on, else None. `digests`: of its buckets that were packed last. `sent`: by bucket, its tensors' digests.
    """

    connected: tuple[str, ...]
    failures: dict[str, ErrorRecord]
    survivors: tuple[str, ...] | None
    digests: list[str]
    sent: dict[int, list[str]]


class Failure(_Record, frozen=True):
    """An error of one rank, in the place of what it was to bring."""

    record: ErrorRecord
    builtin: Literal["", "ValueError", "TypeError"] = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        record = to_record(error)
        if not isinstance(error, (ValueError, TypeError)):
            return cls(record)
        record = msgspec.structs.replace(record, message=str(error)[:MAX_TEXT_CHARACTERS])
        return cls(record, "ValueError" if isinstance(error, ValueError) else "TypeError")

    def error(self, trainer_rank: int) -> Exception:
        """The error as the other ranks raise it; `trainer_rank` is where it happened."""
        record = msgspec.structs.replace(self.record, message=f"trainer rank {trainer_rank}: {self.record.message}")
        if self.builtin:
            return ValueError(record.message) if self.builtin == "ValueError" else TypeError(record.message)
        return from_record(record)


Agreement: TypeAlias = Start | Specs | Settings | Held | Mappable | Agreed | HeldParts
Instruction: TypeAlias = Check | Open | Pack | Packed | AskSenders | AllPacked | Declined | End
Answer: TypeAlias = Nothing | RankStatus | OriginReport | Failure
Record: TypeAlias = Agreement | Instruction | Answer


class Row(msgspec.Struct, frozen=True, array_like=True):
    """A rank's part of an exchange. `version`: the publishing rank's last."""

    version: int
    record: Record
