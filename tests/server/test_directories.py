"""Engines that a directory names: they come, leave and are replaced between and during publishes, with real servers."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from core.direct import DirectEngine, RecordingEngine

from weightcast import ModuleEngine, Publisher, PublishError, PublishOptions, TensorSource
from weightcast.control.server.app import EngineServer
from weightcast.engines.gate import Gate
from weightcast.errors import EngineTornError, PeerTimeoutError, WeightcastError
from weightcast.format.manifest import TensorSpec
from weightcast.host.deadline import Deadline
from weightcast.serving.worker import Worker
from weightcast.testing.transport_kit import PATIENCE_SECONDS
from weightcast.trainer.engine_file import EngineFile
from weightcast.trainer.options import PublishEvent

pytestmark = pytest.mark.usefixtures("leaves_nothing")
MAX_BEHIND = 1


class RefusingEngine(ModuleEngine):
    refuses = False

    def specs(self) -> Any:
        if self.refuses:
            raise ValueError("this engine was told to refuse")
        return super().specs()


class Fleet:
    """Servers of one model each, and the file that names them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.models: dict[EngineServer, torch.nn.Linear] = {}
        self._stack = contextlib.ExitStack()
        self.write()

    def start(self, port: int = 0) -> EngineServer:
        model = torch.nn.Linear(32, 32)
        server = EngineServer(RefusingEngine(model), port=port).start()
        self._stack.callback(server.close)
        self.models[server] = model
        self.write()
        return server

    def forget(self, server: EngineServer) -> None:
        del self.models[server]
        self.write()

    def write(self, text: str | None = None) -> None:
        lines = ["# engines", *(server.url for server in self.models)]
        beside = self.path.with_suffix(".new")
        beside.write_text("\n".join(lines) + "\n" if text is None else text)
        os.replace(beside, self.path)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with contextlib.closing(Fleet(tmp_path / "engines")) as fleet:
        yield fleet


@contextlib.contextmanager
def publisher_of(
    directory: Any, *, transport: str = "ipc://", **options: Any
) -> Iterator[tuple[Publisher, Callable[[int], None]]]:
    """A publisher, and a function that sets all its weights."""
    tensors = {name: tensor.detach() for name, tensor in torch.nn.Linear(32, 32).named_parameters()}

    def fill(number: int) -> None:
        for tensor in tensors.values():
            tensor.fill_(number)

    options = {"engines": directory, "options": PublishOptions(**options)}
    with Publisher(TensorSource(tensors), transport=transport, **options) as publisher:
        yield publisher, fill


def serves(model: torch.nn.Linear) -> float:
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).unique()
    assert len(values) == 1, "a mix"
    return float(values)


def test_engines_come_and_leave_with_the_file(fleet: Fleet) -> None:
    first, second = fleet.start(), fleet.start()
    with publisher_of(EngineFile(fleet.path)) as (publisher, fill):
        assert publisher.engines == []
        fill(1)
        assert set(publisher.publish(1).engines) == {first.url, second.url}
        third = fleet.start()
        assert publisher.sync(third.url).ok
        assert serves(fleet.models[third]) == 1
        fourth = fleet.start()
        report = publisher.sync()
        assert report.ok
        assert set(report.engines) == {server.url for server in (first, second, third, fourth)}
        fleet.forget(first)
        fill(2)
        assert set(publisher.publish(2).engines) == {server.url for server in (second, third, fourth)}
        assert first.worker.info().version == 1
        assert any(not first.worker.info().holder for _ in Deadline(PATIENCE_SECONDS).polls())
        with pytest.raises(ValueError, match="EngineFile"):
            publisher.add_engine(first.url)
        with pytest.raises(ValueError, match="EngineFile"):
            publisher.remove_engine(second.url)


def test_a_file_that_fails_keeps_the_engines_and_is_reported(fleet: Fleet) -> None:
    server = fleet.start()
    with publisher_of(EngineFile(fleet.path)) as (publisher, _):
        for text, said in (("", "is being written"), (server.url, "is being written"), ("nonsense\n", "not the URL")):
            fleet.write()
            assert publisher.publish().directory_error is None
            fleet.write(text)
            report = publisher.publish()
            assert report.ok
            assert set(report.engines) == {server.url}
            assert report.directory_error is not None
            assert said in report.directory_error.message
            assert said in str(report)
        fleet.path.unlink()
        assert "No such file" in str(publisher.publish().directory_error)
    with (
        publisher_of(EngineFile(fleet.path)) as (publisher, _),
        pytest.raises(WeightcastError, match="no engine is"),
    ):
        publisher.publish()


def test_a_file_without_engines_lets_no_engine_go(fleet: Fleet, tmp_path: Path) -> None:
    """No version comes that they would miss."""
    server = fleet.start()
    with publisher_of(EngineFile(fleet.path)) as (publisher, fill):
        fill(1)
        assert publisher.publish(1).ok
        link = server.worker._session
        fleet.write("# none\n")
        for call in (publisher.publish, publisher.sync):
            with pytest.raises(ValueError, match="EngineFile lists no engines, and ipc:// keeps nothing"):
                call()
        assert httpx.get(f"{server.url}/weight_ready?max_behind=0", trust_env=False).is_success
        fleet.write()
        fill(2)
        assert publisher.publish(2).ok
        assert serves(fleet.models[server]) == 2
        assert server.worker._session is link
    fleet.write("# none\n")
    with publisher_of(EngineFile(fleet.path), transport=f"file://{tmp_path}/store") as (publisher, _):
        assert publisher.publish().ok


def test_an_engine_that_left_and_came_back_is_ready_again_after_a_sync(fleet: Fleet) -> None:
    stays, leaves = fleet.start(), fleet.start()
    ready = f"{leaves.url}/weight_ready?max_behind=0"
    with publisher_of(EngineFile(fleet.path)) as (publisher, fill):
        fill(1)
        publisher.publish(1)
        fleet.write(f"{stays.url}\n")
        assert set(publisher.sync().engines) == {stays.url}
        assert httpx.get(ready, trust_env=False).status_code == 503
        fleet.write()
        assert set(publisher.sync().engines) == {stays.url, leaves.url}
        assert httpx.get(ready, trust_env=False).status_code == 200
        assert serves(fleet.models[leaves]) == 1


def test_another_client_under_the_same_name_is_another_engine() -> None:
    class Directory:
        present: list[DirectEngine]

        def engines(self) -> Iterable[DirectEngine]:
            return self.present

    directory = Directory()
    first, second = (DirectEngine("name", RecordingEngine()) for _ in range(2))
    with contextlib.closing(first), contextlib.closing(second), publisher_of(directory) as (publisher, _):
        for engine in (first, first, second):
            directory.present = [engine]
            assert publisher.publish().ok
        assert [len(engine.engine.versions) for engine in (first, second)] == [2, 1]
        directory.present = [second, first]
        assert "two engines are named name" in str(publisher.publish().directory_error)
        assert [len(engine.engine.versions) for engine in (first, second)] == [2, 2]
        assert any(not first.info().holder for _ in Deadline(PATIENCE_SECONDS).polls())


class TornEngine(DirectEngine):
    """Its workers install separately, and can't roll back."""

    num_quarantines = 0

    def settle(self, version: int, *, keep: bool) -> None:
        raise PeerTimeoutError("no answer", peer=self.name)

    def quarantine(self, reason: str) -> None:
        self.num_quarantines += 1
        super().quarantine(reason)


def test_an_engine_that_was_replaced_under_its_name_is_not_taken_for_the_former() -> None:
    """The former one had to be kept from serving; the new one only refuses an offer."""
    engine = TornEngine("name", RecordingEngine())
    engine.engine.fail_after = 0
    with publisher_of([engine], on_failure="report") as (publisher, _):
        try:
            assert publisher.publish().failures["name"].kind == "InstallError"
            assert engine.info().torn
            num_quarantines = engine.num_quarantines
            engine.worker.close()
            engine.gate = Gate()
            engine.worker = Worker(RecordingEngine([TensorSpec("other", "float32", (1,))]), gate=engine.gate)
            assert publisher.publish().failures["name"].kind == "IncompatibleWeightsError"
            assert engine.num_quarantines == num_quarantines > 0
            assert not engine.info().torn
        finally:
            engine.close()


@pytest.mark.parametrize("has_left", [True, False])
def test_an_engine_that_fails_as_it_leaves_fails_no_publish(fleet: Fleet, has_left: bool) -> None:
    """It hangs in a step of generation, so that it can't install, and the publish waits for its own deadline only."""
    stays, leaves = fleet.start(), fleet.start()

    def on_event(event: PublishEvent) -> None:
        if event.phase == "received" and event.version == 2 and event.engine is None:
            steps.enter_context(leaves.step())
            if has_left:
                fleet.forget(leaves)

    with (
        contextlib.ExitStack() as steps,
        publisher_of(EngineFile(fleet.path), deadline_seconds=4.0, on_event=on_event) as (publisher, _),
    ):
        assert publisher.publish(1).ok
        if has_left:
            report = publisher.publish(2)
            assert report.ok
            assert report.failures == {}
        else:
            with pytest.raises(PublishError) as caught:
                publisher.publish(2)
            report = caught.value.report
            assert set(report.failures) == {leaves.url}
        assert report.engines[stays.url].ok
        assert report.engines[leaves.url].error is not None
        assert report.engines[leaves.url].has_left is has_left
        steps.close()
        assert set(publisher.publish(3).engines) == ({stays.url} if has_left else {stays.url, leaves.url})


class Router(threading.Thread):
    """Sends requests, each of one token, to engines whose readiness gate is open; notes each stale or mixed token."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__()
        self._fleet = fleet
        self._end = threading.Event()
        self.newest = -1
        """The last version whose publish has ended."""
        self.wrong: list[str] = []
        self.num_tokens = self.num_refused = 0

    def run(self) -> None:
        with httpx.Client() as client:
            while not self._end.is_set():
                for server, model in list(self._fleet.models.items()):
                    self._request(client, server, model)

    def _request(self, client: httpx.Client, server: EngineServer, model: torch.nn.Linear) -> None:
        floor = self.newest - MAX_BEHIND
        with contextlib.suppress(httpx.TransportError, WeightcastError):  # It has just been closed.
            if client.get(f"{server.url}/weight_ready?max_behind={MAX_BEHIND}").status_code != 200:
                self.num_refused += 1
                return
            with contextlib.suppress(EngineTornError, PeerTimeoutError), server.step(timeout_seconds=0.5) as version:
                self.num_tokens += 1
                if version is None or version.number < floor or serves(model) != version.number:
                    self.wrong.append(f"{server.url}: {version} of {serves(model)}, expected {floor} at least")

    def close(self) -> None:
        self._end.set()
        self.join()


@pytest.mark.parametrize("num_publishes", [20, pytest.param(100, marks=pytest.mark.full)])
def test_no_stale_token_behind_a_ready_gate(fleet: Fleet, num_publishes: int) -> None:
    """One join, leave or replacement between or in the middle of each two publishes, of which two engines refuse each;
    judged token by token.
    """
    chosen = random.Random(num_publishes)
    moment = ""

    def change() -> None:
        servers = list(fleet.models)
        kind = chosen.choice(["replace", *["leave"] * (len(servers) > 2), *["join"] * (len(servers) < 6)])
        if kind == "join":
            fleet.start()
            return
        victim = chosen.choice(servers)
        port = victim.port
        fleet.forget(victim)
        victim.close()
        if kind == "replace":
            try:
                fleet.start(port)
            except WeightcastError:  # Another process has the port by now.
                fleet.start()

    def on_event(event: PublishEvent) -> None:
        if event.engine is None and event.phase == moment:
            change()

    for _ in range(3):
        fleet.start()
    with (
        publisher_of(EngineFile(fleet.path), on_event=on_event, on_failure="report") as (publisher, fill),
        contextlib.closing(Router(fleet)) as router,
    ):
        router.start()
        for number in range(1, num_publishes + 1):
            moment = chosen.choice(["offered", "packed", "received", "installed", "between"])
            fill(number)
            refusing = chosen.sample(list(fleet.models), 2)
            for server in fleet.models:
                server.worker.engine.refuses = server in refusing  # type: ignore[attr-defined]
            report = publisher.publish(number)
            # Others fail only if they are replaced meanwhile; one that refuses may be replaced, or leave.
            assert moment != "between" or set(report.failures) == {server.url for server in refusing}
            router.newest = number
            if moment == "between":
                change()
        moment = ""
        for server in fleet.models:
            server.worker.engine.refuses = False  # type: ignore[attr-defined]
        fill(num_publishes + 1)
        assert publisher.publish().ok
        assert {serves(model) for model in fleet.models.values()} == {num_publishes + 1}
        listener = publisher._connections.listener  # type: ignore[union-attr]
        assert len(listener.links()) == len(listener.joined) == len(fleet.models)
    assert router.wrong == []
    assert router.num_tokens > num_publishes
    assert router.num_refused > 0
