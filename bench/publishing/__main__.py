"""`scripts/bench`: what a publish costs on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from publishing import shapes
from weightcast.cli import exits, output, values

EPILOG = """
examples:
  scripts/bench --shapes qwen3-0.6b --install streaming
  scripts/bench --shapes many-small --json
  scripts/bench --shapes uniform --num-tensors 50000 --total-mib 1024
  scripts/bench --shapes qwen3-30b-a3b --layers 4 --scale 4 --num-engines 2 --plot bench.png
  scripts/bench --shapes moonlight-16b-a3b --scale 16 --transport gloo
  scripts/bench --shapes many-small --transport gloo --trainer-ranks 2

Each publish is measured against what the machine can do, right before it: one memcpy; over gloo and nccl also the raw
broadcast of as many bytes in flat buffers of the bucket's size, between the same processes. At the end, against what
buckets replaced: one step per tensor (ipc: a round trip with the same proofs; gloo, nccl: a message, a broadcast and
the engine's load, without digests), and with several trainer ranks the full_tensor() of every parameter, nothing else.

Needs memory for the model once and once for each engine, for the transport, and twice its size (2 GiB each at most)
for the memcpy that it is measured against; over gloo and nccl, staged, once more for each engine's raw buffers.
"""

_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    transports = ("ipc", "memory", "gloo", "nccl", "file")
    add("--transport", choices=transports, default="ipc", help="memory: all in one process (%(default)s)")
    add("--host", default="127.0.0.1", help="what gloo and nccl connect at, an address of this host (%(default)s)")
    add("--directory", default="", metavar="DIR", help="where `file`'s store is made, for the run (default: TMPDIR)")
    add("--shapes", choices=shapes.NAMES, default="qwen3-0.6b", help="what is published (default: %(default)s)")
    add("--install", choices=("staged", "streaming"), default="staged", help="default: %(default)s")
    add("--trainer-ranks", type=int, default=1, metavar="N", help="shard the model over N processes, by FSDP2")
    add("--num-engines", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--runs", type=int, default=5, metavar="R", help="timed publishes after the first one (default: %(default)s)")
    add("--bucket-size-mib", type=values.integer(1), metavar="M", help="default: the transport's")
    add("--layers", type=int, metavar="N", help="keep the first N layers of an architecture")
    add("--scale", type=int, default=1, metavar="N", help="divide every width of an architecture by N")
    add("--num-tensors", type=int, default=500, metavar="N", help="of the shapes `uniform` (default: %(default)s)")
    add("--total-mib", type=int, default=1024, metavar="M", help="of the shapes `uniform` (default: %(default)s)")
    add("--no-per-tensor", action="store_true", help="leave out the slow baselines, one step per tensor")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where all models are (default: %(default)s)")
    add("--plot", type=Path, metavar="FILE", help="draw the result, as .png, .svg or .pdf (needs matplotlib)")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with output.stage(output.IMPORTING):
        from publishing import report
        from publishing.measure import measure
        from publishing.result import BenchSettings

    options = vars(args) | {
        "num_runs": args.runs,
        "per_tensor": not args.no_per_tensor,
        "num_bytes": args.total_mib * _MIB,
        "bucket_size_bytes": args.bucket_size_mib and args.bucket_size_mib * _MIB,
    }
    settings = BenchSettings(**{name: options[name] for name in BenchSettings.__struct_fields__})
    if args.plot is not None:
        report.check_plot(args.plot)
    with output.stage("starting") as say:
        result = measure(settings, say)
    if args.json:
        sys.stdout.write(result.encode().decode() + "\n")
    else:
        output.show(result, False, report.view(result))
    if args.plot is not None:
        sys.stdout.flush()
        report.plot(result, args.plot)
    return exits.OK if result.verified else exits.NEGATIVE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status, as the commands of weightcast have it. A usage error is a SystemExit."""
    parser = argparse.ArgumentParser(
        "scripts/bench",
        description="Measure a publish on this machine.",
        epilog=f"{EPILOG.strip()}\n\nexit status:\n{exits.TABLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return run(args)
    except (Exception, KeyboardInterrupt) as exc:
        status = exits.status_of(exc)
        if status is None:
            raise
        print(f"scripts/bench: {exits.describe(exc)}", file=sys.stderr)
        return status


if __name__ == "__main__":
    sys.exit(main())
