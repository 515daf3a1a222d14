"""One engine is brought to the current version, without a new one, while the others serve on."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from publishers import publisher_of

import weightcast
from core.direct import DirectEngine, RecordingEngine, fleet
from weightcast import TensorSource
from weightcast.errors import ClosedError, PublishError, StaleVersionError, UpdateAbortedError, to_record
from weightcast.format.messages import Offer
from weightcast.host.deadline import Deadline
from weightcast.serving.follower import Follower
from weightcast.trainer.packer import Packer

pytestmark = pytest.mark.usefixtures("leaves_nothing")
TRANSPORTS = ["memory://", "ipc://", "gloo://127.0.0.1:0", "file://{}"]
MODES = [*((transport, "staged") for transport in TRANSPORTS), ("file://{}", "streaming")]
"""In which a version can be sent again."""


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{n}": torch.randn(40, 40, generator=generator) for n in range(6)}


def url(transport: str, folder: Path) -> str:
    return transport.format(folder / "store")


def same(engine: RecordingEngine, wanted: dict[str, torch.Tensor]) -> bool:
    return engine.held.keys() == wanted.keys() and all(torch.equal(engine.held[n], wanted[n]) for n in wanted)


def assert_serve(engines: Iterable[RecordingEngine], *numbers: int) -> None:
    for engine in engines:
        assert [version.number for version in engine.versions] == list(numbers)


@pytest.mark.parametrize(("transport", "install"), MODES)
def test_a_late_engine_gets_the_version_that_the_others_serve(tmp_path: Path, transport: str, install: str) -> None:
    held, first, second, late = tensors(), RecordingEngine(), RecordingEngine(), RecordingEngine()
    newcomer = DirectEngine("late", late)
    with fleet(TensorSource(held), first, second, transport=url(transport, tmp_path), install=install) as (
        publisher,
        _,
    ):
        assert publisher.version is None, "nothing was published yet"
        publisher.publish()
        num_calls = len(first.calls), len(second.calls)
        publisher.add_engine(newcomer)
        report = publisher.sync(newcomer)
        assert (report.version, publisher.version, list(report.engines), report.ok) == (0, 0, ["late"], True)
        assert same(late, held)
        assert (len(first.calls), len(second.calls)) == num_calls, "the others serve on"
        assert publisher.sync("late").ok, "what it serves already is left alone"
        assert_serve([first, second, late], 0)
        for tensor in held.values():
            tensor.add_(1)
        assert set(publisher.publish().engines) == {"engine-0", "engine-1", "late"}
        assert all(same(engine, held) for engine in (first, second, late))
        assert_serve([first, second, late], 0, 1)
    newcomer.close()


@pytest.mark.parametrize(("transport", "install"), MODES)
def test_weights_that_have_changed_are_told_and_only_what_was_sent_is_installed(
    tmp_path: Path, transport: str, install: str
) -> None:
    """Staged buckets in memory of the sender's, and a store's, are as they were; all else is packed again."""
    held, first, late = tensors(), RecordingEngine(), RecordingEngine()
    newcomer, sent = DirectEngine("late", late), tensors()
    keeps = not transport.startswith("gloo")
    with fleet(TensorSource(held), first, transport=url(transport, tmp_path), install=install) as (publisher, _):
        publisher.publish()
        held["layer.5"].add_(1)
        if keeps:
            publisher.add_engine(newcomer, sync=True)
            assert same(late, sent)
        else:
            with pytest.raises(PublishError, match=r"weights have changed since version 0.*publish a new") as caught:
                publisher.add_engine(newcomer, sync=True)
            assert isinstance(caught.value.failures["late"], UpdateAbortedError)
            assert not late.calls, "nothing was loaded"
            assert not newcomer.gate.torn
        assert publisher.version == 0
        assert publisher.publish().ok
        assert same(late, held)
        assert same(first, held)
    newcomer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_another_plan_of_buckets_is_a_change(tmp_path: Path, transport: str) -> None:
    class Growing(TensorSource):
        def specs(self) -> Any:
            return self.now.specs()

        def regions(self) -> Any:
            return self.now.regions()

    source, newcomer = Growing(), DirectEngine("late", RecordingEngine())
    source.now = TensorSource(tensors())  # type: ignore[attr-defined]
    with fleet(source, RecordingEngine(), transport=url(transport, tmp_path)) as (publisher, _):
        publisher.publish()
        source.now = TensorSource({**tensors(), "more": torch.ones(3)})  # type: ignore[attr-defined]
        with pytest.raises(PublishError, match="weights have changed since version 0"):
            publisher.add_engine(newcomer, sync=True)
        assert publisher.publish().ok
    newcomer.close()


@pytest.mark.parametrize(("transport", "install"), MODES)
def test_an_engine_that_failed_is_brought_to_the_very_version(tmp_path: Path, transport: str, install: str) -> None:
    held, first, failing = tensors(), RecordingEngine(), RecordingEngine()
    with fleet(TensorSource(held), first, failing, transport=url(transport, tmp_path), install=install) as (
        publisher,
        _,
    ):
        failing.fail_after = 1 if install == "staged" else 0
        with pytest.raises(PublishError, match="told to fail"):
            publisher.publish()
        with pytest.raises(PublishError, match="told to fail") as caught:
            publisher.sync("engine-1")
        assert list(caught.value.failures) == ["engine-1"]
        failing.fail_after = None
        assert publisher.sync("engine-1").version == 0
        assert same(failing, held)
        assert_serve([first, failing], 0)
        assert publisher.publish().version == 1
        assert_serve([first, failing], 0, 1)


def test_an_only_engine_that_failed_is_healed_without_a_new_version(tmp_path: Path) -> None:
    """A store has given up what no engine installed: it is written again, and committed."""
    store, engine = f"file://{tmp_path}/store", RecordingEngine()
    with fleet(TensorSource(tensors()), engine, transport=store) as (publisher, (client,)):
        engine.fail_after = 1
        with pytest.raises(PublishError, match="told to fail"):
            publisher.publish()
        assert client.gate.torn
        engine.fail_after = None
        publisher.sync(client)
        assert not client.gate.torn
        assert same(engine, tensors())
        with Follower(store, RecordingEngine()) as follower:
            followed = follower.poll()
            assert followed is not None
            assert followed.version == 0


def test_a_stored_version_is_read_and_not_written_again(tmp_path: Path) -> None:
    late, newcomer = RecordingEngine(), None
    with fleet(TensorSource(tensors()), RecordingEngine(), transport=f"file://{tmp_path}/store") as (publisher, _):
        publisher.publish()
        files = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
        newcomer = DirectEngine("late", late)
        publisher.add_engine(newcomer, sync=True)
        assert same(late, tensors())
        unlike = {path.name for path, then in files.items() if path.stat().st_mtime_ns != then}
        assert not unlike - {"pins"}, "readers note their names there"
    newcomer.close()


def test_staged_buckets_are_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    newcomer = DirectEngine("late", RecordingEngine())
    with fleet(TensorSource(tensors()), RecordingEngine()) as (publisher, _):
        publisher.publish()
        monkeypatch.setattr(Packer, "fill", None)
        publisher.add_engine(newcomer, sync=True)
    newcomer.close()


# --- what is refused ---


@pytest.mark.parametrize("transport", ["memory://", "ipc://", "gloo://127.0.0.1:0"])
def test_a_streamed_version_that_no_store_keeps_is_not_sent_again(transport: str) -> None:
    first, late = RecordingEngine(), RecordingEngine()
    newcomer = DirectEngine("late", late)
    with fleet(TensorSource(tensors()), first, transport=transport, install="streaming") as (publisher, _):
        publisher.publish()
        with pytest.raises(ValueError, match=r"version 0 can't be sent again.*publish a new version"):
            publisher.add_engine(newcomer, sync=True)
        assert not late.calls
        assert set(publisher.publish().engines) == {"engine-0", "late"}, "it is in the fleet"
        assert_serve([late], 1)
    newcomer.close()


def test_before_the_first_publish_there_is_nothing_to_be_brought_to() -> None:
    engine = DirectEngine("late", RecordingEngine())
    with fleet(TensorSource(tensors()), RecordingEngine()) as (publisher, (client,)):
        with pytest.raises(ValueError, match="nothing was published yet"):
            publisher.sync(client)
        with pytest.raises(ValueError, match="nothing was published yet"):
            publisher.add_engine(engine, sync=True)
        publisher.add_engine(engine)
        publisher.publish()
        with pytest.raises(ValueError, match="stranger is not in the fleet; it has engine-0, late"):
            publisher.sync("stranger")
    with pytest.raises(ClosedError):
        publisher.sync(client)
    engine.close()


def test_a_version_that_reached_nobody_is_not_brought_to_anybody() -> None:
    engine = RecordingEngine([weightcast.TensorSpec("other", "F32", (1,))])
    with fleet(TensorSource(tensors()), engine) as (publisher, (client,)):
        with pytest.raises(PublishError):
            publisher.publish()
        with pytest.raises(ValueError, match="version 0 was not sent completely to any engine: publish a new version"):
            publisher.sync(client)


def test_an_engine_that_another_run_holds_is_refused_as_in_a_publish() -> None:
    taken = RecordingEngine()
    client, own = DirectEngine("taken", taken), DirectEngine("own", RecordingEngine())
    with publisher_of(TensorSource(tensors(1)), engines=[client]) as other:
        other.publish()
        with publisher_of(TensorSource(tensors()), engines=[own]) as publisher:
            publisher.publish()
            with pytest.raises(PublishError, match="has held this engine"):
                publisher.add_engine(client, sync=True)
            assert same(taken, tensors(1))
            publisher.remove_engine(client)
        assert other.publish().ok
    client.close()
    own.close()


def test_an_offer_is_taken_again_only_from_a_publisher_that_connected_again() -> None:
    engine = RecordingEngine()
    with fleet(TensorSource(tensors()), engine) as (publisher, (client,)):
        engine.fail_after = 1
        with pytest.raises(PublishError):
            publisher.publish()
        (connections,) = [part for part in publisher._owned if hasattr(part, "listener")]
        offer = Offer(publisher.run, 0, "0" * 64, secret=connections.listener.secret)
        with pytest.raises(StaleVersionError, match="replayed"):
            client.update(offer)
        engine.fail_after = None
        assert publisher.sync(client).ok
        with pytest.raises(StaleVersionError, match="replayed"):
            client.update(offer)


# --- faults ---


@pytest.mark.parametrize(("transport", "install"), MODES)
def test_an_engine_that_dies_during_its_sync_is_alone_in_that(tmp_path: Path, transport: str, install: str) -> None:
    first, dying, held = RecordingEngine(), RecordingEngine(), tensors()
    victim = DirectEngine("late", dying)
    load = dying.load

    def die(given: Any) -> None:
        threading.Thread(target=victim.worker.close).start()
        victim.worker._session.ended = to_record(ClosedError("it ends"))  # type: ignore[union-attr]
        raise ClosedError("it ends")

    dying.load = die  # type: ignore[method-assign]
    with fleet(TensorSource(held), first, transport=url(transport, tmp_path), install=install) as (
        publisher,
        (client,),
    ):
        publisher.publish()
        with pytest.raises(PublishError) as caught:
            publisher.add_engine(victim, sync=True)
        assert list(caught.value.failures) == ["late"]
        assert not client.gate.is_paused
        assert_serve([first], 0)
        publisher.remove_engine(victim)
        dying.load = load  # type: ignore[method-assign]
        again = DirectEngine("late", dying)
        publisher.add_engine(again, sync=True)
        assert same(dying, held)
        assert publisher.publish().ok
        again.close()
    victim.close()


@pytest.mark.parametrize(("transport", "install"), MODES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_publisher_that_gives_a_sync_up_leaves_the_others_serving(
    tmp_path: Path, transport: str, install: str, error: type[BaseException]
) -> None:
    first, late, held = RecordingEngine(), RecordingEngine(), tensors()
    newcomer = DirectEngine("late", late)

    def give_up(done: int, total: int) -> None:
        raise error

    with fleet(TensorSource(held), first, transport=url(transport, tmp_path), install=install) as (
        publisher,
        (client,),
    ):
        publisher.publish()
        publisher.add_engine(newcomer)
        if transport.startswith("file"):
            publisher.sync(newcomer, on_progress=give_up)  # which sends nothing
        else:
            with pytest.raises(error):
                publisher.sync(newcomer, on_progress=give_up)
            # A Ctrl-C does not wait for answers: the engine resumes by itself when its link ends.
            for _ in Deadline(30.0).polls(0.001, 0.05):
                if not newcomer.gate.is_paused:
                    break
            assert not newcomer.gate.is_paused
            assert not late.versions
        assert not client.gate.is_paused
        assert_serve([first], 0)
        assert publisher.sync(newcomer).ok
        assert same(late, held)
        assert publisher.publish().version == 1
        assert_serve([first, late], 0, 1)
    newcomer.close()


def test_a_server_that_was_started_again_is_bit_equal_to_one_that_was_there() -> None:
    model, other = torch.nn.Linear(40, 40), torch.nn.Linear(40, 40)
    with weightcast.EngineServer(weightcast.ModuleEngine(torch.nn.Linear(40, 40))) as stays:
        source = weightcast.ModuleSource(model)
        with weightcast.Publisher(source, engines=[stays.url]) as publisher:
            publisher.publish()
            with weightcast.EngineServer(weightcast.ModuleEngine(other)) as newcomer:
                publisher.add_engine(newcomer.url, sync=True)
                for name, tensor in model.state_dict().items():
                    assert torch.equal(other.state_dict()[name], tensor)
                port = newcomer.port
            other = torch.nn.Linear(40, 40)
            with weightcast.EngineServer(weightcast.ModuleEngine(other), port=port) as restarted:
                assert publisher.sync(restarted.url).ok
                assert torch.equal(other.weight, model.weight)
                assert publisher.publish().ok
