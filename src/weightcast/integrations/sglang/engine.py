"""All ranks behind one SGLang server, as one engine, and weightcast's routes in its HTTP server.

Invariants: the routes require the keys of SGLang's own weight routes and, if set, the token; an install is one request,
which is finished also without its client, in a pause in which nothing runs and which SGLang's own /continue_generation
does not end; while the engine is torn, generation is answered with 503, and /continue_generation with 409. A message to
the schedulers is never abandoned, since its answer would be taken for that to the next message.
"""

from __future__ import annotations

import asyncio
import functools
import os
from typing import Any

import msgspec
from fastapi import FastAPI, HTTPException

from weightcast.control.routes import WEIGHT_ROUTES, guarded
from weightcast.control.worker_rpc import RankCall, RankReply
from weightcast.errors import EngineTornError
from weightcast.format.manifest import convert
from weightcast.format.messages import PauseMode
from weightcast.host.deadline import POLL_SECONDS
from weightcast.integrations.plugin import TOKEN_VARIABLE
from weightcast.integrations.plugin.engine import PluginEngine
from weightcast.integrations.plugin.replies import Replies
from weightcast.integrations.plugin.routes import guard_serving, log
from weightcast.integrations.plugin.server_mutex import ServerMutex
from weightcast.integrations.sglang import internals
from weightcast.integrations.sglang.registered_adapters import RegisteredAdapters
from weightcast.integrations.sglang.scheduler import FORMAT

_GENERATION = (
    *("/generate", "/v1/", "/encode", "/classify", "/decisions", "/invocations", "/vertex_generate"),
    *("/api/chat", "/api/generate", "/rerank", "/score", "/systemone"),
)
_HEALTH = ("/health", "/health_generate", "/ready")
"""Not /ping, which asks whether the server lives."""
_CHANGING = ("/update_weights_from_", "/begin_weight_update", "/weights_checker")


def attach(app: FastAPI, manager: Any) -> None:
    """Add the routes to a server before it runs.

    Raises UnsupportedError if this SGLang lacks a name that they need, ValueError if they would require two different
    keys, or if a variable of the environment has another value than a number.
    """
    from sglang.srt.utils.auth import AuthLevel, auth_level

    engine = SglangEngine(manager)
    token = os.environ.get(TOKEN_VARIABLE) or None
    require_one_key(manager.server_args, token)
    for method, path, kind, answer in WEIGHT_ROUTES:
        handler = guarded(kind, answer, lambda: engine, token=token, on_error=log)
        app.add_api_route(path, auth_level(AuthLevel.ADMIN_OPTIONAL)(handler), methods=[method])
    guard_serving(app, lambda: engine, generation=_GENERATION, changing=_CHANGING, health=_HEALTH)
    manager.continue_generation = functools.partial(_continue, engine)


def require_one_key(server_args: Any, token: str | None) -> None:
    """Raise ValueError if SGLang's key for weight routes differs from the token, since a request can have only one."""
    options = {"--admin-api-key": server_args.admin_api_key, "--api-key": server_args.api_key}
    option, key = next(((option, key) for option, key in options.items() if key), ("", token))
    if token is not None and key != token:
        raise ValueError(
            f"SGLang's {option} and {TOKEN_VARIABLE} differ, but weight routes require both: set both to the same "
            f"value, or unset {TOKEN_VARIABLE}"
        )


async def _continue(engine: SglangEngine, request: Any) -> None:
    """Handle SGLang's own route /continue_generation. Raises HTTPException 409 if the engine is torn."""
    try:
        await engine.resume()
    except EngineTornError as exc:
        raise HTTPException(409, str(exc)) from exc


class SglangEngine(PluginEngine):
    """The engine behind SGLang's TokenizerManager. Raises UnsupportedError if that lacks a required name."""

    def __init__(self, manager: Any, *, deadline_seconds: float = 60.0) -> None:
        internals.require(
            manager,
            *("auto_create_handle_loop", "update_weights_from_tensor_communicator", "is_pause", "is_pause_cond"),
            *("model_update_lock", "pause_generation", "continue_generation", "abort_request", "update_weight_version"),
            *("config_value", "server_args", *(path.rpartition(".")[2] for path in internals.ASKED)),
        )
        internals.require(manager.server_args, "admin_api_key", "api_key")
        super().__init__("SGLang", ServerMutex.of_one(), deadline_seconds, RegisteredAdapters(manager))
        self._manager = manager
        self._continue = manager.continue_generation

    async def world_size(self, *, with_data_parallel: bool) -> int:
        """Return the number of ranks. SGLang with data parallelism is not supported."""
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
        # Without SGLang's lock, on which its own route waits until every request has ended.
        sent = asyncio.ensure_future(manager.update_weights_from_tensor_communicator(request))
        answers = await asyncio.shield(sent)
        return Replies(convert(msgspec.json.decode(answers[0].message), list[RankReply]), len(answers))

    async def _stop(self, mode: PauseMode, *, clear_cache: bool = True) -> None:
        """Pause so that nothing runs, and an install can drop all caches, which SGLang does then.

        "keep": running requests are put back into the queue, and continue from their last token. "wait": they finish
        first. "abort": they are ended. New requests wait.
        """
        if mode != "keep":
            async with self._manager.is_pause_cond:
                self._manager.is_pause = True
            # Each request holds SGLang's weight lock as a reader until it ends; no event marks the last one's end.
            while await self._manager.model_update_lock.is_locked():
                if mode == "abort":
                    self._manager.abort_request(abort_all=True)
                await asyncio.sleep(POLL_SECONDS)
        await self._manager.pause_generation(internals.io("PauseGenerationReqInput", mode="retract"))

    async def _schedule(self) -> None:
        # SGLang's default empties torch's cache of GPU memory, which takes time, and generation needs that memory.
        await self._continue(internals.io("ContinueGenerationReqInput", torch_empty_cache=False))

    async def _is_stopped(self) -> bool:
        return bool(self._manager.is_pause)

    async def _label(self) -> str:
        return str(self._manager.config_value("weight_version"))

    async def _set_label(self, version: str) -> None:
        request = internals.io("UpdateWeightVersionReqInput", new_version=version, abort_all_requests=False)
        await self._manager.update_weight_version(request)
