"""A trainer rank: `python -m weightcast.demo.trainer SETTINGS RUN_DIRECTORY TRAINER_RANK [EVENTS_DESCRIPTOR]`.

Rank 0 writes the model directory, says so, and tells events; every rank makes the same model, keeps its shards, warms
up while the engines start, reads their URLs as one JSON line from stdin, trains and ends. Rank 0 checks the engines.
Invariants: no rank outlives its starter, who holds the other end of stdin: when that closes, the run directory is
removed and the process ends; SIGTERM unwinds rank 0, and ends the others, which have nothing to unwind.
"""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import transformers

from weightcast.demo import oracle, policy
from weightcast.demo.events import Event, EventWriter, RunEnded, Saved, Warming
from weightcast.demo.learner import Learner
from weightcast.demo.ranks import TrainerProcesses, joined
from weightcast.demo.rollouts import Rollouts
from weightcast.demo.settings import MODEL_DIRECTORY, DemoSettings
from weightcast.demo.task import draw
from weightcast.demo.training import Training
from weightcast.demo.warmup import warm_start
from weightcast.errors import WeightcastError
from weightcast.sources.module import ModuleSource
from weightcast.trainer.publisher import Publisher

WARMUP_EVENTS = 20
NUM_THREADS = 1
"""Of torch, here and in each engine: with three busy processes on two cores more would only wait for each other."""
ENGINES_SECONDS = 120.0
TERMINATION_SECONDS = 5.0
_STDIN = 0

Emit = Callable[[Event], None]


def main(argv: Sequence[str]) -> int:
    settings, directory = msgspec.json.decode(argv[0], type=DemoSettings), Path(argv[1])
    trainer_rank = int(argv[2])
    # In the midst of a collective no Python runs: only the default action ends a follower that waits for rank 0.
    signal.signal(signal.SIGTERM, _unwind if trainer_rank == 0 else signal.SIG_DFL)
    engines = _watch_stdin(directory)
    emit: Emit = EventWriter(int(argv[3])) if len(argv) > 3 else lambda event: None
    try:
        with joined(directory, trainer_rank, settings.num_trainer_ranks) as ranks:
            is_early = not _Trainer(settings, directory, ranks, emit).run(engines)
    except WeightcastError as exc:
        emit(RunEnded(problem=f"{type(exc).__name__}: {exc}"))
        if trainer_rank != 0:
            raise
        return 1
    emit(RunEnded(is_early=is_early))
    return 0


class _Trainer:
    """One rank's whole run."""

    def __init__(self, settings: DemoSettings, directory: Path, ranks: TrainerProcesses, emit: Emit) -> None:
        self._settings = settings
        self._directory = directory
        self._ranks = ranks
        self._emit = emit
        self._deadline = time.monotonic() + settings.budget_seconds
        self._rng = random.Random(settings.seed)

    def run(self, engines: queue.Queue[list[str]]) -> bool:
        """Whether all steps were done within the budget, as far as this rank knows."""
        torch.set_num_threads(NUM_THREADS)
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        torch.manual_seed(self._settings.seed)
        model = self._make_model()
        self._warm_up(model)
        first_weights = self._ranks.whole(model)
        urls = _wait_for(engines)
        transport = self._settings.transport_url
        with Publisher(ModuleSource(model), transport=transport, engines=urls) as publisher:
            learner = Learner(model, publisher, self._ranks, learning_rate=self._settings.learning_rate)
            if self._ranks.leads:
                return self._lead(learner, model, first_weights, urls)
            learner.follow()
            self._ranks.whole(model)
        return True

    def _lead(
        self, learner: Learner, model: torch.nn.Module, first_weights: dict[str, torch.Tensor], urls: Sequence[str]
    ) -> bool:
        settings, rng = self._settings, self._rng
        with Rollouts(urls, prompts_per_request=settings.prompts_per_request, seed=settings.seed) as rollouts:
            training = Training(learner, rollouts, settings, rng=rng, emit=self._emit)
            is_whole = training.run(self._deadline)
            served = oracle.with_weights(self._new_model(), self._ranks.whole(model))
            control = oracle.with_weights(served, first_weights)
            puzzles = [draw(rng, settings.num_digits) for _ in range(settings.check_prompts)]
            for url in urls:
                ask = partial(rollouts.greedy, url)
                self._emit(oracle.check(url, ask, served, control, puzzles, training.version))
        return is_whole

    def _new_model(self) -> transformers.Qwen3ForCausalLM:
        settings = self._settings
        return policy.make_model(seed=settings.seed, hidden_size=settings.hidden_size, num_layers=settings.num_layers)

    def _make_model(self) -> transformers.Qwen3ForCausalLM:
        """Every rank makes all of it, from the seed, and keeps its shards."""
        model = self._new_model()
        if self._ranks.leads:
            policy.save(model, self._directory / MODEL_DIRECTORY)
        self._emit(Saved(num_parameters=sum(p.numel() for p in model.parameters())))
        model.set_attn_implementation(policy.ATTENTION_FOR_TRAINING)
        self._ranks.shard(model, model.model.layers)
        return model

    def _warm_up(self, model: torch.nn.Module) -> None:
        settings = self._settings
        every = max(1, settings.warmup_steps // WARMUP_EVENTS)

        def progress(step: int, loss: float) -> None:
            if step % every == 0 or step == settings.warmup_steps:
                self._emit(Warming(step=step, num_steps=settings.warmup_steps, loss=loss))

        warm_start(
            model,
            self._rng,
            self._ranks,
            num_digits=settings.num_digits,
            num_steps=settings.warmup_steps,
            batch_size=settings.warmup_batch_size,
            learning_rate=settings.warmup_learning_rate,
            max_seconds=settings.warmup_seconds,
            progress=progress,
        )


def _wait_for(engines: queue.Queue[list[str]]) -> list[str]:
    try:
        return engines.get(timeout=ENGINES_SECONDS)
    except queue.Empty as exc:
        raise WeightcastError(f"no engine was ready {ENGINES_SECONDS:.0f} s after the warm start") from exc


def _watch_stdin(directory: Path) -> queue.Queue[list[str]]:
    """Read the engines' URLs in the background; at the end of stdin, end the process and remove its directory."""
    engines: queue.Queue[list[str]] = queue.Queue()

    def watch() -> None:
        for line in _lines(_STDIN):
            engines.put(json.loads(line))
        shutil.rmtree(directory, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(TERMINATION_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
    return engines


def _lines(descriptor: int) -> Iterator[bytes]:
    """Until the end. Not sys.stdin: it would hold a lock that the interpreter wants when it ends for another reason."""
    rest = b""
    while data := os.read(descriptor, 4096):
        *lines, rest = (rest + data).split(b"\n")
        yield from lines


def _unwind(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
