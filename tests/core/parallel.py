"""An engine of several workers in one process, as tensor parallelism has it: each with a link and a receiver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightcast.engines.gate import Gate
from weightcast.format.messages import InitInfo, UpdateInfo, WeightInfo
from weightcast.seams.client import EngineClient
from weightcast.serving.worker import Worker


class ParallelEngine(EngineClient):
    """An EngineClient that gives every call to every worker."""

    def __init__(self, name: str, engines: Sequence[Any], **options: Any) -> None:
        self.name = name
        self.engines = list(engines)
        self.workers = [
            Worker(
                engine,
                gate=Gate(),
                engine_rank=rank,
                world_size=len(self.engines),
                install_deadline_seconds=10.0,
                **options,
            )
            for rank, engine in enumerate(self.engines)
        ]

    def info(self) -> WeightInfo:
        return self.workers[0].info()

    def init(self, info: InitInfo) -> None:
        for worker in self.workers:
            worker.init(info)

    def update(self, info: UpdateInfo) -> None:
        for worker in self.workers:
            worker.update(info)

    def finish(self, version: int) -> None:
        for worker in self.workers:
            worker.finish(version)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
