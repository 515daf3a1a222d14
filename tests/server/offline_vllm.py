"""The methods of vLLM's `LLM` and `AsyncLLM` over a real rank: a stand-in for their call signatures alone."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from server.stock_vllm import FragileEngine

from weightcast.control.worker_rpc import METHOD, Leave, RankCall
from weightcast.integrations.plugin.rank_consensus import RankConsensus
from weightcast.integrations.plugin.rank_worker import RankWorker


class Requests:
    """The methods of vLLM's input processor and engine core by which all requests pass."""

    def assign_request_id(self, request: object) -> None:
        """It has one."""

    def get_output(self) -> None:
        """There is some."""


class InprocClient(Requests):
    """By this name vLLM says that an LLM runs in its caller's process."""


class OtherClient(Requests):
    """An LLM whose engine has a process."""


class OfflineLLM:
    """As vLLM's LLM. `log` has the calls in their order, `threads` those that made them."""

    def __init__(self, *, is_inside: bool = True) -> None:
        self.module = torch.nn.Linear(8, 8)
        self.engine = FragileEngine(self.module)
        self.rank = RankWorker(self.engine, RankConsensus([]), engine_rank=0, world_size=1)
        self.llm_engine = SimpleNamespace(
            engine_core=InprocClient() if is_inside else OtherClient(), input_processor=Requests()
        )
        self.log: list[str] = []
        self.threads: set[int] = set()
        self.label = "default"
        self.asleep: set[str] = set()
        self.is_scheduling = True
        self.hangs_at = ""
        self.has_hung = threading.Event()

    def close(self) -> None:
        self.rank.answer(Leave())

    def _note(self, what: str) -> None:
        self.log.append(what)
        self.threads.add(threading.get_ident())
        if what == self.hangs_at:
            assert self.has_hung.wait(60)

    def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        assert (method, timeout, kwargs) == (METHOD, None, None)
        self._note(args[0]["call"])
        return [msgspec.to_builtins(self.rank.answer(msgspec.convert(args[0], RankCall)))]

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._note(f"sleep {level} {mode}")
        self.is_scheduling = False
        if level:
            self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self._note(f"wake_up {tags}")
        self.asleep -= set(tags or self.asleep)
        self.is_scheduling = not self.asleep
        return not self.asleep

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        assert reset_running_requests
        assert reset_connector
        self._note("reset_prefix_cache")
        return True

    def get_weight_version(self) -> str:
        return self.label

    def update_weight_version(self, new_version: str) -> None:
        self._note(f"label {new_version}")
        self.label = new_version


class OnlineLLM:
    """As vLLM's AsyncLLM."""

    def __init__(self) -> None:
        self.inner = OfflineLLM()
        self.home = asyncio.get_running_loop()
        self.engine_core, self.input_processor = OtherClient(), Requests()
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=1))

    async def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        assert asyncio.get_running_loop() is self.home
        if args[0]["call"] == self.inner.hangs_at:
            await asyncio.Event().wait()
        return self.inner.collective_rpc(method, timeout, args, kwargs)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        self.inner._note(f"pause {mode} {clear_cache}")
        self.inner.is_scheduling = False

    async def is_paused(self) -> bool:
        return not self.inner.is_scheduling

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        return self.inner.wake_up(tags)

    async def get_weight_version(self) -> str:
        return self.inner.label

    async def update_weight_version(self, new_version: str) -> None:
        self.inner.update_weight_version(new_version)
