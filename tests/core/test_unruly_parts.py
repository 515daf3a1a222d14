"""An engine or a transport that fails while an update is ended: generation goes on, or the engine says it is torn."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from core.direct import RecordingEngine, fleet
from weightcast import TensorSource
from weightcast.engines.gate import Gate
from weightcast.errors import PublishError, WeightcastError
from weightcast.format.manifest import WeightVersion
from weightcast.format.messages import InitInfo
from weightcast.serving import session
from weightcast.serving.worker import Worker
from weightcast.store.address import StoreAddress
from weightcast.store.writing import StoreWriter
from weightcast.testing.transport_kit import PATIENCE_SECONDS
from weightcast.transports.ipc import IpcReceiver

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TENSORS = {f"layers.{number}.weight": torch.full((64, 40), float(number)) for number in range(4)}


class UnrulyEngine(RecordingEngine):
    """Fails at `commit`, and at `discard` too."""

    fails = True

    def commit(self, version: WeightVersion) -> None:
        if self.fails:
            raise RuntimeError("no commit")
        super().commit(version)

    def discard(self) -> None:
        if self.fails:
            raise RuntimeError("no discard")
        super().discard()


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_an_engine_that_cannot_discard_is_torn_and_not_paused(install: Any) -> None:
    engine = UnrulyEngine()
    with fleet(TensorSource(TENSORS), engine, install=install) as (publisher, (client,)):
        with pytest.raises(PublishError, match="no commit"):
            publisher.publish()
        assert "no commit" in client.gate.torn
        assert not client.gate.is_paused
        engine.fails = False
        assert publisher.publish().ok
        assert client.gate.is_open


def test_a_receiver_that_cannot_end_leaves_no_engine_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine(RecordingEngine):
        def commit(self, version: WeightVersion) -> None:
            super().commit(version)
            monkeypatch.setattr(IpcReceiver, "end", end_badly)

    def end_badly(receiver: IpcReceiver) -> None:
        monkeypatch.undo()
        receiver.end()
        raise OSError("no end")

    with fleet(TensorSource(TENSORS), Engine(), install="streaming") as (publisher, (client,)):
        with pytest.raises(PublishError, match="no end"):
            publisher.publish()
        assert not client.gate.is_paused


def test_a_failure_without_a_message_ends_the_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: Any, **options: Any) -> None:
        failed.set()
        raise WeightcastError("")

    failed = threading.Event()
    monkeypatch.setattr(session, "WorkerLink", fail)
    worker = Worker(RecordingEngine(), gate=Gate())
    run, secret, url = "ab" * 16, "cd" * 32, tmp_path.as_uri()
    with contextlib.closing(worker), contextlib.closing(StoreWriter(StoreAddress.parse(url), run, deadline_seconds=5)):
        worker.init(InitInfo(run, "engine", url, "unix:@nobody", secret, lease_seconds=5.0))
        assert failed.wait(PATIENCE_SECONDS)
        for thread in threading.enumerate():
            if thread.name == "weightcast-init":
                thread.join(PATIENCE_SECONDS)
        assert worker.info().holder == ""
