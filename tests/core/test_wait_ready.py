"""`publish(wait_ready_seconds=...)`: engines that are starting are waited for, those that refuse are not."""

from __future__ import annotations

import contextlib
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ports import free_port
from safetensors.torch import save_file

from core.direct import DirectEngine, RecordingEngine
from weightcast import EngineServer, ModuleEngine, ModuleSource, Publisher, PublishOptions, TensorSource, cli
from weightcast.cli import exits
from weightcast.errors import ControlError, EngineBusyError, PeerDiedError, PublishError

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TENSORS = {"t": torch.randn(8, 8)}
MANY_SECONDS = 600.0
"""More than the test may take: a refusal that was waited for would end it."""

SERVER = """
import sys, torch
from weightcast import EngineServer, ModuleEngine
model = torch.nn.Linear(4, 4, bias=False)
EngineServer(ModuleEngine(model), port=int(sys.argv[1])).run(announce=lambda: print("ready", flush=True))
print(model.weight.tolist())
"""


class OnWaiting(logging.Handler):
    """Calls something when a publish begins to wait for engines: they have been asked once, and were not there."""

    def __init__(self, call: object) -> None:
        super().__init__(logging.INFO)
        self._call = call

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("waiting up to "):
            self._call()  # type: ignore[operator]


@contextlib.contextmanager
def on_waiting(call: object) -> Iterator[None]:
    logger, handler = logging.getLogger("weightcast.trainer.publish_run"), OnWaiting(call)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class LateServer:
    """A server process, which starts when a publish has begun to wait for it."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-c", SERVER, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def end(self) -> str:
        """End it, and return what it printed."""
        assert self.process is not None, "the publish did not wait"
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.communicate(timeout=60)[0]
        finally:
            self.process.kill()
            self.process.communicate()


def test_a_server_process_that_starts_late_is_waited_for() -> None:
    model, server = torch.nn.Linear(4, 4, bias=False), LateServer()
    with Publisher(ModuleSource(model), engines=[server.url]) as publisher, on_waiting(server.start):
        try:
            assert publisher.publish(wait_ready_seconds=120.0).ok
        finally:
            said = server.end()
    assert said == f"ready\n{model.weight.tolist()}\n"


def test_the_command_line_waits_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weight, server = torch.randn(4, 4), LateServer()
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    with on_waiting(server.start):
        try:
            assert cli.main(["publish", str(tmp_path), "--engine", server.url, "--wait"]) == exits.OK
        finally:
            said = server.end()
    assert said == f"ready\n{weight.tolist()}\n"


def test_one_that_never_comes_fails_alone_and_after_the_time() -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    client = DirectEngine("here", engine := RecordingEngine())
    with Publisher(TensorSource(TENSORS), engines=[nobody, client], transport="ipc://") as publisher:
        with pytest.raises(PublishError, match="1 of 2 engines did not take version 0") as caught:
            publisher.publish(wait_ready_seconds=0.2)
        assert [version.number for version in engine.versions] == [0]
        assert isinstance(caught.value.failures[nobody], PeerDiedError)
        assert "start the server first, or wait for it" in str(caught.value)
        with pytest.raises(PublishError):  # by default nobody is waited for
            publisher.publish()
    client.close()


def test_an_engine_that_is_held_is_not_waited_for() -> None:
    client = DirectEngine("here", RecordingEngine())
    with (
        Publisher(TensorSource(TENSORS), engines=[client]) as first,
        Publisher(TensorSource(TENSORS), engines=[client]) as second,
    ):
        first.publish()
        with pytest.raises(PublishError) as caught:
            second.publish(wait_ready_seconds=MANY_SECONDS)
        assert isinstance(caught.value.failures["here"], EngineBusyError)
    client.close()


@pytest.mark.parametrize("path", ["/v1", "/nowhere/at/all"])
def test_what_is_no_engine_is_not_waited_for(path: str) -> None:
    with EngineServer(ModuleEngine(torch.nn.Linear(2, 2))) as server:
        url = f"{server.url}{path}"
        with Publisher(TensorSource(TENSORS), engines=[url]) as publisher, pytest.raises(PublishError) as caught:
            publisher.publish(wait_ready_seconds=MANY_SECONDS)
    assert isinstance(caught.value.failures[url], ControlError)


def test_an_interrupt_ends_the_wait_at_once() -> None:
    """The wait is in the caller's thread: nothing of it is left when the caller was interrupted."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    publisher = Publisher(TensorSource(TENSORS), engines=[f"http://127.0.0.1:{free_port()}"])
    with on_waiting(interrupt), publisher, pytest.raises(KeyboardInterrupt):
        publisher.publish(wait_ready_seconds=MANY_SECONDS)


def test_an_engine_that_is_away_in_between_is_waited_for_again() -> None:
    model, port = torch.nn.Linear(4, 4), free_port()
    servers: queue.SimpleQueue[EngineServer] = queue.SimpleQueue()

    def start() -> None:
        # A server of another thread of this process: the one that waits must not be the one that starts it.
        threading.Thread(target=lambda: servers.put(EngineServer(ModuleEngine(model), port=port).start())).start()

    start()
    first = servers.get(timeout=60.0)
    source, options = ModuleSource(torch.nn.Linear(4, 4)), PublishOptions(deadline_seconds=60.0)
    with Publisher(source, engines=[f"http://127.0.0.1:{port}"], options=options) as publisher:
        assert publisher.publish(wait_ready_seconds=60.0).ok
        first.close()
        with on_waiting(start):
            assert publisher.publish(wait_ready_seconds=60.0).ok
    servers.get(timeout=60.0).close()
