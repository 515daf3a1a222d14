"""Whatever happens to a bucket on its way, the engine serves the old version, and the next publish succeeds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from core.direct import DirectEngine

from weightcast import TensorSource, registry
from weightcast.engines.module import ModuleEngine
from weightcast.errors import PeerTimeoutError, PublishError
from weightcast.host.deadline import Deadline
from weightcast.testing import Corrupt, Drop, Duplicate, FaultyTransport, Kill, Reorder, Stall
from weightcast.testing.faults import SCHEME, Fault, SenderFault
from weightcast.testing.transport_kit import PATIENCE_SECONDS, Background
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

TRANSPORT: object = None
"""What the registry finds under `faulty://`; each test sets its own."""

NUM_BUCKETS = 6


@pytest.fixture(params=["memory", "ipc"])
def faulty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, leaves_nothing: None) -> FaultyTransport:
    url = f"{request.param}://"
    made = FaultyTransport(registry.transport(url), url)
    monkeypatch.setattr(f"{__name__}.TRANSPORT", made.transport())
    monkeypatch.setitem(registry.TRANSPORTS, SCHEME, f"{__name__}:TRANSPORT")
    return made


class Fleet:
    """A trainer's tensors, two engines of their own, and a publisher over `faulty://`."""

    def __init__(self, **options: Any) -> None:
        options = {"bucket_size_bytes": 4096, "deadline_seconds": 5.0, **options}
        self.tensors = {f"t{i}": torch.zeros(1024) for i in range(NUM_BUCKETS)}
        self.modules = {name: self._module() for name in ("good", "bad")}
        self.engines = [DirectEngine(name, ModuleEngine(module)) for name, module in self.modules.items()]
        self.publisher = Publisher(
            TensorSource(self.tensors),
            transport=f"{SCHEME}://",
            engines=self.engines,
            options=PublishOptions(**options),
        )

    def _module(self) -> torch.nn.Module:
        module = torch.nn.Module()
        for name in self.tensors:
            module.register_buffer(name, torch.full((1024,), -1.0))
        return module

    def publish(self, value: float) -> set[str]:
        """Publish a version whose every element is `value`; return who failed."""
        for tensor in self.tensors.values():
            tensor.fill_(value)
        try:
            self.publisher.publish()
        except PublishError as exc:
            return set(exc.failures)
        return set()

    def held(self, name: str) -> set[float]:
        return {v for t in self.modules[name].buffers() for v in t.unique().tolist()}

    def can_generate(self, name: str) -> bool:
        gate = next(e for e in self.engines if e.name == name).gate
        return any(gate.is_open for _ in Deadline(PATIENCE_SECONDS).polls(0.001, 0.05))

    def is_given_up(self, name: str) -> bool:
        """Return whether an update was begun there, and ended for want of buckets."""
        failure = next(e for e in self.engines if e.name == name).worker.failure
        return isinstance(failure, PeerTimeoutError) and "nothing of version" in str(failure)

    def close(self) -> None:
        self.publisher.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture
def fleet(faulty: FaultyTransport) -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


def receiver_of(faulty: FaultyTransport, name: str) -> object:
    (found,) = [r for peer, r in faulty.receivers.items() if name in peer]
    return found


@pytest.mark.parametrize(
    "fault",
    [Corrupt(3, byte=256 + 9), Corrupt(0, byte=30), Drop(2), Drop(NUM_BUCKETS - 1), Duplicate(1), Reorder(2)],
    ids=repr,
)
def test_at_one_receiver(faulty: FaultyTransport, fleet: Fleet, fault: Fault) -> None:
    assert fleet.publish(1.0) == set()
    receiver_of(faulty, "bad").fault = fault  # type: ignore[attr-defined]
    assert fleet.publish(2.0) == {"bad"}
    assert fleet.held("bad") == {1.0}
    assert fleet.held("good") == {2.0}
    assert fleet.can_generate("bad")
    assert fleet.publish(3.0) == set()
    assert fleet.held("bad") == fleet.held("good") == {3.0}


@pytest.mark.parametrize("fault", [Corrupt(3, byte=256 + 9), Drop(2), Duplicate(1)], ids=repr)
def test_at_the_sender(faulty: FaultyTransport, fleet: Fleet, fault: SenderFault) -> None:
    assert fleet.publish(1.0) == set()
    (sender,) = faulty.senders
    sender.fault = fault
    assert fleet.publish(2.0) == {"good", "bad"}
    assert fleet.held("bad") == fleet.held("good") == {1.0}
    assert fleet.can_generate("bad")
    assert fleet.can_generate("good")
    assert fleet.publish(3.0) == set()
    assert fleet.held("bad") == fleet.held("good") == {3.0}


def test_a_receiver_that_stalls(faulty: FaultyTransport, fleet: Fleet) -> None:
    assert fleet.publish(1.0) == set()
    go_on = threading.Event()
    receiver_of(faulty, "bad").fault = Stall(1, go_on)  # type: ignore[attr-defined]
    try:
        assert fleet.publish(2.0) == {"bad"}
        assert fleet.held("bad") == {1.0}
        assert fleet.can_generate("bad")
    finally:
        go_on.set()
    assert fleet.publish(3.0) == set()
    assert fleet.held("bad") == fleet.held("good") == {3.0}


def test_a_receiver_that_raises(faulty: FaultyTransport, fleet: Fleet) -> None:
    def fail() -> None:
        raise MemoryError("no memory for this bucket")

    assert fleet.publish(1.0) == set()
    receiver_of(faulty, "bad").fault = Kill(4, fail)  # type: ignore[attr-defined]
    assert fleet.publish(2.0) == {"bad"}
    assert fleet.held("bad") == {1.0}
    assert fleet.publish(3.0) == set()
    assert fleet.held("bad") == {3.0}


def test_a_publisher_that_hangs_while_its_heartbeats_go_on_keeps_no_engine_waiting(faulty: FaultyTransport) -> None:
    """Streaming, an engine is paused meanwhile: it gives the update up, and goes back to what it had."""
    fleet = Fleet(install="streaming", undo=True, deadline_seconds=3.0, lease_seconds=6.0)
    assert fleet.publish(1.0) == set()
    (sender,), go_on = faulty.senders, threading.Event()
    sender.fault = Stall(1, go_on)
    publishing = Background(fleet.publish, 2.0)
    try:
        for name in ("good", "bad"):
            assert any(fleet.is_given_up(name) for _ in Deadline(PATIENCE_SECONDS).polls(0.01, 0.05))
            assert fleet.can_generate(name)
            assert fleet.held(name) == {1.0}
        assert all(not link.ended for link in fleet.publisher._connections.listener.links())  # type: ignore[union-attr]
    finally:
        go_on.set()
    assert publishing.result() == {"good", "bad"}
    assert fleet.publish(3.0) == set()
    fleet.close()
