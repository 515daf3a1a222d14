"""The storage of a store in an object store with the S3 protocol, through obstore.

Each attempt to write a version has a slot of its own, whose number is that of the attempt, and each bucket is an
object: `slots/N/bucket.K`. There are no locks. The publisher that has opened the store last owns it: `writer.json` and
the pointer are replaced only by conditional puts, so that of two publishers one loses, before it writes to a slot.

A copy of a version that was interrupted goes on in a slot of its own: the server copies the buckets that are left.

Invariants: no two writers write to one slot, and none overwrites an object that readers may have found; a version stays
for `keep_seconds` after it was replaced; a conditional put whose answer was lost is decided by what is there then.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec
import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from weightcast.errors import (
    ClosedError,
    IntegrityError,
    PeerError,
    StaleVersionError,
    Translated,
    UnsupportedError,
    WeightcastError,
)
from weightcast.format.manifest import Manifest
from weightcast.host.deadline import GRACE_SECONDS, Deadline
from weightcast.store import files
from weightcast.store.address import ObjectStoreAddress
from weightcast.store.records import (
    MAX_RECORD_BYTES,
    Commit,
    ReaderRecord,
    SlotInfo,
    Stored,
    WriterRecord,
    seal,
    unseal,
)
from weightcast.store.storage import intact_record, read_record

logger = logging.getLogger(__name__)

_MAX_PUT_BYTES = 4 << 30
"""A larger bucket is uploaded in parts, of which a dead writer may leave some behind; S3 has a limit of 5 GiB, also for
what the server copies.
"""
_DENIED = (PermissionDeniedError, UnauthenticatedError)
_REFUSED = (AlreadyExistsError, PreconditionError)
_CLOSED = "the publisher has closed the store"
_NO_TAG = '"00000000000000000000000000000000"'


class ObjectReader:
    """The buckets of a version; see `BucketReader`. Memory: that of one read, in each thread.

    `others`: by its name, the slot of each bucket that is in another one.
    """

    def __init__(self, storage: ObjectStorage, slot: int, others: Mapping[str, int] = {}) -> None:
        self._storage: ObjectStorage | None = storage
        self._slot = slot
        self._others = others

    def read(self, index: int, parts: Sequence[memoryview], start: int) -> None:
        storage, num_bytes = self._storage, sum(map(len, parts))
        if storage is None:
            raise ClosedError("this version was closed while it was read: pin it again")
        if not num_bytes:
            return
        name = _bucket_name(index)
        slot = self._others.get(name, self._slot)
        data = storage.read_range(name, slot, start, num_bytes)
        if len(data) != num_bytes:
            raise IntegrityError(
                f"{storage.path(name, slot)} ends after {start + len(data)} bytes, expected "
                f"{start + num_bytes}: it was truncated; publish again"
            )
        for part in parts:
            part[:], data = data[: len(part)], data[len(part) :]

    def close(self) -> None:
        self._storage = None


class AttemptSlot:
    """The slot of one attempt to write a version; see `Slot`. Each bucket is an object, and is sent as it lies.

    `left`: by the name of its object, the slot of each bucket that former attempts have left.
    """

    def __init__(self, number: int, storage: ObjectStorage, left: dict[str, int]) -> None:
        self.number = number
        self._storage = storage
        self._left = left
        self._span = range(0)
        self._pid: int | None = os.getpid()

    @property
    def is_open(self) -> bool:
        return self._pid == os.getpid()

    def prepare(self, manifest: Manifest, *, is_delta: bool) -> int:
        return 1

    def left(self, stored: Stored, manifest: Manifest) -> ObjectReader | None:
        return ObjectReader(self._storage, self.number, self._left) if self._left else None

    def keep(self, index: int) -> None:
        slot = self._left.get(name := _bucket_name(index))
        if slot is not None:
            self._storage.move(name, slot, self.number)
            self._left.pop(name, None)  # the request of a push that comes again moves it, too

    def allow_origins(self) -> None: ...

    def open(self, manifest: Manifest, span: range) -> None:
        self._span = span

    def write(self, number: int, data: memoryview) -> None:
        self._storage.write(_bucket_name(self._span[number]), data, self.number)

    def finish(self) -> None: ...

    def close(self) -> None:
        self._pid = None


class ObjectStorage:
    """See `Storage`. Space: `num_slots` versions, the one that is written, and those that are younger than promised."""

    def __init__(self, address: ObjectStoreAddress, deadline_seconds: float) -> None:
        """Credentials, and what the address leaves out, come from the environment (`AWS_ACCESS_KEY_ID`, ...)."""
        self._address = address
        self._where = f"s3://{address.bucket}/{address.prefix}".rstrip("/")
        self._deadline_seconds = deadline_seconds
        self._owner: bytes | None = None
        """The content of `writer.json`, once this writer has replaced it."""
        self._pid: int | None = None
        self._owner_tag: str | None = None
        """Entity tag of `writer.json` from this writer's last write, or from its first read; None: no such object."""
        self._sealed: dict[int, Stored] = {}
        """By slot, the versions that this writer has found; a slot is never sealed twice."""
        self._undecided = set[int]()
        """Slots of sealed versions that a late request may still commit, until another version is committed."""
        # A busy server may take longer for one request than an impatient caller waits for a version.
        request_seconds = max(deadline_seconds, GRACE_SECONDS)
        endpoint = address.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        given = {"endpoint": endpoint, "region": address.region}
        self._open_client: S3Store | None = S3Store(
            address.bucket,
            prefix=address.prefix or None,
            config={name: value for name, value in given.items() if value},  # type: ignore[arg-type]
            client_options={
                "connect_timeout": datetime.timedelta(seconds=GRACE_SECONDS),
                "timeout": datetime.timedelta(seconds=request_seconds),
                **({"allow_http": True} if endpoint.startswith("http://") else {}),
            },
            retry_config={
                "retry_timeout": datetime.timedelta(seconds=deadline_seconds),
                "backoff": {"max_backoff": datetime.timedelta(seconds=1)},
            },
        )

    @property
    def _client(self) -> S3Store:
        if self._open_client is None:
            raise ClosedError(f"{self._where} was closed in this process: make another reader or publisher")
        return self._open_client

    def close(self) -> None:
        self._open_client = None

    def path(self, name: str, slot: int | None = None) -> str:
        key = _key(name, slot)
        return f"{self._where}/{key}" if key else self._where

    def read(self, name: str, max_bytes: int, slot: int | None = None) -> bytes | None:
        return self._read(name, max_bytes, slot)[0]

    def _read(self, name: str, max_bytes: int, slot: int | None = None) -> tuple[bytes | None, str | None]:
        """Return an object's content, and its entity tag; None for both if there is no object."""
        key = _key(name, slot)
        with self._calls(key):
            try:
                found = obstore.get(self._client, key)
                if found.meta["size"] > max_bytes:
                    raise IntegrityError(
                        f"{self.path(name, slot)} has more than {max_bytes} bytes, so it is not a file of a weightcast "
                        "store: remove it, and publish again"
                    )
                return found.bytes().to_bytes(), found.meta["e_tag"]
            except FileNotFoundError:
                return None, None

    def read_range(self, name: str, slot: int, start: int, num_bytes: int) -> memoryview:
        """Read a part of an object; less than `num_bytes` at its end. Raises IntegrityError if there is no object."""
        key = _key(name, slot)
        with self._calls(key):
            try:
                return memoryview(obstore.get_range(self._client, key, start=start, length=num_bytes))
            except FileNotFoundError as exc:
                raise IntegrityError(
                    f"{self.path(name, slot)} is missing: newer versions have replaced this one, or a part of the "
                    f"store was removed. Read the newest version; a slow reader needs a larger keep_seconds, now "
                    f"{self._address.keep_seconds}, in the publisher's URL"
                ) from exc
            except BaseError as exc:
                if "416 Range Not Satisfiable" not in _summary(exc):
                    raise
                return memoryview(b"")  # the object ends before `start`

    def slot_numbers(self) -> set[int]:
        with self._calls(files.SLOTS):
            prefixes = obstore.list_with_delimiter(self._client, files.SLOTS)["common_prefixes"]
        names = (prefix.rpartition("/")[2] for prefix in prefixes)
        return {int(name) for name in names if name.isascii() and name.isdigit()}

    def slots(self) -> list[SlotInfo]:
        numbers = sorted(self.slot_numbers())
        return [SlotInfo(slot, sum(size for _, size in self._objects(slot)), []) for slot in numbers]

    def has_writer(self, record: WriterRecord | None) -> bool | None:
        return False if record is None or record.aborted == _CLOSED else None

    def pin(self, slot: int, reader: ReaderRecord) -> ObjectReader:
        # A writer does not know of its readers: it keeps each version for `keep_seconds`.
        return ObjectReader(self, slot)

    def open_slot(self, stored: Stored, manifest: Manifest) -> ObjectReader:
        return ObjectReader(self, stored.slot)

    # --- for writers ---

    def lock(self, run: str) -> None:
        former, (data, self._owner_tag) = None, self._read(files.WRITER, MAX_RECORD_BYTES)
        with contextlib.suppress(IntegrityError):
            former = None if data is None else unseal(data, WriterRecord, self.path(files.WRITER))
        if former is not None and former.aborted != _CLOSED:
            logger.warning(
                "%s was not closed by its last publisher, %s: if that still lives, it loses the store to this one",
                self._where,
                former.describe(),
            )
        if data is None:
            with self._calls(""):
                found = obstore.list_with_delimiter(self._client)
            names = [
                *(prefix + "/" for prefix in found["common_prefixes"]),
                *(each["path"] for each in found["objects"]),
            ]
            if foreign := [name for name in names if name not in (files.POINTER, f"{files.SLOTS}/")]:
                raise ValueError(
                    f"{self._where} is not a weightcast store, but has {', '.join(sorted(foreign)[:4])}: name an "
                    "empty or a new prefix"
                )
        self._pid = os.getpid()

    def ensure_lock(self, run: str) -> bool:
        if not self.is_locked:
            raise ClosedError(
                f"{self._where} was closed here, or opened by the process from which this one (pid {os.getpid()}) was "
                "forked: publish in that process, or close the publisher there and make one here"
            )
        return False

    @property
    def is_locked(self) -> bool:
        return self._pid == os.getpid()

    def unlock(self) -> None:
        """Say in `writer.json` that this writer has closed the store, for readers that wait and for the next writer."""
        if self.is_locked and self._owner is not None:
            with contextlib.suppress(WeightcastError):
                record = unseal(self._owner, WriterRecord, self.path(files.WRITER))
                self.write_owner(seal(msgspec.structs.replace(record, aborted=_CLOSED)))
        self._pid = None

    def sweep(self) -> None:
        left, newest = (intact_record(self, name, Commit) for name in (files.NEXT, files.POINTER))
        if left is not None and left != newest:  # its writer has ended after the seal, before the commit
            self._undecided.add(left.newest.slot)
        self.remove(files.NEXT)

    def write(self, name: str, data: bytes | memoryview, slot: int | None = None) -> None:
        """Write an object. It is there as a whole or not at all."""
        key = _key(name, slot)
        with self._calls(key):
            try:
                obstore.put(self._client, key, data, use_multipart=len(data) > _MAX_PUT_BYTES)
            except FileNotFoundError as exc:
                raise self._no_bucket() from exc

    def move(self, name: str, slot: int, target: int) -> None:
        """Have the server move an object to another slot, if it is there.

        After it, no late request of this call can overwrite the target: there is nothing left to copy.
        """
        key = _key(name, slot)
        with self._calls(key), contextlib.suppress(FileNotFoundError):
            obstore.copy(self._client, key, _key(name, target))
            obstore.delete(self._client, key)

    def write_owner(self, data: bytes) -> None:
        is_first = self._owner is None
        tag = self._put_if_unchanged(files.WRITER, data, self._owner_tag)
        if tag is None:
            raise self._lost()
        self._owner, self._owner_tag = data, tag
        if is_first:
            self._require_conditions(data)

    def check_owner(self) -> None:
        if self._owner is not None and self.read(files.WRITER, MAX_RECORD_BYTES) != self._owner:
            raise self._lost()

    def remove(self, name: str, slot: int | None = None) -> None:
        self._remove([_key(name, slot)])
        if name == files.SEAL and slot is not None:
            self._sealed.pop(slot, None)

    def commit(self, data: bytes, former: bytes | None) -> None:
        self._undecided.add(_slot_of(data))
        found, tag = self._read(files.POINTER, MAX_RECORD_BYTES)
        if found != former or self._put_if_unchanged(files.POINTER, data, tag) is None:
            raise StaleVersionError(
                f"{self.path(files.POINTER)} was changed by another publisher right before this one: its version is "
                "the newest now, and this one was not committed. Close all publishers, and make a new one"
            )
        self._undecided -= {_slot_of(data), None if former is None else _slot_of(former)}
        with contextlib.suppress(PeerError):  # a next.json that equals the pointer does no harm
            self.remove(files.NEXT)
            while self._undecided:
                self.remove(files.SEAL, min(self._undecided))
                self._undecided.discard(min(self._undecided))

    def free_slot(self, newest: set[int], previous: set[int], attempt: int, *, continues: bool) -> AttemptSlot:
        """Return the slot of this attempt, after former slots that are no longer needed were removed.

        Those are: slots without a seal, which dead or aborted publishers left, unless this attempt `continues` theirs;
        and versions beyond `num_slots` that another one has replaced as the newest more than `keep_seconds` ago. Slots
        from this attempt's number on may be those of a publisher that has taken the store meanwhile.
        """
        known = {slot for slot in self.slot_numbers() if slot < attempt}
        for slot in known - self._sealed.keys():
            if (record := read_record(self, files.SEAL, Commit, slot)) is not None:
                self._sealed[slot] = record.newest
        self._sealed = {slot: stored for slot, stored in self._sealed.items() if slot in known}
        kept, replaced_at = newest | previous, time.time()
        by_age = sorted(self._sealed.values(), key=lambda stored: stored.committed_at, reverse=True)
        for number, stored in enumerate(by_age):
            if number < self._address.num_slots or time.time() - replaced_at < self._address.keep_seconds:
                needed: Stored | None = stored
                while needed is not None and needed.slot not in kept:
                    kept.add(needed.slot)
                    needed = None if needed.base is None else self._sealed.get(needed.base.slot)
            replaced_at = stored.committed_at
        unsealed = sorted(known - kept - self._sealed.keys()) if continues else []
        # Of a bucket that several have, the one of the last attempt.
        left = {
            key.rpartition("/")[2]: slot
            for slot in unsealed
            for key, num_bytes in self._objects(slot)
            if num_bytes <= _MAX_PUT_BYTES
        }
        try:
            for slot in sorted(known - kept.union(unsealed)):
                # The seal first, so that what is left after a failure is not taken for a version.
                self.remove(files.SEAL, slot)
                self._remove([key for key, _ in self._objects(slot)])
        except PeerError as exc:
            logger.warning("old versions in %s were not removed: %s", self._where, exc)
        return AttemptSlot(attempt, self, left)

    def join_slot(self, slot: int, origin: int) -> AttemptSlot:
        return AttemptSlot(slot, self, {})

    # --- calls of the server ---

    def _objects(self, slot: int) -> list[tuple[str, int]]:
        """Return the name and the size in bytes of each object of a slot."""
        with self._calls(_key("", slot)):
            return [(each["path"], each["size"]) for each in obstore.list(self._client, _key("", slot)).collect()]

    def _remove(self, keys: list[str]) -> None:
        if keys:
            with self._calls(keys[0]), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._client, keys)

    def _put_if_unchanged(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Replace a record if it still has this tag, or create it; return the new tag, None if it has another one.

        If an answer is lost, what is there then decides. Raises PeerError if that is unknown at the deadline.
        """
        for _ in Deadline(self._deadline_seconds).polls(max_pause_seconds=1.0):
            try:
                return obstore.put(self._client, name, data, mode="create" if tag is None else {"e_tag": tag})["e_tag"]
            except FileNotFoundError as exc:
                raise self._no_bucket() from exc
            except _REFUSED:
                # A repeated request finds its own first one.
                found, new = self._read(name, MAX_RECORD_BYTES)
                return new if found == data else None
            except BaseError as exc:
                if isinstance(exc, (*_DENIED, NotSupportedError)):
                    self._fail(name, exc)
                problem = _summary(exc)
            found, new = self._read(name, MAX_RECORD_BYTES)
            if found == data:
                return new
        raise PeerError(
            f"{self.path(name)} could not be replaced within {self._deadline_seconds:g} s ({problem}), and the server "
            "may still do so: look with `weightcast inspect` before you publish again",
            peer=self._where,
        )

    def _require_conditions(self, data: bytes) -> None:
        """Raise UnsupportedError unless the server refuses two puts whose conditions are not met.

        They have the present content, so that a server that does not look at conditions changes nothing.
        """
        for mode, header in (("create", "If-None-Match"), ({"e_tag": _NO_TAG}, "If-Match")):
            with self._calls(files.WRITER):
                try:
                    obstore.put(self._client, files.WRITER, data, mode=mode)  # type: ignore[arg-type]
                except _REFUSED:
                    continue
            raise UnsupportedError(
                f"the server of {self._where} ignores {header} in a put, so that two publishers could both commit: use "
                "one with conditional puts (Amazon S3, MinIO, Ceph and others have them), or publish into a directory"
            )

    def _lost(self) -> StaleVersionError:
        data, owner = self.read(files.WRITER, MAX_RECORD_BYTES), "its writer.json was removed or damaged"
        with contextlib.suppress(IntegrityError):
            if data is not None:
                owner = f"{unseal(data, WriterRecord, self.path(files.WRITER)).describe()} has opened it since"
        return StaleVersionError(
            f"this publisher has lost the store {self._where}: {owner}. The publisher that opened the store last "
            "writes it: if that one is right, close this one, else close that one and then make this one again"
        )

    def _no_bucket(self) -> PeerError:
        return PeerError(
            f"the server has no bucket {self._address.bucket!r}: create it, or check the URL and its endpoint",
            peer=self._where,
        )

    def _calls(self, key: str) -> Translated:
        """Translate an error of obstore's into a PeerError."""
        return Translated(BaseError, lambda error: self._fail(key, error))

    def _fail(self, key: str, error: BaseError) -> NoReturn:
        if "404 Not Found" in _summary(error):
            raise self._no_bucket() from error
        remedy = (
            "check that the server runs and can be reached from here, and its address in ?endpoint=; then try again"
        )
        if isinstance(error, _DENIED) or "403" in _summary(error):
            remedy = "check the keys (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY), and what they may do with this bucket"
        raise PeerError(
            f"the server of {self._where} failed for {key or 'a list'}: {_summary(error)}; {remedy}",
            peer=self._where,
        ) from error


def _key(name: str, slot: int | None) -> str:
    return name if slot is None else f"{files.SLOTS}/{slot}/{name}".rstrip("/")


def _slot_of(data: bytes) -> int:
    return unseal(data, Commit, files.POINTER).newest.slot


def _bucket_name(index: int) -> str:
    return f"bucket.{index}"


def _summary(error: BaseError) -> str:
    """Return the first line of an error, which obstore continues with the server's answer."""
    return str(error).partition("\n")[0][:400]
