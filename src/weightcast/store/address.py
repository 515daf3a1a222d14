"""The URL of a store: `file:///dir?num_slots=3&num_threads=4`. It has all options, so that both sides get them."""

from __future__ import annotations

import dataclasses
import os
import urllib.parse
from pathlib import Path

SCHEME = "file"
MAX_SLOTS = 64
MAX_THREADS = 256
MAX_BUFFERS = 8
"""Limit on the buckets that a writer, or a streaming reader, has in memory at once, whatever `num_threads` is."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store's directory and its options for writing and reading.

    `full_every`: with n above 1, every n-th version is full, and each other one is a delta on the one before.
    `num_slots`: number of versions that are kept before the oldest is overwritten, by default 2, or twice `full_every`.
    `max_slots`: limit while readers have pinned the others (default: two more). `num_threads`: number of files per
    version, which are written and read concurrently, up to the number of buckets and `MAX_BUFFERS`. `fsync`: wait for
    the disk before a version is committed.
    """

    directory: Path
    num_slots: int = 2
    max_slots: int = 4
    num_threads: int = 1
    fsync: bool = False
    full_every: int = 1

    @classmethod
    def parse(cls, url: str) -> StoreAddress:
        """Parse a URL. Raises ValueError for another scheme, a relative path, a wrong option; TypeError."""
        if not isinstance(url, str):
            raise TypeError(f"{url!r:.80} is not the URL of a store; pass a str such as 'file:///dir'")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != SCHEME or not parts.path.startswith("/") or parts.fragment:
            known = f"file://{os.path.abspath(url)}" if url and not parts.scheme else "file:///absolute/directory"
            raise ValueError(f"{url!r} is not the URL of a store; write {known}")
        options: dict[str, int] = {}
        for name, text in urllib.parse.parse_qsl(parts.query, keep_blank_values=True):
            if name in options or not (text.isascii() and text.isdigit()) or len(text) > 9:
                raise ValueError(f"{url!r}: option {name}={text} must be a whole number, given once")
            options[name] = int(text)
        full_every = options.pop("full_every", 1)
        num_slots = options.pop("num_slots", max(2, 2 * full_every))
        max_slots = options.pop("max_slots", max(num_slots + 2, 4))
        num_threads, fsync = options.pop("num_threads", 1), options.pop("fsync", 0)
        if options:
            known = "num_slots, max_slots, num_threads, fsync, full_every"
            raise ValueError(f"{url!r} has the unknown option {', '.join(sorted(options))}; known: {known}")
        if not 2 <= num_slots <= max_slots <= MAX_SLOTS:
            raise ValueError(f"{url!r}: 2 <= num_slots <= max_slots <= {MAX_SLOTS} must hold")
        if not 1 <= full_every < num_slots:
            raise ValueError(
                f"{url!r}: full_every must be from 1 to {num_slots - 1}, below num_slots: a version that is a delta "
                "needs all versions back to the last full one"
            )
        if not 1 <= num_threads <= MAX_THREADS:
            raise ValueError(f"{url!r}: num_threads must be from 1 to {MAX_THREADS}")
        if fsync not in (0, 1):
            raise ValueError(f"{url!r}: fsync must be 0 or 1")
        return cls(Path(urllib.parse.unquote(parts.path)), num_slots, max_slots, num_threads, bool(fsync), full_every)
