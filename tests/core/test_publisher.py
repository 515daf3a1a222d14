"""The publisher's own contract: its arguments, its fleet, what an error leaves behind."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from msgspec import UNSET
from publishers import publisher_of

import weightcast
from core.direct import DirectEngine, RecordingEngine, fleet
from weightcast import TensorSource
from weightcast.errors import (
    ClosedError,
    ControlError,
    EngineBusyError,
    IncompatibleWeightsError,
    InsufficientMemoryError,
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    PublishError,
    RefusedError,
    StaleVersionError,
    UnsupportedError,
    WrongBaseError,
)
from weightcast.format.messages import Offer
from weightcast.host import memory as host_memory
from weightcast.host.deadline import Deadline
from weightcast.native.tables import PackTable
from weightcast.seams.client import EngineClient
from weightcast.testing.transport_kit import PATIENCE_SECONDS, Background
from weightcast.trainer import packer
from weightcast.trainer.publisher import Publisher

pytestmark = pytest.mark.usefixtures("leaves_nothing")

TENSORS = {f"t{i}": torch.randn(40, 40) for i in range(12)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"transport": "carrier-pigeon://"}, "no transport 'carrier-pigeon'; known here: file, gloo, ipc"),
        ({"transport": "ipc"}, "not a transport URL"),
        ({"install": "magic"}, "'staged' or 'streaming'"),
        ({"on_failure": "ignore"}, "'raise' or 'report'"),
        ({"deadline_seconds": 0}, "must be positive"),
        ({"deadline_seconds": float("nan")}, "must be positive"),
        ({"deadline_seconds": 1e9}, "at most 864000"),
        ({"lease_seconds": 1e9}, "at most 864000"),
        ({"bucket_size_bytes": 0}, "must be from 256 to 4294967296"),
        ({"engines": ["http://[::1"]}, "not the URL of an engine"),
        ({"engines": ["localhost:8000"]}, "not the URL of an engine"),
        ({"engines": ["http://a", "http://a/"]}, "in the fleet already"),
    ],
)
def test_wrong_arguments_say_what_is_right(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        publisher_of(TensorSource(TENSORS), **options)


@pytest.mark.parametrize("name", ["prepare", "publish", "sync", "add_engine", "remove_engine", "release", "close"])
def test_what_a_publish_calls_can_not_call_the_publisher(name: str) -> None:
    """It would end the update under way, or take its memory, and the report would say that it went well."""
    with fleet(TensorSource(TENSORS), RecordingEngine(), RecordingEngine()) as (publisher, clients):
        publisher.publish()
        arguments = [clients[0]] if name in ("sync", "add_engine", "remove_engine") else []

        def on_progress(done_bytes: int, total_bytes: int) -> None:
            with pytest.raises(ValueError, match="this thread is publishing"):
                getattr(publisher, name)(*arguments)

        assert publisher.publish(on_progress=on_progress).ok
        assert [client.gate.version and client.gate.version.number for client in clients] == [1, 1]


def test_a_call_that_a_ctrl_c_has_left_is_waited_for() -> None:
    """Coming later, it would take what the next publish knows of its engine for what it knew itself."""
    entered, ended = threading.Event(), threading.Event()

    class Slow(DirectEngine):
        def update(self, message: Any) -> None:
            super().update(message)
            if isinstance(message, Offer) and message.version == 1:
                entered.set()
                ended.wait(PATIENCE_SECONDS)

    class Interrupting(DirectEngine):
        def update(self, message: Any) -> None:
            super().update(message)
            if isinstance(message, Offer) and message.version == 1:
                entered.wait(PATIENCE_SECONDS)
                raise KeyboardInterrupt

    # Futures are waited for in the order of the engines.
    clients = [Interrupting("a", RecordingEngine()), Slow("b", RecordingEngine())]
    with Publisher(TensorSource(TENSORS), engines=clients) as publisher:
        publisher.publish()
        later = threading.Timer(0.2, ended.set)
        later.start()
        with pytest.raises(KeyboardInterrupt):
            publisher.publish()
        assert ended.is_set()
        later.join()
        assert publisher.publish().ok
    for client in clients:
        client.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_error_in_mid_publish_leaves_nobody_paused_and_the_next_publish_works(
    error: type[BaseException], install: str
) -> None:
    engine = RecordingEngine()
    with fleet(TensorSource(TENSORS), engine, install=install) as (publisher, (client,)):
        publisher.publish()
        wire = publisher._connections
        assert wire is not None
        send = wire.sender.send

        def fail_once(index: int, num_bytes: int) -> None:
            wire.sender.send = send  # type: ignore[method-assign]
            raise error("in the middle")

        wire.sender.send = fail_once  # type: ignore[method-assign]
        with pytest.raises(error):
            publisher.publish()
        assert any(client.gate.is_open or client.gate.torn for _ in Deadline(PATIENCE_SECONDS).polls(0.001, 0.05))
        assert not client.gate.is_paused
        report = publisher.publish()
        assert report.ok
        assert client.gate.version is not None
        assert client.gate.version.number == report.version == 2
        assert not client.gate.torn


def test_report_instead_of_raise() -> None:
    good, bad = RecordingEngine(), RecordingEngine()
    bad.fail_after = 3
    with fleet(TensorSource(TENSORS), good, bad, on_failure="report") as (publisher, _):
        report = publisher.publish()
    assert not report.ok
    assert report.engines["engine-0"].ok
    error = report.engines["engine-1"].error
    assert error is not None
    assert error.kind == "InstallError"
    assert b'"engine-1"' in report.to_json()


def test_a_report_is_printed_as_a_table() -> None:
    good, bad = RecordingEngine(), RecordingEngine()
    bad.fail_after = 3
    with fleet(TensorSource(TENSORS), good, bad, on_failure="report") as (publisher, _):
        first, second, heading, *rows, problem = str(publisher.publish(version=7)).splitlines()
        for engine in (good, bad):
            engine.fail_after = 0
        nowhere = str(publisher.publish())
        bad.fail_after = good.fail_after = None
        whole = str(publisher.publish())
    assert first.startswith("version 7: 76,800 bytes (tensors: 12, buckets: ")
    assert second.startswith("offer ")
    assert heading.split() == ["engine", "result", "pause", "install"]
    assert [row.split()[:2] for row in rows[:1]] == [["engine-0", "serves"]]
    assert rows[1].split()[:2] == ["engine-1", "InstallError"]
    assert len({len(line) for line in (heading, *rows)}) == 1, "columns are aligned"
    assert problem.startswith("engine-1: InstallError: ")
    assert nowhere.startswith("version 8 was not installed anywhere\n")
    assert whole.count("serves 9") == 2
    assert len(whole.splitlines()) == 5


@pytest.mark.parametrize("over_http", [False, True])
@pytest.mark.parametrize("call", ["publish", "sync"])
def test_a_publish_inside_a_step_of_this_thread_is_refused_at_once(call: str, over_http: bool) -> None:
    model = torch.nn.Linear(4, 3)
    if over_http:
        engine: Any = weightcast.EngineServer(weightcast.ModuleEngine(torch.nn.Linear(4, 3))).start()
    else:
        engine = weightcast.LocalEngine(weightcast.ModuleEngine(torch.nn.Linear(4, 3)))
    target = engine.url if over_http else engine
    with contextlib.closing(engine), Publisher(weightcast.ModuleSource(model), engines=[target]) as publisher:
        publisher.publish()
        with engine.gate.step(), pytest.raises(ValueError, match=r"was called inside `with step\(\):` of this thread"):
            publisher.publish() if call == "publish" else publisher.sync(target)
        assert publisher.publish().version == 1


def test_fleet_may_change_between_publishes() -> None:
    first, second = RecordingEngine(), RecordingEngine()
    newcomer = DirectEngine("newcomer", second)
    with fleet(TensorSource(TENSORS), first) as (publisher, (client,)):
        publisher.publish()
        publisher.add_engine(newcomer)
        assert set(publisher.publish().engines) == {"engine-0", "newcomer"}
        publisher.remove_engine(client)
        assert set(publisher.publish().engines) == {"newcomer"}
        with pytest.raises(ValueError, match="not in the fleet"):
            publisher.remove_engine("engine-0")
        with Publisher(TensorSource(TENSORS), engines=[client]) as other:
            assert other.publish().version == 2  # one above the engine's own
    newcomer.close()
    assert [v.number for v in first.versions] == [0, 1, 2]
    assert [v.number for v in second.versions] == [1, 2]


def test_versions_only_grow_and_close_is_final() -> None:
    with fleet(TensorSource(TENSORS), RecordingEngine()) as (publisher, _):
        assert publisher.publish(10).version == 10
        assert publisher.publish().version == 11
        for version, words in ((11, "not above 11"), (3, "not above 11"), (-1, "from 0 to"), (1 << 63, "from 0 to")):
            with pytest.raises(ValueError, match=words):
                publisher.publish(version)
        publisher.close()
        publisher.close()
        with pytest.raises(ClosedError):
            publisher.publish()


def test_calls_from_several_threads_wait_for_each_other() -> None:
    engine, errors = RecordingEngine(), []

    def publish(publisher: Publisher) -> None:
        try:
            publisher.publish()
        except BaseException as exc:
            errors.append(exc)

    with fleet(TensorSource(TENSORS), engine) as (publisher, _):
        threads = [threading.Thread(target=publish, args=(publisher,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert errors == []
    assert [v.number for v in engine.versions] == [0, 1, 2, 3, 4, 5]


def test_one_engine_that_is_not_there_does_not_spoil_the_others() -> None:
    engine = RecordingEngine()
    with fleet(TensorSource(TENSORS), engine) as (publisher, _):
        publisher.add_engine("http://127.0.0.1:9")
        with pytest.raises(PublishError, match="1 of 2 engines") as caught:
            publisher.publish()
    assert isinstance(caught.value.failures["http://127.0.0.1:9"], PeerDiedError)
    assert len(engine.versions) == 1


class SilentEngine(DirectEngine):
    """Installs, or does not, and does not say so."""

    installs = True
    num_asked: int | None = None

    def finish(self, version: int) -> None:
        if self.installs:
            super().finish(version)
        self.num_asked = 0
        raise PeerTimeoutError(f"{self.name} gave no answer in time", peer=self.name)

    def info(self) -> Any:
        if self.num_asked is not None:
            self.num_asked += 1
        return super().info()


@pytest.mark.parametrize("installs", [True, False])
def test_an_engine_that_was_silent_for_the_deadline_is_not_asked_again(installs: bool) -> None:
    """That could take as long once more. If it has installed the version, its workers have said so."""
    engine = SilentEngine("engine", RecordingEngine())
    engine.installs = installs
    with (
        contextlib.closing(engine),
        publisher_of(TensorSource(TENSORS), engines=[engine], on_failure="report") as publisher,
    ):
        report = publisher.publish()
        assert engine.num_asked == 0
        assert report.ok is installs
        assert [error.kind for error in report.failures.values()] == ([] if installs else ["PeerTimeoutError"])


def test_token_is_needed_and_named_when_missing() -> None:
    module = torch.nn.Linear(3, 3)
    source = weightcast.ModuleSource(torch.nn.Linear(3, 3))
    with weightcast.EngineServer(weightcast.ModuleEngine(module), token="s3cret") as server:
        with Publisher(source, engines=[server.url]) as publisher, pytest.raises(PublishError) as caught:
            publisher.publish()
        error = caught.value.failures[server.url]
        assert isinstance(error, ControlError)
        assert "401" in str(error)
        assert "token" in str(error)
        with Publisher(source, engines=[server.url], token="s3cret") as publisher:
            assert publisher.publish().ok


def test_memory_is_checked_before_any_byte_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    from weightcast.host import memory as host_memory

    engine = RecordingEngine()
    with fleet(TensorSource(TENSORS), engine) as (publisher, (client,)):
        with monkeypatch.context() as patch:
            patch.setattr(host_memory, "available_bytes", lambda *args, **kwargs: 1000)
            with pytest.raises(InsufficientMemoryError, match="1000"):
                publisher.publish()
        assert engine.calls == []
        assert publisher.publish().ok
        assert not client.gate.is_paused


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_a_publisher_that_was_prepared_publishes_from_that_memory(install: str) -> None:
    with fleet(TensorSource(TENSORS), RecordingEngine(), install=install) as (publisher, (client,)):
        publisher.prepare()
        assert publisher._connections is not None
        assert not client.gate.is_paused
        sender: Any = publisher._connections.sender
        arena = sender._arena
        assert arena.size_bytes >= (76_800 if install == "staged" else 2 * 4096)
        arena.populating.wait(arena.size_bytes, 60.0)
        assert publisher.publish().ok
        publisher.prepare()
        report = publisher.publish()
        assert report.ok
        assert sender._arena is arena
        assert report.seconds.memory == 0.0
        publisher.release()
        assert sender._arena is None
        report = publisher.publish()
        assert report.ok
        assert 0.0 < report.seconds.memory < report.seconds.send


class Mixed(torch.nn.Module):
    """Tensors that are packed as bytes, with strides, and by casts to bfloat16; of many buckets of 4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = torch.nn.ParameterList(torch.randn(30, 40) for _ in range(6))
        self.columns = torch.nn.Parameter(torch.randn(40, 30).t())
        self.small = torch.nn.Parameter(torch.randn(500).bfloat16())
        self.register_buffer("steps", torch.arange(700))


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_prepared_publish_sends_the_values_of_its_time(
    dtype: torch.dtype | None, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables for packing are made by `prepare`, where no tensor of a bucket is cast, and not again."""
    made = list[PackTable]()

    class Counted(PackTable):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(packer, "PackTable", Counted)
    model, served = Mixed(), Mixed() if dtype is None else Mixed().to(dtype)
    source = weightcast.ModuleSource(model, dtype=dtype)
    with fleet(source, weightcast.ModuleEngine(served), install=install) as (publisher, _):
        publisher.prepare()
        num_prepared = len(made)
        for number in range(3):
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.add_(number + 1)
            report = publisher.publish()
            expected = model if dtype is None else copy.deepcopy(model).to(dtype)
            for (name, found), wanted in zip(served.state_dict().items(), expected.state_dict().values(), strict=True):
                assert torch.equal(found, wanted), name
        assert len(made) == report.num_buckets
        assert 0 < num_prepared < len(made) if dtype else num_prepared == len(made)
        publisher.release()
        assert publisher.publish().ok
        assert len(made) == report.num_buckets


MOVES: dict[str, Callable[[torch.nn.Linear], object]] = {
    "other memory": lambda layer: setattr(layer.weight, "data", torch.randn(64, 64)),
    "another parameter": lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.randn(64, 64))),
    "of another tensor": lambda layer: torch.utils.swap_tensors(layer.weight, torch.nn.Parameter(torch.randn(64, 64))),
    "its storage set": lambda layer: layer.weight.set_(torch.randn(64 * 64).untyped_storage(), 0, (64, 64)),
    "transposed": lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_tensor_that_moves_between_prepare_and_publish_is_seen(move: str) -> None:
    model, served = (torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))) for _ in range(2))
    with fleet(weightcast.ModuleSource(model), weightcast.ModuleEngine(served)) as (publisher, _):
        publisher.prepare()
        former = model[3].weight.data
        with torch.no_grad():
            MOVES[move](cast(torch.nn.Linear, model[3]))
        if move != "transposed":
            former.fill_(float("nan"))  # a publish from the former memory would send this
        wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert not wanted["3.weight"].isnan().any()
        assert publisher.publish().ok
        for name, found in served.state_dict().items():
            assert torch.equal(found, wanted[name]), name


def test_memory_that_goes_between_prepare_and_publish_is_not_read() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    with fleet(weightcast.ModuleSource(model), RecordingEngine()) as (publisher, _):
        publisher.prepare()
        model[3].weight.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"'3\.weight' .*its storage was freed, so load the weights back first"):
            publisher.publish()
    for move in (lambda tensor: tensor.untyped_storage().resize_(0), lambda tensor: tensor.set_(torch.randn(40, 40))):
        with fleet(TensorSource(tensors), RecordingEngine()) as (publisher, _):
            publisher.prepare()
            move(tensors["t7"])
            with pytest.raises(IncompatibleWeightsError, match=r"'t7': found a view at .*, expected it at"):
                publisher.publish()
        tensors["t7"] = torch.randn(40, 40)


@pytest.mark.parametrize("transport", ["memory://", "ipc://"])
def test_a_release_does_not_wait_for_what_engines_have_said_already(transport: str) -> None:
    """The link's own thread has read, before the release, that the engine is done with every bucket."""
    options: dict[str, Any] = {"transport": transport, "deadline_seconds": 600.0}
    with fleet(TensorSource(TENSORS), RecordingEngine(), **options) as (publisher, _):
        assert publisher.publish().ok
        assert publisher._connections is not None
        (link,) = publisher._connections.listener.links()
        deadline = Deadline(PATIENCE_SECONDS)
        while not link.records and not deadline.has_passed:
            time.sleep(0.01)
        Background(publisher.release).result()
        assert publisher.publish().ok


def test_what_can_not_be_prepared_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(8, 8)
    stream = weightcast.IteratorSource()
    with fleet(stream, RecordingEngine()) as (publisher, _):
        publisher.prepare()
        assert publisher._connections is None
        stream.use(iter(TENSORS.items()))
        assert publisher.publish().ok
    engine = weightcast.ModuleEngine(torch.nn.Linear(8, 8, dtype=torch.bfloat16))
    with fleet(weightcast.ModuleSource(model, dtype="engine"), engine) as (publisher, _):
        publisher.prepare()
        assert publisher._connections is not None
        assert cast(Any, publisher._connections.sender)._arena is None
        assert publisher.publish().ok
    with fleet(TensorSource(TENSORS), RecordingEngine()) as (publisher, _):
        with monkeypatch.context() as patch:
            patch.setattr(host_memory, "available_bytes", lambda: 1000)
            with pytest.raises(InsufficientMemoryError, match="the arena of this update needs"):
                publisher.prepare()
        publisher.prepare()
        assert publisher.publish().ok
        publisher.close()
        with pytest.raises(ClosedError):
            publisher.prepare()
    with Publisher(TensorSource(TENSORS)) as publisher, pytest.raises(ValueError, match="there is no engine"):
        publisher.prepare()


class Undoable(RecordingEngine):
    def snapshot(self) -> Any:
        held = dict(self.held)
        return lambda: self.held.update(held)


def test_undo_copy_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Undoable()
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1000)
    with fleet(TensorSource(TENSORS), engine, undo=True) as (publisher, _), pytest.raises(PublishError) as caught:
        publisher.publish()
    assert isinstance(caught.value.failures["engine-0"], InsufficientMemoryError)
    assert engine.calls == []


def test_worker_refuses_what_is_not_its_runs() -> None:
    from weightcast.format.messages import Abort, DeltaBase, InitInfo, Offer, Seal

    engine = RecordingEngine()
    with fleet(TensorSource(TENSORS), engine) as (publisher, (client,)):
        publisher.publish(5)
        worker, digest = client.worker, "0" * 64
        stranger = InitInfo("f" * 32, "x", "ipc://@nowhere", "unix:@nowhere", digest, 5.0)
        with pytest.raises(EngineBusyError, match=publisher.run):
            worker.init(stranger)
        with pytest.raises(StaleVersionError, match="holds this engine: publish from that run only"):
            worker.update(Offer("f" * 32, 6, digest))
        session = worker._session
        assert session is not None
        for secret in (UNSET, "1" * 64):
            for message in (
                Offer(publisher.run, 5, digest, secret=secret),
                Seal(publisher.run, 4, 1, "0" * 32, secret),
            ):
                with pytest.raises(RefusedError, match="lacks the secret"):
                    worker.update(message)
        text = session.install.layout.manifest.text if session.install is not None else ""
        for manifest, found in (
            (None, "the offer has no manifest, and this session has not received one"),
            ("", "not the JSON of a Manifest"),
            (text[:-2], "not the JSON of a Manifest"),
            ("{}", "not a Manifest of protocol 4: Object missing required field"),
            (text, f"the manifest has digest [0-9a-f]{{64}}, but the offer names {digest}"),
        ):
            with pytest.raises(ManifestError, match=found):
                worker.update(Offer(publisher.run, 60, digest, manifest, secret=session.info.secret))
        with pytest.raises(StaleVersionError, match="replayed"):
            worker.update(Offer(publisher.run, 5, digest, secret=session.info.secret))
        with pytest.raises(StaleVersionError, match="not the update in progress"):
            worker.update(Seal(publisher.run, 4, 1, "0" * 32, session.info.secret))
        with pytest.raises(StaleVersionError):
            worker.update(Abort("f" * 32, 5, "malice"))
        with pytest.raises(UnsupportedError, match="no transport"):
            worker.init(InitInfo(publisher.run, "x", "pigeon://", "unix:@n", digest, 5.0))
        with pytest.raises(UnsupportedError, match="protocol 1, this engine speaks 4"):
            worker.init(InitInfo(publisher.run, "x", "ipc://@n", "unix:@n", digest, 5.0, protocol=1))
        assert session.install is not None
        base, known = DeltaBase(5, "0" * 32, (8,), ("0" * 32,)), session.install.manifest_digest
        with pytest.raises(WrongBaseError, match="the packed buckets of no version: offer a full update"):
            worker.update(Offer(publisher.run, 60, known, base=base, secret=session.info.secret))
        worker.finish(5)  # installed already: idempotent
        with pytest.raises(StaleVersionError):
            worker.finish(7)
        assert publisher.publish().ok
    assert [v.number for v in engine.versions] == [5, 6]


def test_progress_is_told_after_each_bucket() -> None:
    told: list[tuple[int, int]] = []
    with fleet(TensorSource(TENSORS), RecordingEngine()) as (publisher, _):
        report = publisher.publish(on_progress=lambda done, total: told.append((done, total)))
    assert len(told) == report.num_buckets > 1
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[-1][0] == told[-1][1] >= report.num_bytes


def test_a_client_that_can_pause_in_part_is_refused_when_it_is_added() -> None:
    """Its engine would generate during installs, and nobody would know."""

    class Halfway(EngineClient):
        name = "halfway"

        def pause(self, run: str) -> None: ...

        def resume(self, run: str) -> None: ...

    with pytest.raises(TypeError, match=r"Halfway has pause\(\) .* derive it from .*ServesTraffic"):
        Publisher(TensorSource(TENSORS), engines=[Halfway()])  # type: ignore[abstract]


def test_close_closes_every_part_whatever_another_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    with fleet(TensorSource(TENSORS), RecordingEngine()) as (publisher, _):
        publisher.publish()
        for name in ("_connections", "_fleet", "_watchdog"):
            part = getattr(publisher, name)

            def close(name: str = name, close: Callable[[], None] = part.close) -> None:
                closed.append(name)
                close()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")

            monkeypatch.setattr(part, "close", close)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            publisher.close()
    assert closed == ["_connections", "_fleet", "_watchdog"]
