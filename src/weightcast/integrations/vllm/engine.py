"""All ranks of all engine cores behind one vLLM API server, as one engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from weightcast.control.worker_rpc import METHOD, Ask, RankCall, numbered, replies_to
from weightcast.format.messages import PauseMode
from weightcast.integrations.plugin.engine import PluginEngine
from weightcast.integrations.plugin.replies import Replies
from weightcast.integrations.plugin.server_mutex import ServerMutex
from weightcast.integrations.vllm.served_adapters import ServedAdapters

DEADLINE_SECONDS = 50.0
"""Shorter than a publisher's default deadline, so that it receives the error."""


class VllmEngine(PluginEngine):
    """The engine behind `client`, vLLM's EngineClient. `mutex`: needed with several API servers.

    `adapters`: the API server's; None if there are several API servers, of which each would name them by itself.
    """

    default_pause = "abort"  # that of vLLM's own route, which ours replaces

    def __init__(
        self,
        client: Any,
        mutex: ServerMutex | None = None,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        adapters: ServedAdapters | None = None,
    ) -> None:
        super().__init__("vLLM", ServerMutex.of_one() if mutex is None else mutex, deadline_seconds, adapters)
        self._client = client

    async def world_size(self, *, with_data_parallel: bool) -> int:
        parallel = self._client.vllm_config.parallel_config
        return int(parallel.world_size_across_dp if with_data_parallel else parallel.world_size)

    @contextlib.asynccontextmanager
    async def waking(self, tags: Sequence[str]) -> AsyncIterator[None]:
        """Context in which vLLM may be woken, and so may begin to generate. Raises EngineTornError.

        A torn engine may wake its weights, for the next update, as long as its KV cache stays asleep.
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
        # Without vLLM's own timeout, which would leave a reply that the next step would read.
        core = self._client.engine_core
        answers = await core.call_utility_all_async("collective_rpc", METHOD, None, (values,), None)
        replies = replies_to(values, [reply for answer in answers for reply in answer], "vLLM")
        return Replies(replies, len(answers))

    async def _stop(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        if clear_cache:
            await self._client.renderer.clear_mm_cache_async()
        # As vLLM's `pause_generation`, but without its sleep afterwards.
        await self._client.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)

    async def _schedule(self) -> None:
        # Data-parallel engines with expert parallelism synchronise in a resume, which one that runs would not join.
        if await self._is_stopped():
            await self._go_on()

    async def _end_stop(self) -> None:
        # Data-parallel engines with expert parallelism can't resume before all have paused, which waits for running
        # requests. A pause in this mode ends the former one at once.
        await self._stop("keep", clear_cache=False)

    async def _go_on(self) -> None:
        # Unlike vLLM's resume, this does not start an engine whose weights or KV cache are asleep.
        await self._client.wake_up(tags=["scheduling"])

    async def _is_stopped(self) -> bool:
        return bool(await self._client.is_paused())

    async def _label(self) -> str:
        return str(await self._client.get_weight_version())

    async def _set_label(self, version: str) -> None:
        await self._client.update_weight_version(version)
