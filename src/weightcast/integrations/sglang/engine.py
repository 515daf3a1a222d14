"""All ranks behind one SGLang server, as one engine, in the process of its HTTP server.

Invariants: an install happens in a pause in which nothing runs; SGLang's own /continue_generation does not end it. A
message to the schedulers is never given up: its answer would be taken for the next one's.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from weightcast.control.worker_rpc import RankCall, RankReply
from weightcast.format.messages import PauseMode
from weightcast.integrations.plugin.engine import PluginEngine
from weightcast.integrations.plugin.replies import Replies
from weightcast.integrations.plugin.server_mutex import ServerMutex
from weightcast.integrations.sglang import internals
from weightcast.integrations.sglang.scheduler import FORMAT

_POLL_SECONDS = 0.02


class SglangEngine(PluginEngine):
    """The engine behind SGLang's TokenizerManager. Raises UnsupportedError if that lacks what is leant on."""

    def __init__(self, manager: Any, *, deadline_seconds: float = 60.0) -> None:
        internals.require(
            manager,
            *("auto_create_handle_loop", "update_weights_from_tensor_communicator", "is_pause", "is_pause_cond"),
            *("model_update_lock", "pause_generation", "continue_generation", "abort_request", "update_weight_version"),
            "config_value",
        )
        super().__init__("SGLang", ServerMutex.of_one(), deadline_seconds)
        self._manager = manager
        self._continue = manager.continue_generation

    def world_size(self, *, with_data_parallel: bool) -> int:
        """Of its ranks; SGLang with data parallelism is not updated."""
        return int(internals.parallel().tp_size)

    # --- SGLang's side ---

    async def _ask(self, call: RankCall) -> Replies:
        manager = self._manager
        manager.auto_create_handle_loop()
        request = internals.io(
            "UpdateWeightsFromTensorReqInput",
            serialized_named_tensors=[msgspec.json.encode(call)],
            load_format=FORMAT,
            flush_cache=False,
        )
        # Past the lock for which SGLang's own route would wait until every request has ended.
        sent = asyncio.ensure_future(manager.update_weights_from_tensor_communicator(request))
        answers = await asyncio.shield(sent)
        return Replies(msgspec.json.decode(answers[0].message, type=list[RankReply]), len(answers))

    async def _stop(self, mode: PauseMode) -> None:
        """Nothing runs afterwards, so that an install can drop all caches.

        `keep`: running requests are put back into the queue, and go on from their last token. `wait` lets them end
        first, `abort` ends them; requests that come meanwhile wait.
        """
        if mode != "keep":
            async with self._manager.is_pause_cond:
                self._manager.is_pause = True
            await self._drained(mode)
        await self._manager.pause_generation(internals.io("PauseGenerationReqInput", mode="retract"))

    async def _drained(self, mode: PauseMode) -> None:
        # A request holds SGLang's lock of its weights as a reader for as long as it lives; no event tells of the last.
        while await self._manager.model_update_lock.is_locked():
            if mode == "abort":
                self._manager.abort_request(abort_all=True)
            await asyncio.sleep(_POLL_SECONDS)

    async def _schedule(self) -> None:
        # SGLang's default gives a GPU's free memory back, which takes time and helps nobody who goes on serving.
        await self._continue(internals.io("ContinueGenerationReqInput", torch_empty_cache=False))

    async def _is_stopped(self) -> bool:
        return bool(self._manager.is_pause)

    async def _label(self) -> str:
        return str(self._manager.config_value("weight_version"))

    async def _set_label(self, version: str) -> None:
        request = internals.io("UpdateWeightVersionReqInput", new_version=version, abort_all_requests=False)
        await self._manager.update_weight_version(request)
