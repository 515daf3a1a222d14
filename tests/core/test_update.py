"""What is checked before an update may change an engine: dtypes, the number of buckets, the seal, who has ended."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from publishers import publisher_of
from torch import nn

from core.direct import DirectEngine, RecordingEngine, fleet
from weightcast import LocalEngine, TensorSource
from weightcast.engines.gate import Gate
from weightcast.engines.module import ModuleEngine
from weightcast.errors import (
    ClosedError,
    IncompatibleWeightsError,
    IncompleteUpdateError,
    InstallError,
    IntegrityError,
    PeerDiedError,
    PeerTimeoutError,
    PublishError,
    UpdateAbortedError,
    to_record,
)
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.messages import InitInfo, InstallMode, Offer, Seal, WeightInfo
from weightcast.format.plan import plan
from weightcast.host.deadline import Deadline
from weightcast.seams.transport import Bucket
from weightcast.serving.admission import admit
from weightcast.serving.update import State, Update
from weightcast.serving.worker import Worker
from weightcast.testing.transport_kit import PATIENCE_SECONDS, RUN, TransportEnds, numbered, send, send_all, version
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.relay import Relay

pytestmark = pytest.mark.usefixtures("leaves_nothing")
MANIFEST = numbered(3)


@pytest.fixture
def ends() -> Iterator[TransportEnds]:
    made = TransportEnds()
    with contextlib.ExitStack() as stack:
        made.url, made.stack = "memory://", stack
        yield made


@contextlib.contextmanager
def update_of(ends: TransportEnds, engine: RecordingEngine, *, install: InstallMode = "staged") -> Iterator[Update]:
    """An update whose buckets were all sent; streaming, the first."""
    sender = ends.sender()
    receiver, digest = ends.receiver(sender), MANIFEST.digest()
    offer = Offer(RUN, 1, digest, install=install)
    way = admit(MANIFEST, digest, engine)
    update = Update(offer, way, receiver=receiver, gate=Gate(), deadline_seconds=60.0)
    update.open()
    sender.open(MANIFEST, version(1), peers=["a"], staged=install == "staged")
    if install == "staged":
        send_all(sender, MANIFEST, 1)
    else:
        send(sender, MANIFEST, 1, 0)
    yield update
    update.abort(ClosedError("the test is over"))


def test_another_dtype_is_refused_before_the_engine_is_touched() -> None:
    engine = RecordingEngine([TensorSpec("a", "bfloat16", (4,))])
    with fleet(TensorSource({"a": torch.ones(4)}), engine) as (publisher, _), pytest.raises(PublishError) as caught:
        publisher.publish()
    (error,) = caught.value.failures.values()
    assert isinstance(error, IncompatibleWeightsError)
    assert list(error.problems) == ["'a' is float32, the engine has bfloat16"]
    assert engine.calls == []


def test_buckets_that_are_missing_at_the_end_are_found(ends: TransportEnds, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RecordingEngine()
    with update_of(ends, engine) as update:
        receiver = update._receiver

        def all_but_the_last(_: object) -> Iterator[Bucket]:
            buckets = list(own(receiver))
            yield from buckets[:-1]

        own = type(receiver).__iter__
        monkeypatch.setattr(type(receiver), "__iter__", all_but_the_last)
        with pytest.raises(IncompleteUpdateError, match="received 2 of 3 buckets"):
            update.receive()
    assert engine.calls == []


def test_an_update_that_is_given_up_with_a_bucket_in_hand_keeps_no_exception(
    ends: TransportEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was raised refers to the frames it has passed: the transport's memory would stay with the update."""
    with update_of(ends, RecordingEngine()) as update:
        receiver = update._receiver

        def then_aborted(_: object) -> Iterator[Bucket]:
            yield from own(receiver)
            update.abort(ClosedError("another rank of the engine failed"))

        own = type(receiver).__iter__
        monkeypatch.setattr(type(receiver), "__iter__", then_aborted)
        with pytest.raises(ClosedError, match="another rank"):
            update.receive()
        assert update.error == to_record(ClosedError("another rank of the engine failed"))


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_the_cause_of_a_failed_install_has_the_frames_of_the_engines_loader(
    ends: TransportEnds, install: InstallMode
) -> None:
    engine = RecordingEngine()
    engine.fail_after = 0
    with update_of(ends, engine, install=install) as update:
        if install == "staged":
            update.seal(Seal(RUN, 1, 3, update.receive()))
        with pytest.raises(InstallError) as caught:
            update.install() if install == "staged" else update.receive()
    assert caught.value.torn
    cause = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    frames = list(traceback.walk_tb(cause.__traceback__))
    assert [frame.f_code.co_name for frame, _ in frames][-1] == "load"
    assert "tensor" in frames[-1][0].f_locals
    assert install == "streaming" or update.error == to_record(caught.value)
    del caught, cause, frames  # this frame is one of theirs


def test_an_update_that_is_given_up_while_a_step_of_generation_ends_opens_no_receiver(
    ends: TransportEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would end it."""
    receiver, digest, gate = ends.receiver(ends.sender()), MANIFEST.digest(), Gate()
    install = admit(MANIFEST, digest, RecordingEngine())
    offer = Offer(RUN, 1, digest, install="streaming")
    update = Update(offer, install, receiver=receiver, gate=gate, deadline_seconds=60.0)
    begin_writing = gate.begin_writing

    def given_up_meanwhile(writer: str, *, deadline_seconds: float) -> None:
        update.abort(ClosedError("the publisher has gone"))
        begin_writing(writer, deadline_seconds=deadline_seconds)

    monkeypatch.setattr(gate, "begin_writing", given_up_meanwhile)
    update.open()
    with pytest.raises(UpdateAbortedError, match="no update is open"):
        next(iter(receiver))
    assert not gate.is_paused


def test_an_update_that_is_given_up_leaves_the_receiver_before_another_one_can_open_it(
    ends: TransportEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds it given up goes on to the next one."""
    with update_of(ends, RecordingEngine()) as update:
        receiver, was_writing = update._receiver, []
        end = receiver.end
        monkeypatch.setattr(receiver, "end", lambda: (was_writing.append(update.is_writing), end()))
        update.abort(ClosedError("the publisher has gone"))
    assert was_writing
    assert all(was_writing)


def test_a_seal_of_other_bytes_is_refused(ends: TransportEnds) -> None:
    engine = RecordingEngine()
    with update_of(ends, engine) as update:
        root = update.receive()
        for num_buckets, other in ((3, "0" * 32), (2, root)):
            with pytest.raises(IntegrityError, match="the seal names"):
                update.seal(Seal(RUN, 1, num_buckets, other))
            with pytest.raises(IncompleteUpdateError, match="not sealed"):
                update.install()
        assert engine.calls == []
        update.seal(Seal(RUN, 1, 3, root))
        update.install()
        assert update.state is State.INSTALLED
    assert len(engine.held) == 3


def test_an_engine_that_ends_takes_no_publisher() -> None:
    worker = Worker(RecordingEngine(), gate=Gate())
    worker.close()
    with pytest.raises(ClosedError, match="shutting down"):
        worker.init(InitInfo(RUN, "engine", "memory://", "unix:@nowhere", "0" * 64, lease_seconds=1.0))
    assert worker.info().holder == ""


def test_a_version_that_can_not_be_taken_back_in_time_can_be_taken_back_later() -> None:
    served, gate = nn.Linear(4, 4), Gate()
    nn.init.zeros_(served.weight)
    source = TensorSource({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    client = LocalEngine(ModuleEngine(served), gate=gate, settles=True, install_deadline_seconds=0.1)
    with publisher_of(source, transport="memory://", engines=[client], undo=True) as publisher:
        settled = WeightVersion(publisher.run, publisher.publish().version)
        with (
            gate.step(),
            ThreadPoolExecutor(1) as pool,
            pytest.raises(PeerTimeoutError, match="step of generation did not end"),
        ):
            pool.submit(client.worker.settle, settled, keep=False).result()
        assert client.worker.unsettled == gate.version == settled
        for _ in range(2):
            client.worker.settle(settled, keep=False)
            assert client.worker.unsettled is None
            assert gate.version is None
            assert served.weight.eq(0).all()


class Undone(ModuleEngine):
    """Refuses to commit; `can_restore`: whether its undo copy works."""

    fails, can_restore = False, True

    def commit(self, version: WeightVersion) -> None:
        if self.fails:
            raise RuntimeError("this commit was told to fail")
        super().commit(version)

    def begin(self, copied: Collection[str]) -> None:
        super().begin(copied)
        if self.fails and not self.can_restore:
            raise RuntimeError("this load was told to fail")

    def snapshot(self) -> Callable[[], None]:
        restore = super().snapshot()

        def put_back() -> None:
            if not self.can_restore:
                raise RuntimeError("this undo copy was told to fail")
            restore()

        return put_back


@pytest.mark.parametrize("install", ["staged", "streaming"])
@pytest.mark.parametrize("can_restore", [True, False])
def test_whoever_is_asked_says_the_same_of_an_install_that_failed(can_restore: bool, install: str) -> None:
    """Torn or not: the error of the update, what the publisher is told, and the gate."""
    engine = Undone(nn.Linear(4, 4))
    engine.can_restore = can_restore
    client = LocalEngine(engine)
    source = TensorSource({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    with publisher_of(source, transport="memory://", engines=[client], undo=True, install=install) as publisher:
        publisher.publish()
        engine.fails = True
        with pytest.raises(PublishError, match="told to fail") as error:
            publisher.publish()
        (failure,) = error.value.failures.values()
        assert bool(client.gate.torn) == (not can_restore)
        for said in (failure, client.worker.failure):
            assert isinstance(said, InstallError)
            assert said.torn == (not can_restore)


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_a_failed_install_that_is_undone_in_a_torn_engine_leaves_it_torn(install: str) -> None:
    engine = Undone(nn.Linear(4, 4))
    client = LocalEngine(engine)
    source = TensorSource({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    with publisher_of(source, transport="memory://", engines=[client], undo=True, install=install) as publisher:
        publisher.publish()
        client.gate.tear("by the test")
        engine.fails = True
        with pytest.raises(PublishError, match="told to fail") as error:
            publisher.publish()
        (failure,) = error.value.failures.values()
        assert client.gate.torn == "by the test"
        assert isinstance(failure, InstallError)
        assert failure.torn


@pytest.mark.parametrize("install", ["staged", "streaming"])
def test_a_second_ctrl_c_while_the_first_one_is_undone_leaves_the_engine_torn(install: str) -> None:
    class Interrupted(ModuleEngine):
        is_interrupted = False

        def commit(self, version: WeightVersion) -> None:
            if self.is_interrupted:
                raise KeyboardInterrupt
            super().commit(version)

        def snapshot(self) -> Callable[[], None]:
            restore = super().snapshot()

            def put_back() -> None:
                if self.is_interrupted:
                    raise KeyboardInterrupt
                restore()

            return put_back

    engine = Interrupted(nn.Linear(4, 4))
    client = LocalEngine(engine)
    source = TensorSource({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    with publisher_of(source, transport="memory://", engines=[client], undo=True, install=install) as publisher:
        publisher.publish()
        engine.is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            publisher.publish()
        assert client.gate.torn == (
            "installing version 1 failed: KeyboardInterrupt(); publish a complete update to heal this engine"
        )
        engine.is_interrupted = False
        assert publisher.publish().ok
        assert not client.gate.torn


def test_a_relay_that_failed_holds_no_engine() -> None:
    engine = RecordingEngine()
    engine.fail_after = 0
    manifest = plan([TensorSpec("a", "float32", (4,))], 4096)
    client = DirectEngine("engine", engine)
    with contextlib.closing(client), contextlib.closing(Relay([client])) as relay:
        relay.validate(manifest)
        relay.load([("a", torch.ones(4))])
        with pytest.raises(PublishError):
            relay.commit(version(1))
        # The worker notices by itself that its publisher has gone.
        assert any(client.info().holder == "" for _ in Deadline(PATIENCE_SECONDS).polls(0.001, 0.1))


class Away(DirectEngine):
    """Can't be reached while it `is_away`."""

    is_away = False

    def info(self) -> WeightInfo:
        if self.is_away:
            raise PeerDiedError(f"{self.name} is away", peer=self.name)
        return super().info()


@pytest.mark.parametrize("on_failure", ["raise", "report"])
@pytest.mark.parametrize("order", ["dead, back, ok", "back, dead, ok", "ok, dead, back"])
def test_a_relay_brings_the_version_to_every_engine_that_is_back(order: str, on_failure: str) -> None:
    clients = {name: Away(name, RecordingEngine()) for name in order.split(", ")}
    manifest = plan([TensorSpec("a", "float32", (4,))], 4096)
    options = PublishOptions(on_failure=on_failure)  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        for client in clients.values():
            stack.callback(client.close)
        relay = stack.enter_context(contextlib.closing(Relay(list(clients.values()), options=options)))
        relay.validate(manifest)
        clients["dead"].is_away = clients["back"].is_away = True
        for lacking in ({"dead", "back"}, {"dead"}, {"dead"}, set()):
            clients["back"].is_away = "back" in lacking
            clients["dead"].is_away = "dead" in lacking
            with contextlib.ExitStack() as refused:
                if lacking:
                    failed = refused.enter_context(pytest.raises(PublishError))
                if relay.report is None:
                    relay.load([("a", torch.ones(4))])
                    relay.commit(version(1))
                    relay.require_all()
                else:
                    relay.catch_up()
            assert not lacking or failed.value.failures.keys() == lacking
            assert set(relay.missing) == lacking
            assert bool(relay.given.held) == bool(lacking)
            served = {name for name, client in clients.items() if client.gate.version is not None}
            assert served == clients.keys() - lacking
