"""Where a command's words go: results to stdout, as a table or as one JSON object; progress to stderr."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from weightcast.cli import values

Step = Callable[[int], None]
Say = Callable[[str], None]
Update = Callable[[int, int], None]


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def add_engines(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument(
        "--engine",
        action="append",
        required=required,
        default=None if required else [],
        metavar="URL",
        dest="engines",
        help="an engine, such as http://127.0.0.1:8000; repeat it for more",
    )
    add_token(parser)


def add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="a file with the engines' bearer token")


def add_update(parser: argparse.ArgumentParser, *, transport_help: str) -> None:
    """How a version reaches the engines: the choices of `Publisher` that every command which publishes has."""
    parser.add_argument(
        "--transport",
        type=values.transport_between_processes,
        default="ipc://",
        metavar="URL",
        help=f"{transport_help} (default: %(default)s)",
    )
    parser.add_argument(
        "--install",
        choices=("staged", "streaming"),
        default="staged",
        help="staged: the old version serves until everything is there; streaming: less memory (default: %(default)s)",
    )
    parser.add_argument("--undo", action="store_true", help="engines go back to the old version if the install fails")
    parser.add_argument("--takeover", action="store_true", help="take engines that another publisher holds")
    parser.add_argument(
        "--deadline", type=values.seconds, default=60.0, metavar="SECONDS", help="of each wait (%(default)s)"
    )


def read_token(path: Path | None) -> str | None:
    """The token in a file, without the line end. Raises ValueError if it can't be read or has no token."""
    if path is None:
        return None
    try:
        token = path.read_bytes().decode("ascii", "replace").strip()
    except OSError as exc:
        raise ValueError(f"--token-file {path} can't be read: {exc.strerror}") from exc
    if len(token.split()) != 1 or not token.isascii():
        raise ValueError(f"--token-file {path} must hold one token, in ASCII, and nothing else")
    return token


def show(
    result: object, as_json: bool, view: Callable[[], RenderableType], lines: Callable[[], Iterable[str]] = tuple
) -> None:
    """Print `result` as JSON, or what `view` makes of it and below it each of `lines`, which is never wrapped."""
    if as_json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        return
    console = Console()
    console.print(view(), width=None if console.is_terminal else 120)
    for line in lines():
        console.print(Text(line), soft_wrap=True)


@contextlib.contextmanager
def stage(text: str) -> Iterator[Say]:
    """A spinner on a terminal, nothing elsewhere. Call what it gives to change the text."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with _progress(*columns) as progress:
        task = progress.add_task(text, total=None)
        yield lambda text: progress.update(task, description=text)


@contextlib.contextmanager
def measured(text: str) -> Iterator[Update]:
    """A bar of bytes on a terminal, nothing elsewhere. Call what it gives with how many are done, and of how many."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with _progress(*columns) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done_bytes, total_bytes: progress.update(task, completed=done_bytes, total=total_bytes)


@contextlib.contextmanager
def counted(text: str, total: int, unit: str) -> Iterator[Step]:
    """A bar on a terminal, nothing elsewhere. Call what it gives with how many more are done."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit, markup=False),
        TimeElapsedColumn(),
    )
    with _progress(*columns) as progress:
        task = progress.add_task(text, total=total)
        yield lambda count: progress.advance(task, count)


def _progress(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
