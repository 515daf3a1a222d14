"""`weightcast demo`: RL training that publishes to live engines, on this machine."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

EPILOG = """
examples:
  weightcast demo
  weightcast demo --trainer-ranks 2 --transport gloo
  weightcast demo --help
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _demo().add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    return int(_demo().run(args))


def _demo() -> Any:
    # The demo brings transformers: it is imported only when it is called.
    return importlib.import_module("weightcast.demo.run")
