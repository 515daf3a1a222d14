"""`weightcast follow`: publish the versions of a store, or the checkpoint directories of a loop, to engines."""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from weightcast.cli import exits, output, values
from weightcast.errors import PeerTimeoutError, WeightcastError
from weightcast.format.amounts import size
from weightcast.host.deadline import GRACE_SECONDS, MAX_SECONDS, Deadline

if TYPE_CHECKING:
    from weightcast.cli.directory_follower import DirectoryFollower
    from weightcast.serving.follower import Follower

EPILOG = """
examples:
  weightcast follow file:///mnt/weights --engine http://127.0.0.1:8000
  weightcast follow file:///mnt/weights --engine http://127.0.0.1:8000 --once --json
  weightcast follow outputs/broadcasts --marker STABLE --engine http://127.0.0.1:8000

It starts with the newest version, or waits for the first, with --once at most as long as --deadline says, and runs
until Ctrl-C or SIGTERM. A version that an engine did not install is sent to it again, until the engine has installed it
or there is a newer version. With --json each version is one line.

With --marker TARGET is a directory in which a training loop makes one directory of safetensors for each version:
step_12, weight_v000012, checkpoint-12. The last digits of its name are the version's number; the directory that was
written last is the newest. A directory is complete when it has the marker, a file that the loop writes last: prime-rl's
is STABLE, in later versions .finished.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "target",
        metavar="TARGET",
        help="a store, file:///dir or s3://bucket/prefix, or with --marker a directory; may not exist yet",
    )
    marker_help = "TARGET has checkpoint directories, which are complete when they have this file; repeatable"
    add("--marker", action="append", metavar="NAME", help=marker_help)
    add("--dtype", choices=values.DTYPES, help="with --marker: cast the weights to this dtype")
    output.add_engines(parser)
    output.add_update(parser, transport_help="the transport to the engines")
    add("--once", action="store_true", help="end after the first version that all engines have installed")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    pause_seconds = 1.0
    # After this time without a version a line is printed, since the directory or its marker may be wrong.
    look_seconds = GRACE_SECONDS

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(output.until_terminated())
        follower = _follower(args, stack)
        first = Deadline(args.deadline if args.once else math.inf)
        needed = f" (a directory with the file {' or '.join(args.marker)})" if args.marker else ""
        while not stop.is_set():
            try:
                followed = follower.wait(min(look_seconds, first.remaining_seconds), stop=stop)
            except WeightcastError as exc:
                if args.once:
                    raise
                pause_seconds = output.wait_to_retry(exc, pause_seconds, stop)
                continue
            if followed is None and first.has_passed:
                raise PeerTimeoutError(
                    f"no complete version{needed} came into {args.target} within {args.deadline:g} s: check that it is "
                    "the right one and that a trainer publishes there, or wait longer (--deadline)",
                    peer="trainer",
                )
            if followed is None and look_seconds == GRACE_SECONDS and not stop.is_set():
                print(f"weightcast: {args.target} has no complete version yet{needed}; waiting", file=sys.stderr)
            look_seconds = MAX_SECONDS
            if followed is not None:
                pause_seconds = 1.0
                text = f"version {followed.version}: all engines have it already, nothing was sent"
                if followed.run:
                    text = (
                        f"version {followed.version} of run {followed.run[:8]}: {size(followed.num_bytes)} in "
                        f"{followed.seconds:.2f} s, {followed.lag_seconds:.2f} s after its commit"
                    )
                output.show(followed, args.json, [text])
                if args.once:
                    return exits.OK
    return exits.NEGATIVE if args.once else exits.OK


def _check(args: argparse.Namespace) -> None:
    """End with a usage error unless the options fit the target: a store, or with --marker a directory."""
    if args.marker is None:
        if args.dtype is not None:
            args.usage_error("--dtype works only with --marker, since a store's versions are not cast: leave it out")
        try:
            values.store(args.target)
        except argparse.ArgumentTypeError as exc:
            args.usage_error(
                f"{exc}; to follow a directory of checkpoint directories, pass --marker NAME, the file that your loop "
                "writes into each when it is complete"
            )
    elif "://" in args.target:
        args.usage_error(f"--marker is for a directory: pass its path in place of {args.target}")
    elif unfit := [name for name in args.marker if Path(name).name != name]:
        args.usage_error(f"--marker {unfit[0]} is not the name of a file in a checkpoint directory")


def _follower(args: argparse.Namespace, stack: contextlib.ExitStack) -> Follower | DirectoryFollower:
    with output.stage(output.IMPORTING):
        from weightcast.checkpoint.directories import CheckpointDirectories
        from weightcast.cli.directory_follower import DirectoryFollower
        from weightcast.format.bucket import TORCH_DTYPES
        from weightcast.serving.follower import Follower
        from weightcast.sources.safetensors import SafetensorsSource
        from weightcast.trainer.options import PublishOptions
        from weightcast.trainer.relay import Relay

    token = output.read_token(args.token_file)
    options = PublishOptions(
        install=args.install, undo=args.undo, takeover=args.takeover, deadline_seconds=args.deadline
    )
    if args.marker is not None:
        directories = CheckpointDirectories(Path(args.target), args.marker)
        dtype = None if args.dtype is None else TORCH_DTYPES[args.dtype]
        read = functools.partial(SafetensorsSource, dtype=dtype, copied=True)
        follower = DirectoryFollower(
            directories, read, args.engines, transport=args.transport, token=token, options=options
        )
        return stack.enter_context(follower)
    relay = Relay(args.engines, transport=args.transport, token=token, options=options)
    stack.callback(relay.close)
    return stack.enter_context(Follower(args.target, relay, label="weightcast follow"))
