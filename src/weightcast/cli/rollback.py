"""`weightcast rollback`: publish an earlier version of a store again, as its newest version."""

from __future__ import annotations

import argparse

from weightcast.cli import exits, output, values
from weightcast.format.manifest import MAX_VERSION

EPILOG = """
examples:
  weightcast rollback file:///mnt/weights
  weightcast rollback file:///mnt/weights --version 700
  weightcast rollback file:///mnt/weights --version 700 --json

A store keeps two versions, or as many as num_slots in its URL says. Readers that follow the store install the version
like any new one. A publisher that has the store open must be closed first; within its program, call Publisher.rollback.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, number = parser.add_argument, values.integer(0, MAX_VERSION)
    add("store", type=values.store, metavar="STORE", help="a store, file:///dir or s3://bucket/prefix")
    version_help = "number of the version to publish again (default: the one before the newest)"
    add("--version", type=number, metavar="N", help=version_help)
    add("--deadline", type=values.seconds, default=60.0, metavar="SECONDS", help="longest single wait (%(default)s)")
    output.add_json(parser)


def run(args: argparse.Namespace) -> int:
    with output.stage(output.IMPORTING):
        from weightcast.trainer.rollback import rollback

    with output.stage(f"reading {args.store}"):
        report = rollback(args.store, version=args.version, deadline_seconds=args.deadline)
    which = "the version before the newest" if args.version is None else f"version {args.version}"
    line = f"{which} is the newest of {args.store} again, as version {report.version}"
    output.show(report, args.json, [line, *str(report).splitlines()])
    return exits.OK
