"""`weightcast pull`: copy the newest version of a store elsewhere into a store of this host."""

from __future__ import annotations

import argparse

from weightcast.cli import copies, values

EPILOG = """
examples:
  weightcast pull store+https://HOST file:///mnt/weights
  weightcast pull 'store+https://HOST?token_file=/etc/token&num_threads=8' file:///mnt/weights
  weightcast pull store+http://127.0.0.1:8200 file:///mnt/weights --follow --json

The source is a store that `weightcast serve-store` serves, or any other. The version keeps its run and number. It
becomes the newest one here once every bucket has arrived and was checked. An interrupted pull keeps the buckets that
have arrived: run the same command again. With --follow each newer version is pulled too, until Ctrl-C or SIGTERM.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=values.store, metavar="SOURCE", help="the store to copy from")
    parser.add_argument("target", type=values.store, metavar="STORE", help="the store to copy into; may not exist yet")
    copies.add_arguments(parser)


run = copies.run
