"""`weightcast publish`: publish a checkpoint to running engines or into a store, or copy a store's newest version."""

from __future__ import annotations

import argparse
import contextlib

from weightcast.cli import exits, output, values
from weightcast.format.manifest import MAX_VERSION
from weightcast.host.deadline import LOAD_SECONDS

EPILOG = """
examples:
  weightcast publish ./checkpoint --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001
  weightcast publish ./checkpoint --engine http://127.0.0.1:8000 --version 12 --undo
  weightcast publish ./checkpoint --engine http://127.0.0.1:8000 --install streaming --json
  weightcast publish ./checkpoint --engine http://127.0.0.1:8000 --dtype bfloat16
  weightcast publish ./checkpoint --engine http://127.0.0.1:8000 --wait
  weightcast publish ./checkpoint --transport file:///mnt/weights
  weightcast publish file:///mnt/weights --transport s3://bucket/run-7
"""

_MIB = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, number = parser.add_argument, values.integer(0, MAX_VERSION)
    checkpoint_help = "a directory of safetensors files, or a store, whose newest version goes into another one"
    add("checkpoint", metavar="CHECKPOINT", help=checkpoint_help)
    output.add_engines(parser, required=False)
    add(
        "--version",
        type=number,
        metavar="N",
        help="the version's number (default: one above the highest of the engines and the store)",
    )
    dtype_help = "cast the weights to this dtype; engine: each tensor to the engines' dtype (default: the checkpoint's)"
    add("--dtype", choices=(*values.DTYPES, "engine"), help=dtype_help)
    output.add_update(parser, transport_help="the transport, or the store to publish into")
    wait_help = f"wait for engines that are starting, up to this time for all (default: {LOAD_SECONDS:g})"
    add("--wait", type=values.seconds, nargs="?", const=LOAD_SECONDS, default=0.0, metavar="SECONDS", help=wait_help)
    add("--bucket-size-mib", type=values.integer(1), metavar="M", help="bucket size in MiB (default: the transport's)")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    if not args.engines and not values.is_store(args.transport):
        args.usage_error("at least one --engine, or --transport file:///dir for a store, is required")
    is_store = values.is_store(args.checkpoint)
    if is_store and args.engines:
        args.usage_error(
            f"{args.checkpoint} is a store: use `weightcast follow` to install its versions in engines, or leave "
            "--engine out"
        )
    if is_store and args.dtype is not None:
        args.usage_error("--dtype works only with a checkpoint, since a store's versions are not cast: leave it out")
    with output.stage(output.IMPORTING):
        from weightcast.format.bucket import TORCH_DTYPES
        from weightcast.seams.source import Source
        from weightcast.sources.safetensors import SafetensorsSource
        from weightcast.sources.store import StoreSource
        from weightcast.trainer.options import PublishOptions
        from weightcast.trainer.publisher import Publisher

    with contextlib.ExitStack() as stack:
        on_progress = stack.enter_context(output.measured(f"publishing {args.checkpoint}"))
        dtype = TORCH_DTYPES.get(args.dtype, args.dtype)
        source: Source
        if is_store:
            source = StoreSource(args.checkpoint)
        else:
            source = stack.enter_context(SafetensorsSource(args.checkpoint, dtype=dtype))
        publisher = Publisher(
            source,
            transport=args.transport,
            engines=args.engines,
            token=output.read_token(args.token_file),
            options=PublishOptions(
                bucket_size_bytes=args.bucket_size_mib and args.bucket_size_mib * _MIB,
                install=args.install,
                undo=args.undo,
                takeover=args.takeover,
                on_failure="report",
                deadline_seconds=args.deadline,
            ),
        )
        report = stack.enter_context(publisher).publish(
            args.version, wait_ready_seconds=args.wait, on_progress=on_progress
        )
    output.show(report, args.json, str(report).splitlines())
    return exits.OK if report.ok else exits.NEGATIVE
