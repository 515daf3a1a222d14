"""The URL of a store: `file:///dir?num_slots=3`, `s3://bucket/prefix`, `store+https://HOST`.

Both sides get all options from it.
"""

from __future__ import annotations

import dataclasses
import os
import urllib.parse
from pathlib import Path
from typing import Any

SCHEMES = ("file", "s3", "store+http", "store+https")
MAX_SLOTS = 64
MAX_THREADS = 256
MAX_BUFFERS = 8
"""Limit on the buckets that a writer, or a streaming reader, has in memory at once, whatever `num_threads` is."""
_LIMITS = {
    "num_slots": (2, MAX_SLOTS),
    "max_slots": (2, MAX_SLOTS),
    "num_threads": (1, MAX_THREADS),
    "full_every": (1, MAX_SLOTS - 1),
    "by_classes": (0, 1),
    "fsync": (0, 1),
    "keep_seconds": (0, 864_000),
}
"""The smallest and the largest value of each option that is a number, or 0 or 1."""
_OF_WRITERS = ("num_slots", "num_threads", "full_every", "by_classes")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Options of every store.

    `full_every`: with n above 1, every n-th version is full, and each other one is a delta on the one before.
    `by_classes`: such deltas are written in the shorter codec, which takes more time at both ends. `num_slots`: number
    of versions that are kept before the oldest is overwritten or removed, by default 2, or twice `full_every`.
    `num_threads`: number of buckets that are written and read concurrently, up to `MAX_BUFFERS`.
    """

    num_slots: int = 2
    num_threads: int = 1
    full_every: int = 1
    by_classes: bool = False

    @staticmethod
    def parse(url: str) -> StoreAddress:
        """Parse a URL. Raises ValueError for another scheme, a wrong place or option; TypeError."""
        if not isinstance(url, str):
            raise TypeError(f"{url!r:.80} is not the URL of a store; pass a str such as 'file:///dir'")
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "s3":
            prefix = urllib.parse.unquote(parts.path).strip("/")
            if not parts.netloc or parts.fragment or set(parts.netloc) & set("@:") or "//" in prefix:
                raise ValueError(
                    f"{url!r} is not the URL of a store; write s3://bucket/prefix, with the server's address, if it is "
                    "not Amazon's, in ?endpoint=https://HOST:PORT, and the keys in AWS_ACCESS_KEY_ID, "
                    "AWS_SECRET_ACCESS_KEY"
                )
            options = _options(url, parts, *_OF_WRITERS, "keep_seconds", "endpoint", "region", "host")
            options.pop("host", None)  # for the engines
            endpoint = options.get("endpoint")
            if endpoint and not endpoint.startswith(("http://", "https://")):
                raise ValueError(f"{url!r}: endpoint must be a URL, such as https://HOST:PORT")
            return ObjectStoreAddress(parts.netloc, prefix, **options)
        if parts.scheme in ("store+http", "store+https"):
            if not parts.hostname or parts.fragment or "@" in parts.netloc:
                raise ValueError(
                    f"{url!r} is not the URL of a store; write store+https://HOST:PORT, with the path of a file that "
                    "has the server's token in ?token_file="
                )
            server = f"{parts.scheme.removeprefix('store+')}://{parts.netloc}{parts.path.rstrip('/')}"
            return RemoteAddress(server, **_options(url, parts, "num_threads", "token_file", "ca_file"))
        if parts.scheme != "file" or not parts.path.startswith("/") or parts.fragment or "%00" in parts.path:
            here = f"file://{urllib.parse.quote(os.path.abspath(url))}"
            known = here if url and not parts.scheme else "file:///absolute/directory"
            raise ValueError(
                f"{url!r} is not the URL of a store; write {known}, s3://bucket/prefix or store+https://HOST"
            )
        options = _options(url, parts, *_OF_WRITERS, "max_slots", "fsync")
        num_slots = options["num_slots"]
        if options.setdefault("max_slots", min(max(num_slots + 2, 4), MAX_SLOTS)) < num_slots:
            raise ValueError(f"{url!r}: max_slots must be at least num_slots, which is {num_slots}")
        return DirectoryAddress(Path(urllib.parse.unquote(parts.path)), **options)


@dataclasses.dataclass(frozen=True, slots=True)
class DirectoryAddress(StoreAddress):
    """A store in a directory.

    `max_slots`: limit while readers have pinned the others (default: two more). `num_threads` is also the number of
    files per version. `fsync`: wait for the disk before a version is committed.
    """

    directory: Path
    max_slots: int = dataclasses.field(default=4, kw_only=True)
    fsync: bool = dataclasses.field(default=False, kw_only=True)


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectStoreAddress(StoreAddress):
    """A store in an object store with the S3 protocol: its objects are named `prefix/...`.

    `endpoint`, `region`: of the server; empty for what the environment says. `keep_seconds`: time for which a version
    stays readable, at least, after a newer one was committed.
    """

    bucket: str
    prefix: str = ""
    num_threads: int = dataclasses.field(default=3, kw_only=True)
    endpoint: str = dataclasses.field(default="", kw_only=True)
    region: str = dataclasses.field(default="", kw_only=True)
    keep_seconds: int = dataclasses.field(default=300, kw_only=True)


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteAddress(StoreAddress):
    """A store behind `weightcast serve-store`, which is only read. `num_threads`: number of requests at once.

    `url`: of the server, http:// or https://. `token_file`: path of a file with the server's token; empty for none.
    `ca_file`: path of a file with the certificates, in PEM format, of the authorities that are trusted for https://;
    empty for those that this system trusts.
    """

    url: str
    num_threads: int = dataclasses.field(default=4, kw_only=True)
    token_file: str = dataclasses.field(default="", kw_only=True)
    ca_file: str = dataclasses.field(default="", kw_only=True)


def read_token(path: Path, option: str) -> str:
    """Read a file's token, without the line end. Raises ValueError if it can't be read or has no token."""
    try:
        token = path.read_bytes().decode("ascii", "replace").strip()
    except OSError as exc:
        raise ValueError(f"{option} {path} can't be read: {exc.strerror}") from exc
    if len(token.split()) != 1 or not token.isascii():
        raise ValueError(f"{option} {path} must contain one token, in ASCII, and nothing else")
    return token


def _options(url: str, parts: urllib.parse.SplitResult, *names: str) -> dict[str, Any]:
    """Return the options in a URL, which may have those of these names; with `num_slots`, if a writer needs it.

    Raises ValueError.
    """
    options: dict[str, Any] = {}
    for name, text in urllib.parse.parse_qsl(parts.query, keep_blank_values=True):
        if name not in names:
            raise ValueError(f"{url!r} has the unknown option {name}; known: {', '.join(names)}")
        if name in options:
            raise ValueError(f"{url!r} has the option {name} twice: give it once")
        options[name] = text
        if name in _LIMITS:
            low, high = _LIMITS[name]
            if not (text.isascii() and text.isdigit() and len(text) <= 9 and low <= int(text) <= high):
                raise ValueError(f"{url!r}: {name} must be a whole number from {low} to {high}")
            options[name] = bool(int(text)) if high == 1 else int(text)
    if "num_slots" in names:
        full_every = options.get("full_every", 1)
        num_slots = options.setdefault("num_slots", min(2 * full_every, MAX_SLOTS))
        if full_every >= num_slots:
            raise ValueError(
                f"{url!r}: full_every must be from 1 to {num_slots - 1}, below num_slots: a version that is a delta "
                "needs all versions back to the last full one"
            )
        if options.get("by_classes") and full_every == 1:
            raise ValueError(f"{url!r}: by_classes must be 0 unless full_every is above 1")
    return options
