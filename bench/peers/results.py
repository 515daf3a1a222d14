"""The JSON that `scripts/bench-peers` writes: a list of comparisons, each one run of peers beside weightcast's ways."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from others import QUIET_CORES

from peers.ways import WAYS

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
    """One run of peers and of the weightcast ways that they are compared with, which took turns, on one machine.

    `rows`: weightcast's first. `other_cores`: how many cores other work took meanwhile.
    """

    boundary: str
    shapes: str
    num_tensors: int
    num_bytes: int
    rows: Sequence[Row]
    command: str
    versions: dict[str, str]
    machine: str
    other_cores: float

    @property
    def model(self) -> tuple[str, str, int, int]:
        return self.boundary, self.shapes, self.num_tensors, self.num_bytes

    @property
    def peers(self) -> list[Row]:
        return [row for row in self.rows if not WAYS[row.name].is_ours]

    @property
    def is_quiet(self) -> bool:
        return self.other_cores <= QUIET_CORES

    def against(self, peer: Row) -> list[Row]:
        """The rows of weightcast that the peer is compared with."""
        return [row for row in self.rows if row.name in WAYS[peer.name].against]

    def without(self, names: Sequence[str]) -> Comparison:
        """The same without these peers, and without the ways that only they were compared with."""
        left = [row for row in self.peers if row.name not in names]
        kept = {name for row in left for name in (row.name, *WAYS[row.name].against)}
        return msgspec.structs.replace(self, rows=[row for row in self.rows if row.name in kept])


def read(path: Path) -> list[Comparison]:
    return msgspec.json.decode(path.read_bytes(), type=list[Comparison]) if path.exists() else []


def put(path: Path, new: Comparison) -> None:
    """Add a run to the file; the earlier rows of its peers, for the same model, go.

    One model's runs are all of one machine, and all with or all without other work beside them: a quiet run takes the
    place of disturbed ones, and one of another machine that of all earlier ones. Raises ValueError for a disturbed
    run beside quiet ones.
    """
    kept = []
    for old in read(path):
        if old.model == new.model:
            if old.machine == new.machine and old.is_quiet and not new.is_quiet:
                raise ValueError(
                    f"not kept: other work took {new.other_cores:.2f} cores, and the file has quiet runs of "
                    f"{new.shapes}. Measure again when the machine is quiet, or into another file (--json)"
                )
            if (old.machine, old.is_quiet) != (new.machine, new.is_quiet):
                continue
            old = old.without([row.name for row in new.peers])
        if old.rows:
            kept.append(old)
    path.write_bytes(msgspec.json.format(msgspec.json.encode([*kept, new]), indent=1) + b"\n")
