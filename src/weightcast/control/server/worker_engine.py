"""The reference server's worker, adapted to the routes: calls that may block run in a thread pool."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weightcast.control.routes import InstallAnswer, ServedEngine, reply
from weightcast.control.server.metrics import ServerMetrics
from weightcast.errors import UnsupportedError
from weightcast.format.manifest import TensorSpec
from weightcast.format.messages import HeldWeights, InitInfo, PauseMode, Seal, UpdateInfo, WeightInfo
from weightcast.serving.worker import Worker

P = ParamSpec("P")
T = TypeVar("T")


class WorkerEngine(ServedEngine):
    """Implements `ServedEngine` with a `Worker`. The gate keeps the pauses of runs and persons apart."""

    default_pause: PauseMode = "keep"

    def __init__(self, worker: Worker, pool: ThreadPoolExecutor, metrics: ServerMetrics) -> None:
        self._worker = worker
        self._pool = pool
        self._metrics = metrics

    def _run(self, call: Callable[P, T], *args: P.args, **_: P.kwargs) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, call, *args)

    async def init(self, info: InitInfo) -> None:
        await self._run(self._worker.init, info)

    async def update(self, info: UpdateInfo) -> None:
        await self._run(self._worker.update, info)

    async def finish(self, number: int, mode: PauseMode, run: str, seal: Seal | None = None) -> InstallAnswer:
        return await self._run(self._install, number, mode, run, seal)

    def _install(self, number: int, mode: PauseMode, run: str, seal: Seal | None) -> InstallAnswer:
        """Install between a pause and a resume, so that a publisher needs no requests for these; adapters, without."""
        worker = self._worker
        if seal is not None:
            worker.update(seal)
        if worker.offered_adapter:
            version = worker.finish(number, run)
            return InstallAnswer(str(version.number), version.run, 0.0)
        owner = f"install of version {number}"
        worker.gate.pause(mode, owner=owner, deadline_seconds=worker.install_deadline_seconds)
        paused_at = time.perf_counter()
        try:
            version = worker.finish(number, run)
        finally:
            worker.gate.resume(owner=owner)
        seconds = time.perf_counter() - paused_at
        self._metrics.pause_seconds.observe(seconds)
        return InstallAnswer(str(version.number), version.run, seconds)

    async def pause(self, mode: PauseMode, run: str, *, clear_cache: bool) -> None:
        await self._run(self._worker.pause, mode, run)

    async def resume(self, run: str) -> None:
        self._worker.gate.resume(owner=run)

    async def shutdown(self) -> None:
        await self._run(self._worker.shutdown)

    async def info(self) -> WeightInfo:
        info = self._worker.info()
        return msgspec.structs.replace(info, abilities=("install", *info.abilities))

    async def is_paused(self) -> bool:
        return self._worker.gate.is_paused

    async def world_size(self, *, with_data_parallel: bool) -> int:
        return self._worker.info().world_size

    async def held(self, names: Sequence[str], start: int, limit_bytes: int) -> HeldWeights:
        return await self._run(self._worker.held, set(names), start, limit_bytes)

    async def dtypes(self, specs: list[TensorSpec]) -> dict[str, str]:
        return await self._run(self._worker.dtypes, specs)

    async def quarantine(self, reason: str) -> None:
        self._worker.gate.tear(reason)

    async def specs(self, request: Request) -> Response:
        """Handle GET /weight_specs, a route that only this server has."""
        specs = await self._run(self._worker.engine.specs)
        if specs is None:
            raise UnsupportedError(f"{type(self._worker.engine).__name__} can't list its tensors: its specs() is None")
        return reply({"tensors": list(specs)})
