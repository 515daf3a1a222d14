"""A publisher over gloo with engines of one and of several workers, all in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from core.direct import DictSource, DirectEngine, RecordingEngine
from core.parallel import ParallelEngine
from weightcast.errors import PublishError
from weightcast.publisher import Publisher
from weightcast.testing.leftovers import nothing_left
from weightcast.transports.collective_sender import CollectiveSender

TENSORS = {f"t{i}": torch.full((64, 16), float(i)) for i in range(20)}


@contextlib.contextmanager
def publishing(clients: Sequence[Any], **options: Any) -> Iterator[Publisher]:
    options = {"bucket_size_bytes": 8192, "deadline_seconds": 10.0, **options}
    with nothing_left():
        try:
            with Publisher(
                DictSource(TENSORS), transport="gloo://127.0.0.1:0", engines=clients, **options
            ) as publisher:
                yield publisher
        finally:
            for client in clients:
                client.close()


def num_joined(publisher: Publisher) -> int:
    """How many receivers are in the transport's group."""
    assert publisher._wire is not None
    sender = publisher._wire.sender
    assert isinstance(sender, CollectiveSender)
    assert sender._formation.epoch is not None
    return len(sender._formation.epoch.joined)


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
