"""What is in a store, and who is at it: for people. Changes nothing, and waits for nobody."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weightcast.errors import ClosedError
from weightcast.store import locks
from weightcast.store.files import PINS, SLOTS
from weightcast.store.locks import LockFile
from weightcast.store.reading import StoreReader
from weightcast.store.records import SlotInfo, StoreInfo


def survey(directory: Path) -> StoreInfo:
    """Raises ClosedError if there is no version, IntegrityError if a record is damaged."""
    reader = StoreReader(directory)
    commit, writer = reader.commit(), reader.writer()
    if commit is None:
        raise ClosedError(f"{directory} does not hold any version yet")
    numbers = sorted(int(path.name) for path in (directory / SLOTS).iterdir() if path.name.isdigit())
    name = "unknown" if writer.record is None else writer.record.describe()
    slots = [_slot(directory / SLOTS / str(number), number) for number in numbers]
    return StoreInfo(commit.newest, commit.previous, name, writer.is_alive, slots)


def _slot(path: Path, number: int) -> SlotInfo:
    readers: list[str] = []
    with contextlib.suppress(FileNotFoundError), contextlib.closing(LockFile(path / PINS, os.O_RDONLY)) as lock:
        readers = locks.readers(lock)
    return SlotInfo(number, sum(file.stat().st_blocks * 512 for file in path.iterdir()), readers)
