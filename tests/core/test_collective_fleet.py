"""A publisher over gloo with engines of one and of several workers, all in this process."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from publishers import publisher_of

from core.direct import DirectEngine, RecordingEngine
from core.parallel import ParallelEngine
from weightcast import TensorSource
from weightcast.errors import PeerDiedError, PublishError
from weightcast.format.manifest import WeightVersion
from weightcast.host.deadline import Deadline
from weightcast.host.memory import SharedMemory
from weightcast.testing.leftovers import nothing_left
from weightcast.trainer.publisher import Publisher
from weightcast.transports.collective.sender import CollectiveSender

PATIENCE_SECONDS = 60.0
HELD_UP_SECONDS = 1.0
TENSORS = {f"t{i}": torch.full((64, 16), float(i)) for i in range(20)}


@contextlib.contextmanager
def publishing(clients: Sequence[Any], **options: Any) -> Iterator[Publisher]:
    options = {"transport": "gloo://127.0.0.1:0", "bucket_size_bytes": 8192, "deadline_seconds": 10.0, **options}
    with nothing_left():
        try:
            with publisher_of(TensorSource(TENSORS), engines=clients, **options) as publisher:
                yield publisher
        finally:
            for client in clients:
                client.close()


def sender_of(publisher: Publisher) -> CollectiveSender:
    assert publisher._connections is not None
    sender = publisher._connections.sender
    assert isinstance(sender, CollectiveSender)
    return sender


def num_joined(publisher: Publisher) -> int:
    """How many receivers are in the transport's group."""
    group = sender_of(publisher)._group
    assert group is not None
    return len(group.joined)


def wait_until(condition: threading.Condition, is_done: Callable[[], object]) -> None:
    with condition:
        assert condition.wait_for(is_done, PATIENCE_SECONDS)


def holds(engine: RecordingEngine, plus: float) -> bool:
    return all(torch.equal(engine.held[name], tensor + plus) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(("install", "joined"), [("staged", 2), ("streaming", 4)])
def test_staged_one_worker_of_a_host_receives_for_all(install: str, joined: int) -> None:
    wide = ParallelEngine("wide", [RecordingEngine() for _ in range(3)])
    narrow = DirectEngine("narrow", RecordingEngine())
    with publishing([wide, narrow], install=install) as publisher:
        for step in range(3):
            for number, tensor in enumerate(publisher._source.tensors.values()):  # type: ignore[attr-defined]
                tensor.fill_(number + step)
            assert publisher.publish().ok
            assert all(holds(engine, 0.0) for engine in [*wide.engines, narrow.engine])
        assert num_joined(publisher) == joined


def test_a_reader_that_spoils_its_tensors_spoils_nobody_elses() -> None:
    class Scaling(RecordingEngine):
        def load(self, tensors: Any) -> None:
            super().load((name, tensor.mul_(2)) for name, tensor in tensors)

    wide = ParallelEngine("wide", [Scaling(), RecordingEngine()])
    with publishing([wide]) as publisher:
        for _ in range(2):
            assert publisher.publish().ok
            assert holds(wide.engines[1], 0.0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_worker_costs_its_engine_the_version_and_nobody_else(victim: int) -> None:
    class Dying(RecordingEngine):
        fails = False

        def specs(self) -> None:
            if Dying.fails:
                wide.workers[victim].shutdown()

    engines: list[RecordingEngine] = [RecordingEngine(), RecordingEngine()]
    engines[victim] = Dying()
    wide, narrow = ParallelEngine("wide", engines), DirectEngine("narrow", RecordingEngine())
    with publishing([wide, narrow]) as publisher:
        assert publisher.publish().ok
        Dying.fails = True
        with pytest.raises(PublishError) as caught:
            publisher.publish()
        assert set(caught.value.failures) == {"wide"}
        assert len(narrow.engine.versions) == 2
        Dying.fails = False
        assert publisher.publish().ok
        assert len(narrow.engine.versions) == 3
        assert all(engine.versions[-1] == narrow.engine.versions[-1] for engine in wide.engines)


@pytest.mark.parametrize("end", ["sender's", "receiver's"])
def test_a_worker_that_lost_its_link_between_publishes_is_connected_again(end: str) -> None:
    client = DirectEngine("a", RecordingEngine())
    with publishing([client]) as publisher:
        assert publisher.publish().ok
        sender = sender_of(publisher)
        link = sender._listener.links("a")[0]
        assert client.worker._session is not None
        receiver: Any = client.worker._session.receiver
        if end == "sender's":
            link.end("cut")
        else:
            receiver._link._sock.shutdown(socket.SHUT_RDWR)
        wait_until(sender.condition, lambda: link.ended)
        wait_until(receiver._condition, lambda: receiver._link.over)
        assert publisher.publish().ok
        assert holds(client.engine, 0.0)


def test_a_link_lost_during_an_install_that_went_well_is_no_failure() -> None:
    """The engine finishes it; its word can't come over the link, so the publisher asks."""

    class Cutting(RecordingEngine):
        cut: Any = None

        def commit(self, version: WeightVersion) -> None:
            super().commit(version)
            if self.cut is not None:
                self.cut()

    client = DirectEngine("a", Cutting())
    with publishing([client]) as publisher:
        assert publisher.publish().ok
        assert publisher._connections is not None
        [link] = publisher._connections.listener.links("a")
        client.engine.cut = lambda: link.end("cut")
        report = publisher.publish()
        assert report.ok
        assert client.info().weight_version == str(report.version)
        client.engine.cut = None
        assert publisher.publish().ok


def test_receivers_are_as_patient_as_the_publisher() -> None:
    """For one of its steps, and a lease."""
    client = DirectEngine("a", RecordingEngine())
    with publishing([client], deadline_seconds=300.0, lease_seconds=7.0) as publisher:
        assert publisher.publish().ok
        assert client.worker._session is not None
        receiver: Any = client.worker._session.receiver
        assert receiver._deadline_seconds == 307.0


@pytest.mark.parametrize("transport", ["gloo://127.0.0.1:0", "ipc://"])
def test_an_engine_is_free_for_another_run_as_soon_as_its_publisher_is_closed(transport: str) -> None:
    """Even before the engine has noticed: its own thread, which would, is held up here."""
    client, others_turn = DirectEngine("a", RecordingEngine()), threading.Event()
    notice = client.worker._on_end

    def notice_late(hold: Any, reason: str) -> None:
        others_turn.wait(HELD_UP_SECONDS)
        notice(hold, reason)

    client.worker._on_end = notice_late  # type: ignore[method-assign]
    with publishing([client], transport=transport) as publisher:
        assert publisher.publish().ok
        publisher.close()
        with Publisher(TensorSource(TENSORS), transport=transport, engines=[client]) as another:
            assert another.publish().ok
            assert client.info().holder == another.run
            others_turn.set()
            assert another.publish().ok


def test_memory_that_a_broken_group_may_still_read_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update goes on in other memory, and nothing keeps the former one, once its broadcasts are over."""
    engine = DirectEngine("a", RecordingEngine())
    former: list[weakref.ref[SharedMemory]] = []
    send = CollectiveSender.send

    def break_once(self: CollectiveSender, index: int, num_bytes: int) -> None:
        if index == 2 and not former:
            with self.condition:
                memory = SharedMemory.of(self.buffer(index).payload)
                assert memory is not None
                former.append(weakref.ref(memory))
                self._slots_are_lost = True
                self._interrupt(self._require_update(index), {}, PeerDiedError("as if the group had broken"))
        send(self, index, num_bytes)

    with publishing([engine]) as publisher:
        assert publisher.publish().ok
        monkeypatch.setattr(CollectiveSender, "send", break_once)
        assert publisher.publish().ok
        assert holds(engine.engine, 0.0)
        assert any(former[0]() is None for _ in Deadline(PATIENCE_SECONDS).polls(0.01, 0.1))
