"""Errors of a process or host without free file descriptors: detection, remedy, and rate-limited logging."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import time

from weightcast.errors import PeerError


def shortage(error: BaseException | None) -> str:
    """Return a message with the remedy if an error or one of its causes is a lack of descriptors; else empty."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"this process has no file descriptor left (limit {limit}): raise the limit (ulimit -n, or a service's "
                "LimitNOFILE), or close files and connections"
            )
        if isinstance(error, OSError) and error.errno == errno.ENFILE:
            return "this host has no file descriptor left: raise fs.file-max (sysctl), or end processes that use many"
        error = error.__cause__
    return ""


def shortage_now() -> str:
    """Do what `shortage` does by trying to open a file, after a wait that failed without an error."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        return shortage(exc)
    return ""


def require_free(count: int, what: str) -> None:
    """Raise PeerError unless this process can open `count` more files for `what`, a library that would crash."""
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                stack.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as exc:
        raise PeerError(f"{what} needs {count} file descriptors: {shortage(exc) or exc}") from exc


class AcceptLog:
    """Logs that connections can't be accepted, at most once a minute."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        """`what`: what is accepted, such as "a receiver"."""
        self._logger = logger
        self._what = what
        self._next_at = 0.0
        self._num_failed = 0

    def failed(self, error: BaseException | None) -> None:
        self._num_failed += 1
        if time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + 60
            reason = shortage(error) or error
            self._logger.warning("%s could not be accepted (attempts: %d): %s", self._what, self._num_failed, reason)
            self._num_failed = 0
