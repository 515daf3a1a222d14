"""The seam between the rules of a store and the place where its bytes lie: a directory, or an object store.

`reading` and `writing` have the rules: which record is written when, what is checked, and what is never touched. A
storage has the files. A record lies at the store's top, or in a slot.

    R  StoreReader                       read, slot_numbers, pin, open_slot
    W  StoreWriter                       lock, then read, write_owner, sweep
       for each version                  free_slot, Slot.prepare, write_owner, write the manifest,
                                         Slot.allow_origins, Slot.open, write the seal and next.json, at last commit
    O  OriginWriter                      join_slot, Slot.open

A foreign exception of the place leaves a storage as a WeightcastError or as an OSError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from weightcast.errors import IntegrityError
from weightcast.format.manifest import Manifest
from weightcast.host.closing import Closeable
from weightcast.store import files
from weightcast.store.records import MAX_RECORD_BYTES, Commit, ReaderRecord, SlotInfo, Stored, WriterRecord, unseal


class BucketReader(Protocol):
    """The buckets of a complete version. `read` is thread-safe."""

    def read(self, index: int, parts: Sequence[memoryview], start: int) -> None:
        """Fill `parts` from byte `start` of what is stored of bucket `index`. Raises IntegrityError."""

    def close(self) -> None:
        """Idempotent."""


class Slot(Protocol):
    """A slot that nobody reads, and that nobody else writes until `close`. `write` is thread-safe."""

    number: int

    def prepare(self, manifest: Manifest, *, is_delta: bool) -> int:
        """Remove the former version's seal, and make room for another; return `num_files` of its seal.

        Raises InsufficientMemoryError.
        """

    def left(self, stored: Stored, manifest: Manifest) -> BucketReader | None:
        """Return, after `prepare`, what may be there of `stored`, which was not completed; None if nothing is."""

    def keep(self, index: int) -> None:
        """Have in this slot what is left of a bucket. Thread-safe."""

    def allow_origins(self) -> None:
        """Allow the writers of other origins to write theirs from now on."""

    def open(self, manifest: Manifest, span: range) -> None:
        """Open these buckets for writing."""

    def write(self, number: int, data: memoryview) -> None:
        """Write header and payload of one of the open buckets, counted from 0.

        Raises InsufficientMemoryError, OSError.
        """

    def finish(self) -> None:
        """Make everything that was written readable by others. Idempotent. Raises as `write`."""

    @property
    def is_open(self) -> bool:
        """False after `close`, and in a child forked from the process that has it."""

    def close(self) -> None:
        """Stop writing; what was written is discarded unless it was finished. Idempotent."""


class ReadStorage(Protocol):
    """The files of one store, for readers. It may not exist yet. `slot`: that of a file; None for the top."""

    def path(self, name: str, slot: int | None = None) -> Path | str:
        """Return where a file lies, for messages; with an empty name the folder."""

    def read(self, name: str, max_bytes: int, slot: int | None = None) -> bytes | None:
        """Return the present content of a small file; None if it does not exist. Raises IntegrityError."""

    def slot_numbers(self) -> set[int]:
        """Return the numbers of the existing slots."""

    def slots(self) -> list[SlotInfo]:
        """Return the existing slots in order, with the space that each takes, and its readers."""

    def has_writer(self, record: WriterRecord | None) -> bool | None:
        """Return whether the last writer, which left this record, still has the store open; None if it is unknown."""

    def pin(self, slot: int, reader: ReaderRecord) -> Closeable | None:
        """Keep a slot from being overwritten until the pin is closed; None while the slot is written."""

    def open_slot(self, stored: Stored, manifest: Manifest) -> BucketReader:
        """Open a version for reading. Raises IntegrityError if a part of it is missing."""

    def close(self) -> None:
        """Close connections, after `unlock`. Calls that are under way go on. Idempotent."""


class Storage(ReadStorage, Protocol):
    """The files of one store, for writers."""

    def lock(self, run: str) -> None:
        """Open the store for writing, and create it. Raises EngineBusyError, ValueError, UnsupportedError."""

    def ensure_lock(self, run: str) -> bool:
        """Lock the store again if its lock was removed; return whether it was. Raises ClosedError, EngineBusyError."""

    @property
    def is_locked(self) -> bool:
        """False after `unlock`, and in a child forked from the process that locked it."""

    def unlock(self) -> None:
        """Idempotent."""

    def sweep(self) -> None:
        """Remove temporary and uncommitted files of a writer that died."""

    def write(self, name: str, data: bytes, slot: int | None = None) -> None:
        """Replace a small file, atomically for readers."""

    def write_owner(self, data: bytes) -> None:
        """Replace `writer.json`. Raises StaleVersionError if another writer has done so since this one did last."""

    def check_owner(self) -> None:
        """Raise StaleVersionError if another writer has opened the store, unless a lock makes that impossible."""

    def remove(self, name: str, slot: int | None = None) -> None:
        """Remove a file if it exists."""

    def commit(self, data: bytes, former: bytes | None) -> None:
        """Replace the pointer, which has the content `former`, by `next.json`, which has this one, and remove that.

        Raises StaleVersionError if the pointer was changed, PeerError if it is unknown which one is there.
        """

    def free_slot(self, newest: set[int], previous: set[int], attempt: int, *, continues: bool) -> Slot:
        """Return a slot for the next version, waiting while readers have pinned all. `attempt`: the writer's next.

        `newest`, `previous`: the slots that the newest version needs, which must stay, and the one before.
        `continues`: the former attempt was to write the same version.
        """

    def join_slot(self, slot: int, origin: int) -> Slot | None:
        """Return a slot that the publishing rank writes, for writing one origin's buckets; None if it is locked.

        Raises FileNotFoundError if it is not visible here yet.
        """


R = TypeVar("R", Commit, WriterRecord)


def read_record(storage: ReadStorage, name: str, kind: type[R], slot: int | None = None) -> R | None:
    """Read a file's record; None if there is no file. Raises IntegrityError."""
    data = storage.read(name, MAX_RECORD_BYTES, slot)
    return None if data is None else unseal(data, kind, storage.path(name, slot))


def intact_record(storage: ReadStorage, name: str, kind: type[R], slot: int | None = None) -> R | None:
    """Read a file's record; None if there is no file, or it is damaged."""
    with contextlib.suppress(IntegrityError):
        return read_record(storage, name, kind, slot)
    return None


def base_of(storage: ReadStorage, stored: Stored) -> Stored | None:
    """Return the version on which `stored` is a delta, if its slot has it still. Raises IntegrityError."""
    if stored.base is None:
        return None
    sealed = read_record(storage, files.SEAL, Commit, stored.base.slot)
    return sealed.newest if sealed is not None and is_base(sealed.newest, stored) else None


def is_base(found: Stored, stored: Stored) -> bool:
    """Return whether `found`, which may be of another store, is the version on which `stored` is a delta."""
    base = stored.base
    wanted = None if base is None else (stored.run, base.number, base.root, stored.manifest_digest)
    return (found.run, found.number, found.root, found.manifest_digest) == wanted


def slots_of(storage: ReadStorage, stored: Stored) -> list[int] | None:
    """Return the slots that `stored` needs: its own, and those back to a full version; None if one is not there."""
    slots = [stored.slot]
    while stored.base is not None:
        base = base_of(storage, stored)
        if base is None or base.slot in slots:
            return None
        slots.append(base.slot)
        stored = base
    return slots
