"""What the tests of TorchRL's scheme share: vLLM's shape around a loader, weights whose values tell their version."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from integrations.test_vllm_rank import TENSORS, Engine

from weightcast.control.worker_rpc import METHOD
from weightcast.integrations.torchrl import VLLMDoubleBufferSyncScheme, VLLMDoubleBufferWeightSender

__all__ = ["TENSORS", "Copies", "LoadingModule", "Workers", "sender_of", "vllm_shape", "weights"]

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]


class Requests:
    """The methods of vLLM's input processor and engine core by which all requests pass."""

    def assign_request_id(self, request: object = None) -> None:
        """It has one."""

    def get_output(self) -> None:
        """There is some."""


def generate_by(engine: Any, generate: Callable[[], Any]) -> None:
    """Have an engine generate, with requests that pass where vLLM's do."""
    inner = getattr(engine, "llm_engine", engine)

    def step() -> Any:
        inner.engine_core.get_output()
        return generate()

    def add_and_step() -> Any:
        inner.input_processor.assign_request_id()
        return step()

    inner.step = step
    engine.generate = add_and_step


def vllm_shape(load_weights: Loader, model: Any = None, *, inner: bool = True) -> Any:
    """An object in which TorchRL finds a model; `inner`: behind `.llm_engine`."""
    model = SimpleNamespace(load_weights=load_weights) if model is None else model
    runner = SimpleNamespace(model=model)
    engine = SimpleNamespace(
        model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
        input_processor=Requests(),
        engine_core=Requests(),
    )
    return SimpleNamespace(llm_engine=engine) if inner else engine


class Copies:
    """A loader that keeps copies; `engine` is one around it."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[dict[str, torch.Tensor]] = []
        self.engine = vllm_shape(self._load, **options)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.calls.append({name: tensor.clone() for name, tensor in weights})

    @property
    def held(self) -> dict[str, torch.Tensor]:
        return self.calls[-1]


class LoadingModule(torch.nn.Module):
    """A module with vLLM's loader; `fail_at` is the number of the tensor at which it raises."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(8))
        self.b = torch.nn.Parameter(torch.zeros(8))
        self.fail_at = -1

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.named_parameters())
        for index, (name, tensor) in enumerate(weights):
            if index == self.fail_at:
                raise RuntimeError("the test's fault")
            own[name].data.copy_(tensor)


def weights(number: float, num_tensors: int = 6, numel: int = 20_000) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.full((numel,), float(number)) for i in range(num_tensors)}


def version_in(held: dict[str, torch.Tensor]) -> float:
    """The one value that all of them have."""
    (value,) = {float(v) for tensor in held.values() for v in torch.unique(tensor.detach())}
    return value


class Workers:
    """AsyncVLLM's shape: a method runs on every worker, calls answer with a future for each. Two real ranks.

    `in_a_call` runs once, between the calls of an update.
    """

    def __init__(self) -> None:
        self.ranks = Engine()
        self.in_a_call: Callable[[], None] | None = None
        self.num_resets = 0

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        assert (method, kwargs or {}) == (METHOD, {})
        if self.in_a_call is not None:
            act, self.in_a_call = self.in_a_call, None
            act()
        return [self.ranks._pool.submit(rank.answer, *args) for rank in self.ranks.ranks]

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1

    def generate(self) -> None:
        """Nothing is asked of it."""


_ANY = torch.nn.Linear(1, 1)


def sender_of(scheme: VLLMDoubleBufferSyncScheme, model: Any = _ANY) -> VLLMDoubleBufferWeightSender:
    """A sender with a model registered, as TorchRL wants it before any update."""
    sender = scheme.create_sender()
    sender.register_model(model)
    return sender


def write_freely(directory: str, num_threads: str, seconds: str) -> None:
    """A trainer's process: updates as fast as it goes, each number said once it is there."""
    sender, end, number = sender_of(VLLMDoubleBufferSyncScheme(directory, None, int(num_threads))), 0.0, 0
    tensors = weights(0, num_tensors=8, numel=20_000)
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        for tensor in tensors.values():
            tensor.fill_(number)
        sender.update_weights(tensors)
        print(number, flush=True)
        number += 1
    os._exit(0)


def trainer_command(directory: Path, num_threads: int, seconds: float) -> list[str]:
    """Runs `write_freely` in a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
    code += f"from torchrl_scheme.scheme_kit import write_freely; write_freely({str(directory)!r}, "
    return [sys.executable, "-c", code + f"{str(num_threads)!r}, {str(seconds)!r})"]
