"""Checkpoint directories that a training loop writes one after another: finds the newest complete one.

Invariant: a directory is complete if the loop has written a marker file to it last. If another file is newer than the
marker, the directory is being written again and counts as unmarked. A search opens only index files and reads no
tensor.

Sources: prime-rl's filesystem broadcast writes `step_N/`, then STABLE in it, later versions .finished; slime writes
`weight_v000012/`, AReaL `weight_update_v12/`, transformers' trainer `checkpoint-12/`, all without a marker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from weightcast.checkpoint.files import INDEX_FILE, SINGLE_FILE, read_index
from weightcast.errors import IntegrityError

MAX_CANDIDATES = 16
"""Number of directories that are inspected: those with the newest markers."""

_NUMBERED = re.compile(r"(?!\.|tmp)(?:.*[^0-9])?([0-9]{1,18})", re.DOTALL)

FileState = tuple[str, int, int, int]
"""A file's name, inode, size and time of its last change in nanoseconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompleteDirectory:
    """A complete checkpoint, as found; equal fields mean the same files. `number`: the last digits of its name."""

    path: Path
    number: int
    files: tuple[FileState, ...]

    @property
    def completed_ns(self) -> int:
        """Time at which the last of its files was written, by the filesystem's clock, in nanoseconds since 1970."""
        return max(changed_ns for *_, changed_ns in self.files)


class CheckpointDirectories:
    """The numbered subdirectories of one directory, which may not exist yet. Call it from one thread."""

    def __init__(self, root: Path, markers: Sequence[str]) -> None:
        """`markers`: file names, one of which the loop writes into a directory when it is complete.

        Raises ValueError if `root` is a file, or a checkpoint itself.
        """
        if root.exists() and not root.is_dir():
            raise ValueError(f"{root} is not a directory: give the directory in which checkpoint directories appear")
        own = next((name for name in (INDEX_FILE, SINGLE_FILE) if (root / name).is_file()), None)
        if own is not None:
            raise ValueError(
                f"{root} is a checkpoint itself, it has {own}: give the directory in which such directories appear, or "
                "publish this one with `weightcast publish`"
            )
        self._root = root
        self._markers = tuple(markers)
        self._left_out: dict[Path, tuple[FileState, ...]] = {}

    def newest(self, known: CompleteDirectory | None = None) -> CompleteDirectory | None:
        """Return the complete directory that was written last, if it was written after `known`.

        Ordered by time and not by number, since a loop that resumes from an earlier step repeats numbers.
        """
        found = [each for each in self._complete() if self._left_out.get(each.path) != each.files]
        newest = max(found, key=lambda each: (each.completed_ns, each.number), default=None)
        if newest is None or known is None:
            return newest
        is_newer = (newest.completed_ns, newest.number) > (known.completed_ns, known.number)
        return newest if is_newer else None

    def is_unchanged(self, directory: CompleteDirectory) -> bool:
        """Return whether the directory's files are those that were found."""
        try:
            return self._files(directory.path) == directory.files
        except OSError:
            return False

    def leave_out(self, directory: CompleteDirectory) -> None:
        """Skip this directory until one of its files has changed."""
        self._left_out[directory.path] = directory.files

    def _complete(self) -> Iterator[CompleteDirectory]:
        candidates: list[tuple[int, int, Path]] = []
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    match = _NUMBERED.fullmatch(entry.name)
                    if match is not None and entry.is_dir():
                        # Not the directory's mtime: rewriting a file in place does not change it, a removal does.
                        for name in self._markers:
                            with contextlib.suppress(OSError):
                                written_ns = os.stat(os.path.join(entry.path, name)).st_mtime_ns
                                candidates.append((written_ns, int(match[1]), Path(entry.path)))
        except FileNotFoundError:
            pass  # the root, or an entry, was removed: keep what was found so far
        except OSError as exc:
            raise IntegrityError(f"{self._root} can't be listed: {exc.strerror}; mend its permissions") from exc
        found = {path: number for _, number, path in sorted(candidates, reverse=True)}
        paths = dict(itertools.islice(found.items(), MAX_CANDIDATES))
        self._left_out = {path: files for path, files in self._left_out.items() if path in paths}
        for path, number in paths.items():
            try:
                files = self._files(path)
            except OSError:
                continue  # it is being removed, or not yet readable
            if files is not None:
                yield CompleteDirectory(path, number, files)

    def _files(self, path: Path) -> tuple[FileState, ...] | None:
        """Return the state of every relevant file; None unless a marker was written last. Raises OSError."""
        markers = [name for name in self._markers if (path / name).is_file()]
        if not markers:
            return None
        weight_map: dict[str, str] | None = {}
        with contextlib.suppress(ValueError, FileNotFoundError):  # reported when the checkpoint is read
            weight_map = read_index(path)
        names = {SINGLE_FILE} if weight_map is None else {INDEX_FILE, *weight_map.values()}
        states: list[FileState] = []
        for name in sorted(names) + markers:
            try:
                info = os.stat(path / name)
            except FileNotFoundError:
                continue  # reported when the checkpoint is read
            if stat.S_ISREG(info.st_mode):
                states.append((name, info.st_ino, info.st_size, info.st_mtime_ns))
        marked_ns = max((changed_ns for name, *_, changed_ns in states if name in markers), default=-1)
        return tuple(states) if marked_ns >= max((changed_ns for *_, changed_ns in states), default=0) else None
