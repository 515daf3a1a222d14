"""A process that forks: its children must not keep it alive in the eyes of its engines."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from forking import in_child

import weightcast
from faults.actors import DEADLINE_SECONDS, build_model
from faults.engine_actor import EngineProcess


def trainer(url: str, alive: int) -> None:
    """Publish, fork a child that lives as long as `alive` is open elsewhere, and die."""
    publisher = weightcast.Publisher(
        weightcast.ModuleSource(build_model()), engines=[url], options=weightcast.PublishOptions(lease_seconds=600.0)
    )
    publisher.publish()
    if os.fork() == 0:
        os.read(alive, 1)  # a DataLoader's worker, say
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("transport", ["ipc://", "file://{}"])
def test_a_forked_child_can_not_publish_and_closing_there_is_nothing(
    tmp_path: Path, transport: str, num_engines: int
) -> None:
    servers = [weightcast.EngineServer(weightcast.ModuleEngine(build_model())).start() for _ in range(num_engines)]
    source, urls = weightcast.ModuleSource(build_model()), [server.url for server in servers]
    with weightcast.Publisher(source, transport=transport.format(tmp_path), engines=urls) as publisher:
        publisher.publish()
        assert in_child(lambda: str(publisher.publish())).startswith("ClosedError: this publisher is of pid ")
        assert in_child(lambda: str(publisher.close())) == "None"  # type: ignore[func-returns-value]
        assert publisher.publish().ok
    for server in servers:
        server.close()


def test_a_forked_child_does_not_keep_the_port_of_an_engine_that_has_ended() -> None:
    server = weightcast.EngineServer(weightcast.ModuleEngine(build_model())).start()
    url, port = server.url, server.port
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    try:
        server.close()
        with weightcast.EngineServer(weightcast.ModuleEngine(build_model()), port=port) as again:
            assert again.url == url
    finally:
        os.close(writer)
        os.close(reader)
        os.waitpid(pid, 0)


def test_a_publisher_made_before_a_fork_and_dropped_in_the_child_lets_its_engine_go() -> None:
    engine = EngineProcess()
    publisher = weightcast.Publisher(weightcast.ModuleSource(build_model()), engines=[engine.url])

    def publish_twice() -> str:
        nonlocal publisher
        publisher.publish()
        del publisher
        with weightcast.Publisher(weightcast.ModuleSource(build_model()), engines=[engine.url]) as other:
            other.publish()
        return "done"

    try:
        assert in_child(publish_twice) == "done"
    finally:
        publisher.close()
        engine.close()


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
