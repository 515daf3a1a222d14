"""A publish in the background: the trainer goes on once all is packed, and what it does meanwhile changes nothing."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from publishers import publisher_of

from core.direct import DirectEngine, RecordingEngine
from weightcast import Publisher, PublishHandle, PublishOptions, TensorSource
from weightcast.errors import ClosedError, PublishError, PublishInFlightError, UpdateAbortedError
from weightcast.format.messages import Offer, Seal
from weightcast.host.deadline import Deadline
from weightcast.trainer.options import PublishEvent

pytestmark = pytest.mark.usefixtures("leaves_nothing")
SECONDS = 30.0


def content(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"t{i}": torch.randn(40, 40, generator=generator) for i in range(12)}


class SlowEngine(DirectEngine):
    """Waits at the call that `stops_at` names: a message's type, or "finish"."""

    def __init__(self, name: str = "engine") -> None:
        super().__init__(name, RecordingEngine())
        self.stops_at: Any = None
        self.reached, self.goes_on = threading.Event(), threading.Event()

    def update(self, info: Any) -> None:
        self._stop(type(info))
        super().update(info)

    def finish(self, version: int) -> None:
        self._stop("finish")
        super().finish(version)

    def go_on(self) -> None:
        self.stops_at = None
        self.goes_on.set()

    def _stop(self, at: Any) -> None:
        if self.stops_at == at:
            self.reached.set()
            assert self.goes_on.wait(SECONDS)
            self.goes_on.clear()
            self.reached.clear()


class Loop:
    """A trainer with one engine that can be held up; its weights are a function of the version."""

    def __init__(self, **options: Any) -> None:
        self.engine = SlowEngine()
        self.weights = content(0)
        options = {"bucket_size_bytes": 4096, "deadline_seconds": 10.0, **options}
        self.publisher = publisher_of(TensorSource(self.weights), engines=[self.engine], **options)

    def train(self, version: int) -> None:
        for name, tensor in content(version).items():
            self.weights[name].copy_(tensor)

    def holds(self) -> dict[str, torch.Tensor]:
        return self.engine.worker.engine.held

    def start(self, version: int, **arguments: Any) -> PublishHandle:
        handle = self.publisher.start(version, **arguments)
        assert handle is not None
        return handle

    def close(self) -> None:
        self.engine.go_on()
        self.publisher.close()
        self.engine.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def assert_serves(loop: Loop, version: int) -> None:
    torch.testing.assert_close(loop.holds(), content(version), rtol=0, atol=0)
    assert loop.engine.info().weight_version == str(version)


def test_the_trainer_goes_on_while_the_engine_installs(loop: Loop) -> None:
    loop.engine.stops_at = "finish"
    handle = loop.start(0)
    assert handle.packed()
    assert not handle.done()
    assert handle.version == 0
    loop.train(7)  # is not what was published
    assert loop.engine.reached.wait(SECONDS)
    with pytest.raises(TimeoutError):
        handle.result(timeout_seconds=0.01)
    loop.engine.go_on()
    report = handle.result(SECONDS)
    assert handle.done()
    assert report.ok
    assert_serves(loop, 0)
    assert 0.0 < report.seconds.pack < report.seconds.stall == handle.stall_seconds < report.seconds.total
    assert handle.result() is report


def test_of_a_publish_that_blocks_the_stall_is_all(loop: Loop) -> None:
    seconds = loop.publisher.publish().seconds
    assert seconds.stall == seconds.total > 0.0


def test_what_a_start_does_while_another_publish_is_in_flight(loop: Loop) -> None:
    loop.engine.stops_at = "finish"
    first = loop.start(0)
    assert loop.engine.reached.wait(SECONDS)
    assert loop.publisher.start(1, overlap="skip") is None
    with pytest.raises(PublishInFlightError, match="in flight"):
        loop.publisher.start(1, overlap="raise")
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(loop.start, 1)
        loop.train(1)
        assert not waits.done()
        loop.engine.go_on()
        second = waits.result(SECONDS)
    assert first.done()
    assert second.result(SECONDS).ok
    assert_serves(loop, 1)
    assert loop.publisher.version == 1


@pytest.mark.parametrize("overlap", ["skip", "raise"])
def test_a_start_after_the_result_of_the_last_one_is_not_declined(loop: Loop, overlap: Any) -> None:
    for version in range(20):
        loop.train(version)
        assert loop.start(version, overlap=overlap).result(SECONDS).ok
    assert_serves(loop, 19)


def test_every_other_call_waits_for_the_publish_in_flight(loop: Loop) -> None:
    loop.engine.stops_at = "finish"
    handle = loop.start(0)
    other = SlowEngine("other")
    calls = [loop.publisher.release, lambda: loop.publisher.add_engine(other), lambda: loop.publisher.publish(1)]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(call) for call in calls]
        assert loop.engine.reached.wait(SECONDS)
        assert not any(call.done() for call in waiting)
        loop.engine.go_on()
        assert handle.result(SECONDS).ok
        for call in waiting:
            call.result(SECONDS)
    loop.publisher.close()
    with pytest.raises(ClosedError):
        loop.publisher.start()
    other.close()


def test_closing_waits_for_the_publish_in_flight() -> None:
    loop = Loop()
    loop.engine.stops_at = "finish"
    with ThreadPoolExecutor() as pool:
        with loop.publisher:
            handle = loop.start(0)
            pool.submit(lambda: loop.engine.reached.wait(SECONDS) and loop.engine.go_on())
        assert handle.done()
        assert handle.result().ok
    loop.close()


# --- cancelled ------------------------------------------------------------------------------------


def test_a_publish_is_cancelled_before_engines_install(loop: Loop) -> None:
    assert loop.publisher.publish(0).ok
    loop.train(1)
    loop.engine.stops_at = Seal
    handle = loop.start(1)
    assert loop.engine.reached.wait(SECONDS)
    assert handle.cancel()
    loop.engine.go_on()
    with pytest.raises(UpdateAbortedError, match="was cancelled"):
        handle.result(SECONDS)
    assert handle.cancel() is False
    assert_serves(loop, 0)
    loop.train(2)
    assert loop.start(2).result(SECONDS).ok
    assert_serves(loop, 2)


def test_an_install_that_has_begun_is_not_cancelled(loop: Loop) -> None:
    loop.engine.stops_at = "finish"
    handle = loop.start(0)
    assert loop.engine.reached.wait(SECONDS)
    assert not handle.cancel()
    loop.engine.go_on()
    assert handle.result(SECONDS).ok
    assert_serves(loop, 0)


def test_a_ctrl_c_while_start_waits_cancels_the_publish(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightcast.trainer.background import Flight

    loop.engine.stops_at = Offer

    def interrupted(flight: Flight) -> bool:
        assert loop.engine.reached.wait(SECONDS)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Flight, "wait_until_packed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.publisher.start(0)
    loop.engine.go_on()
    loop.train(1)
    assert loop.start(1).result(SECONDS).ok
    assert_serves(loop, 1)
    assert [version.number for version in loop.engine.worker.engine.versions] == [1]


# --- failures -------------------------------------------------------------------------------------


def test_what_fails_before_all_is_packed_is_raised_by_start(loop: Loop) -> None:
    loop.start(5).result(SECONDS)
    with pytest.raises(ValueError, match="is not above 5"):
        loop.publisher.start(5)
    with pytest.raises(TypeError, match="on_progress"):
        loop.publisher.start(on_progress=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'wait', 'skip' or 'raise'"):
        loop.publisher.start(overlap="queue")  # type: ignore[arg-type]
    assert loop.start(6).result(SECONDS).ok


@pytest.mark.parametrize("on_failure", ["raise", "report"])
def test_what_fails_later_is_the_result(on_failure: str, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(on_failure=on_failure)
    loop.start(0).result(SECONDS)
    loop.engine.worker.engine.fail_after = 3
    loop.train(1)
    handle = loop.start(1)
    if on_failure == "report":
        assert not handle.result(SECONDS).ok
    else:
        with pytest.raises(PublishError, match="told to fail"):
            handle.result(SECONDS)
        assert "the publish of version 1 in the background failed: 1 of 1 engine did not take version 1" in caplog.text
    loop.engine.worker.engine.fail_after = None
    loop.train(2)
    assert loop.start(2).result(SECONDS).ok
    assert_serves(loop, 2)
    loop.close()


def test_streaming_engines_are_refused_by_name() -> None:
    loop = Loop(install="streaming")
    with pytest.raises(ValueError, match="install='staged'"):
        loop.publisher.start()
    assert asyncio.run(loop.publisher.publish_async()).ok
    loop.close()


def test_a_source_that_moves_nothing_on_this_thread_is_read_on_another(loop: Loop) -> None:
    threads = set[int]()
    loop.start(0, on_progress=lambda done, total: threads.add(threading.get_ident())).result(SECONDS)
    assert threads
    assert threading.get_ident() not in threads


# --- what is known of the fleet -------------------------------------------------------------------


def test_the_publisher_says_what_it_knows_of_its_engines(loop: Loop) -> None:
    publisher = loop.publisher
    assert publisher.last_report is None
    (new,) = publisher.engines
    assert (new.name, new.version, new.state, new.last_error) == ("engine", None, "new", None)
    loop.engine.stops_at = "finish"
    handle = loop.start(4)
    assert loop.engine.reached.wait(SECONDS)
    assert [(engine.version, engine.state) for engine in publisher.engines] == [(None, "connected")]
    loop.engine.go_on()
    report = handle.result(SECONDS)
    assert publisher.last_report is report
    assert [(engine.version, engine.state) for engine in publisher.engines] == [(4, "connected")]
    loop.engine.worker.engine.fail_after = 3
    with pytest.raises(PublishError) as caught:
        loop.start(5).result(SECONDS)
    (failed,) = publisher.engines
    assert (failed.version, failed.state) == (4, "failed")
    assert failed.last_error is not None
    assert "told to fail" in failed.last_error.message
    assert publisher.last_report is caught.value.report
    loop.engine.worker.engine.fail_after = None
    assert publisher.publish(6).ok
    loop.engine.close()
    for _ in Deadline(SECONDS).polls(0.01, 0.1):
        if [engine.state for engine in publisher.engines] == ["lost"]:
            return
    pytest.fail("the engine's end was not noticed")


def test_each_phase_of_each_engine_is_an_event() -> None:
    events: list[PublishEvent] = []
    engines = [SlowEngine("a"), SlowEngine("b")]
    options = PublishOptions(on_event=events.append, on_failure="report", bucket_size_bytes=4096)
    with Publisher(TensorSource(content(0)), engines=engines, options=options) as publisher:
        publisher.publish(3)
        phases = ["offered", "packed", "received", "installed"]
        of_engines = ["a", "b", None]
        whole = [(phase, name) for phase in phases for name in ([None] if phase == "packed" else of_engines)]
        assert [(event.phase, event.engine) for event in events] == whole
        assert all(event.version == 3 and event.error is None for event in events)
        seconds = [event.seconds for event in events]
        assert seconds == sorted(seconds)
        events.clear()
        engines[0].worker.engine.fail_after = 3
        report = publisher.publish(4)
        failed = [(event.phase, event.engine, event.error) for event in events if event.error is not None]
        assert failed == [("installed", "a", report.engines["a"].error)]
        events.clear()
        engines[0].close()
        report = publisher.publish(5)
        told = [(event.phase, event.error) for event in events if event.engine == "a"]
        assert told == [("offered", report.engines["a"].error)]
    engines[1].close()


def test_what_on_event_raises_ends_the_publish() -> None:
    def refuse(event: PublishEvent) -> None:
        if event.phase == "packed" and event.version == 1:
            raise RuntimeError("not this one")

    loop = Loop(on_event=refuse)
    assert loop.start(0).result(SECONDS).ok
    loop.train(1)
    with pytest.raises(RuntimeError, match="not this one"):
        loop.start(1).result(SECONDS)
    assert_serves(loop, 0)
    with pytest.raises(TypeError, match="on_event"):
        PublishOptions(on_event=3)  # type: ignore[arg-type]
    loop.close()


def test_a_report_has_figures_for_trackers(loop: Loop) -> None:
    metrics = loop.start(3).result(SECONDS).metrics()
    assert metrics["weightcast/version_max"] == 3.0
    assert metrics["weightcast/failed_engines_total"] == 0.0
    assert 0.0 < metrics["weightcast/stall_s"] < metrics["weightcast/update_s"]
    assert all(type(value) is float for value in metrics.values())
    assert loop.publisher.last_report is not None
    assert "sync/version_max" in loop.publisher.last_report.metrics(prefix="sync/")


# --- asyncio --------------------------------------------------------------------------------------


def test_a_handle_is_awaited_and_calls_back(loop: Loop) -> None:
    handles: list[PublishHandle] = []
    called = threading.Event()

    async def train() -> None:
        handle = loop.start(0)
        handle.add_done_callback(lambda ended: (handles.append(ended), called.set()))
        report = await handle
        assert report.ok
        assert await handle is report

    asyncio.run(train())
    assert called.wait(SECONDS)
    assert handles[0].result().version == 0


def test_the_event_loop_runs_during_a_publish(loop: Loop) -> None:
    """Also while it waits for the publish before."""
    loop.engine.stops_at = "finish"

    async def main() -> list[int]:
        first = asyncio.create_task(loop.publisher.publish_async(0))
        second = asyncio.create_task(loop.publisher.publish_async(1))
        while not loop.engine.reached.is_set():
            await asyncio.sleep(0.001)
        assert not first.done()
        assert not second.done()
        loop.engine.go_on()
        return [(await first).version, (await second).version]

    assert asyncio.run(main()) == [0, 1]


def test_a_cancelled_task_cancels_its_publish(loop: Loop) -> None:
    loop.publisher.publish(0)
    loop.train(1)
    loop.engine.stops_at = Seal

    async def main() -> None:
        task = asyncio.create_task(loop.publisher.publish_async(1))
        while not loop.engine.reached.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    loop.engine.go_on()
    loop.train(2)
    assert loop.start(2).result(SECONDS).ok
    assert [version.number for version in loop.engine.worker.engine.versions] == [0, 2]


def test_a_cancelled_task_lets_a_streamed_version_go_on() -> None:
    """Engines that have half of it would be torn."""
    loop = Loop(install="streaming")
    loop.engine.stops_at = Seal

    async def main() -> None:
        task = asyncio.create_task(loop.publisher.publish_async(0))
        while not loop.engine.reached.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    loop.engine.go_on()
    assert loop.publisher.publish(1).ok
    assert [version.number for version in loop.engine.worker.engine.versions] == [0, 1]
    loop.close()


# --- at random ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_starts_cancels_skips_and_failures_in_any_order(loop: Loop, seed: int) -> None:
    """What the engine serves is always one whole version, of a publish that says that it went well."""
    chance, served, in_flight = random.Random(seed), [-1], list[tuple[int, PublishHandle]]()
    recorded: RecordingEngine = loop.engine.worker.engine

    def end(number: int, handle: PublishHandle) -> None:
        try:
            assert handle.result(SECONDS).version == number
        except UpdateAbortedError:
            return
        served.append(number)

    for number in range(60):
        loop.train(number)
        overlap = chance.choice(["wait", "skip", "raise"])
        try:
            handle = loop.publisher.start(number, overlap=overlap)
        except PublishInFlightError:
            assert overlap == "raise"
            continue
        if handle is None:
            assert overlap == "skip"
            continue
        for former in in_flight:
            end(*former)
        in_flight = [(number, handle)]
        if chance.random() < 0.4:
            handle.cancel()
        if chance.random() < 0.3:
            end(*in_flight.pop())
            assert_serves(loop, served[-1]) if served[-1] >= 0 else None
    for former in in_flight:
        end(*former)
    assert served[1:] == [version.number for version in recorded.versions]
    assert_serves(loop, served[-1])
    assert threading.active_count() < 30
