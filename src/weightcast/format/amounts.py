"""Formatting of amounts for the output of commands."""

from __future__ import annotations

_UNITS = ((1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB"))


def size(num_bytes: int) -> str:
    """Format bytes with three significant digits and a decimal unit: "1.19 GB", "596 MB", "12 bytes"."""
    for unit_bytes, unit in _UNITS:
        # From 999.5 on, three digits of the smaller unit would be rounded to four.
        if num_bytes >= 0.9995 * unit_bytes:
            value = num_bytes / unit_bytes
            decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
            return f"{value:,.{decimals}f} {unit}"
    return count(num_bytes, "byte")


def count(number: int, noun: str) -> str:
    """Format a number with its noun, in the plural unless it is 1: "1 engine", "2,005 tensors"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
