"""`weightcast export`: write a store's newest version as a checkpoint directory of safetensors files."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from weightcast.cli import exits, output, values
from weightcast.format.amounts import count, size

EPILOG = """
examples:
  weightcast export file:///mnt/weights ./checkpoint-700
  weightcast export file:///mnt/weights ./checkpoint-700 --config-from ./Qwen3-0.6B
  weightcast export file:///mnt/weights ./checkpoint-700 --max-shard-mb 2000

A store has only weights. With --config-from the directory also gets a model's configuration and tokenizer, so that
`weightcast serve` and other engines can load it; without, `weightcast publish` can read it.
"""


class Exported(msgspec.Struct, frozen=True):
    """The JSON output of `export`."""

    version: int
    run: str
    num_tensors: int
    num_bytes: int
    files: list[str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, megabytes = parser.add_argument, values.integer(1)
    add("store", type=values.store, metavar="STORE", help="a store, file:///dir or s3://bucket/prefix")
    add("directory", type=Path, metavar="OUT", help="the directory to create; it must not exist")
    config_help = "copy the configuration and the tokenizer from this model's directory"
    add("--config-from", type=Path, metavar="MODEL_DIR", help=config_help)
    add(
        "--max-shard-mb",
        type=megabytes,
        default=5000,
        metavar="M",
        help="largest size of a file in MB (default: %(default)s)",
    )
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with output.stage(output.IMPORTING):
        from weightcast.sources.store import StoreSource
        from weightcast.trainer.export import export

    with output.stage(f"reading {args.store}") as say:
        source = StoreSource(args.store)
        say(f"writing {args.directory}")
        max_shard_bytes = args.max_shard_mb * 1_000_000
        files = export(source, args.directory, max_shard_bytes=max_shard_bytes, config_from=args.config_from)
    num_bytes = sum(spec.num_bytes for spec in source.specs())
    exported = Exported(source.version.number, source.version.run, len(source.specs()), num_bytes, files)
    line = (
        f"version {exported.version} of run {exported.run[:8]} is in {args.directory}: "
        f"{count(exported.num_tensors, 'tensor')}, {size(num_bytes)}, {count(len(files), 'file')}"
    )
    output.show(exported, args.json, [line])
    return exits.OK
