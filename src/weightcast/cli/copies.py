"""Copies between stores: the options and the loop of `weightcast pull` and `weightcast push`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading

import msgspec

from weightcast.cli import exits, output, values
from weightcast.errors import VersionNotFoundError, WeightcastError
from weightcast.format.amounts import size

_LOOK_SECONDS = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--follow", action="store_true", help="then copy each newer version too, until Ctrl-C or SIGTERM")
    add("--deadline", type=values.seconds, default=60.0, metavar="SECONDS", help="longest single wait (%(default)s)")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with output.stage(output.IMPORTING):
        from weightcast.store.address import StoreAddress
        from weightcast.store.copying import copy_newest

    source, target = StoreAddress.parse(args.source), StoreAddress.parse(args.target)
    stop, pause_seconds, is_empty = threading.Event(), 1.0, False

    def end(number: int, frame: object) -> None:
        # In another thread: the handler may interrupt the thread that waits for `stop` while it has the event's lock.
        threading.Thread(target=stop.set).start()

    with contextlib.ExitStack() as stack:
        if args.follow:
            stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, end))
        while not stop.is_set():
            try:
                with output.measured(f"copying {args.source}") as on_progress:
                    copied = copy_newest(source, target, deadline_seconds=args.deadline, on_progress=on_progress)
            except VersionNotFoundError as exc:
                if not args.follow:
                    raise
                if not is_empty:
                    print(f"weightcast: {exc}; waiting", file=sys.stderr)
                is_empty = True
                stop.wait(_LOOK_SECONDS)
                continue
            except WeightcastError as exc:
                if not args.follow:
                    raise
                print(f"weightcast: {exits.describe(exc)}; trying again in {pause_seconds:g} s", file=sys.stderr)
                stop.wait(pause_seconds)
                pause_seconds = min(2 * pause_seconds, 30.0)
                continue
            pause_seconds = 1.0
            if copied is not None:
                text = (
                    f"version {copied.version} of run {copied.run[:8]}: {size(copied.num_bytes)} in "
                    f"{copied.seconds:.2f} s, {size(copied.sent_bytes)} sent"
                )
                print(msgspec.json.encode(copied).decode() if args.json else text, flush=True)
            if not args.follow:
                if copied is None:
                    output.show(None, args.json, lambda: [f"{args.target} has the newest version of {args.source}"])
                return exits.OK
            stop.wait(_LOOK_SECONDS)
    return exits.OK
