"""The reading side of a store: what is newest, held against being overwritten, and its bytes.

Invariants: bytes are read only from a slot that is pinned and whose seal is of the version that is read; what a file
holds is believed only after its digest was checked. A poll without news is one small file read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import torch

from weightcast.errors import ClosedError, IntegrityError
from weightcast.format.bucket import TRAILER_BYTES, check_trailer, root_digest, slot_size_bytes
from weightcast.format.manifest import MAX_MESSAGE_BYTES, Manifest, WeightVersion
from weightcast.store import locks
from weightcast.store.files import (
    MANIFEST,
    NEXT,
    PINS,
    POINTER,
    SEAL,
    WRITER,
    WRITER_LOCK,
    FileLayout,
    data_name,
    open_file,
    read_at,
    read_file,
    slot_path,
    unreadable,
)
from weightcast.store.locks import LockFile
from weightcast.store.records import MAX_RECORD_BYTES, Commit, Stored, WriterRecord, this_reader, unseal

_PIN_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class WriterState:
    """The last writer of a store, and whether it still holds the store's lock."""

    record: WriterRecord | None
    is_alive: bool


def pinned(
    directory: Path, *, previous: bool = False, version: WeightVersion | None = None, label: str = ""
) -> PinnedVersion:
    """Hold the newest version of a store, or the one before, or `version`: see `StoreReader.pin_version`.

    Raises ClosedError if it is not there, IntegrityError.
    """
    reader = StoreReader(directory, label=label)
    if version is not None:
        found, what = reader.pin_version(version), f"version {version.number} of run {version.run}"
    elif previous:
        found, what = reader.pin_previous(), "the version before the newest"
    else:
        found, what = reader.pin_newest(), "any version yet"
    if found is None:
        raise ClosedError(f"{directory} does not hold {what}")
    return found


class StoreReader:
    """Reads the versions of a store, which need not be there yet. Calls come from one thread at a time."""

    def __init__(self, directory: Path, *, label: str = "") -> None:
        self.directory = directory
        self._label = label
        self._known: tuple[bytes, Commit] | None = None
        self._manifests: dict[str, Manifest] = {}

    def commit(self) -> Commit | None:
        """The pointer as it is now; the same object while it has not changed, None if nothing was ever committed.

        Raises IntegrityError if the file is not a store's pointer.
        """
        path = self.directory / POINTER
        data = read_file(path, MAX_RECORD_BYTES)
        if data is None:
            return None
        if self._known is None or self._known[0] != data:
            self._known = data, unseal(data, Commit, str(path))
        return self._known[1]

    def writer(self) -> WriterState:
        """Who writes, or wrote last."""
        path = self.directory / WRITER
        data = read_file(path, MAX_RECORD_BYTES)
        record = None if data is None else unseal(data, WriterRecord, str(path))
        path = self.directory / WRITER_LOCK
        try:
            lock = LockFile(path, os.O_RDONLY)
        except FileNotFoundError:
            return WriterState(record, False)
        except OSError as exc:
            raise unreadable(exc, path) from exc
        with contextlib.closing(lock):
            return WriterState(record, lock.conflict() is not None)

    def pin_newest(self) -> PinnedVersion | None:
        """Hold the newest version; None if there is none. Waits only while a slot changes hands.

        Raises IntegrityError if a part of it is missing or damaged.
        """
        return self._pin_told(self.commit)

    def pin_version(self, version: WeightVersion) -> PinnedVersion | None:
        """Hold this version, if it is the newest, or whole and about to be: for engines of the publish it is of.

        None if it is neither. Waits and raises as `pin_newest`.
        """

        def told() -> Commit | None:
            # In this order: a commit makes the one file the other.
            path = self.directory / NEXT
            data = read_file(path, MAX_RECORD_BYTES)
            commits = (None if data is None else unseal(data, Commit, str(path)), self.commit())
            return next((c for c in commits if c is not None and c.newest.version == version), None)

        return self._pin_told(told)

    def _pin_told(self, told: Callable[[], Commit | None]) -> PinnedVersion | None:
        end, pause = time.monotonic() + _PIN_SECONDS, _FIRST_PAUSE_SECONDS
        while (commit := told()) is not None:
            pinned = self._pin(commit.newest, must_hold=time.monotonic() >= end)
            if pinned is not None:
                # Once more: what is pinned may have been overtaken since it was told.
                if (again := told()) is not None and again.newest == commit.newest:
                    return pinned
                pinned.close()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return None

    def pin_previous(self) -> PinnedVersion | None:
        """Hold the version before the newest; None if there is none, or if it has been overwritten."""
        commit = self.commit()
        return None if commit is None or commit.previous is None else self._pin(commit.previous, must_hold=False)

    def _pin(self, stored: Stored, *, must_hold: bool) -> PinnedVersion | None:
        """None if the slot is being written or holds another version; with `must_hold` that is an IntegrityError."""
        slot = slot_path(self.directory, stored.slot)
        lock = locks.pin(slot / PINS, this_reader(self._label))
        if lock is None:
            if must_hold:
                raise IntegrityError(f"{slot} is locked for writing, but version {stored.number} is said to be in it")
            return None
        try:
            found = _sealed(slot / SEAL)
            if found == stored:
                return PinnedVersion(slot, stored, self._manifest(slot, stored), lock)
            if must_hold:
                holds = "no whole version" if found is None else f"version {found.number} of run {found.run}"
                raise IntegrityError(f"{slot} holds {holds}, version {stored.number} of run {stored.run} was expected")
        except BaseException:
            lock.close()
            raise
        lock.close()
        return None

    def _manifest(self, slot: Path, stored: Stored) -> Manifest:
        known = self._manifests.get(stored.manifest_digest)
        if known is not None:
            return known
        path = slot / MANIFEST
        data = read_file(path, MAX_MESSAGE_BYTES)
        if data is None:
            raise IntegrityError(f"{path} is missing: somebody has removed a part of the store; publish again")
        found = hashlib.sha256(data).hexdigest()
        if found != stored.manifest_digest:
            raise IntegrityError(f"the digest of {path} is {found}, the pointer says {stored.manifest_digest}")
        manifest = Manifest.decode(data)
        if len(manifest.buckets) != stored.num_buckets:
            raise IntegrityError(f"{path} has {len(manifest.buckets)} buckets, the pointer says {stored.num_buckets}")
        self._manifests = {stored.manifest_digest: manifest}
        return manifest


def _sealed(path: Path) -> Stored | None:
    data = read_file(path, MAX_RECORD_BYTES)
    return None if data is None else unseal(data, Commit, str(path)).newest


class PinnedVersion:
    """A version that no writer touches until `close`, or until this process ends. `read` may run in several threads."""

    def __init__(self, slot: Path, stored: Stored, manifest: Manifest, lock: LockFile) -> None:
        self.stored = stored
        self.manifest = manifest
        self._lock = lock
        self._arena_layout = FileLayout(manifest, stored.num_files)
        self._paths = [slot / data_name(file) for file in range(stored.num_files)]
        self._descriptors: list[int] = []
        try:
            for path in self._paths:
                self._descriptors.append(_open(path))
        except BaseException:
            self.close()
            raise

    def read(self, index: int, buffer: torch.Tensor) -> None:
        """Read bucket `index` with its trailer into the beginning of `buffer`, unchecked. Raises IntegrityError."""
        file, offset = self._arena_layout.at(index)
        size = self.manifest.buckets[index] + TRAILER_BYTES
        read_at(self._descriptors[file], buffer.numpy().data[:size], offset, self._paths[file])

    def read_checked(self, index: int, buffer: torch.Tensor) -> bytes:
        """Read bucket `index` and check its trailer and digest, which is returned. Raises IntegrityError."""
        self.read(index, buffer)
        num_bytes, kind = self.manifest.buckets[index], self.manifest.digest_kind
        return check_trailer(buffer, num_bytes, self.stored.version, index, kind)

    def check(self, step: Callable[[int], None]) -> None:
        """Read and check everything in the memory of one bucket; `step` is told the bytes of each. IntegrityError."""
        buffer, digests = torch.empty(slot_size_bytes(self.manifest), dtype=torch.uint8), []
        for index, num_bytes in enumerate(self.manifest.buckets):
            digests.append(self.read_checked(index, buffer))
            step(num_bytes)
        self.check_root(digests)

    def check_root(self, digests: Sequence[bytes]) -> None:
        """Prove that these are the digests of all buckets. Raises IntegrityError."""
        root = root_digest(self.stored.manifest_digest, digests)
        if root != self.stored.root:
            raise IntegrityError(
                f"the buckets of version {self.stored.number} have the root {root}, its seal says "
                f"{self.stored.root}: they are not of one version; publish again"
            )

    def close(self) -> None:
        """Let go of it. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._lock.close()

    def __enter__(self) -> PinnedVersion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _open(path: Path) -> int:
    try:
        return open_file(path, os.O_RDONLY)
    except OSError as exc:
        raise unreadable(exc, path) from exc
