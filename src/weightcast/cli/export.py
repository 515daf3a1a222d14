"""`weightcast export`: a store's newest version as a checkpoint directory, for whatever reads safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from rich.text import Text

from weightcast.cli import exits, output, values

EPILOG = """
examples:
  weightcast export file:///mnt/weights ./checkpoint-700
  weightcast export file:///mnt/weights ./checkpoint-700 --max-shard-mb 2000

The directory holds weights only; config and tokenizer are those of the model's own directory.
"""


class Exported(msgspec.Struct, frozen=True):
    """The JSON of `export`."""

    version: int
    run: str
    num_tensors: int
    num_bytes: int
    files: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, megabytes = parser.add_argument, values.integer(1)
    add("store", type=values.store, metavar="STORE", help="a store, file:///dir")
    add("directory", type=Path, metavar="OUT", help="the directory to make; it must not be there")
    add("--max-shard-mb", type=megabytes, default=5000, metavar="M", help="of a file (default: %(default)s)")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    from weightcast.sources.store import StoreSource
    from weightcast.trainer.export import export

    with output.stage(f"reading {args.store}") as say:
        source = StoreSource(args.store)
        say(f"writing {args.directory}")
        files = export(source, args.directory, max_shard_bytes=args.max_shard_mb * 1_000_000)
    num_bytes = sum(spec.num_bytes for spec in source.specs())
    exported = Exported(source.version.number, source.version.run, len(source.specs()), num_bytes, files)
    line = (
        f"version {exported.version} of run {exported.run[:8]} is in {args.directory}: "
        f"{exported.num_tensors:,} tensors, {num_bytes / 1e9:.3f} GB, {len(files)} files"
    )
    output.show(exported, args.json, lambda: Text(line))
    return exits.OK
