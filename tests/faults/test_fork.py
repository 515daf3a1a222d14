"""A process that forks: its children must not keep it alive in the eyes of its engines."""

from __future__ import annotations

import os
import signal
import threading
import time

import weightcast
from faults.actors import DEADLINE_SECONDS, build_model
from faults.engine_actor import EngineProcess


def trainer(url: str, alive: int) -> None:
    """Publish, fork a child that lives as long as `alive` is open elsewhere, and die."""
    publisher = weightcast.Publisher(weightcast.ModuleSource(build_model()), engines=[url], lease_seconds=600.0)
    publisher.publish()
    if os.fork() == 0:
        os.read(alive, 1)  # a DataLoader's worker, say
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_forked_child_does_not_keep_a_dead_trainer_alive() -> None:
    engine = EngineProcess()
    client = weightcast.HttpEngine(engine.url)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        try:
            trainer(engine.url, reader)
        finally:
            os._exit(1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        end = time.monotonic() + DEADLINE_SECONDS
        while client.info().holder and time.monotonic() < end:
            threading.Event().wait(0.02)
        assert client.info().holder == "", "the hold outlived its publisher"
        assert client.info().weight_version == "0"
    finally:
        os.close(reader)
        os.close(writer)
        client.close()
        engine.close()
