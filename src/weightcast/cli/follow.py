"""`weightcast follow`: every version that comes into a store, passed on to running engines under its own number."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading

import msgspec

from weightcast.cli import exits, output, values
from weightcast.errors import WeightcastError
from weightcast.format.amounts import size

EPILOG = """
examples:
  weightcast follow file:///mnt/weights --engine http://127.0.0.1:8000
  weightcast follow file:///mnt/weights --engine http://127.0.0.1:8000 --once --json

It starts with the newest version and goes on until it is interrupted (Ctrl-C) or ended (SIGTERM). A version that an
engine did not take is tried again, on all engines, until it is or a newer one is there. With --json each is one line.
"""

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_LOOK_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=values.store, metavar="STORE", help="a store, file:///dir; it may come later")
    output.add_engines(parser)
    output.add_update(parser, transport_help="how bytes travel to the engines")
    parser.add_argument("--once", action="store_true", help="end after the first version that all engines took")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with output.stage(output.IMPORTING):
        from weightcast.serving.follower import Follower
        from weightcast.trainer.options import PublishOptions
        from weightcast.trainer.relay import Relay

    stop, pause_seconds = threading.Event(), _FIRST_PAUSE_SECONDS
    with contextlib.ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda number, frame: stop.set()))
        relay = Relay(
            args.engines,
            transport=args.transport,
            token=output.read_token(args.token_file),
            options=PublishOptions(
                install=args.install, undo=args.undo, takeover=args.takeover, deadline_seconds=args.deadline
            ),
        )
        stack.callback(relay.close)
        follower = stack.enter_context(Follower(args.store, relay, label="weightcast follow"))
        while not stop.is_set():
            try:
                followed = follower.wait(_LOOK_SECONDS, stop=stop)
            except WeightcastError as exc:
                if args.once:
                    raise
                print(f"weightcast: {exits.describe(exc)}; trying again in {pause_seconds:g} s", file=sys.stderr)
                stop.wait(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
                continue
            if followed is not None:
                pause_seconds = _FIRST_PAUSE_SECONDS
                text = (
                    f"version {followed.version} of run {followed.run[:8]}: {size(followed.num_bytes)} in "
                    f"{followed.seconds:.2f} s, {followed.lag_seconds:.2f} s after its commit"
                )
                print(msgspec.json.encode(followed).decode() if args.json else text, flush=True)
                if args.once:
                    break
    return exits.OK
