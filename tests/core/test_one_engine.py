"""One engine is held by one publisher, under one name; whoever does not get it is told at once who has it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from publishers import publisher_of

import weightcast
from core.direct import DirectEngine, RecordingEngine
from weightcast import TensorSource
from weightcast.errors import ClosedError, EngineBusyError, PublishError, RefusedError, StaleVersionError
from weightcast.format.messages import InitInfo, UpdateInfo
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TENSORS = {f"t{i}": torch.full((40, 40), float(i)) for i in range(8)}
TWOS = {name: torch.full_like(t, 2.0) for name, t in TENSORS.items()}
TRANSPORTS = ["ipc://", "memory://", "gloo://127.0.0.1:0"]
DEADLINE_SECONDS = 20.0


class Other(DirectEngine):
    """The engine of another client, under this name."""

    def __init__(self, name: str, client: DirectEngine) -> None:
        self.__dict__.update(client.__dict__, name=name)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_names", [2, 3])
def test_an_engine_under_several_names_is_named_at_once(num_names: int, transport: str) -> None:
    first, bystander = DirectEngine("a", RecordingEngine()), DirectEngine("bystander", RecordingEngine())
    others = [Other(name, first) for name in "bc"[: num_names - 1]]
    engines = [first, *others, bystander]
    source = TensorSource(TENSORS)
    with Publisher(
        source, transport=transport, engines=engines, options=PublishOptions(on_failure="report")
    ) as publisher:
        for _ in range(2):
            report = publisher.publish()
            assert report.engines["a"].ok
            assert report.engines["bystander"].ok
            for other in others:
                error = report.engines[other.name].error
                assert error is not None
                assert (error.kind, error.message) == (
                    RefusedError.__name__,
                    f"{other.name} and a are the same engine: name it once in `engines`",
                )
        for other in others:
            publisher.remove_engine(other)
        assert publisher.publish().ok
    first.close()
    bystander.close()


def test_an_engine_that_joins_later_under_another_name_is_found_out() -> None:
    first = DirectEngine("a", RecordingEngine())
    with Publisher(TensorSource(TENSORS), engines=[first]) as publisher:
        assert publisher.publish().ok
        publisher.add_engine(Other("b", first))
        with pytest.raises(PublishError, match="b and a are the same engine"):
            publisher.publish()
        publisher.remove_engine("a")
        assert publisher.publish().ok
    first.close()


def test_a_server_by_its_names_and_addresses() -> None:
    with weightcast.EngineServer(RecordingEngine(), port=0).start() as server:
        port = server.url.rpartition(":")[2]
        urls = [f"http://127.0.0.1:{port}/", f"http://localhost:{port}", f"http://[::ffff:127.0.0.1]:{port}"]
        with Publisher(TensorSource(TENSORS), engines=urls, options=PublishOptions(on_failure="report")) as publisher:
            with pytest.raises(ValueError, match="in the fleet already"):
                publisher.add_engine(f"http://127.0.0.1:{port}")
            report = publisher.publish()
    assert [result.ok for result in report.engines.values()] == [True, False, False]
    for url in urls[1:]:
        error = report.engines[url].error
        assert error is not None
        assert f"{url} and http://127.0.0.1:{port} are the same engine" in error.message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_loses_its_engine_while_it_connects_is_told_who_has_it(transport: str) -> None:
    """The link of the one comes up and ends, or never comes up: it does not wait for it till its deadline."""
    client = DirectEngine("engine", RecordingEngine())

    class Overtaken(Other):
        is_overtaken = False

        def init(self, info: InitInfo) -> None:
            super().init(info)
            if not self.is_overtaken:
                self.is_overtaken = True
                assert winner.publish().ok

    loser = Publisher(
        TensorSource(TENSORS),
        transport=transport,
        engines=[Overtaken("engine", client)],
        options=PublishOptions(deadline_seconds=600.0),
    )
    winner = Publisher(TensorSource(TWOS), transport=transport, engines=[client], options=PublishOptions(takeover=True))
    with winner, loser:
        with pytest.raises(PublishError) as caught:
            loser.publish()
        error = caught.value.failures["engine"]
        assert isinstance(error, EngineBusyError)
        assert f"run {winner.run} took engine over" in str(error)
        del caught
        assert winner.publish().ok
    client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_who_loses_its_engine_to_a_run_that_has_let_it_go_again_is_told_at_once(transport: str) -> None:
    client = DirectEngine("engine", RecordingEngine())

    class Overtaken(Other):
        is_overtaken = False

        def init(self, info: InitInfo) -> None:
            super().init(info)
            if not self.is_overtaken:
                self.is_overtaken = True
                with Publisher(
                    TensorSource(TWOS), transport=transport, engines=[client], options=PublishOptions(takeover=True)
                ) as winner:
                    assert winner.publish().ok

    engines = [Overtaken("engine", client)]
    with Publisher(
        TensorSource(TENSORS), transport=transport, engines=engines, options=PublishOptions(deadline_seconds=600.0)
    ) as loser:
        with pytest.raises(PublishError) as caught:
            loser.publish()
        assert isinstance(caught.value.failures["engine"], ClosedError)
        del caught
        assert loser.publish().ok
    client.close()


@pytest.mark.parametrize("step", ["Offer", "received", "Seal", "pause", "finish"])
def test_who_loses_its_engine_in_mid_publish_is_told_who_has_it(step: str) -> None:
    client = DirectEngine("engine", RecordingEngine())

    class Overtaken(Other):
        is_overtaken = False

        def _overtake(self, here: str) -> None:
            if here == step and not self.is_overtaken:
                self.is_overtaken = True
                assert winner.publish().ok

        def update(self, info: UpdateInfo) -> None:
            self._overtake(type(info).__name__)
            super().update(info)

        def pause(self, run: str) -> None:
            self._overtake("pause")
            super().pause(run)

        def finish(self, version: int) -> None:
            self._overtake("finish")
            self.worker.finish(version, loser.run)

    overtaken = Overtaken("engine", client)
    options: dict[str, Any] = {"bucket_size_bytes": 4096, "deadline_seconds": DEADLINE_SECONDS}
    with (
        publisher_of(TensorSource(TENSORS), engines=[overtaken], **options) as loser,
        publisher_of(TensorSource(TWOS), engines=[client], **options, takeover=True) as winner,
    ):
        with pytest.raises(PublishError) as caught:
            loser.publish(on_progress=lambda done, total: overtaken._overtake("received"))
        error = caught.value.failures["engine"]
        assert isinstance(error, EngineBusyError | StaleVersionError)
        assert winner.run in str(error)
        del caught
        assert winner.publish().ok
    assert all(torch.equal(client.engine.held[name], t) for name, t in TWOS.items())
    client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_of_two_that_take_over_at_once_nobody_blames_the_network(transport: str) -> None:
    client = DirectEngine("engine", RecordingEngine())
    for _ in range(4):
        begin = threading.Barrier(2)
        publishers = [
            Publisher(
                TensorSource(tensors),
                transport=transport,
                engines=[Other("engine", client)],
                options=PublishOptions(takeover=True, deadline_seconds=DEADLINE_SECONDS),
            )
            for tensors in (TENSORS, TWOS)
        ]
        causes: dict[str, str] = {}

        def publish(publisher: Publisher, begin: threading.Barrier, causes: dict[str, str]) -> None:
            begin.wait()
            try:
                publisher.publish()
            except PublishError as exc:
                cause = exc.failures["engine"]
                causes[publisher.run] = f"{type(cause).__name__}: {cause}"

        threads = [threading.Thread(target=publish, args=(each, begin, causes)) for each in publishers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for publisher, rival in (publishers, reversed(publishers)):
            cause = causes.get(publisher.run, rival.run)
            assert rival.run in cause, cause
            assert "Peer" not in cause, cause
        for publisher in publishers:
            publisher.close()
        assert not client.gate.torn
        held = client.engine.held
        whole = [all(name in held and torch.equal(held[name], t) for name, t in one.items()) for one in (TENSORS, TWOS)]
        assert any(whole) or not held
    client.close()
    # A loser may have been making a group. gloo can't be woken then: it ends at its deadline.
    for thread in threading.enumerate():
        if thread.name == "weightcast-group":
            thread.join(3 * DEADLINE_SECONDS)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publish_to_nobody_says_so(transport: str) -> None:
    client = DirectEngine("engine", RecordingEngine())
    with Publisher(TensorSource(TENSORS), transport=transport, engines=[]) as publisher:
        with pytest.raises(ValueError, match=r"no engine to publish to.*add_engine"):
            publisher.publish()
        publisher.add_engine(client)
        assert publisher.publish().ok
        publisher.remove_engine(client)
        with pytest.raises(ValueError, match="no engine to publish to"):
            publisher.publish()
    client.close()


def test_a_store_needs_no_engine(tmp_path: Path) -> None:
    with Publisher(TensorSource(TENSORS), transport=f"file://{tmp_path}/store", engines=[]) as publisher:
        assert publisher.publish().ok
