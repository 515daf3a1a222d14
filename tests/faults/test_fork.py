"""A process that forks: its children must not keep it alive in the eyes of its engines."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import get_context

import weightcast
from faults.actors import DEADLINE_SECONDS, EngineProcess, build_model


def test_a_forked_child_does_not_keep_a_dead_trainer_alive() -> None:
    """The child of a fork holds neither links nor transport sockets: the trainer's end is noticed at once."""
    engine, context = EngineProcess(), get_context("fork")
    stop, started = context.Event(), context.Event()

    def trainer() -> None:
        publisher = weightcast.Publisher(
            weightcast.ModuleSource(build_model()), engines=[engine.url], lease_seconds=600.0
        )
        publisher.publish()
        if os.fork() == 0:
            stop.wait(2 * DEADLINE_SECONDS)  # a DataLoader's worker, say, that lives on
            os._exit(0)
        started.set()
        os.kill(os.getpid(), signal.SIGKILL)

    process = context.Process(target=trainer)
    process.start()
    try:
        assert started.wait(DEADLINE_SECONDS)
        process.join(DEADLINE_SECONDS)
        client = weightcast.HttpEngine(engine.url)
        end = threading.Event()
        for _ in range(200):
            if client.info().holder == "":
                break
            end.wait(0.02)
        assert client.info().holder == "", "the hold outlived its publisher"
        client.close()
    finally:
        stop.set()
        engine.close()
