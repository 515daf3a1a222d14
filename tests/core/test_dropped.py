"""A publisher that nothing refers to any more lets its engines go, as `close` would."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from publishers import publisher_of

import weightcast
from core.direct import DirectEngine, RecordingEngine
from weightcast import TensorSource
from weightcast.errors import EngineBusyError, PublishError
from weightcast.trainer.publisher import Publisher

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TENSORS = {f"t{i}": torch.full((40, 40), float(i)) for i in range(8)}
TRANSPORTS = ["ipc://", "memory://", "gloo://127.0.0.1:0"]
DEADLINE_SECONDS = 20.0


def made(client: DirectEngine, transport: str = "ipc://", **options: object) -> Publisher:
    options = {"bucket_size_bytes": 4096, "deadline_seconds": DEADLINE_SECONDS, **options}
    return publisher_of(TensorSource(TENSORS), engines=[client], transport=transport, **options)


def is_free(client: DirectEngine) -> bool:
    """Whether another run gets the engine without taking it over, and can update it."""
    with made(client, "memory://") as other:
        return other.publish().ok


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dropped_publisher_frees_its_engine(transport: str, install: str) -> None:
    client = DirectEngine("engine", RecordingEngine())
    publisher = made(client, transport, install=install)
    assert publisher.publish().ok
    gone = weakref.ref(publisher)
    del publisher
    assert gone() is None
    assert is_free(client)
    client.close()


def test_a_cell_that_is_run_again_gets_the_engine() -> None:
    client = DirectEngine("engine", RecordingEngine())
    for _ in range(3):
        publisher = made(client, takeover=True)
        assert publisher.publish().ok
    publisher = made(client)  # the former one goes once this one is there
    assert publisher.publish().ok
    publisher.close()
    client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publisher_in_a_cycle_frees_its_engine_when_it_is_collected(transport: str) -> None:
    client = DirectEngine("engine", RecordingEngine())
    publisher = made(client, transport)
    publisher.itself = publisher  # type: ignore[attr-defined]
    publisher._source.publisher = publisher  # type: ignore[attr-defined]
    assert publisher.publish().ok
    del publisher
    gc.collect()
    assert is_free(client)
    client.close()


def test_a_collection_in_a_thread_of_its_own_does_not_wait_for_itself() -> None:
    client = DirectEngine("engine", RecordingEngine())
    publisher = made(client)
    publisher.publish()
    assert publisher._connections is not None
    links = publisher._connections.listener
    begun, collected, read = threading.Event(), threading.Event(), links.condition.on_ready

    def collecting(events: list[tuple[int, int]]) -> None:
        # Dropping the publisher reads its links, so this is called again before the collection has ended.
        if not begun.is_set():
            begun.set()
            gc.collect()
            collected.set()
        read(events)

    publisher.itself = publisher  # type: ignore[attr-defined]
    hold = client.worker._session
    assert hold is not None
    del publisher
    # Not earlier: a heartbeat would have the publisher collected while it is referred to.
    links.condition.on_ready = collecting
    del links
    from weightcast.format.messages import Accepted

    hold.send(Accepted(0))
    assert collected.wait(DEADLINE_SECONDS)
    assert is_free(client)
    client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publisher_that_is_dropped_in_mid_publish_goes_when_that_has_ended(transport: str) -> None:
    client = DirectEngine("engine", RecordingEngine())
    half_way, go_on, reports = threading.Event(), threading.Event(), []

    def wait(done_bytes: int, total_bytes: int) -> None:
        half_way.set()
        assert go_on.wait(DEADLINE_SECONDS)

    def publish(publisher: Publisher) -> None:
        reports.append(publisher.publish(on_progress=wait))

    publisher = made(client, transport)
    gone = weakref.ref(publisher)
    thread = threading.Thread(target=publish, args=(publisher,))
    thread.start()
    del publisher
    assert half_way.wait(DEADLINE_SECONDS)
    assert gone() is not None
    go_on.set()
    thread.join(DEADLINE_SECONDS)
    assert gone() is None
    assert reports[0].ok
    assert is_free(client)
    client.close()


def test_an_error_that_is_kept_keeps_its_publisher_and_the_message_says_what_to_do() -> None:
    engine = RecordingEngine()
    client = DirectEngine("engine", engine)
    kept: list[BaseException] = []

    def run() -> str:
        publisher = made(client, lease_seconds=20.0)
        publisher.publish()
        engine.fail_after = 0
        try:
            publisher.publish()
        except PublishError as exc:
            kept.append(exc)  # as a notebook keeps the last one
        return publisher.run

    former = run()
    engine.fail_after = None
    with made(client) as other:
        with pytest.raises(PublishError) as caught:
            other.publish()
        error = caught.value.failures["engine"]
        assert isinstance(error, EngineBusyError)
        del caught
        kept.clear()
        gc.collect()
        assert other.publish().ok
    text = str(error)
    assert former in text
    assert re.search(r"\(pid \d+ on .+\) has held this engine since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+00:00", text)
    assert "the lease does not end" in text
    assert re.search(r"without another message it ends in at most (20|1?\d) s", text)
    assert "takeover=True" in text
    client.close()


def test_a_publisher_that_never_published_is_dropped_without_a_word() -> None:
    client = DirectEngine("engine", RecordingEngine())
    publisher = made(client)
    gone = weakref.ref(publisher)
    del publisher
    assert gone() is None
    with pytest.raises(ValueError, match="transport"):
        Publisher(TensorSource(TENSORS), transport="pigeon://")
    assert is_free(client)
    client.close()


PROGRAM = """
import sys, torch, weightcast
module = torch.nn.Linear(4, 4)
publisher = weightcast.Publisher(weightcast.ModuleSource(module), transport=sys.argv[2], engines=[sys.argv[1]])
publisher.publish()
if "cycle" in sys.argv:
    publisher.itself = publisher
print("published")
"""


@pytest.mark.cluster
@pytest.mark.parametrize(("transport", "how"), [("ipc://", "end"), ("ipc://", "cycle"), ("gloo://127.0.0.1:0", "end")])
def test_a_program_that_ends_with_an_open_publisher_ends_well(transport: str, how: str) -> None:
    module = torch.nn.Linear(4, 4)
    with weightcast.EngineServer(weightcast.ModuleEngine(module), port=0).start() as server:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.url, transport, how], capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "published", "")
        with Publisher(weightcast.ModuleSource(module), engines=[server.url]) as other:
            assert other.publish().ok
