"""Clients of vLLM without a server: an `LLM` or `AsyncLLM` of this process, a Ray actor, or `collective_rpc`.

Invariants: the clients call only public methods of vLLM's classes; every wait has a deadline, after which the engine
counts as hung; an engine that is partly asleep is paused and resumed without waking it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from types import SimpleNamespace
from typing import Any

from weightcast.errors import ControlError, import_of_extra
from weightcast.format.messages import PauseMode
from weightcast.host.deadline import in_background
from weightcast.integrations.plugin.refusal import Refusal
from weightcast.integrations.vllm.rank_client import RankClient
from weightcast.seams.client import EngineClient


def detect(engine: Any) -> list[EngineClient]:
    """Return the clients of an engine object, one for each replica; empty if it has no `collective_rpc`."""
    if not hasattr(engine, "collective_rpc"):
        return []
    if hasattr(engine, "actors"):
        return [CollectiveEngine(_replica(a), f"replica-{i}", of=engine) for i, a in enumerate(engine.actors)]
    if inspect.iscoroutinefunction(engine.collective_rpc):
        return [AsyncLLMEngine(engine)]
    if hasattr(getattr(engine, "llm_engine", None), "engine_core"):
        return [LLMEngine(engine)]
    return [CollectiveEngine(engine, type(engine).__name__)]


class LLMEngine(RankClient):
    """Client of an offline `LLM` in the publishing process. Don't generate while `publish` runs.

    `timeout_seconds`: limit of each call to its engine process. Without an engine process the LLM runs in this process,
    and calls have no limit. `pause="wait"` needs an engine process.
    """

    def __init__(
        self,
        llm: Any,
        *,
        name: str = "LLM",
        pause: PauseMode = "keep",
        token: str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        if not hasattr(getattr(llm, "llm_engine", None), "engine_core"):
            raise TypeError(f"{type(llm).__name__} is not an LLM of vLLM: pass the object that vllm.LLM(...) returned")
        # Without an engine process vLLM computes in the caller's thread, and torch has state by thread.
        is_inside = type(llm.llm_engine.engine_core).__name__ == "InprocClient"

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            work = functools.partial(getattr(llm, method), *args, **kwargs)
            if is_inside:
                return work()
            # vLLM's own wait for a hung or dead engine process has no deadline.
            return in_background(work, name="weightcast-llm").result(timeout_seconds)

        super().__init__(name, call, timeout_seconds, refusal=Refusal(llm), pause=pause, token=token)


class AsyncLLMEngine(RankClient):
    """Client of an `AsyncLLM`. Its event loop must run during the publish: `await publisher.publish_async()`.

    `loop`: the AsyncLLM's event loop, by default the running one.
    """

    def __init__(
        self,
        async_llm: Any,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        name: str = "AsyncLLM",
        pause: PauseMode = "keep",
        token: str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        if not hasattr(async_llm, "vllm_config"):
            raise TypeError(f"{type(async_llm).__name__} is not an AsyncLLM of vLLM: pass the AsyncLLM itself")
        home = asyncio._get_running_loop() if loop is None else loop
        if home is None:
            raise ValueError(
                "no event loop is running: make AsyncLLMEngine in a coroutine of the AsyncLLM's loop, or pass loop="
            )

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            if asyncio._get_running_loop() is home:
                raise ControlError(
                    f"{name} can't answer while its event loop waits: publish by `await publisher.publish_async()`",
                    peer=name,
                )
            future = asyncio.run_coroutine_threadsafe(getattr(async_llm, method)(*args, **kwargs), home)
            try:
                return future.result(timeout_seconds)
            finally:
                future.cancel()

        super().__init__(
            name,
            call,
            timeout_seconds,
            is_async=True,
            world_size=async_llm.vllm_config.parallel_config.world_size_across_dp,
            refusal=Refusal(async_llm),
            pause=pause,
            token=token,
        )


class RayEngine(RankClient):
    """Client of a Ray actor of vLLM's `LLM` or `AsyncLLM`, or of a class with their methods.

    The actor needs `collective_rpc`, `wake_up`, `get_weight_version`, `update_weight_version`, and `pause_generation`
    with `is_paused` (AsyncLLM) or `sleep` with `reset_prefix_cache` (LLM); raises ValueError if it lacks one. If the
    publisher's process dies during a pause, the actor stays paused: call its `wake_up(tags=["scheduling"])`.
    """

    def __init__(
        self,
        handle: Any,
        *,
        name: str = "",
        pause: PauseMode = "keep",
        token: str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        with import_of_extra():
            import ray
        if not hasattr(handle, "_actor_id"):
            raise TypeError(
                f"{type(handle).__name__} is not a handle of a Ray actor: pass the handle; for an LLM use LLMEngine"
            )
        name = name or f"ray:{handle._actor_id.hex()}"
        is_async = hasattr(handle, "pause_generation")
        needed = ["collective_rpc", "wake_up", "get_weight_version", "update_weight_version"]
        needed += ["is_paused"] if is_async else ["sleep", "reset_prefix_cache"]
        missing = [method for method in needed if not hasattr(handle, method)]
        if missing:
            raise ValueError(
                f"the actor {name} is not an LLM or AsyncLLM of vLLM, since it has no {', '.join(missing)}: derive its "
                "class from one of them, or add these methods"
            )

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            return ray.get(getattr(handle, method).remote(*args, **kwargs), timeout=timeout_seconds)

        super().__init__(name, call, timeout_seconds, is_async=is_async, pause=pause, token=token)


class CollectiveEngine(RankClient):
    """Client of an object with `collective_rpc(method, timeout, args, kwargs)`, for all of its workers.

    No other method is required (TorchRL's AsyncVLLM, and each of its replicas). Calls that return a future or a Ray
    reference are waited for. `sleep(level=0)` and `wake_up(tags)`, if present, pause the engine for an install, during
    which `reset_prefix_cache` is called. Without them the caller must not generate during an install.
    """

    def __init__(self, engine: Any, name: str, *, of: Any = None, timeout_seconds: float = 60.0) -> None:
        """`of`: the object with which callers generate, if `engine` is one of its replicas."""

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            return _resolved(getattr(engine, method)(*args, **kwargs), timeout_seconds)

        self._engine = engine
        refusal = Refusal(engine) if of is None else Refusal(of, name)
        super().__init__(name, call, timeout_seconds, refusal=refusal)

    def _label(self) -> str:
        """Return "default", since TorchRL's replicas have no label."""
        return "default"

    def _set_label(self, version: str) -> None:
        """Do nothing, since the engine has no label."""

    def _stop(self, mode: PauseMode) -> None:
        del mode  # a sleep of level 0 keeps requests
        if hasattr(self._engine, "sleep"):
            self._call("sleep", level=0)
        if hasattr(self._engine, "reset_prefix_cache") and self._call("reset_prefix_cache") is False:
            # Requests wait in the pause: try again, as TorchRL does, and once more after the install.
            self._call("reset_prefix_cache")

    def _schedule(self) -> None:
        if hasattr(self._engine, "wake_up"):
            super()._schedule()


def _replica(actor: Any) -> Any:
    """Wrap a replica of AsyncVLLM, a Ray actor, as an object whose methods return Ray references."""
    methods = {name: name for name in ("sleep", "wake_up", "reset_prefix_cache")}
    methods["collective_rpc"] = "collective_rpc_v1"
    return SimpleNamespace(**{name: getattr(actor, m).remote for name, m in methods.items() if hasattr(actor, m)})


def _resolved(value: Any, timeout_seconds: float) -> Any:
    """Return a call's result, after waiting for futures, alone or in a list. Raises TimeoutError."""
    if isinstance(value, list):
        return [_resolved(item, timeout_seconds) for item in value]
    if type(value).__name__ == "ObjectRef":
        import ray

        return ray.get(value, timeout=timeout_seconds)
    return value.result(timeout_seconds) if hasattr(value, "result") else value
