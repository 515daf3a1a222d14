"""Many engines behind one publisher: what each costs, and that the loss of some stays theirs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import fleet
import pytest
import torch

from weightcast import Publisher, PublishOptions, TensorSource
from weightcast.control import client
from weightcast.control.server.connections import KEEP_ALIVE_SECONDS
from weightcast.trainer.options import PublishEvent

pytestmark = pytest.mark.usefixtures("leaves_nothing")
NUM_ENGINES = 100


@pytest.fixture
def processes() -> Iterator[list[fleet.StandInProcess]]:
    with fleet.started(NUM_ENGINES, 2) as processes:
        yield processes


def test_many_engines(processes: list[fleet.StandInProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine is, no connection gets too old.
    monkeypatch.setattr(client, "_MAX_IDLE_SECONDS", KEEP_ALIVE_SECONDS)
    tensors = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in fleet.SPECS}
    urls = [url for process in processes for url in process.urls]
    num_threads: list[int] = []
    doomed: list[fleet.StandInProcess] = []

    def on_event(event: PublishEvent) -> None:
        num_threads.append(threading.active_count())
        if event.phase == "offered" and event.engine is None:
            for process in doomed:
                process.kill()

    def states() -> dict[str, fleet.State]:
        return {url: state for process in processes for url, state in process.state().items()}

    options = PublishOptions(on_event=on_event, on_failure="report")
    with contextlib.closing(Publisher(TensorSource(tensors), engines=urls, options=options)) as publisher:
        before = {}
        for number in (1, 2, 3):
            for tensor in tensors.values():
                tensor.fill_(number)
            assert publisher.publish().ok
            after = states()
            assert {state.value for state in after.values()} == {number}
            for url, state in after.items():
                assert number == 1 or state.num_requests - before[url].num_requests <= 4
                assert state.num_connections == 1
            before = after
        assert max(num_threads) < NUM_ENGINES

        lost = processes.pop()
        doomed.append(lost)
        for tensor in tensors.values():
            tensor.fill_(4)
        report = publisher.publish()
        assert {name for name, result in report.engines.items() if result.error is not None} == set(lost.urls)
        assert {state.value for state in states().values()} == {4}
