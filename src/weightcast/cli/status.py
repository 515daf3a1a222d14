"""`weightcast status`: which version each engine of a fleet serves, which are behind, and why."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import msgspec
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from weightcast.cli import exits, output, values
from weightcast.control.client import HttpEngine
from weightcast.errors import ErrorRecord, WeightcastError, printable, to_record
from weightcast.format.messages import WeightInfo

EPILOG = """
examples:
  weightcast status http://127.0.0.1:8000 http://127.0.0.1:8001
  weightcast status http://127.0.0.1:8000 http://127.0.0.1:8001 --watch 2
  weightcast status http://127.0.0.1:8000 --json | jq '.engines[].behind'

The newest version is the highest number that any of these engines serves. The exit status is 0 if every engine answers
and serves it, and is neither paused nor torn. --watch asks again until Ctrl-C; with --json, one line each time.
"""

Answer: TypeAlias = WeightInfo | ErrorRecord
"""An engine's answer, or the error that came instead."""

_MAX_ASKED_AT_ONCE = 64
_STYLES = {"serves": "green", "behind": "yellow", "paused": "yellow", "torn": "bold red", "no answer": "bold red"}


class EngineStatus(msgspec.Struct, frozen=True):
    """One engine's answer, or the error that came instead.

    `state`: "serves" (the newest version), "behind", "paused", "torn" (it refuses to serve), or "no answer". `behind`:
    by how many version numbers; None where the engine or the whole fleet has no number.
    """

    engine: str
    state: str
    behind: int | None
    info: WeightInfo | None
    error: ErrorRecord | None


class FleetStatus(msgspec.Struct, frozen=True):
    """The JSON of `status`. `ok`: every engine serves `newest`, the highest version number among them; None: none."""

    ok: bool
    newest: int | None
    engines: list[EngineStatus]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("engines", nargs="+", metavar="URL", help="an engine, such as http://127.0.0.1:8000")
    add("--watch", type=values.seconds, metavar="SECONDS", help="ask again every SECONDS, until Ctrl-C")
    add("--deadline", type=values.seconds, default=10.0, metavar="SECONDS", help="longest wait (%(default)s)")
    output.add_token(parser)
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with contextlib.ExitStack() as stack:
        token = output.read_token(args.token_file)
        urls = dict.fromkeys(url.rstrip("/") for url in args.engines)
        engines = [
            stack.enter_context(contextlib.closing(HttpEngine(url, token=token, timeout_seconds=args.deadline)))
            for url in urls
        ]
        pool = stack.enter_context(ThreadPoolExecutor(_MAX_ASKED_AT_ONCE, thread_name_prefix="weightcast-status"))

        def look() -> FleetStatus:
            return judged(dict(zip((engine.name for engine in engines), pool.map(ask, engines), strict=True)))

        if args.watch is None:
            found = look()
            output.show(found, args.json, _view(found))
            return exits.OK if found.ok else exits.NEGATIVE
        if args.json:
            while True:
                output.show(look(), True, ())
                time.sleep(args.watch)
        with Live(auto_refresh=False) as live:
            while True:
                lines = (Text(part) if isinstance(part, str) else part for part in _view(look()))
                live.update(Group(*lines), refresh=True)
                time.sleep(args.watch)


def judged(answers: Mapping[str, Answer], published: int | None = None) -> FleetStatus:
    """Return the fleet's status by its engines' answers. `published`: a version that is at most the newest one."""
    numbers = [info.version for info in answers.values() if isinstance(info, WeightInfo)]
    newest = max((number for number in (published, *numbers) if number is not None), default=None)
    found: list[EngineStatus] = []
    for name, answer in answers.items():
        if isinstance(answer, ErrorRecord):
            found.append(EngineStatus(name, "no answer", None, None, answer))
            continue
        state = "serves" if answer.version == newest else "behind"
        if answer.torn:
            state = "torn"
        elif answer.paused:
            state = "paused"
        behind = None if newest is None or answer.version is None else newest - answer.version
        found.append(EngineStatus(name, state, behind, answer, None))
    return FleetStatus(all(engine.state == "serves" for engine in found), newest, found)


def ask(engine: HttpEngine) -> Answer:
    """Ask an engine for its state; each request has the client's deadline."""
    try:
        return engine.connect().info()
    except WeightcastError as exc:
        return to_record(exc)


def _view(found: FleetStatus) -> Iterator[str | Table]:
    table = Table()
    for heading in ("engine", "state", "version", "behind", "of run", "held by run"):
        table.add_column(heading, justify="right" if heading in ("version", "behind") else "left", overflow="fold")
    for engine in found.engines:
        info = engine.info
        cells = ["", "", ""] if info is None else [info.weight_version, info.run[:8], info.holder[:8]]
        version, run, holder = (escape(printable(cell)) for cell in cells)
        behind = "" if engine.behind is None else str(engine.behind)
        state = Text(engine.state, style=_STYLES[engine.state])
        table.add_row(escape(printable(engine.engine)), state, version, behind, run, holder)
    yield table
    for engine in found.engines:
        if engine.error is not None:
            yield f"{engine.engine}: {engine.error.kind}: {engine.error.message}"
        elif engine.info is not None and engine.info.torn:
            yield f"{engine.engine} is torn: {engine.info.torn}"
    num_serving = sum(engine.state == "serves" for engine in found.engines)
    what = "" if found.newest is None else f" version {found.newest}"
    yield f"engines that serve{what}: {num_serving:,} of {len(found.engines):,}"
