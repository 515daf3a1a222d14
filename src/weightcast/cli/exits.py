"""Exit statuses of commands, and exceptions as a status and as one line of text or one JSON object."""

from __future__ import annotations

import sys

import msgspec

from weightcast.errors import WeightcastError, printable, to_record, with_extra

OK = 0
NEGATIVE = 1
USAGE = 2
INTERRUPTED = 130

TABLE = """\
  0    success
  1    failed: an engine did not install the version, a tensor differs, a peer can't be reached
  2    wrong call: unknown option, no such file, a value out of range
  130  interrupted by Ctrl-C"""

_USAGE = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ImportError)


def status_of(exc: BaseException) -> int | None:
    """Return the exit status; None for an unexpected exception, which is a bug and is shown with its traceback."""
    if isinstance(exc, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(exc, (*_USAGE, *safetensor_errors())):
        return USAGE
    if isinstance(exc, (WeightcastError, OSError)):
        return NEGATIVE
    return None


def safetensor_errors() -> tuple[type[BaseException], ...]:
    """Return safetensors' error class for invalid files, if the library was imported; else nothing can raise it."""
    library = sys.modules.get("safetensors")
    return () if library is None else (library.SafetensorError,)


def describe(exc: BaseException, *, as_json: bool = False) -> str:
    """Return one line, or a JSON object {"error": {"kind", "message", ...}} with every problem that the error lists."""
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted"
    if isinstance(exc, ModuleNotFoundError):
        exc = with_extra(exc)
    kind, message = type(exc).__name__, str(exc)
    if as_json:
        record = to_record(exc) if isinstance(exc, WeightcastError) else {"kind": kind, "message": message}
        return msgspec.json.encode({"error": record}).decode()
    return f"{kind}: {printable(' '.join(message.split()))}"
