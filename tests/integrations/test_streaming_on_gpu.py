"""Streaming into an engine with a loader of its own, from buckets on a GPU whose work is done only when waited for."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from core.direct import fleet
from pretended import LazyGpu
from torch import nn

from integrations import loader_model
from integrations.loader_model import FUSED, Model, ModelEngine, checkpoint
from weightcast import TensorSource
from weightcast.engines.gate import Gate
from weightcast.errors import EngineTornError, PublishError
from weightcast.host import device as host_device
from weightcast.integrations.plugin.dry_run import DryRunOutcome, dry_run
from weightcast.trainer.publisher import Publisher

pytestmark = pytest.mark.usefixtures("leaves_nothing")
NUM_OPAQUE = len({"mixer.A", "latent.kv", *FUSED})
"""What stays with the loader once the other copies are proven."""


class GpuModelEngine(ModelEngine):
    """As those of vLLM and SGLang: the loader's work is queued, and waited for once, at the end."""

    def __init__(self, gpu: LazyGpu, model: Model) -> None:
        super().__init__(model)
        self.device = gpu.device

    def _finish_load(self) -> list[str]:
        missing = super()._finish_load()
        host_device.synchronize(self.device)
        return missing


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[LazyGpu]:
    def on_a_cpu(model: Model, form: Any, specs: Any) -> DryRunOutcome:
        """The trial of the loader, which needs no memory, is that of the same model on a CPU."""
        outcome = dry_run(Model(), form, specs)
        assert [tuple(tensor.shape) for tensor in outcome.beside] == [tuple(model.latent.bound.shape)]
        return dataclasses.replace(outcome, beside=[model.latent.bound])

    monkeypatch.setattr(loader_model, "dry_run", on_a_cpu)
    with LazyGpu() as made:
        yield made


def on(gpu: LazyGpu, model: Model) -> Model:
    for layer in model.modules():
        for name, tensor in list(layer._parameters.items()):
            assert tensor is not None
            layer._parameters[name] = nn.Parameter(gpu.tensor(tensor), requires_grad=False)
    model.latent.absorbed, model.latent.bound = gpu.tensor(model.latent.absorbed), gpu.tensor(model.latent.bound)
    return model


def held(gpu: LazyGpu, model: Model) -> dict[str, torch.Tensor]:
    """What is in its memory now: nothing is waited for."""
    made = {"absorbed": model.latent.absorbed, "bound": model.latent.bound}
    return {name: gpu.read(value) for name, value in (*model.named_parameters(), *made.items())}


def cold(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    model = Model()
    model.load_weights(tensors.items())
    return model.live()


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextlib.contextmanager
def streaming(
    gpu: LazyGpu, **options: Any
) -> Iterator[tuple[Publisher, dict[str, torch.Tensor], GpuModelEngine, Gate]]:
    weights = {name: gpu.tensor(tensor) for name, tensor in checkpoint(1).items()}
    engine = GpuModelEngine(gpu, on(gpu, Model()))
    with fleet(TensorSource(weights), engine, **{"install": "streaming", **options}) as (publisher, (client,)):
        yield publisher, weights, engine, client.gate


def use(weights: Mapping[str, torch.Tensor], seed: int) -> None:
    for name, tensor in checkpoint(seed).items():
        weights[name].copy_(tensor)


@pytest.mark.parametrize("transport", ["memory://", "ipc://"])
@pytest.mark.parametrize("bucket_size_bytes", [512, 4096])
def test_every_version_is_whole_when_publish_returns(gpu: LazyGpu, bucket_size_bytes: int, transport: str) -> None:
    """By the loader, by copies that are proven, then by copies: of whole tensors, and of pieces of them."""
    options = {"transport": transport, "bucket_size_bytes": bucket_size_bytes}
    with streaming(gpu, **options) as (publisher, weights, engine, _):
        for number in range(1, 5):
            use(weights, number)
            assert publisher.publish(number).ok
            assert same(held(gpu, engine.model), cold(checkpoint(number)))
            for tensor in weights.values():
                tensor.fill_(-1.0)
        gpu.synchronize(gpu.device)
        assert same(held(gpu, engine.model), cold(checkpoint(4)))
        assert engine.model.num_loads == len(weights) + 3 * NUM_OPAQUE


def test_the_last_step_of_generation_reads_the_former_weights(gpu: LazyGpu) -> None:
    with streaming(gpu) as (publisher, weights, engine, _):
        publisher.publish(1)
        for number in (2, 3):
            with gpu.stream(gpu.Stream(gpu.device)):
                read = {name: tensor.clone() for name, tensor in engine.model.named_parameters()}
            use(weights, number)
            publisher.publish(number)
            gpu.synchronize(gpu.device)
            expected = cold(checkpoint(number - 1))
            assert all(torch.equal(gpu.read(tensor), expected[name]) for name, tensor in read.items())


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("number", [2, 3])
def test_an_update_that_fails_at_its_end_is_undone_or_leaves_the_engine_torn(
    gpu: LazyGpu, number: int, undo: bool
) -> None:
    with streaming(gpu, undo=undo) as (publisher, weights, engine, gate):
        for each in range(1, number):
            use(weights, each)
            publisher.publish(each)
        before = held(gpu, engine.model)
        use(weights, 7)
        engine.fail_in_copy = True
        with pytest.raises(PublishError, match="told to fail"):
            publisher.publish(number)
        with contextlib.nullcontext() if undo else pytest.raises(EngineTornError), gate.step(timeout_seconds=0):
            pass
        gpu.synchronize(gpu.device)
        assert same(held(gpu, engine.model), before) is undo
        engine.fail_in_copy = False
        publisher.publish(number + 1)
        with gate.step():
            assert same(held(gpu, engine.model), cold(checkpoint(7)))
