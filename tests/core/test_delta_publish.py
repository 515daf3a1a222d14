"""Publishes that send deltas: who gets one, what it costs, and that engines have the bits of a full update."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import preloaded
from integrations.loader_model import Model, ModelEngine
from publishers import publisher_of
from sources import delta_ranks
from torch import nn

from core.direct import DirectEngine, RecordingEngine
from core.parallel import ParallelEngine
from weightcast import EngineServer, ModuleEngine, ModuleSource, TensorSource
from weightcast.errors import InsufficientMemoryError, PublishError
from weightcast.format.manifest import WeightVersion
from weightcast.format.packed_base import PackedBase
from weightcast.host.deadline import Deadline
from weightcast.host.memory import SharedMemory
from weightcast.serving.worker import Worker
from weightcast.testing.leftovers import nothing_left
from weightcast.testing.transport_kit import PATIENCE_SECONDS
from weightcast.trainer.publisher import Publisher

preloaded("torch", "torch.distributed.fsdp", "sources.delta_ranks")
TRANSPORTS = ("memory://", "ipc://", "gloo://127.0.0.1:0")


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Embedding(512, 64), nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 512, bias=False)
    )
    layers.to(torch.bfloat16)
    layers[2].float()
    return layers


def step(model: nn.Module, density: float = 0.01) -> None:
    """Change some elements of every tensor by a little, as an optimizer step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            changed = torch.rand(parameter.shape) < density
            parameter.data += changed * parameter.abs().clamp(min=1e-3) * 0.02 * torch.randn(parameter.shape)


def require_equal(model: nn.Module, served: nn.Module) -> None:
    ours, theirs = model.state_dict(), served.state_dict()
    for name in ours:
        assert torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)), name


@contextlib.contextmanager
def publishing(source: Any, clients: list[Any], **options: Any) -> Iterator[Publisher]:
    options = {"delta": "always", "bucket_size_bytes": 32768, "deadline_seconds": 10.0, **options}
    with nothing_left():
        try:
            with publisher_of(source, engines=clients, **options) as publisher:
                yield publisher
        finally:
            for client in clients:
                client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_get_what_changed(transport: str) -> None:
    model, served = model_of(0), [model_of(1), model_of(2)]
    clients = [DirectEngine(f"engine-{number}", ModuleEngine(each)) for number, each in enumerate(served)]
    with publishing(ModuleSource(model), clients, transport=transport) as publisher:
        first = publisher.publish()
        assert first.delta is not None
        assert first.delta.reason
        assert first.delta.num_engines == 0
        for _ in range(3):
            step(model)
            report = publisher.publish()
            assert report.delta is not None
            assert (report.delta.reason, report.delta.base, report.delta.num_engines) == ("", report.version - 1, 2)
            assert report.delta.num_bytes < report.num_bytes / 10
            assert "deltas on version" in str(report)
            for each in served:
                require_equal(model, each)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_without_the_base_gets_all(transport: str) -> None:
    model, served = model_of(0), [model_of(1), model_of(2)]
    clients = [DirectEngine(f"engine-{number}", ModuleEngine(each)) for number, each in enumerate(served)]
    with publishing(ModuleSource(model), clients[:1], transport=transport) as publisher:
        publisher.publish()
        publisher.add_engine(clients[1])
        for num_engines in (1, 2):
            step(model)
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == num_engines
            for each in served:
                require_equal(model, each)
    clients[1].close()


@pytest.mark.parametrize("number", [50, pytest.param(500, marks=pytest.mark.full)])
def test_many_deltas_in_a_row(number: int) -> None:
    model, served, proven = model_of(0), model_of(1), model_of(2)
    client, prover = DirectEngine("engine", ModuleEngine(served)), DirectEngine("prover", ModuleEngine(proven))
    options: dict[str, Any] = {"verify": "installed", "verify_every": 25}
    with publishing(ModuleSource(model), [client, prover], transport="gloo://127.0.0.1:0", **options) as publisher:
        publisher.publish()
        for _ in range(number):
            step(model, 0.001)
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == 2
    require_equal(model, served)
    require_equal(model, proven)


def test_nothing_changed_and_everything_changed() -> None:
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engine = RecordingEngine()
    with publishing(TensorSource(tensors), [DirectEngine("engine", engine)]) as publisher:
        publisher.publish()
        report = publisher.publish()
        assert report.delta is not None
        assert report.delta.num_changed == 0
        for tensor in tensors.values():
            tensor.normal_()
        report = publisher.publish()
        # Each bucket travels as it is, since a delta would be no shorter.
        assert report.delta is not None
        assert report.delta.num_engines == 1
        assert report.delta.num_changed > 0.9 * report.delta.num_words
        for name, tensor in tensors.items():
            assert torch.equal(engine.held[name], tensor)
        tensors["t3"][0, 0] += 1
        told: list[tuple[int, int]] = []
        report = publisher.publish(on_progress=lambda done, total: told.append((done, total)))
        assert report.delta is not None
        assert report.delta.num_changed == 1
        assert len(told) == report.num_buckets
        assert told[-1][0] == told[-1][1] >= report.num_bytes
        assert torch.equal(engine.held["t3"], tensors["t3"])


class WritingEngine(RecordingEngine):
    """Writes into what it is given."""

    def load(self, tensors: Any) -> None:
        received = list(tensors)
        super().load(received)
        for _, tensor in received:
            tensor.zero_()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_loader_that_writes_does_not_spoil_the_base(transport: str) -> None:
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engine = WritingEngine()
    with publishing(TensorSource(tensors), [DirectEngine("engine", engine)], transport=transport) as publisher:
        for _ in range(4):
            assert publisher.publish().ok
            for name, tensor in tensors.items():
                assert torch.equal(engine.held[name], tensor)
                tensor[0] += 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_failed_install_is_followed_by_a_full_update(transport: str) -> None:
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engines = [RecordingEngine(), RecordingEngine()]
    clients = [DirectEngine(f"engine-{number}", engine) for number, engine in enumerate(engines)]
    with publishing(TensorSource(tensors), clients, transport=transport) as publisher:
        publisher.publish()
        engines[0].fail_after = 3
        tensors["t0"] += 1
        with pytest.raises(PublishError):
            publisher.publish()
        engines[0].fail_after = None
        for num_engines in (1, 2):
            tensors["t1"] += 1
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == num_engines
            for engine in engines:
                assert all(torch.equal(engine.held[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_worker_that_has_lost_its_base(transport: str) -> None:
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engines = [RecordingEngine(), RecordingEngine()]
    client = ParallelEngine("engine", engines)
    with publishing(TensorSource(tensors), [client], transport=transport) as publisher:
        publisher.publish()
        session = client.workers[1]._session
        assert session is not None
        session.base = None
        del session  # which keeps the base's memory mapped
        tensors["t0"] += 1
        report = publisher.publish()
        assert report.ok
        assert report.delta is not None
        assert report.delta.num_engines == 0
        tensors["t1"] += 1
        report = publisher.publish()
        assert report.ok
        assert report.delta is not None
        assert report.delta.num_engines == 1
        for engine in engines:
            assert all(torch.equal(engine.held[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_of_one_host_share_a_base_and_the_work(transport: str) -> None:
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engines = [RecordingEngine() for _ in range(3)]
    client = ParallelEngine("engine", engines)
    with publishing(TensorSource(tensors), [client], transport=transport) as publisher:
        publisher.publish()
        for number in range(3):
            for tensor in tensors.values():
                tensor[number] += 1
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == 1
            assert sum(report.engines["engine"].read_bytes) == report.delta.num_bytes
            for engine in engines:
                assert all(torch.equal(engine.held[name], tensor) for name, tensor in tensors.items())
        bases = [base_of(worker) for worker in client.workers]
        assert sorted(index for base in bases for index in base.own) == list(range(report.num_buckets))
        memories = [SharedMemory.of(base.payloads[0]) for base in bases]
        assert len({memory.location for memory in memories if memory is not None}) == 1
        mapped = memories[0]
        assert mapped is not None
        del bases, memories
        publisher.release()
        for _ in Deadline(PATIENCE_SECONDS).polls(0.01, 0.1):
            if not os.fstat(mapped.descriptor).st_blocks:
                break
        else:
            pytest.fail("release() has not freed the base")
        tensors["t0"] += 1
        for num_engines in (0, 1):
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == num_engines


def test_a_base_may_be_released_after_its_session_has_closed() -> None:
    client = ParallelEngine("engine", [RecordingEngine() for _ in range(2)])
    with publishing(TensorSource({"t": torch.randn(64, 64)}), [client], transport="memory://") as publisher:
        publisher.publish()
        for worker in client.workers:
            session = worker._session
            assert session is not None
            session.close()
            session.release(session.last_offered)
        del session


@pytest.mark.parametrize("rank", [0, 1])
def test_a_base_that_has_other_bytes_is_refused_and_the_next_publish_is_full(rank: int) -> None:
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engines = [RecordingEngine(), RecordingEngine()]
    client = ParallelEngine("engine", engines)
    with publishing(TensorSource(tensors), [client], transport="ipc://", on_failure="report") as publisher:
        publisher.publish()
        former = {name: tensor.clone() for name, tensor in tensors.items()}
        base = base_of(client.workers[rank])
        base.payloads[min(base.own)][0] ^= 1
        del base
        tensors["t0"] += 1
        report = publisher.publish()
        error = report.engines["engine"].error
        assert error is not None
        assert error.kind == "IntegrityError"
        assert "after its delta was added, expected" in error.message
        for engine in engines:
            assert all(torch.equal(engine.held[name], tensor) for name, tensor in former.items())
        for num_engines in (0, 1):
            report = publisher.publish()
            assert report.ok
            assert report.delta is not None
            assert report.delta.num_engines == num_engines
            for engine in engines:
                assert all(torch.equal(engine.held[name], tensor) for name, tensor in tensors.items())


def base_of(worker: Worker) -> PackedBase:
    assert worker._session is not None
    assert worker._session.base is not None
    return worker._session.base


def test_a_worker_without_room_gets_full_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its connection: it says that it has no base, so that no delta is offered."""
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engine = RecordingEngine()
    client = DirectEngine("engine", engine)

    def no_room(*_: Any) -> None:
        raise InsufficientMemoryError("the base of deltas needs more than there is")

    with publishing(TensorSource(tensors), [client], transport="gloo://127.0.0.1:0") as publisher:
        with monkeypatch.context() as full:
            publisher.publish()
            session = client.worker._session
            assert session is not None
            session.base = None
            full.setattr("weightcast.serving.session.PackedBase", no_room)
            sessions = []
            for _ in range(3):
                tensors["t2"][1] += 1
                report = publisher.publish()
                assert report.delta is not None
                assert report.delta.num_engines == 0
                sessions.append(client.worker._session)
            assert sessions[0] is sessions[1] is sessions[2]
        for num_engines in (0, 1):
            tensors["t2"][1] += 1
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == num_engines
            assert torch.equal(engine.held["t2"], tensors["t2"])


def test_a_server_that_has_lost_its_base() -> None:
    model, served = model_of(0), model_of(1)
    with (
        EngineServer(ModuleEngine(served)) as server,
        publisher_of(
            ModuleSource(model), engines=[server.url], transport="gloo://127.0.0.1:0", delta="always"
        ) as publisher,
    ):
        publisher.publish()
        for num_engines in (1, 0, 1):
            session = server.worker._session
            assert session is not None
            if not num_engines:
                session.base = None
            step(model)
            report = publisher.publish()
            assert report.ok
            assert report.delta is not None
            assert report.delta.num_engines == num_engines
            require_equal(model, served)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"transport": "ipc://"}, "over ipc:// engines read this process's memory"),
        ({"transport": "gloo://127.0.0.1:0", "install": "streaming"}, 'engines install with install="streaming"'),
        ({"transport": "gloo://127.0.0.1:0"}, ""),
    ],
    ids=["ipc", "streaming", "gloo"],
)
def test_auto_says_why_there_are_no_deltas(options: dict[str, Any], reason: str) -> None:
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engine = RecordingEngine()
    with publishing(TensorSource(tensors), [DirectEngine("engine", engine)], delta="auto", **options) as publisher:
        for _ in range(2):
            tensors["t1"][0] += 1
            report = publisher.publish()
            assert torch.equal(engine.held["t1"], tensors["t1"])
        assert report.delta is not None
        assert report.delta.reason.startswith(reason)
        assert report.delta.num_engines == (not reason)


def test_auto_tries_again_after_deltas_were_slow() -> None:
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engine = RecordingEngine()
    client = DirectEngine("engine", engine)
    with publishing(TensorSource(tensors), [client], delta="auto", transport="gloo://127.0.0.1:0") as publisher:
        publisher.publish()
        deltas = publisher._deltas
        assert deltas is not None
        deltas._full_seconds = 0.0  # a full update that took no time
        num_engines = []
        for _ in range(19):
            tensors["t1"][0] += 1
            report = publisher.publish()
            assert report.delta is not None
            num_engines.append(report.delta.num_engines)
            assert torch.equal(engine.held["t1"], tensors["t1"])
        # One is slow, 16 are full without a base, one is full and makes a base.
        assert num_engines == [1, *[0] * 17, 1]


@pytest.mark.parametrize(
    "options", [{"install": "streaming"}, {"transport": "file:///nowhere"}], ids=["streaming", "store"]
)
def test_always_is_refused_where_there_can_be_none(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="publish with delta=None"):
        publisher_of(TensorSource({"t": torch.zeros(4)}), delta="always", **options)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_may_change_once_a_background_publish_is_packed(transport: str) -> None:
    """Also while an engine that joins gets all of that version."""
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    engines = [RecordingEngine(), RecordingEngine()]
    clients = [DirectEngine(f"engine-{number}", engine) for number, engine in enumerate(engines)]
    with publishing(TensorSource(tensors), clients[:1], transport=transport) as publisher:
        publisher.publish()
        publisher.add_engine(clients[1])
        tensors["t3"][5] += 1
        tensors["t5"].normal_()
        expected = {name: tensor.clone() for name, tensor in tensors.items()}
        handle = publisher.start()
        assert handle is not None
        for tensor in tensors.values():
            tensor.zero_()
        report = handle.result()
        assert report.delta is not None
        assert report.delta.num_engines == 1
        for engine in engines:
            assert all(torch.equal(engine.held[name], tensor) for name, tensor in expected.items())
    clients[1].close()


class FailingModule(ModuleEngine):
    """Fails at the end of an install, on demand."""

    fails = False

    def commit(self, version: Any) -> None:
        super().commit(version)
        if self.fails:
            raise RuntimeError("this engine was told to fail")


def test_undo_and_deltas() -> None:
    model, served = model_of(0), model_of(1)
    engine = FailingModule(served)
    with publishing(ModuleSource(model), [DirectEngine("engine", engine)], undo=True) as publisher:
        publisher.publish()
        before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
        engine.fails = True
        step(model)
        with pytest.raises(PublishError):
            publisher.publish()
        assert all(torch.equal(tensor, before[name]) for name, tensor in served.state_dict().items())
        engine.fails = False
        for num_engines in (0, 1):
            step(model)
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == num_engines
            require_equal(model, served)


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_what_changed_is_written(transport: str, undo: bool) -> None:
    model, served = model_of(0), model_of(1)
    engine = ChangesOnly(served)
    with publishing(ModuleSource(model), [DirectEngine("engine", engine)], transport=transport, undo=undo) as publisher:
        publisher.publish()
        engine.copies_all = False
        unchanged = model[1].weight[7].clone()
        with torch.no_grad():
            served[1].weight[7] = -1
        for _ in range(3):
            step(model, 0.003)
            with torch.no_grad():
                model[1].weight[7] = unchanged
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == 1
            assert (served[1].weight[7] == -1).all()
        with torch.no_grad():
            served[1].weight[7] = unchanged
        require_equal(model, served)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_undo_of_deltas_needs_no_copy_of_the_model(transport: str) -> None:
    model, served = model_of(0), model_of(1)
    engine = ChangesOnly(served)
    with publishing(ModuleSource(model), [DirectEngine("engine", engine)], transport=transport, undo=True) as publisher:
        publisher.publish()
        engine.copies_all = False
        for _ in range(2):
            step(model, 0.003)
            publisher.publish()
        before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
        engine.fails = True
        step(model, 0.003)
        with pytest.raises(PublishError):
            publisher.publish()
        for name, tensor in served.state_dict().items():
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name
        engine.fails, engine.copies_all = False, True
        for num_engines in (0, 1, 1):
            engine.copies_all = not num_engines
            step(model, 0.003)
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == num_engines
            require_equal(model, served)


class Replacing(FailingModule):
    """Has another tensor in place of one that was just written, and then fails."""

    def commit(self, version: WeightVersion) -> None:
        if self.fails:
            self._model[1].weight.data = self._model[1].weight.data.clone()
        super().commit(version)


@pytest.mark.parametrize("density", [0.003, 0.3])
def test_an_undo_that_does_not_find_its_tensors_leaves_the_engine_torn_or_restores_all(density: float) -> None:
    model, served = model_of(0), model_of(1)
    client = DirectEngine("engine", engine := Replacing(served))
    with publishing(ModuleSource(model), [client], undo=True) as publisher:
        publisher.publish()
        before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
        engine.fails = True
        step(model, density)
        with pytest.raises(PublishError):
            publisher.publish()
        is_whole = all(torch.equal(tensor, before[name]) for name, tensor in served.state_dict().items())
        assert is_whole is not bool(client.gate.torn)
        engine.fails = False
        step(model, density)
        assert publisher.publish().ok
        require_equal(model, served)


class Broadcast(Model):
    """Has a row of the checkpoint in all its rows."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.rank, self.size, self.num_loads = 0, 1, 0
        self.rows = nn.Parameter(torch.zeros(4, 64), requires_grad=False)
        self.plain = nn.Parameter(torch.zeros(64, 64), requires_grad=False)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            getattr(self, name).data.copy_(tensor)


@pytest.mark.parametrize("undo", [False, True])
def test_a_loader_that_broadcasts(undo: bool) -> None:
    tensors = {"rows": torch.randn(64), "plain": torch.randn(64, 64)}
    module = Broadcast()
    engine = ModelEngine(module, reference=tensors)
    with publishing(TensorSource(tensors), [DirectEngine("engine", engine)], undo=undo) as publisher:
        for number in range(5):
            tensors["rows"][number] += 1
            tensors["plain"][number, 3] += 1
            report = publisher.publish()
            assert report.delta is not None
            assert report.delta.num_engines == (number > 0)
            assert torch.equal(module.rows, tensors["rows"].expand(4, 64))
            assert torch.equal(module.plain, tensors["plain"])
        assert engine.install_map is not None
        assert set(engine.install_map.proven) == set(tensors)


def test_a_release_frees_the_base() -> None:
    tensors = {"weight": torch.randn(64, 64)}
    client = DirectEngine("engine", RecordingEngine())
    with publishing(TensorSource(tensors), [client]) as publisher:
        for _ in range(2):
            publisher.publish()
            tensors["weight"][0, 0] += 1
        gone = weakref.ref(base_of(client.worker))
        publisher.release()
        assert any(gone() is None for _ in Deadline(PATIENCE_SECONDS).polls())
        assert publisher.publish().ok


def test_a_version_that_was_released_before_it_was_settled_can_be_taken_back() -> None:
    """Of ranks that share a base, which is gone by then."""
    model, served = model_of(0), [model_of(1), model_of(2)]
    client = ParallelEngine("engine", [ModuleEngine(each) for each in served], settles=True)
    with publishing(ModuleSource(model), [client], undo=True) as publisher:
        publisher.publish()
        before = model_of(0)
        before.load_state_dict(model.state_dict())
        step(model, 0.003)
        report = publisher.publish()
        assert report.delta is not None
        assert report.delta.num_engines == 1
        shared = [base_of(worker) for worker in client.workers]
        publisher.release()
        assert any(
            all(worker._session.base is None for worker in client.workers) for _ in Deadline(PATIENCE_SECONDS).polls()
        )
        del shared
        for worker in client.workers:
            assert worker.unsettled is not None
            worker.settle(worker.unsettled, keep=False)
        for each in served:
            require_equal(before, each)


@pytest.mark.parametrize("how", ["replaced", "lost its label", "torn"])
def test_live_tensors_that_are_not_the_last_version_are_written_in_full(how: str) -> None:
    model, served = model_of(0), model_of(1)
    client = DirectEngine("engine", ModuleEngine(served))
    with publishing(ModuleSource(model), [client]) as publisher:
        publisher.publish()
        for _ in range(2):
            step(model, 0.003)
            publisher.publish()
        with torch.no_grad():
            for parameter in served.parameters():
                if how == "replaced":
                    parameter.data = torch.full_like(parameter, -1)
                else:
                    parameter.fill_(-1)
        if how == "lost its label":
            client.worker.gate.set_version(None)
        if how == "torn":
            client.worker.gate.tear("somebody wrote to it")
        for _ in range(2):
            step(model, 0.003)
            publisher.publish()
            require_equal(model, served)


class ChangesOnly(FailingModule):
    """Lets no undo copy of the model be made, on demand."""

    copies_all = True

    def snapshot(self) -> Callable[[], None]:
        assert self.copies_all, "the model was copied"
        return super().snapshot()


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("transport", "num_hosts"), [("ipc://", 1), ("gloo://127.0.0.1:0", 1), ("gloo://127.0.0.1:0", 2)]
)
def test_several_trainer_ranks(tmp_path: Path, size: int, transport: str, num_hosts: int) -> None:
    arguments = (size, str(tmp_path / "meet"), transport, num_hosts)
    torch.multiprocessing.start_processes(delta_ranks.run, arguments, nprocs=size, start_method="forkserver")
