"""argparse types of the options. A wrong value is a usage error that names the allowed values."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import TypeVar

from weightcast.host.deadline import MAX_SECONDS
from weightcast.store.address import SCHEMES, StoreAddress

N = TypeVar("N", int, float)

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that a checkpoint can be cast to when it is published."""


def number(convert: Callable[[str], N], is_right: Callable[[N], bool], wanted: str) -> Callable[[str], N]:
    """Return a parser of numbers for which `is_right`. `wanted`: a description of these."""

    def parse(text: str) -> N:
        with contextlib.suppress(ValueError):
            if is_right(given := convert(text)):
                return given
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high`, both included."""
    wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    return number(int, lambda given: low <= given and (high is None or given <= high), wanted)


percent = number(float, lambda given: 0 <= given <= 100, "a number from 0 to 100")
positive = number(float, lambda given: 0 < given <= 1e18, "a number above 0, such as 400 or 1e12")
seconds = number(
    float, lambda given: 0 < given <= MAX_SECONDS, f"a finite number of seconds above 0, at most {MAX_SECONDS}"
)


def is_store(target: str) -> bool:
    """Return whether a target or transport is a store's URL."""
    return target.partition("://")[0] in SCHEMES and "://" in target


def store(url: str) -> str:
    """Check a store's URL, and return it."""
    try:
        StoreAddress.parse(url)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return url


def transport_between_processes(url: str) -> str:
    """Check a transport's URL, and return it. Refuses memory://, which can't reach an engine with a URL."""
    if url.partition("://")[0] == "memory":
        raise argparse.ArgumentTypeError(f"{url} works only within one process, not with an engine's URL: use ipc://")
    return url
