"""Publishes that send deltas: who gets one, what it costs, and that engines have the bits of a full update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import preloaded
from publishers import publisher_of
from sources import delta_ranks
from torch import nn

from core.direct import DirectEngine, RecordingEngine
from core.parallel import ParallelEngine
from weightcast import EngineServer, ModuleEngine, ModuleSource, TensorSource
from weightcast.errors import PublishError
from weightcast.testing.leftovers import nothing_left
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
        assert publisher.publish().delta.num_changed == 1  # type: ignore[union-attr]
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


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS[1:])
def test_several_trainer_ranks(tmp_path: Path, size: int, transport: str) -> None:
    arguments = (size, str(tmp_path / "meet"), transport)
    torch.multiprocessing.start_processes(delta_ranks.run, arguments, nprocs=size, start_method="forkserver")
