"""The trainer's process: `python -m weightcast.demo.trainer SETTINGS RUN_DIRECTORY EVENTS_DESCRIPTOR`.

It writes the model directory, says so, warms up while the engines start, reads their URLs as one JSON line from stdin,
trains, checks, ends. Invariants: it does not outlive its starter, who holds the other end of stdin: when that closes,
the run directory is removed and the process ends; SIGTERM unwinds it.
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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import transformers

from weightcast.demo import oracle, policy
from weightcast.demo.events import Ended, EventWriter, Saved, Warming
from weightcast.demo.rollouts import Rollouts
from weightcast.demo.settings import MODEL_DIRECTORY, Settings
from weightcast.demo.task import draw
from weightcast.demo.training import Training
from weightcast.demo.warmup import warm_start
from weightcast.errors import WeightcastError
from weightcast.publisher import Publisher
from weightcast.sources.module import ModuleSource

WARMUP_EVENTS = 20
NUM_THREADS = 1
"""Of torch, here and in each engine: with three busy processes on two cores more would only wait for each other."""
ENGINES_SECONDS = 120.0
TERMINATION_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    settings, directory = msgspec.json.decode(argv[0], type=Settings), Path(argv[1])
    emit = EventWriter(int(argv[2]))
    signal.signal(signal.SIGTERM, _unwind)
    engines = _watch_stdin(directory)
    try:
        is_early = not _train(settings, directory, engines, emit)
    except WeightcastError as exc:
        emit(Ended(problem=f"{type(exc).__name__}: {exc}"))
        return 1
    emit(Ended(is_early=is_early))
    return 0


def _train(settings: Settings, directory: Path, engines: queue.Queue[list[str]], emit: EventWriter) -> bool:
    """The whole run; whether all steps were done within the budget."""
    deadline = time.monotonic() + settings.budget_seconds
    torch.set_num_threads(NUM_THREADS)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(settings.seed)
    rng = random.Random(settings.seed)
    model = _make_model(settings, directory, emit)
    model.set_attn_implementation(policy.ATTENTION_FOR_TRAINING)
    _warm_up(model, rng, settings, emit)
    first_weights = oracle.snapshot(model)
    try:
        urls = engines.get(timeout=ENGINES_SECONDS)
    except queue.Empty as exc:
        raise WeightcastError(f"no engine was ready {ENGINES_SECONDS:.0f} s after the warm start") from exc
    with (
        Rollouts(urls, prompts_per_request=settings.prompts_per_request, seed=settings.seed) as rollouts,
        Publisher(ModuleSource(model), transport="ipc://", engines=urls) as publisher,
    ):
        training = Training(model, publisher, rollouts, settings, rng=rng, emit=emit)
        is_whole = training.run(deadline)
        model.set_attn_implementation(policy.ATTENTION_FOR_SERVING)
        control = oracle.with_weights(model, first_weights)
        puzzles = [draw(rng, settings.num_digits) for _ in range(settings.check_prompts)]
        for url in urls:
            emit(oracle.check(url, partial(rollouts.greedy, url), model, control, puzzles, training.version))
    return is_whole


def _make_model(settings: Settings, directory: Path, emit: EventWriter) -> transformers.Qwen3ForCausalLM:
    model = policy.make_model(seed=settings.seed, hidden_size=settings.hidden_size, num_layers=settings.num_layers)
    policy.save(model, directory / MODEL_DIRECTORY)
    emit(Saved(num_parameters=sum(p.numel() for p in model.parameters())))
    return model


def _warm_up(model: torch.nn.Module, rng: random.Random, settings: Settings, emit: EventWriter) -> None:
    every = max(1, settings.warmup_steps // WARMUP_EVENTS)

    def progress(step: int, loss: float) -> None:
        if step % every == 0 or step == settings.warmup_steps:
            emit(Warming(step=step, num_steps=settings.warmup_steps, loss=loss))

    warm_start(
        model,
        rng,
        num_digits=settings.num_digits,
        num_steps=settings.warmup_steps,
        batch_size=settings.warmup_batch_size,
        learning_rate=settings.warmup_learning_rate,
        max_seconds=settings.warmup_seconds,
        progress=progress,
    )


def _watch_stdin(directory: Path) -> queue.Queue[list[str]]:
    """Read the engines' URLs in the background; at the end of stdin, end the process and remove its directory."""
    engines: queue.Queue[list[str]] = queue.Queue()

    def watch() -> None:
        for line in sys.stdin.buffer:
            engines.put(json.loads(line))
        shutil.rmtree(directory, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(TERMINATION_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="stdin", daemon=True).start()
    return engines


def _unwind(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
