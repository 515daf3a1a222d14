"""The trainer of the tests: one model in pytest's process whose weights become those of a seed, and are published."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from publishers import publisher_of

from real_vllm.models import make_model, model_of
from real_vllm.servers import Setup
from weightcast import ModuleSource, PublishError, PublishReport, Region, TensorSpec, WeightcastError, registry
from weightcast.seams.client import EngineClient
from weightcast.seams.source import Regions
from weightcast.testing.faults import FaultyTransport

IPC = "ipc://"
GLOO = "gloo://127.0.0.1:0"
FILE = "file://{}/store"
"""Of a test's own directory: format it with that."""
SMALL_BUCKETS = 1 << 18
"""Of a tiny model this makes a dozen buckets, so that there is a middle of the transfer."""


class Trainer:
    """A publisher of one model of the setup's family; `models[seed]` is what it publishes as that seed."""

    def __init__(self, setup: Setup, engines: Sequence[str | EngineClient], transport: str, **options: Any) -> None:
        self._setup = setup
        self._model = make_model(setup.family, 0, setup.dtype)
        options = {"bucket_size_bytes": SMALL_BUCKETS, "token": setup.token or None} | options
        self.publisher = publisher_of(ModuleSource(self._model), engines=engines, transport=transport, **options)

    def publish(self, seed: int, **options: Any) -> PublishReport:
        """Step to the weights of that seed and publish them."""
        self._model.load_state_dict(self.of(seed).state_dict())
        return self.publisher.publish(**options)

    def publish_near(self, seed: int) -> PublishReport:
        """Publish weights of which some are not those of that seed: the first row of each tensor."""
        self._model.load_state_dict(self.of(seed).state_dict())
        change_first_rows(self._model)
        return self.publisher.publish()

    def of(self, seed: int) -> Any:
        """The oracle's model of a seed."""
        return model_of(self._setup.family, seed, self._setup.dtype)

    def failure(self, seed: int, **options: Any) -> WeightcastError:
        """Publish what the one engine will not take; its error."""
        try:
            report = self.publish(seed, **options)
        except PublishError as error:
            (cause,) = error.failures.values()
            return cause
        raise AssertionError(f"published: {report}")


def change_first_rows(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[:1] += 0.5


@contextlib.contextmanager
def trainer(setup: Setup, *engines: str | EngineClient, transport: str = IPC, **options: Any) -> Iterator[Trainer]:
    """A trainer, gone with everything of it in the end. `options` are Publisher's."""
    made = Trainer(setup, engines, transport, **options)
    with contextlib.closing(made.publisher):
        yield made


class Tensors:
    """A source of whatever tensors it is given, right or wrong."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._specs = [
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in tensors.items()
        ]
        self._regions: Regions = {
            name: [(Region((0,) * tensor.ndim, tuple(tensor.shape)), tensor)] for name, tensor in tensors.items()
        }

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


def checkpoint_tensors(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors by checkpoint name, tied names once; a dict to spoil."""
    held = ModuleSource(model).regions()
    return {name: pieces[0][1] for name, pieces in held.items()}


TRANSPORT: object = None
"""What the registry finds as `ipc` in a test with `faulty_ipc`."""


def faulty_ipc(monkeypatch: pytest.MonkeyPatch) -> FaultyTransport:
    """The transport of this process's publishers by `ipc://` until the test ends; engines have their own."""
    faulty = FaultyTransport(registry.transport(IPC), IPC)
    monkeypatch.setattr(f"{__name__}.TRANSPORT", faulty.transport())
    monkeypatch.setitem(registry.TRANSPORTS, "ipc", f"{__name__}:TRANSPORT")
    return faulty
