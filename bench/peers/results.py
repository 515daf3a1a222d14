"""The JSON that `scripts/bench-peers` writes: a list of comparisons, each of one peer beside weightcast's ways."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

RESULTS = Path(__file__).with_name("results.json")


class Turn(msgspec.Struct, frozen=True):
    """One update. CPU seconds are of all threads, and of what a process has started. `memcpy_seconds`: right before."""

    seconds: float
    pause_seconds: float
    memcpy_seconds: float
    trainer_cpu_seconds: float
    engine_cpu_seconds: float


class Row(msgspec.Struct, frozen=True):
    """A way's turns. `extra_bytes`: peak resident memory beyond its tensors, of the trainer and of the engine.

    `first_seconds`: of the first update, which connects and allocates, and is none of the turns.
    `verified`: after every turn the engine held what the trainer has, bit for bit.
    """

    name: str
    turns: Sequence[Turn]
    first_seconds: float
    extra_bytes: tuple[int, int]
    verified: bool

    def median(self, field: str) -> float:
        return statistics.median(getattr(turn, field) for turn in self.turns)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one peer beside weightcast's ways, which took turns, on one machine. The peer's row is the last."""

    peer: str
    boundary: str
    shapes: str
    num_tensors: int
    num_bytes: int
    rows: list[Row]
    command: str
    versions: dict[str, str]
    machine: str

    @property
    def model(self) -> tuple[str, str, int, int]:
        return self.boundary, self.shapes, self.num_tensors, self.num_bytes


def read(path: Path) -> list[Comparison]:
    return msgspec.json.decode(path.read_bytes(), type=list[Comparison]) if path.exists() else []


def put(path: Path, comparison: Comparison) -> None:
    """Add it to the file, in the place of an earlier one of the same peer and model."""
    kept = [old for old in read(path) if (old.peer, old.model) != (comparison.peer, comparison.model)]
    path.write_bytes(msgspec.json.format(msgspec.json.encode([*kept, comparison]), indent=1) + b"\n")
