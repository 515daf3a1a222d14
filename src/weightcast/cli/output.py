"""Output of a command: results on stdout, as lines and tables or as one JSON object; progress on stderr."""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from weightcast.cli import exits, values
from weightcast.errors import WeightcastError, printable
from weightcast.store import address as store_address

IMPORTING = "importing torch"
"""Text that a command shows on a terminal during its imports, which take seconds."""

_UNBOUNDED = 1 << 14
_TEXT = TextColumn("{task.description}", markup=False)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_engines(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add `--engine`, which fills the list `engines`. `required`: at least one must be given."""
    shown = "URL of an engine, such as http://127.0.0.1:8000; repeatable"
    parser.add_argument(
        "--engine", dest="engines", action="append", required=required, default=[], metavar="URL", help=shown
    )
    add_token(parser)


def add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="a file with the engines' bearer token")


def add_update(parser: argparse.ArgumentParser, *, transport_help: str) -> None:
    """Add the options of `Publisher` that every publishing command has."""
    add, default, url = parser.add_argument, "(default: %(default)s)", values.transport_between_processes
    installs = f"staged: engines generate during the transfer; streaming: they are paused, with less memory {default}"
    add("--transport", type=url, default="ipc://", metavar="URL", help=f"{transport_help} {default}")
    add("--install", choices=("staged", "streaming"), default="staged", help=installs)
    add("--undo", action="store_true", help="engines roll back to the old version if the install fails")
    add("--takeover", action="store_true", help="take engines from another publisher")
    add("--deadline", type=values.seconds, default=60.0, metavar="SECONDS", help="longest single wait (%(default)s)")


def read_token(path: Path | None) -> str | None:
    """Read the token of --token-file; None without that option. Raises ValueError."""
    return None if path is None else store_address.read_token(path, "--token-file")


def show(result: object, as_json: bool, view: Iterable[str | Table]) -> None:
    """Print `result` as JSON, or the lines and tables of `view`. Lines are never wrapped.

    A table is as wide as its content; on a narrower terminal long cells are folded.
    """
    if as_json:
        print(msgspec.json.encode(result).decode(), flush=True)
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=_UNBOUNDED)
    for part in view:
        console.print(Text(printable(part)) if isinstance(part, str) else part, soft_wrap=isinstance(part, str))


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """Context of a server, which Ctrl-C ends, and SIGTERM likewise, so that everything is closed."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, former)


@contextlib.contextmanager
def until_terminated() -> Iterator[threading.Event]:
    """Context of a loop, which ends its present round when SIGTERM has set the event that this yields."""
    stop = threading.Event()

    def end(number: int, frame: object) -> None:
        # In another thread: the handler may interrupt the thread that waits for `stop` while it has the event's lock.
        threading.Thread(target=stop.set).start()

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, former)


def wait_to_retry(error: WeightcastError, pause_seconds: float, stop: threading.Event) -> float:
    """Print the error of a loop's round, wait, and return the pause after another failure, in seconds."""
    print(f"weightcast: {exits.describe(error)}; trying again in {pause_seconds:g} s", file=sys.stderr)
    stop.wait(pause_seconds)
    return min(2 * pause_seconds, 30.0)


@contextlib.contextmanager
def stage(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on a terminal, nothing elsewhere; yield a function that changes the text."""
    with _progress(text, SpinnerColumn(), _TEXT) as update:
        yield lambda text: update(description=text)


@contextlib.contextmanager
def measured(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of bytes on a terminal, nothing elsewhere; yield a function of done and total bytes."""
    with _progress(text, _TEXT, BarColumn(), DownloadColumn()) as update:
        yield lambda done_bytes, total_bytes: update(completed=done_bytes, total=total_bytes)


@contextlib.contextmanager
def _progress(text: str, *columns: ProgressColumn) -> Iterator[Callable[..., None]]:
    console = Console(stderr=True)
    shown = Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal)
    with shown as progress:
        yield functools.partial(progress.update, progress.add_task(text, total=None))
