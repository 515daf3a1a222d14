"""What an adversary found: each of these once served a mix, told a lie, or waited for ever."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

import weightcast
from core.direct import DirectEngine, RecordingEngine, fleet
from weightcast import TensorSource
from weightcast.engines.gate import Gate
from weightcast.errors import EngineBusyError, InsufficientMemoryError, PeerTimeoutError, PublishError
from weightcast.format.messages import Offer, UpdateInfo, WeightInfo
from weightcast.serving.session import PublisherSession
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TENSORS = {f"t{i}": torch.full((40, 40), float(i)) for i in range(8)}
DEADLINE_SECONDS = 60.0


class HalfWay(RecordingEngine):
    """Stops half-way through a load until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.half_way, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        pairs = [(name, tensor.clone()) for name, tensor in tensors]
        super().load(pairs[: len(pairs) // 2])
        self.half_way.set()
        assert self.go_on.wait(DEADLINE_SECONDS)
        super().load(pairs[len(pairs) // 2 :])


def test_an_install_under_way_is_finished_before_another_run_may_write() -> None:
    engine = HalfWay()
    twos = TensorSource({name: torch.full_like(t, 2.0) for name, t in TENSORS.items()})
    with fleet(TensorSource(TENSORS), engine) as (first, (client,)):
        first.publish()
        engine.half_way.clear()
        engine.go_on.clear()
        thread = threading.Thread(target=first.publish)
        thread.start()
        assert engine.half_way.wait(DEADLINE_SECONDS)
        assert first._connections is not None
        first._connections.listener.end_links("as if the publisher had been killed", client.name)
        with Publisher(
            twos, engines=[client], options=PublishOptions(install="streaming", deadline_seconds=3.0)
        ) as second:
            with pytest.raises(PublishError) as caught:
                second.publish()
            assert isinstance(caught.value.failures[client.name], EngineBusyError)
            engine.go_on.set()
            thread.join(DEADLINE_SECONDS)
            assert all(torch.equal(engine.held[name], t) for name, t in TENSORS.items())
            assert not client.gate.torn


def test_an_offer_that_comes_twice_at_once_is_taken_once() -> None:
    """As one that a proxy repeats: two updates would share one receiver, and fail each other."""
    answers: list[BaseException | None] = []

    class Meeting(RecordingEngine):
        """Waits a while for a second offer to be tried at the same time."""

        def __init__(self) -> None:
            super().__init__()
            self._both = threading.Barrier(2, timeout=0.5)

        def validate(self, manifest: Any) -> None:
            with contextlib.suppress(threading.BrokenBarrierError):
                self._both.wait()

    class Doubling(DirectEngine):
        def update(self, info: UpdateInfo) -> None:
            num_times = 2 if isinstance(info, Offer) else 1
            with ThreadPoolExecutor(num_times) as pool:
                calls = [pool.submit(DirectEngine.update, self, info) for _ in range(num_times)]
            answers.extend(call.exception() for call in calls)

    client = Doubling("engine", Meeting())
    with Publisher(TensorSource(TENSORS), engines=[client]) as publisher:
        report = publisher.publish()
    client.close()
    assert report.ok
    assert not any(answers)


def test_a_persons_resume_does_not_let_generation_into_half_loaded_weights() -> None:
    gate = Gate()
    gate.begin_writing("update")
    gate.pause(owner="run")
    gate.resume()
    assert gate.is_paused
    with pytest.raises(PeerTimeoutError), gate.step(timeout_seconds=0.05):
        pass
    gate.end_writing("update")
    with gate.step(timeout_seconds=DEADLINE_SECONDS):
        pass


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_a_loader_that_writes_into_its_tensors_spoils_nothing(install: str) -> None:
    class Scaling(RecordingEngine):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load((name, tensor.mul_(2)) for name, tensor in tensors)

    scaling, plain = Scaling(), RecordingEngine()
    with fleet(TensorSource(TENSORS), scaling, plain, install=install) as (publisher, _):
        for _ in range(4):
            assert publisher.publish().ok
    assert all(torch.equal(scaling.held[name], 2 * t) for name, t in TENSORS.items())
    assert all(torch.equal(plain.held[name], t) for name, t in TENSORS.items())


def test_a_refused_manifest_does_not_spoil_the_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    source, engine = TensorSource(TENSORS), RecordingEngine()
    with fleet(source, engine) as (publisher, _):
        publisher.publish()
        source.replace({"big": torch.zeros(100)})
        with monkeypatch.context() as patch:
            # After the manifest was taken, before the update is begun.
            patch.setattr(PublisherSession, "end_update", _no_memory)
            with pytest.raises(PublishError):
                publisher.publish()
        source.replace(TENSORS)
        assert publisher.publish().ok


def _no_memory(*args: Any) -> None:
    raise InsufficientMemoryError("the test says so")


def test_an_interrupted_install_is_torn_before_anything_can_step() -> None:
    seen: list[str] = []

    class Interrupted(RecordingEngine):
        def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
            super().load(list(tensors)[:2])
            raise KeyboardInterrupt

    class Watching(DirectEngine):
        def finish(self, version: int) -> None:
            try:
                super().finish(version)
            finally:
                seen.append(self.gate.torn)

    client = Watching("engine", Interrupted())
    with Publisher(TensorSource(TENSORS), engines=[client]) as publisher, pytest.raises(KeyboardInterrupt):
        publisher.publish()
    client.close()
    assert "installing version 0 failed" in seen[0]


@pytest.mark.parametrize("label", ["²", "9" * 5000, str((1 << 63) - 1), "v7", ""], ids=range(5))
def test_an_odd_label_of_one_engine_is_no_version(label: str) -> None:
    class Odd(DirectEngine):
        def info(self) -> WeightInfo:
            return msgspec.structs.replace(super().info(), weight_version=label)

    client = Odd("odd", RecordingEngine())
    with Publisher(TensorSource(TENSORS), engines=[client]) as publisher:
        assert publisher.publish().version == 0
    client.close()


def test_any_error_of_one_client_is_its_own() -> None:
    class Broken(DirectEngine):
        def info(self) -> WeightInfo:
            raise ZeroDivisionError("a bug in somebody's client")

    broken, good = Broken("broken", RecordingEngine()), DirectEngine("good", RecordingEngine())
    with Publisher(
        TensorSource(TENSORS), engines=[broken, good], options=PublishOptions(on_failure="report")
    ) as publisher:
        report = publisher.publish()
    broken.close()
    good.close()
    assert report.engines["good"].ok
    error = report.engines["broken"].error
    assert error is not None
    assert "ZeroDivisionError" in error.message


@pytest.mark.parametrize("change", [lambda w: w.t(), lambda w: w[:2], lambda w: w.t().contiguous()], ids=range(3))
def test_another_view_of_a_parameter_is_published_as_it_is_now(change: Any) -> None:
    model = torch.nn.Linear(3, 3, bias=False).requires_grad_(False)
    engine = RecordingEngine()
    with fleet(weightcast.ModuleSource(model), engine) as (publisher, _):
        publisher.publish()
        model.weight.data = change(model.weight.data)
        publisher.publish()
    assert torch.equal(engine.held["weight"], model.weight)


def test_a_negated_view_keeps_its_sign() -> None:
    from weightcast.host.copy import copy_all

    source = torch._neg_view(torch.ones(40000))
    target = torch.zeros(40000)
    assert source.is_neg()
    copy_all([target], [source])
    assert torch.equal(target, -torch.ones(40000))
