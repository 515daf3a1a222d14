"""vLLM without a server: an `LLM` or `AsyncLLM` of this process, or a Ray actor that is one, as engines of a Publisher.

Invariants: each calls public methods of vLLM's classes only; every wait has a deadline, after which the engine counts
as hung; an engine that is partly asleep is paused and resumed without waking it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

from weightcast.control.worker_rpc import METHOD, unmarked
from weightcast.errors import ControlError, PeerDiedError, PeerTimeoutError, WeightcastError, from_record
from weightcast.format.messages import PauseMode
from weightcast.integrations.plugin.refusal import Refusal
from weightcast.integrations.vllm.rank_client import RankClient, Status

Call = Callable[..., Any]
"""Calls a method of an engine: its name, then its arguments. Raises WeightcastError only."""


class LLMEngine(RankClient):
    """An offline `LLM`, in the process that publishes. Don't generate while `publish` runs: an LLM has one caller.

    `timeout_seconds` bounds each call to its engine process; an LLM without one runs in this process and can't be
    timed out. `pause="wait"` needs an engine process.
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
        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            return _translated(name, method, lambda: run(lambda: getattr(llm, method)(*args, **kwargs)))

        # Without a process of its own the engine computes in the caller's thread, whose state torch keeps by thread.
        is_inside = type(llm.llm_engine.engine_core).__name__ == "InprocClient"
        run: Call = (lambda work: work()) if is_inside else (lambda work: _within(timeout_seconds, work))
        super().__init__(name, _OfflineControl(name, call), refusal=Refusal(llm), pause=pause, token=token)


class AsyncLLMEngine(RankClient):
    """An `AsyncLLM`. Its event loop must go on while `publish` runs: `await asyncio.to_thread(publisher.publish)`.

    `loop` is the one that it lives in, by default the one that runs where this is made.
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
        home = asyncio.get_running_loop() if loop is None else loop

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            if _is_running_here(home):
                raise ControlError(
                    f"{name} can't answer while its event loop waits: publish in another thread, "
                    "`await asyncio.to_thread(publisher.publish)`",
                    peer=name,
                )
            future = asyncio.run_coroutine_threadsafe(getattr(async_llm, method)(*args, **kwargs), home)
            try:
                return _translated(name, method, lambda: future.result(timeout_seconds))
            finally:
                future.cancel()

        world_size = async_llm.vllm_config.parallel_config.world_size_across_dp
        control = _AsyncControl(name, call, world_size)
        super().__init__(name, control, refusal=Refusal(async_llm), pause=pause, token=token)


class RayEngine(RankClient):
    """A Ray actor of vLLM's `LLM` or `AsyncLLM`, or of a class that has their methods.

    Needs `collective_rpc`, `wake_up`, `get_weight_version`, `update_weight_version`, and `pause_generation` with
    `is_paused` (AsyncLLM) or `sleep` with `reset_prefix_cache` (LLM); raises ValueError if the actor lacks one. If the
    publisher's process dies in a pause, nobody lifts it from an actor that lives on: call its
    `wake_up(tags=["scheduling"])`.
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
        import ray

        name = name or f"ray:{handle._actor_id.hex()}"
        is_async = hasattr(handle, "pause_generation")
        needed = [*_ALWAYS, *(_ASYNC if is_async else _OFFLINE)]
        missing = [method for method in needed if not hasattr(handle, method)]
        if missing:
            raise ValueError(f"the actor {name} is no LLM or AsyncLLM of vLLM: it has no {', '.join(missing)}")

        def call(method: str, *args: Any, **kwargs: Any) -> Any:
            reply = getattr(handle, method).remote(*args, **kwargs)
            return _translated(name, method, lambda: ray.get(reply, timeout=timeout_seconds))

        control = _AsyncControl(name, call) if is_async else _OfflineControl(name, call)
        super().__init__(name, control, pause=pause, token=token)


_ALWAYS = ("collective_rpc", "wake_up", "get_weight_version", "update_weight_version")
_ASYNC = ("pause_generation", "is_paused")
_OFFLINE = ("sleep", "reset_prefix_cache")


class _Methods:
    """What `LLM` and `AsyncLLM` have in common of a `Control`."""

    def __init__(self, name: str, call: Call) -> None:
        self._name = name
        self._call = call

    def call_ranks(self, call: Any) -> list[Any]:
        replies: list[Any] = self._call("collective_rpc", METHOD, args=(call,))
        return replies

    def resume(self) -> None:
        # Not resume_generation: an engine of which only the weights are awake must not schedule.
        self._call("wake_up", tags=["scheduling"])

    def set_label(self, version: str) -> None:
        self._call("update_weight_version", version)


class _OfflineControl(_Methods):
    """An `LLM`, which has no pause of its own, but a sleep that frees nothing."""

    def status(self) -> Status:
        return Status(self._call("get_weight_version"), False)

    def pause(self, mode: PauseMode) -> None:
        self._call("sleep", level=0, mode=mode)
        if not self._call("reset_prefix_cache", reset_running_requests=True, reset_connector=True):
            raise ControlError(f"{self._name} did not drop its prefix cache", peer=self._name)


class _AsyncControl(_Methods):
    """An `AsyncLLM`. `world_size`: None where it can't be read."""

    def __init__(self, name: str, call: Call, world_size: int | None = None) -> None:
        super().__init__(name, call)
        self._world_size = world_size

    def status(self) -> Status:
        return Status(self._call("get_weight_version"), self._call("is_paused"), self._world_size)

    def pause(self, mode: PauseMode) -> None:
        self._call("pause_generation", mode=mode, clear_cache=True)


def _translated(name: str, method: str, call: Callable[[], Any]) -> Any:
    """Run a call to vLLM; its errors, asyncio's and Ray's become ours."""
    try:
        return call()
    except WeightcastError:
        raise
    except TimeoutError as exc:
        raise PeerTimeoutError(f"{name}.{method} gave no answer in time", peer=name) from exc
    except Exception as exc:
        kinds = {kind.__name__ for kind in type(exc).__mro__}
        if kinds & {"EngineDeadError", "RayActorError"}:
            raise PeerDiedError(f"{name} has died: {exc}", peer=name) from exc
        record = unmarked(str(exc))
        if record is not None:
            raise from_record(record) from exc
        raise ControlError(f"{name}.{method} failed: {type(exc).__name__}: {exc}", peer=name) from exc


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _within(timeout_seconds: float, work: Callable[[], Any]) -> Any:
    """Run `work` in a thread of its own, since nothing ends vLLM's wait for an engine process that is stuck or gone.

    Raises TimeoutError; the thread is then left behind.
    """
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as exc:
            future.set_exception(exc)

    threading.Thread(target=run, name="weightcast-llm", daemon=True).start()
    return future.result(timeout_seconds)
