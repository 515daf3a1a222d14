"""Whoever knows a run's id, which /weight_info says, can neither end its updates nor spoil its versions."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from msgspec import UNSET

import weightcast
from core.direct import DirectEngine, RecordingEngine, fleet
from weightcast import TensorSource
from weightcast.errors import EngineBusyError, RefusedError, WeightcastError
from weightcast.format.manifest import WeightVersion
from weightcast.format.messages import Abort, InitInfo, Offer, Seal, UpdateInfo
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TENSORS = {f"t{i}": torch.full((40, 40), float(i)) for i in range(8)}
CURRENT = 5
VERSIONS = [CURRENT - 1, CURRENT, CURRENT + 1, 2**62, 2**63 - 1]
SECRETS = [None, "0" * 64]
TRANSPORTS = ["ipc://", "memory://", "gloo://127.0.0.1:0"]


def forged(kind: str, publisher: Publisher, version: int, secret: str | None) -> UpdateInfo:
    packing = publisher._pack_plan
    assert packing is not None
    proof = {} if secret is None else {"secret": secret}
    if kind == "offer":
        return Offer(publisher.run, version, packing.manifest_digest, packing.layout.manifest.text, **proof)
    if kind == "seal":
        return Seal(publisher.run, version, 1, "0" * 32, **proof)
    return Abort(publisher.run, version, "malice", **proof)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("kind", ["offer", "seal", "abort"])
def test_what_a_stranger_sends_between_two_publishes_changes_nothing(kind: str, install: str, transport: str) -> None:
    engine = RecordingEngine()
    with fleet(TensorSource(TENSORS), engine, install=install, transport=transport) as (publisher, (client,)):
        publisher.publish(CURRENT)
        for version in VERSIONS:
            for secret in SECRETS:
                with pytest.raises(WeightcastError):
                    client.update(forged(kind, publisher, version, secret))
        assert not client.gate.is_paused
        assert publisher.publish().ok
        assert publisher.publish().ok
    assert [v.number for v in engine.versions] == [CURRENT, CURRENT + 1, CURRENT + 2]


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("kind", ["offer", "seal", "abort", "finish"])
def test_what_a_stranger_sends_in_mid_publish_changes_nothing(kind: str, install: str) -> None:
    engine = RecordingEngine()
    refused: list[str] = []

    def meddle(done_bytes: int, total_bytes: int) -> None:
        for version in VERSIONS[kind == "finish" :]:
            for secret in SECRETS:
                refused.append(refusal(kind, version, secret))

    def refusal(kind: str, version: int, secret: str | None) -> str:
        """The words of the error: the error itself would keep the publisher's frames."""
        try:
            if kind == "finish":
                client.finish(version)
            else:
                client.update(forged(kind, publisher, version, secret))
        except WeightcastError as exc:
            return str(exc)
        return ""

    with fleet(TensorSource(TENSORS), engine, install=install) as (publisher, (client,)):
        assert publisher.publish(CURRENT - 1).ok
        assert publisher.publish(CURRENT, on_progress=meddle).ok
        assert publisher.publish().ok
    assert refused
    assert all(refused)
    assert [v.number for v in engine.versions] == [CURRENT - 1, CURRENT, CURRENT + 1]


@pytest.mark.parametrize("moment", ["before the seal", "after the seal"])
def test_a_stranger_who_installs_too_early_is_refused_alone(moment: str) -> None:
    class Watched(DirectEngine):
        def update(self, info: UpdateInfo) -> None:
            if isinstance(info, Seal):
                if moment == "before the seal":
                    with pytest.raises(WeightcastError, match="not sealed"):
                        self.finish(info.version)
                super().update(info)
                if moment == "after the seal":
                    self.finish(info.version)  # that is what a seal allows
                return
            super().update(info)

    client = Watched("engine", RecordingEngine())
    with Publisher(TensorSource(TENSORS), engines=[client]) as publisher:
        assert publisher.publish(CURRENT).ok
        assert publisher.publish().ok
    assert [v.number for v in client.engine.versions] == [CURRENT, CURRENT + 1]
    client.close()


def test_a_stranger_can_not_say_that_a_dropped_engine_has_the_last_version() -> None:
    is_dropped = []

    class Watched(DirectEngine):
        def update(self, info: UpdateInfo) -> None:
            if isinstance(info, Seal) and self.info().dropped is True:
                for secret in SECRETS:
                    with pytest.raises(RefusedError):
                        super().update(forged("seal", publisher, info.version, secret))
                    is_dropped.append(self.info().dropped)
            super().update(info)

    client = Watched("engine", RecordingEngine())
    with Publisher(TensorSource(TENSORS), engines=[client]) as publisher:
        publisher.publish(CURRENT)
        publisher.remove_engine(client)
        publisher.add_engine(client, sync=True)
        assert is_dropped == [True, True]
        assert client.info().dropped is UNSET
        assert publisher.publish().ok
    client.close()


def test_who_has_the_runs_id_alone_does_not_take_its_engine() -> None:
    with fleet(TensorSource(TENSORS), RecordingEngine()) as (publisher, (client,)):
        publisher.publish(CURRENT)
        for secret in ("0" * 64, "f" * 64):
            stranger = InitInfo(publisher.run, client.name, "ipc://@nowhere", "unix:@nowhere", secret, 5.0)
            with pytest.raises(EngineBusyError, match=publisher.run):
                client.init(stranger)
        assert publisher.publish().ok


def test_a_stranger_who_takes_over_with_the_runs_id_loses_the_engine_again() -> None:
    """Whoever may call the routes may take over: its publisher gets the engine back the same way."""
    with fleet(TensorSource(TENSORS), RecordingEngine(), takeover=True) as (publisher, (client,)):
        publisher.publish(CURRENT)
        thief = InitInfo(publisher.run, client.name, "ipc://@nowhere", "unix:@nowhere", "0" * 64, 5.0, takeover=True)
        client.init(thief)
        with contextlib.suppress(weightcast.PublishError):
            publisher.publish()
        assert publisher.publish().ok


def test_the_same_over_http() -> None:
    engine = weightcast.EngineServer(RecordingEngine(), port=0)
    with engine.start() as server:
        stranger = weightcast.HttpEngine(server.url)
        with Publisher(TensorSource(TENSORS), engines=[server.url]) as publisher:
            publisher.publish(CURRENT)
            assert stranger.info().holder == publisher.run
            for kind in ("offer", "seal", "abort"):
                for version in VERSIONS:
                    with pytest.raises(WeightcastError):
                        stranger.update(forged(kind, publisher, version, None))
            assert publisher.publish().ok
            stranger.pause(publisher.run)
            stranger.resume(publisher.run)
            stranger.shutdown()  # whoever runs the server may end a hold: the next publish connects again
            assert publisher.publish().ok
        stranger.close()


def test_no_repr_shows_the_secret() -> None:
    for record in (
        Offer("f" * 32, 1, "0" * 64, secret="5" * 64),
        Seal("f" * 32, 1, 1, "0" * 32, "5" * 64),
        Abort("f" * 32, 1, "why not", "5" * 64),
    ):
        assert "5" * 64 not in repr(record)


def test_a_finish_of_somebody_else_at_the_same_time_is_waited_for() -> None:
    class Slow(RecordingEngine):
        def commit(self, version: WeightVersion) -> None:
            is_installing.set()
            assert may_end.wait(60)
            super().commit(version)

    class Twice(DirectEngine):
        def finish(self, version: int) -> None:
            stranger = threading.Thread(target=self.worker.finish, args=(version,))
            stranger.start()
            assert is_installing.wait(60)
            # Only once this call waits for the other's install may that end; before, it is waited for all the same.
            threading.Timer(0.2, may_end.set).start()
            try:
                self.worker.finish(version)
            finally:
                stranger.join()

    is_installing, may_end = threading.Event(), threading.Event()
    engine = Slow()
    client = Twice("engine", engine)
    with Publisher(TensorSource(TENSORS), engines=[client], options=PublishOptions(deadline_seconds=60.0)) as publisher:
        assert publisher.publish().ok
    assert [version.number for version in engine.versions] == [0]
    client.close()
