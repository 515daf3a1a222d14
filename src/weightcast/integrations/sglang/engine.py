"""All ranks behind one SGLang server, as one engine, and weightcast's routes beside SGLang's in its HTTP server.

Invariants: the routes ask for the keys that SGLang's own weight routes ask for, and with a token set for that; an
install is one request, which goes on to its end also without its client, in a pause in which nothing runs and which
SGLang's own /continue_generation does not end; while the engine is torn, generation is answered with 503, and
/continue_generation with 409. A message to the schedulers is never given up: its answer would be taken for the next
one's.
"""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException

from weightcast.control.routes import guarded, weight_handlers
from weightcast.control.worker_rpc import RankCall, RankReply
from weightcast.errors import EngineTornError
from weightcast.format.messages import PauseMode
from weightcast.host.deadline import POLL_SECONDS
from weightcast.integrations.plugin import TOKEN_VARIABLE
from weightcast.integrations.plugin.engine import PluginEngine
from weightcast.integrations.plugin.replies import Replies
from weightcast.integrations.plugin.routes import TornGuard, log
from weightcast.integrations.plugin.server_mutex import ServerMutex
from weightcast.integrations.sglang import internals
from weightcast.integrations.sglang.scheduler import FORMAT

_GENERATION = (
    *("/generate", "/v1/", "/encode", "/classify", "/decisions", "/invocations", "/vertex_generate"),
    *("/api/chat", "/api/generate", "/rerank", "/score", "/systemone"),
)

_CHANGING = ("/update_weights_from_", "/begin_weight_update", "/weights_checker")


def attach(app: FastAPI, manager: Any) -> None:
    """Add the routes to a server that does not run yet.

    Raises UnsupportedError if this SGLang lacks what they need, ValueError if they would ask for two different keys.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    engine = SglangEngine(manager)
    token = os.environ.get(TOKEN_VARIABLE) or None
    require_one_key(manager.server_args, token)
    for method, path, handler in weight_handlers(lambda: engine):
        endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(guarded(handler, token=token, on_error=log))
        app.add_api_route(path, endpoint, methods=[method])
    app.add_middleware(
        TornGuard, why_torn=engine.why_torn, doubt=engine.doubt, generation=_GENERATION, changing=_CHANGING
    )
    manager.continue_generation = functools.partial(_continue, engine)


def require_one_key(server_args: Any, token: str | None) -> None:
    """Raises ValueError if SGLang's key of its weight routes is not the token: no caller could give both."""
    options = {"--admin-api-key": server_args.admin_api_key, "--api-key": server_args.api_key}
    option, key = next(((option, key) for option, key in options.items() if key), ("", token))
    if token is not None and key != token:
        raise ValueError(
            f"SGLang's {option} and {TOKEN_VARIABLE} differ, and weight routes ask for both: give the two the same "
            f"value, or unset {TOKEN_VARIABLE}"
        )


async def _continue(engine: SglangEngine, request: Any) -> None:
    """Handle SGLang's own route /continue_generation. Raises HTTPException 409 if the engine is torn."""
    try:
        await engine.resume()
    except EngineTornError as exc:
        raise HTTPException(409, str(exc)) from exc


class SglangEngine(PluginEngine):
    """The engine behind SGLang's TokenizerManager. Raises UnsupportedError if that lacks what is leant on."""

    def __init__(self, manager: Any, *, deadline_seconds: float = 60.0) -> None:
        internals.require(
            manager,
            *("auto_create_handle_loop", "update_weights_from_tensor_communicator", "is_pause", "is_pause_cond"),
            *("model_update_lock", "pause_generation", "continue_generation", "abort_request", "update_weight_version"),
            *("config_value", "server_args", *(path.rpartition(".")[2] for path in internals.ASKED)),
        )
        internals.require(manager.server_args, "admin_api_key", "api_key")
        super().__init__("SGLang", ServerMutex.of_one(), deadline_seconds)
        self._manager = manager
        self._continue = manager.continue_generation

    async def world_size(self, *, with_data_parallel: bool) -> int:
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
            # A request holds SGLang's lock of its weights as a reader as long as it lives; no event marks the last end.
            while await self._manager.model_update_lock.is_locked():
                if mode == "abort":
                    self._manager.abort_request(abort_all=True)
                await asyncio.sleep(POLL_SECONDS)
        await self._manager.pause_generation(internals.io("PauseGenerationReqInput", mode="retract"))

    async def _schedule(self) -> None:
        # SGLang's default gives a GPU's free memory back, which takes time, and generation needs that memory again.
        await self._continue(internals.io("ContinueGenerationReqInput", torch_empty_cache=False))

    async def _is_stopped(self) -> bool:
        return bool(self._manager.is_pause)

    async def _label(self) -> str:
        return str(self._manager.config_value("weight_version"))

    async def _set_label(self, version: str) -> None:
        request = internals.io("UpdateWeightVersionReqInput", new_version=version, abort_all_requests=False)
        await self._manager.update_weight_version(request)
