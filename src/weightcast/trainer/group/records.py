"""What trainer ranks tell each other at an exchange: fixed numbers, and an error as a record. No torch."""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

import msgspec

from weightcast.errors import MAX_TEXT_CHARACTERS, ErrorRecord, from_record, to_record

MAX_RECORD_BYTES = 4 << 20


class Instruction(enum.IntEnum):
    """What an exchange is about; the publishing rank says it."""

    START = 1
    SETTLE = 2
    WAIT = 3
    BUCKET = 4
    END = 5
    OPEN = 6
    SPREAD = 7
    ASK = 8


class RankStatus(NamedTuple):
    """What one rank brings to an exchange: fixed numbers. `num_error_bytes` of its failure's record, or 0.

    `argument`, `version`: the publishing rank's. `news`, `digest_low`, `digest_high`, `device`: see `agreement`.
    `is_busy`, `num_failures`: see `rank_arena`.
    """

    num_error_bytes: int = 0
    command: int = 0
    argument: int = 0
    version: int = -1
    news: int = 0
    digest_low: int = 0
    digest_high: int = 0
    device: int = 0
    is_busy: int = 0
    num_failures: int = 0


class NextInstruction(NamedTuple):
    """What the publishing rank said at an exchange. `is_ready`: no rank was busy with what it had said before."""

    command: Instruction
    argument: int
    is_ready: bool


class Opening(msgspec.Struct, frozen=True):
    """The publishing rank to all: an update begins for these peers, on whichever arena each of them reads."""

    version: int
    peers: tuple[str, ...]
    staged: bool


class ConnectedPeers(msgspec.Struct, frozen=True):
    """An arena rank to the publishing one: which of the peers are connected to it; back: which it is to serve."""

    names: tuple[str, ...]


class LostPeers(msgspec.Struct, frozen=True):
    """An arena rank to the publishing one: its sender's failures, by peer."""

    failures: dict[str, ErrorRecord]


class Failure(msgspec.Struct, frozen=True):
    """An error of one rank, on its way to the others. `is_named`: its text says itself which ranks it is about."""

    record: ErrorRecord
    builtin: Literal["", "ValueError", "TypeError"] = ""
    is_named: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        record = to_record(error)
        is_named = bool(getattr(error, "names_trainer_ranks", False))
        builtin: Literal["", "ValueError", "TypeError"] = ""
        if isinstance(error, ValueError):
            builtin = "ValueError"
        elif isinstance(error, TypeError):
            builtin = "TypeError"
        if builtin:
            record = msgspec.structs.replace(record, message=str(error)[:MAX_TEXT_CHARACTERS])
        return cls(record, builtin, is_named)

    def error(self, trainer_rank: int) -> Exception:
        """The error as the other ranks raise it; `trainer_rank` is where it happened."""
        record = self.record
        if not self.is_named:
            record = msgspec.structs.replace(record, message=f"trainer rank {trainer_rank}: {record.message}")
        match self.builtin:
            case "ValueError":
                return ValueError(record.message)
            case "TypeError":
                return TypeError(record.message)
        return from_record(record)
