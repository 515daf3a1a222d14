"""vLLM's EngineClient over real ranks: a stand-in for its method names and its order of calls alone.

Several may share one `Cores`, as vLLM's API servers share engine cores. A core does one call after another.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from server.stock_vllm import FragileEngine

from weightcast.control.worker_rpc import METHOD
from weightcast.integrations.plugin.rank_consensus import RankConsensus
from weightcast.integrations.plugin.rank_worker import RankWorker


class Cores:
    """The data-parallel engine cores, each of one rank. `log` has every call but questions, once for all cores.

    `failing` names rank calls whose answers get lost, after the first core alone has done them. While one is
    `is_busy`, a pause ends only once it is to freeze what runs; until then, as of experts, all refuse to go on.
    """

    def __init__(self, num_engines: int) -> None:
        self.modules = [torch.nn.Linear(8, 8) for _ in range(num_engines)]
        self.engines = [FragileEngine(module) for module in self.modules]
        self.ranks = [
            RankWorker(engine, RankConsensus([]), engine_rank=i, world_size=num_engines)
            for i, engine in enumerate(self.engines)
        ]
        self.label = "default"
        self.is_paused = False
        self.log: list[str] = []
        self.num_calls = 0
        self.failing: set[str] = set()
        self.is_busy = False
        self.pausing: asyncio.Event | None = None

    def values(self) -> list[float]:
        return [float(module.weight.detach()[0, 0]) for module in self.modules]


class ApiServerClient:
    """One API server's EngineClient."""

    def __init__(self, cores: Cores) -> None:
        self._cores = cores
        self.engine_core = SimpleNamespace(
            call_utility_all_async=self._call_all, pause_scheduler_async=self._pause_scheduler
        )
        self.renderer = SimpleNamespace(clear_mm_cache_async=self._step)

    async def _step(self) -> None:
        await asyncio.sleep(0)

    async def _called(self, what: str = "") -> None:
        self._cores.num_calls += 1
        await self._step()
        if what:
            self._cores.log.append(what)

    async def _call_all(self, utility: str, method: str, timeout: None, args: tuple[Any], kwargs: None) -> list[Any]:
        assert (utility, method, timeout, kwargs) == ("collective_rpc", METHOD, None, None)
        name = args[0]["call"]
        await self._called("" if name == "ask" else name)
        if name in self._cores.failing:
            self._cores.ranks[0].answer(args[0])
            raise RuntimeError(f"the test's loss of the answers to {name}")
        return [[await asyncio.to_thread(rank.answer, args[0])] for rank in self._cores.ranks]

    async def _pause_scheduler(self, *, mode: str, clear_cache: bool) -> None:
        await self._called(f"pause {mode} {clear_cache}")
        self._cores.is_paused = True
        if self._cores.is_busy and mode != "keep":
            self._cores.pausing = asyncio.Event()
            await self._cores.pausing.wait()
        elif self._cores.pausing is not None:
            self._cores.pausing.set()

    def _go_on(self) -> None:
        if self._cores.pausing is not None and not self._cores.pausing.is_set():
            raise RuntimeError("resume_scheduler called while pause is still in flight")
        self._cores.is_paused = False

    async def wake_up(self, tags: list[str]) -> bool:
        await self._called(f"wake_up {' '.join(tags)}")
        self._go_on()
        return True

    async def is_paused(self) -> bool:
        await self._called()
        return self._cores.is_paused

    async def get_weight_version(self) -> str:
        await self._called()
        return self._cores.label

    async def update_weight_version(self, version: str) -> None:
        await self._called(f"label {version}")
        self._cores.label = version
