"""The small files of a store: the pointer, the seals, the writer's and readers' records, as JSON with a digest.

Invariant: a record is replaced as a whole or not at all, and a record with a wrong digest is never used.
"""

from __future__ import annotations

import hashlib
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
from weightcast.store.files import MAX_FILES

FORMAT = f"weightcast-store-{PROTOCOL}"
MAX_RECORD_BYTES = 64 << 10
MAX_REASON_CHARACTERS = 2000
_MAX_UNIX_TIME = 253_402_300_799
"""The end of the year 9999, the last that a date can show."""
_REMEDY = "close the publishers, remove this file, and publish again: the next version will then be the newest"

SlotNumber = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class StoredBase(msgspec.Struct, frozen=True):
    """The version on which another slot's version is a delta: of the same run and manifest."""

    number: VersionNumber
    slot: SlotNumber
    root: Digest128


class Stored(msgspec.Struct, frozen=True):
    """A version in a slot: `num_files` data files, the `root` digest; `committed_at` is by the writer's clock.

    `base`: the version on which it is a delta; None if it is full. The root digest is that of its raw buckets.
    """

    run: RunId
    number: VersionNumber
    slot: SlotNumber
    num_files: Annotated[int, msgspec.Meta(ge=1, le=MAX_FILES)]
    num_buckets: Annotated[int, msgspec.Meta(ge=0, le=MAX_BUCKETS)]
    manifest_digest: Digest256
    root: Digest128
    committed_at: Annotated[float, msgspec.Meta(ge=0, le=_MAX_UNIX_TIME)]
    base: StoredBase | None = None

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(self.run, self.number)


class Commit(msgspec.Struct, frozen=True):
    """`current.json`, `next.json` and every slot's `seal.json`: a complete version.

    `current.json` and `next.json` name the version before, too.
    """

    format: str
    newest: Stored
    previous: Stored | None = None
    digest: str = ""


class WriterRecord(msgspec.Struct, frozen=True):
    """`writer.json`: the process that has or had `writer.lock`. `attempt`: count of updates. `aborted`: why the last
    one ended.

    `number`: that of the last version that was begun, by this or a former writer.
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
    """From the publishing rank to the leaders of other origins: the slot to write, and the writer's attempt."""

    slot: SlotNumber
    attempt: Annotated[int, msgspec.Meta(ge=1)]


class ReaderRecord(msgspec.Struct, frozen=True):
    """A record of a slot's `pins`: the reader that has the lock on it."""

    host: str
    pid: int
    label: str

    def describe(self) -> str:
        return f"{self.label} (pid {self.pid} on {self.host})" if self.label else f"pid {self.pid} on {self.host}"


class SlotInfo(msgspec.Struct, frozen=True):
    """State of a slot. `num_bytes`: space that its files take. `readers`: the readers that have pinned it."""

    number: int
    num_bytes: int
    readers: list[str]


class StoreInfo(msgspec.Struct, frozen=True):
    """State of a store. `writer`: description of the last writer. `is_written`: it still has the store open."""

    newest: Stored
    previous: Stored | None
    writer: str
    is_written: bool
    slots: list[SlotInfo]


R = TypeVar("R", Commit, WriterRecord)


def seal(record: R) -> bytes:
    """Encode a record with a digest, which covers its encoding without the digest."""
    return encode(msgspec.structs.replace(record, digest=_digest(record)))


def unseal(data: bytes, kind: type[R], path: Path | str) -> R:
    """Decode a record of the file `path`. Raises IntegrityError if it is invalid, or was changed."""
    try:
        record: R = decode(data, kind, max_bytes=MAX_RECORD_BYTES)
    except ManifestError as exc:
        raise IntegrityError(f"{path} is not a record of a weightcast store: {exc}; {_REMEDY}") from exc
    if record.format != FORMAT:
        raise IntegrityError(
            f"{path} has the format {record.format!r}, expected {FORMAT!r}: another program or protocol version wrote "
            "this store; read it with that one, or publish into an empty directory"
        )
    if record.digest != _digest(record):
        raise IntegrityError(f"{path} was changed: its digest does not fit; {_REMEDY}")
    return record


def _digest(record: Commit | WriterRecord) -> str:
    return hashlib.sha256(encode(msgspec.structs.replace(record, digest=""))).hexdigest()


def encodable(text: str) -> str:
    """Return a text that JSON can hold: bytes that are not UTF-8 (of a path, for example) are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
