"""vLLM engines that somebody hands over as Python objects: which client drives which.

An object that is known by its `collective_rpc` alone (TorchRL's AsyncVLLM, and each of its replicas) is driven by what
it has of vLLM's methods; calls that answer with a future, or a Ray reference, are waited for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from weightcast.control.worker_rpc import METHOD
from weightcast.errors import ControlError, PeerDiedError, PeerTimeoutError, WeightcastError
from weightcast.format.messages import PauseMode
from weightcast.integrations.plugin.refusal import Refusal
from weightcast.integrations.vllm.clients import AsyncLLMEngine, LLMEngine
from weightcast.integrations.vllm.rank_client import RankClient, Status
from weightcast.seams.client import EngineClient


def detect(engine: Any) -> list[EngineClient]:
    """The clients of an engine object, one for each replica; empty if it has no `collective_rpc`."""
    if not hasattr(engine, "collective_rpc"):
        return []
    if hasattr(engine, "actors"):
        actors = enumerate(engine.actors)
        return [CollectiveEngine(_ActorCalls(actor), f"replica-{i}", of=engine) for i, actor in actors]
    if inspect.iscoroutinefunction(engine.collective_rpc):
        return [AsyncLLMEngine(engine)]
    if hasattr(getattr(engine, "llm_engine", None), "engine_core"):
        return [LLMEngine(engine)]
    return [CollectiveEngine(engine, type(engine).__name__)]


class CollectiveEngine(RankClient):
    """An `EngineClient` of what has `collective_rpc(method, timeout, args, kwargs)`, for all of its workers.

    `sleep(level=0)` and `wake_up(tags)`, where it has them, pause it for an install; `reset_prefix_cache` is called in
    that pause. Without them the caller sees to it that nothing generates meanwhile.
    """

    def __init__(
        self,
        engine: Any,
        name: str,
        *,
        of: Any = None,
        token: str | None = None,
        timeout_seconds: float = 60.0,
    ) -> None:
        """`of`: the object by which callers generate, where `engine` is one of several parts of it."""
        control = _CollectiveControl(engine, name, timeout_seconds)
        super().__init__(name, control, refusal=Refusal(engine) if of is None else Refusal(of, name), token=token)


class _CollectiveControl:
    def __init__(self, engine: Any, name: str, timeout_seconds: float) -> None:
        self._engine = engine
        self._name = name
        self._timeout_seconds = timeout_seconds

    def call_ranks(self, call: Any) -> list[Any]:
        return list(_flat(self._call("collective_rpc", METHOD, None, (call,), None)))

    def status(self) -> Status:
        """Neither label nor pause is asked for: a replica of TorchRL's tells neither."""
        return Status("default", False)

    def pause(self, mode: PauseMode) -> None:
        del mode  # a sleep of level 0 keeps requests
        if hasattr(self._engine, "sleep"):
            self._call("sleep", level=0)
        if hasattr(self._engine, "reset_prefix_cache") and self._call("reset_prefix_cache") is False:
            # With requests that stand still in the pause: once more, as TorchRL does, and then after the install.
            self._call("reset_prefix_cache")

    def resume(self) -> None:
        if hasattr(self._engine, "wake_up"):
            self._call("wake_up", tags=["scheduling"])

    def set_label(self, version: str) -> None:
        """There is none."""

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        name = self._name
        try:
            return _resolved(getattr(self._engine, method)(*args, **kwargs), self._timeout_seconds)
        except WeightcastError:
            raise
        except TimeoutError as exc:
            raise PeerTimeoutError(f"{name}.{method} gave no answer in {self._timeout_seconds:g} s", peer=name) from exc
        except Exception as exc:
            if {"RayActorError", "EngineDeadError"} & {kind.__name__ for kind in type(exc).__mro__}:
                raise PeerDiedError(f"{name} has died: {exc}", peer=name) from exc
            raise ControlError(f"{name}.{method} failed: {type(exc).__name__}: {exc}", peer=name) from exc


class _ActorCalls:
    """A replica of AsyncVLLM, which is a Ray actor, as an object with methods that answer with Ray references."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Callable[..., Any]:
        actual = "collective_rpc_v1" if method == "collective_rpc" else method
        remote: Callable[..., Any] = getattr(self._actor, actual).remote
        return remote


def _flat(replies: list[Any]) -> Iterator[Any]:
    """Of each worker, also where they come in one list for each engine."""
    for reply in replies:
        if isinstance(reply, list):
            yield from reply
        else:
            yield reply


def _resolved(value: Any, timeout_seconds: float) -> Any:
    """What a call answered with, also where that is a future, or a list of them. Raises TimeoutError."""
    if isinstance(value, list):
        return [_resolved(item, timeout_seconds) for item in value]
    if type(value).__name__ == "ObjectRef":
        import ray

        return ray.get(value, timeout=timeout_seconds)
    return value.result(timeout_seconds) if hasattr(value, "result") else value
