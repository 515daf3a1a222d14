"""One comparison: a peer and weightcast's ways in processes of their own, in turns, on the same tensors.

In each round every way has its turn, in an order that rotates. Before a turn the trainer's values change, as after an
optimizer step, and one memcpy of as many bytes is timed; after it the digests of both ends are compared. Timed is from
the word to the trainer until both ends are done: what the trainer has is what the engine computes with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from peers.ends import DEADLINE_SECONDS, run_end
from peers.ways import WAYS, Way
from weightcast.bench.baselines import Memcpy
from weightcast.bench.meters import ProcessMeter, children
from weightcast.format.manifest import TensorSpec

END_SECONDS = 10.0


class Turn(msgspec.Struct, frozen=True):
    """One update. CPU seconds are of all threads, and of what a process has started. `memcpy_seconds`: right before."""

    seconds: float
    pause_seconds: float
    memcpy_seconds: float
    trainer_cpu_seconds: float
    engine_cpu_seconds: float


class Row(msgspec.Struct, frozen=True):
    """A way's turns. `extra_bytes`: peak resident memory beyond its tensors, of the trainer and of the engine.

    `verified`: after every turn both ends held the same, bit for bit.
    """

    name: str
    turns: Sequence[Turn]
    first_seconds: float
    extra_bytes: tuple[int, int]
    verified: bool

    def median(self, field: str) -> float:
        return statistics.median(getattr(turn, field) for turn in self.turns)


class Process:
    """An end in a process of its own; see `ends.run_end`. Raises RuntimeError with what failed in it."""

    def __init__(self, way: Way, is_trainer: bool, specs: Sequence[TensorSpec], folder: Path, other: Connection) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._name = f"{way.name}: the {'trainer' if is_trainer else 'engine'}"
        end = (is_trainer, folder, other, "")
        arguments = (theirs, end, specs, way.adapter, dict(way.options))
        self._process = context.Process(target=run_end, args=arguments, daemon=False)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.meter = ProcessMeter(self._process.pid)

    def tell(self, word: str | int) -> None:
        self._pipe.send(word)

    def answer(self) -> Any:
        """What it says once it is done."""
        if not self._pipe.poll(DEADLINE_SECONDS):
            raise RuntimeError(f"{self._name} did not answer within {DEADLINE_SECONDS:g} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self._name} has ended") from None
        if isinstance(answer, str):
            raise RuntimeError(f"{self._name} failed:\n{answer}")
        return answer

    def cpu_seconds(self) -> float:
        meters = [self.meter, *(ProcessMeter(pid) for pid in children(self.meter.pid))]
        return sum(meter.cpu_seconds() for meter in meters)

    def close(self) -> None:
        self._pipe.close()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


@dataclasses.dataclass
class Pair:
    """A way's two processes, open."""

    way: Way
    trainer: Process
    engine: Process
    turns: list[Turn] = dataclasses.field(default_factory=list)
    verified: bool = True

    @property
    def ends(self) -> tuple[Process, Process]:
        return self.trainer, self.engine

    def both(self, word: str | int) -> list[Any]:
        for end in self.ends:
            end.tell(word)
        return [end.answer() for end in self.ends]

    def turn(self, step: int, memcpy: Memcpy) -> Turn:
        self.trainer.tell("change")
        self.trainer.answer()
        memcpy_seconds = memcpy.seconds()
        before = [end.cpu_seconds() for end in self.ends]
        self.engine.tell(step)
        start = time.perf_counter()
        self.trainer.tell(step)
        (_, told), (_, seen) = self.trainer.answer(), self.engine.answer()
        seconds = time.perf_counter() - start
        cpu = [end.cpu_seconds() - was for end, was in zip(self.ends, before, strict=True)]
        sent, held = self.both("digest")
        self.verified &= sent == held
        return Turn(seconds, seen if told is None else told, memcpy_seconds, *cpu)


@contextlib.contextmanager
def opened(way: Way, specs: Sequence[TensorSpec]) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-", dir="/dev/shm")))
        between = multiprocessing.get_context("spawn").Pipe()
        ends = []
        for is_trainer, other in zip((True, False), between, strict=True):
            ends.append(stack.enter_context(contextlib.closing(Process(way, is_trainer, specs, folder, other))))
            other.close()
        pair = Pair(way, *ends)
        for end in ends:
            end.answer()
            end.meter.begin()
        pair.both("open")
        yield pair
        pair.both("close")


def compare(peer: Way, specs: Sequence[TensorSpec], num_rounds: int) -> list[Row]:
    """Rows of the peer and of the ways that it takes turns with. The first update of each is reported by itself."""
    with contextlib.ExitStack() as stack:
        ways = [*(WAYS[name] for name in peer.against), peer]
        pairs = [stack.enter_context(opened(way, specs)) for way in ways]
        memcpy = Memcpy(sum(spec.num_bytes for spec in specs))
        for number in range(num_rounds + 1):
            for position in range(len(pairs)):
                pair = pairs[(position + number) % len(pairs)]
                pair.turns.append(pair.turn(number, memcpy))
        return [
            Row(
                name=pair.way.name,
                turns=pair.turns[1:],
                first_seconds=pair.turns[0].seconds,
                extra_bytes=(pair.trainer.meter.extra_bytes(), pair.engine.meter.extra_bytes()),
                verified=pair.verified,
            )
            for pair in pairs
        ]
