"""One run: peers and weightcast's ways in processes of their own, in turns, on the same tensors.

In each round every way has its turn, in an order that rotates. Before a turn the trainer's values change, as after an
optimizer step, and one memcpy of as many bytes is timed; after it the digests of both ends are compared. Timed is from
the word to the trainer until both ends are done: what the trainer has is what the engine computes with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from others import Others, cpu_seconds
from publishing.baselines import Memcpy
from publishing.meters import ProcessMeter, children

from peers.ends import DEADLINE_SECONDS, Job, run_end
from peers.results import Row, Turn
from peers.ways import WAYS, Way
from weightcast.format.manifest import TensorSpec

END_SECONDS = 10.0
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = ["peers.ends", "weightcast.trainer.publisher", "weightcast.control.client"]


class Process:
    """An end in a process of its own; see `ends.run_end`. Raises RuntimeError with what failed in it."""

    def __init__(self, way: Way, job: Job) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._name = f"{way.name}: the {'trainer' if job.is_trainer else 'engine'}"
        self._process = CONTEXT.Process(target=run_end, args=(theirs, job))
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self._meter = ProcessMeter(self._process.pid)
        self.begin, self.extra_bytes = self._meter.begin, self._meter.extra_bytes

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
        """Of the process and of what it has started, of which helpers may end at any time."""
        return self._meter.cpu_seconds() + sum(map(cpu_seconds, children(self._meter.pid)))

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
    engine: Any
    turns: list[Turn] = dataclasses.field(default_factory=list)
    seen: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    verified: bool = True

    @property
    def ends(self) -> tuple[Any, Any]:
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
        self.seen.append(self.both("digest"))
        return Turn(seconds, seen if told is None else told, memcpy_seconds, *cpu)


@contextlib.contextmanager
def opened(way: Way, specs: Sequence[TensorSpec], checkpoints: Sequence[Path]) -> Iterator[Pair]:
    """The way's two ends, connected. `checkpoints`: see `compare`; with them the engine is a server."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-", dir="/dev/shm")))
        job = Job(True, specs, way.adapter, way.options, folder, None)
        if checkpoints:
            from peers.servers import served  # which needs what the tests of real engines need

            engine = stack.enter_context(served(way, checkpoints[0 if way.is_ours else 1]))
            trainer_job = dataclasses.replace(job, server=engine.server.url, checkpoint=checkpoints[0])
            trainer = stack.enter_context(contextlib.closing(Process(way, trainer_job)))
        else:
            ours, theirs = CONTEXT.Pipe()
            with ours, theirs:
                jobs = [dataclasses.replace(job, other=ours), dataclasses.replace(job, is_trainer=False, other=theirs)]
                trainer, engine = (stack.enter_context(contextlib.closing(Process(way, it))) for it in jobs)
        pair = Pair(way, trainer, engine)
        for end in pair.ends:
            end.answer()
            end.begin()
        pair.both("open")
        yield pair
        pair.both("close")


def compare(
    peers: Sequence[Way], specs: Sequence[TensorSpec], num_rounds: int, checkpoints: Sequence[Path] = ()
) -> tuple[list[Row], float]:
    """Rows of the ways that the peers are compared with, then of the peers; how many cores other work took meanwhile.

    The first update of each is kept apart. `checkpoints`, for servers: of the trainer's first values, and of the same
    negated, which every second update sends. Servers of weightcast's ways start from the former, peers' from the
    latter: so what each must answer after each update is known from one that has never been updated.
    """
    CONTEXT.set_forkserver_preload([*PRELOADED, *(module for peer in peers for module in peer.imports)])
    with contextlib.ExitStack() as stack:
        ways = [*(WAYS[name] for name in dict.fromkeys(name for peer in peers for name in peer.against)), *peers]
        pairs = [stack.enter_context(opened(way, specs, checkpoints)) for way in ways]
        cold = [pairs[-1].both("digest")[1], pairs[0].both("digest")[1]] if checkpoints else []
        assert not cold or cold[0] != cold[1]
        memcpy = Memcpy(sum(spec.num_bytes for spec in specs))
        with Others() as others:
            for number in range(num_rounds + 1):
                for position in range(len(pairs)):
                    pair = pairs[(position + number) % len(pairs)]
                    pair.turns.append(turn := pair.turn(number, memcpy))
                    print(f"  round {number}: {pair.way.name} {turn.seconds:.3f} s", file=sys.stderr, flush=True)
        for pair in pairs:
            for number, (sent, held) in enumerate(pair.seen):
                pair.verified &= held == (cold[number % 2] if cold else sent)
        rows = [
            Row(
                name=pair.way.name,
                turns=pair.turns[1:],
                first_seconds=pair.turns[0].seconds,
                extra_bytes=(pair.trainer.extra_bytes(), pair.engine.extra_bytes()),
                verified=pair.verified,
            )
            for pair in pairs
        ]
        return rows, others.cores
