"""The small files of a store, typed JSON with a digest over itself: the pointer, the seals, who writes and reads.

Invariant: a record is replaced as a whole or not at all, and one whose digest does not fit is never believed.
"""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from weightcast.errors import IntegrityError, ManifestError
from weightcast.format.manifest import (
    MAX_BUCKETS,
    MAX_VERSION,
    PROTOCOL,
    RunId,
    VersionNumber,
    WeightVersion,
    decode,
    encode,
)
from weightcast.format.messages import Digest128, Digest256
from weightcast.store.files import MAX_FILES, MAX_STORED_SLOTS, read_file

FORMAT = f"weightcast-store-{PROTOCOL}"
MAX_RECORD_BYTES = 64 << 10
MAX_REASON_CHARACTERS = 2000
_MAX_UNIX_TIME = 253_402_300_799
"""The end of the year 9999, the last that a date can show."""
_REMEDY = "close the publishers, remove this file, and publish again: the next version is the newest then"


class Stored(msgspec.Struct, frozen=True):
    """A version in a slot: `num_files` data files, `root` as the wire format has it; the time is the writer's clock."""

    run: RunId
    number: VersionNumber
    slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STORED_SLOTS)]
    num_files: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILES)]
    num_buckets: Annotated[int, msgspec.Meta(ge=0, le=MAX_BUCKETS)]
    manifest_digest: Digest256
    root: Digest128
    committed_at: Annotated[float, msgspec.Meta(ge=0, le=_MAX_UNIX_TIME)]

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.run, self.number)


class Commit(msgspec.Struct, frozen=True):
    """`current.json`, `next.json` and every slot's `seal.json`: a version is whole.

    The pointer, and what is to be the pointer, name the one before as well.
    """

    format: str
    newest: Stored
    previous: Stored | None = None
    digest: str = ""


class WriterRecord(msgspec.Struct, frozen=True):
    """`writer.json`: who has or had `writer.lock`; `attempt` counts updates, `aborted` says why the last one ended.

    `number`: of the last version that was begun, by this writer or one before.
    """

    format: str
    run: RunId
    host: str
    pid: int
    attempt: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    number: Annotated[int, msgspec.Meta(ge=-1, le=MAX_VERSION)] = -1
    aborted: str = ""
    digest: str = ""

    def describe(self) -> str:
        return f"run {self.run} (pid {self.pid} on {self.host})"


class SlotAttempt(msgspec.Struct, frozen=True):
    """The publishing rank to those that lead other origins: the slot that is written, in the writer's attempt."""

    slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STORED_SLOTS)]
    attempt: Annotated[int, msgspec.Meta(ge=1)]


class ReaderRecord(msgspec.Struct, frozen=True):
    """A record of a slot's `pins`: who holds the lock on it."""

    host: str
    pid: int
    label: str

    def describe(self) -> str:
        return f"{self.label} (pid {self.pid} on {self.host})" if self.label else f"pid {self.pid} on {self.host}"


class SlotInfo(msgspec.Struct, frozen=True):
    """`num_bytes`: what its files take of the filesystem. `readers`: who holds it now."""

    number: int
    num_bytes: int
    readers: list[str]


class StoreInfo(msgspec.Struct, frozen=True):
    """`writer`: the last one, as a text; `is_written`: it still has the store."""

    newest: Stored
    previous: Stored | None
    writer: str
    is_written: bool
    slots: list[SlotInfo]


R = TypeVar("R", Commit, WriterRecord)


def seal(record: R) -> bytes:
    """The record's encoding, with the digest of the same encoding without one."""
    return encode(msgspec.structs.replace(record, digest=_digest(record)))


def unseal(data: bytes, kind: type[R], path: Path) -> R:
    """Read a record of the file `path`. Raises IntegrityError if it is none, or not what was written."""
    try:
        record: R = decode(data, kind, max_bytes=MAX_RECORD_BYTES)
    except ManifestError as exc:
        raise IntegrityError(f"{path} is not a record of a weightcast store: {exc}; {_REMEDY}") from exc
    if record.format != FORMAT:
        raise IntegrityError(
            f"{path} says it is {record.format!r}, expected {FORMAT!r}: another program or protocol wrote this store; "
            "read it with that one, and publish into an empty directory"
        )
    if record.digest != _digest(record):
        raise IntegrityError(f"{path} was changed: its digest does not fit; {_REMEDY}")
    return record


def read_record(path: Path, kind: type[R]) -> R | None:
    """The record in a file; None if there is no file. Raises IntegrityError."""
    data = read_file(path, MAX_RECORD_BYTES)
    return None if data is None else unseal(data, kind, path)


def _digest(record: Commit | WriterRecord) -> str:
    return hashlib.sha256(encode(msgspec.structs.replace(record, digest=""))).hexdigest()


def encodable(text: str) -> str:
    """Return a text that JSON can hold: bytes that are not UTF-8 (of a path, for example) are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def this_reader(label: str) -> ReaderRecord:
    return ReaderRecord(socket.gethostname(), os.getpid(), encodable(label))
