"""What an exception is for the command line: its exit status, and one line of text or one JSON object."""

from __future__ import annotations

import sys

import msgspec

from weightcast.cli import exits
from weightcast.errors import WeightcastError, to_record

_USAGE = (ValueError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, ImportError)

_EXTRAS = {
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "transformers": "serve",
    "rich": "cli",
    "matplotlib": "bench",
}


def status_of(exc: BaseException) -> int | None:
    """The exit status, or None for an exception that is a bug here and deserves its traceback."""
    if isinstance(exc, KeyboardInterrupt):
        return exits.INTERRUPTED
    if isinstance(exc, (*_USAGE, *safetensor_errors())):
        return exits.USAGE
    if isinstance(exc, (WeightcastError, OSError)):
        return exits.NEGATIVE
    return None


def safetensor_errors() -> tuple[type[BaseException], ...]:
    """A file that is no safetensors file. Only who has imported the library can have raised it."""
    library = sys.modules.get("safetensors")
    return () if library is None else (library.SafetensorError,)


def describe(exc: BaseException, *, as_json: bool = False) -> str:
    """One line, or an object {"error": {"kind", "message", ...}} with every problem that the error lists."""
    if as_json:
        return msgspec.json.encode({"error": _record(exc)}).decode()
    if isinstance(exc, KeyboardInterrupt):
        return "interrupted"
    return f"{type(exc).__name__}: {' '.join(_message(exc).split())}"


def _message(exc: BaseException) -> str:
    extra = _EXTRAS.get(exc.name or "") if isinstance(exc, ModuleNotFoundError) else None
    return str(exc) if extra is None else f"{exc}: pip install 'weightcast[{extra}]'"


def _record(exc: BaseException) -> object:
    if isinstance(exc, WeightcastError):
        return to_record(exc)
    return {"kind": type(exc).__name__, "message": _message(exc)}
