"""All ranks of all engine cores behind one vLLM API server, as one engine: a call reaches each of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from weightcast.control.worker_rpc import METHOD, Ask, RankCall, numbered, replies_to
from weightcast.format.messages import PauseMode
from weightcast.integrations.plugin.engine import PluginEngine
from weightcast.integrations.plugin.replies import Replies
from weightcast.integrations.plugin.server_mutex import ServerMutex

DEADLINE_SECONDS = 50.0
"""Less than a publisher waits for an answer by default, so that it receives why there is none."""


class VllmEngine(PluginEngine):
    """The engine behind `client`, vLLM's EngineClient. By default one API server is in front of it."""

    default_pause = "abort"  # vLLM's own route's, in whose place ours stands

    def __init__(
        self, client: Any, mutex: ServerMutex | None = None, *, deadline_seconds: float = DEADLINE_SECONDS
    ) -> None:
        super().__init__("vLLM", ServerMutex.of_one() if mutex is None else mutex, deadline_seconds)
        self._client = client

    async def world_size(self, *, with_data_parallel: bool) -> int:
        parallel = self._client.vllm_config.parallel_config
        return int(parallel.world_size_across_dp if with_data_parallel else parallel.world_size)

    async def pause(self, mode: PauseMode, run: str = "", *, clear_cache: bool = True) -> None:
        """Stop generation until `resume`; vLLM's own route may leave the caches."""
        if clear_cache:
            await super().pause(mode)
            return
        async with self._alone():
            await self._in_time(self._client.engine_core.pause_scheduler_async(mode=mode, clear_cache=False))

    @contextlib.asynccontextmanager
    async def waking(self, tags: Sequence[str]) -> AsyncIterator[None]:
        """Inside of it vLLM may be woken, which sets it going once all its memory is there. Raises EngineTornError.

        A torn one may have its weights back, to be healed: where they sleep, so does its KV cache.
        """
        async with self._alone():
            replies = await self._in_time(self._replies(Ask()))
            are_asleep = all(reply.weights_asleep for reply in replies.ranks)
            if not (are_asleep and list(tags) == ["weights"]):
                await self._require_untorn(replies)
            yield

    # --- vLLM's side ---

    async def _ask(self, call: RankCall) -> Replies:
        values = numbered(call)
        # Never with a timeout of vLLM's, which would leave a reply behind for the next step to read.
        core = self._client.engine_core
        answers = await core.call_utility_all_async("collective_rpc", METHOD, None, (values,), None)
        replies = replies_to(values, [reply for answer in answers for reply in answer], "vLLM")
        return Replies(replies, len(answers))

    async def _stop(self, mode: PauseMode) -> None:
        await self._client.renderer.clear_mm_cache_async()
        # What vLLM's own `pause_generation` does, without its rest of 20 ms after it.
        await self._client.engine_core.pause_scheduler_async(mode=mode, clear_cache=True)

    async def _schedule(self) -> None:
        # Data-parallel engines of experts meet in a resume: one that is in a step would miss the others.
        if await self._is_stopped():
            await self._go_on()

    async def _end_stop(self) -> None:
        # Data-parallel engines of experts refuse to resume before all have paused, which waits for what is running. A
        # pause in this mode ends that one too.
        await self._client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def _go_on(self) -> None:
        # Unlike vLLM's resume, this leaves an engine alone whose weights or KV cache are asleep.
        await self._client.wake_up(tags=["scheduling"])

    async def _is_stopped(self) -> bool:
        return bool(await self._client.is_paused())

    async def _label(self) -> str:
        return str(await self._client.get_weight_version())

    async def _set_label(self, version: str) -> None:
        await self._client.update_weight_version(version)
