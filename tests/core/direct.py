"""A publisher and workers in one process, with the real link and transport and no HTTP between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from publishers import publisher_of

from weightcast import LocalEngine
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.trainer.publisher import Publisher


class RecordingEngine:
    """Keeps a copy of what it is given, call by call, and can fail on demand."""

    def __init__(self, specs: Sequence[TensorSpec] | None = None) -> None:
        self._specs = specs
        self.calls: list[dict[str, torch.Tensor]] = []
        self.held: dict[str, torch.Tensor] = {}
        self.versions: list[WeightVersion] = []
        self.num_discards = 0
        self.fail_after: int | None = None

    def specs(self) -> Sequence[TensorSpec] | None:
        return self._specs

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        call: dict[str, torch.Tensor] = {}
        self.calls.append(call)
        for name, tensor in tensors:
            if self.fail_after is not None and len(call) >= self.fail_after:
                raise RuntimeError("this loader was told to fail")
            assert name not in call, f"{name} twice in one call"
            call[name] = tensor.clone()
            self.held[name] = call[name]

    def commit(self, version: WeightVersion) -> None:
        self.versions.append(version)

    def discard(self) -> None:
        self.num_discards += 1


class ReadableEngine(RecordingEngine):
    """Shows what it holds; of the tensor `spoilt` with a wrong element."""

    spoilt = ""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.held.items():
            if name == self.spoilt:
                tensor = tensor.clone()
                tensor.flatten()[0] += 1
            yield name, tensor


class DirectEngine(LocalEngine):
    """A client in the same process."""

    def __init__(self, name: str, engine: Any) -> None:
        super().__init__(engine, name=name, install_deadline_seconds=10.0)


@contextlib.contextmanager
def fleet(source: Any, *engines: Any, **options: Any) -> Iterator[tuple[Publisher, list[DirectEngine]]]:
    """A publisher of `source` over ipc with a direct client for each engine, closed at the end."""
    clients = [DirectEngine(f"engine-{number}", engine) for number, engine in enumerate(engines)]
    options = {"transport": "ipc://", "bucket_size_bytes": 4096, "deadline_seconds": 20.0, **options}
    try:
        with publisher_of(source, engines=clients, **options) as publisher:
            yield publisher, clients
    finally:
        for client in clients:
            client.close()
