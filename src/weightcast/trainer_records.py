"""What trainer ranks tell each other at an exchange: fixed numbers, and an error as a record. No torch."""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple

import msgspec

from weightcast.errors import MAX_TEXT_CHARACTERS, ErrorRecord, from_record, to_record

MAX_RECORD_BYTES = 4 << 20


class Command(enum.IntEnum):
    """What an exchange is about; the publishing rank says it."""

    START = 1
    SETTLE = 2
    WAIT = 3
    BUCKET = 4
    END = 5


class Row(NamedTuple):
    """What one rank brings to an exchange: fixed numbers. `num_error_bytes` of its failure's record, or 0.

    `argument`, `version`: the publishing rank's. `news`, `digest_low`, `digest_high`, `device`: see `agreement`.
    """

    num_error_bytes: int = 0
    command: int = 0
    argument: int = 0
    version: int = -1
    news: int = 0
    digest_low: int = 0
    digest_high: int = 0
    device: int = 0


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
