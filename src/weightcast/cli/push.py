"""`weightcast push`: copy the newest version of a store into a store elsewhere."""

from __future__ import annotations

from weightcast.cli.pull import add_arguments as add_arguments
from weightcast.cli.pull import run as run

EPILOG = """
examples:
  weightcast push file:///mnt/weights store+https://HOST
  weightcast push file:///mnt/weights 'store+https://HOST?token_file=/etc/token'
  weightcast push file:///mnt/weights store+http://127.0.0.1:8200 --follow --json

The target is a store that `weightcast serve-store --allow-push` serves. The version keeps its run and number. It
becomes the newest one there once every bucket has arrived and was checked there. After an interrupted push the server
keeps the buckets that have arrived: run the same command again. With --follow each newer version is pushed too, until
Ctrl-C or SIGTERM.
"""
