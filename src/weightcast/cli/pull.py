"""`weightcast pull`: copy the newest version of a store into another one. `weightcast push` is this command, too."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading

from weightcast.cli import exits, output, values
from weightcast.errors import VersionNotFoundError, WeightcastError
from weightcast.format.amounts import size

EPILOG = """
examples:
  weightcast pull store+https://HOST file:///mnt/weights
  weightcast pull 'store+https://HOST?token_file=/etc/token&num_threads=8' file:///mnt/weights
  weightcast pull store+http://127.0.0.1:8200 file:///mnt/weights --follow --json

The source is a store that `weightcast serve-store` serves, or any other. The version keeps its run and number. It
becomes the newest one here once every bucket has arrived and was checked. An interrupted pull keeps the buckets that
have arrived: run the same command again. With --follow each newer version is pulled too, until Ctrl-C or SIGTERM.
"""

_LOOK_SECONDS = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=values.store, metavar="SOURCE", help="the store to copy from")
    add("target", type=values.store, metavar="TARGET", help="the store to copy into; may not exist yet")
    add("--follow", action="store_true", help="then copy each newer version too, until Ctrl-C or SIGTERM")
    add("--deadline", type=values.seconds, default=60.0, metavar="SECONDS", help="longest single wait (%(default)s)")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with output.stage(output.IMPORTING):
        from weightcast.store.address import StoreAddress
        from weightcast.store.copying import copy_newest

    source, target = StoreAddress.parse(args.source), StoreAddress.parse(args.target)
    pause_seconds, is_empty = 1.0, False
    with output.until_terminated() if args.follow else contextlib.nullcontext(threading.Event()) as stop:
        while not stop.is_set():
            try:
                with output.measured(f"copying {args.source}") as on_progress:
                    copied = copy_newest(source, target, deadline_seconds=args.deadline, on_progress=on_progress)
            except WeightcastError as exc:
                if not args.follow:
                    raise
                if not isinstance(exc, VersionNotFoundError):
                    pause_seconds = output.wait_to_retry(exc, pause_seconds, stop)
                    continue
                if not is_empty:
                    print(f"weightcast: {exc}; waiting", file=sys.stderr)
                is_empty = True
                stop.wait(_LOOK_SECONDS)
                continue
            pause_seconds = 1.0
            if copied is not None:
                text = (
                    f"version {copied.version} of run {copied.run[:8]}: {size(copied.num_bytes)} in "
                    f"{copied.seconds:.2f} s, {size(copied.sent_bytes)} sent"
                )
                output.show(copied, args.json, [text])
            if not args.follow:
                if copied is None:
                    output.show(None, args.json, [f"{args.target} has the newest version of {args.source}"])
                return exits.OK
            stop.wait(_LOOK_SECONDS)
    return exits.OK
