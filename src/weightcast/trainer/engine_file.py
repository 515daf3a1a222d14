"""A directory of engines in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


class EngineFile:
    """Implements `EngineDirectory`: the URLs in a text file, one per line, which is read for every publish.

    Empty lines and the rest of a line after `#` are ignored. Replace the file at once (write another one beside it and
    rename that), or end it with a newline last: a file that is empty or does not end with a newline is being written,
    for which `engines` raises ValueError. For no engines, write a comment. Raises OSError if it can't be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def engines(self) -> Sequence[str]:
        text = self._path.read_text()
        if not text.endswith("\n"):
            raise ValueError(f"{self._path} is being written, since it does not end with a newline: end it with one")
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return [line for line in lines if line]
