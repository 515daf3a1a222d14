"""What is in a store, and who is at it: for people. Changes nothing, and waits for nobody."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from weightcast.errors import ClosedError
from weightcast.store import locks
from weightcast.store.files import PINS, SLOTS, check_folder, slot_path
from weightcast.store.locks import LockFile
from weightcast.store.reading import StoreReader
from weightcast.store.records import SlotInfo, StoreInfo, slot_number


def store_status(directory: Path) -> StoreInfo:
    """Raises ClosedError if there is no version, IntegrityError if a record is damaged."""
    reader = StoreReader(directory)
    commit, writer = reader.commit(), reader.writer()
    if commit is None:
        raise ClosedError(f"{directory} does not hold any version yet")
    check_folder(directory / SLOTS)
    numbers = sorted(n for path in (directory / SLOTS).iterdir() if (n := slot_number(path.name)) is not None)
    name = "unknown" if writer.record is None else writer.record.describe()
    slots = [_slot(slot_path(directory, number), number) for number in numbers]
    return StoreInfo(commit.newest, commit.previous, name, writer.is_alive, slots)


def _slot(path: Path, number: int) -> SlotInfo:
    readers: list[str] = []
    with contextlib.suppress(FileNotFoundError), contextlib.closing(LockFile(path / PINS, os.O_RDONLY)) as lock:
        readers = locks.readers(lock)
    num_bytes = 0
    for file in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # replaced meanwhile
            num_bytes += file.lstat().st_blocks * 512
    return SlotInfo(number, num_bytes, readers)
