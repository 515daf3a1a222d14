"""A publisher and workers in one process, with the real link and transport and no HTTP between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from weightcast.engines.gate import Gate
from weightcast.format.geometry import whole
from weightcast.format.manifest import TensorSpec, WeightVersion
from weightcast.format.messages import InitInfo, UpdateInfo, WeightInfo
from weightcast.seams.source import Regions
from weightcast.serving.worker import Worker
from weightcast.trainer.publisher import Publisher


class DictSource:
    """Tensors by name; `groups` and `aliases` by name."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        groups: Mapping[str, str] | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.tensors = dict(tensors)
        self._specs = tuple(
            TensorSpec(
                name,
                str(t.dtype).removeprefix("torch."),
                tuple(t.shape),
                aliases=(aliases or {}).get(name, ()),
                group=(groups or {}).get(name, ""),
            )
            for name, t in tensors.items()
        )
        self._regions = {name: ((whole(t.shape), t),) for name, t in self.tensors.items()}

    def specs(self) -> Sequence[TensorSpec]:
        return self._specs

    def regions(self) -> Regions:
        return self._regions


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


class DirectEngine:
    """An EngineClient that calls the worker in the same process."""

    def __init__(self, name: str, engine: Any) -> None:
        self.name = name
        self.gate = Gate()
        self.engine = engine
        self.worker = Worker(engine, gate=self.gate, install_deadline_seconds=5.0)

    def info(self) -> WeightInfo:
        return self.worker.info()

    def init(self, info: InitInfo) -> None:
        self.worker.init(info)

    def update(self, info: UpdateInfo) -> None:
        self.worker.update(info)

    def finish(self, version: int) -> None:
        self.worker.finish(version)

    def pause(self, run: str) -> None:
        self.worker.pause("keep", run)

    def resume(self, run: str) -> None:
        self.worker.resume(run)

    def close(self) -> None:
        self.worker.close()


@contextlib.contextmanager
def fleet(source: Any, *engines: Any, **options: Any) -> Iterator[tuple[Publisher, list[DirectEngine]]]:
    """A publisher of `source` over ipc with a direct client for each engine, closed at the end."""
    clients = [DirectEngine(f"engine-{number}", engine) for number, engine in enumerate(engines)]
    options = {"transport": "ipc://", "bucket_size_bytes": 4096, "deadline_seconds": 10.0, **options}
    try:
        with Publisher(source, engines=clients, **options) as publisher:
            yield publisher, clients
    finally:
        for client in clients:
            client.close()
