"""The shapes in which vLLM's engines reach TorchRL's scheme, each over two real ranks; they generate what these hold.

An engine that stands still has its callers wait: `generate` says so by Waiting here, where vLLM's would not return.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from integrations.test_vllm_rank import Engine
from torchrl_scheme.scheme_kit import Requests

from weightcast.control.worker_rpc import METHOD


class Waiting(AssertionError):
    """A request would wait for an engine that stands still."""


class Ranks:
    """Two ranks behind a `collective_rpc` that answers with futures. `answer` may change one: (call, rank, future)."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.models = self.engine.models
        self.is_paused = False
        self.answer: Callable[[str, int, Any], Any] = lambda call, rank, future: future

    def collective_rpc(self, method: str, timeout: Any = None, args: Any = (), kwargs: Any = None) -> list[Any]:
        assert (method, timeout, kwargs or {}) == (METHOD, None, {})
        submit, (call,) = self.engine._pool.submit, args
        futures = [submit(rank.answer, call) for rank in self.engine.ranks]
        return [self.answer(call["call"], rank, future) for rank, future in enumerate(futures)]

    def held(self) -> list[dict[str, torch.Tensor]]:
        """What each rank generates with."""
        if self.is_paused:
            raise Waiting("generate() would not return")
        return [dict(model.held) for model in self.models]

    def holds(self, tensors: dict[str, torch.Tensor]) -> bool:
        return self.engine.holds(tensors)

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.is_paused = True

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.is_paused = False

    def close(self) -> None:
        self.answer = lambda call, rank, future: future
        self.engine.close()


class Shape:
    """An engine of some kind: `given` is what a receiver is made for, `generate` what a user calls."""

    def __init__(self) -> None:
        self.replicas = [Ranks()]
        self.given: Any = None

    @property
    def models(self) -> list[Any]:
        return self.replicas[-1].models

    @property
    def ranks(self) -> Ranks:
        """Where the tests' faults are."""
        return self.replicas[-1]

    def generate(self) -> Any:
        return self.given.generate()

    def create(self, scheme: Any, **options: Any) -> Any:
        return scheme.create_receiver(self.given, **options)

    def close(self) -> None:
        for ranks in self.replicas:
            ranks.close()


class Collective(Shape):
    """What has `collective_rpc`, a pause and `generate`."""

    def __init__(self) -> None:
        super().__init__()
        ranks = self.ranks
        self.given = SimpleNamespace(
            collective_rpc=ranks.collective_rpc, generate=ranks.held, sleep=ranks.sleep, wake_up=ranks.wake_up
        )


class LLM(Shape):
    """vLLM's LLM, whose requests go through its `llm_engine`."""

    def __init__(self) -> None:
        super().__init__()
        ranks = self.ranks

        class LLMEngine:
            def __init__(self) -> None:
                self.input_processor, self.engine_core = Requests(), Requests()

            def add_request(self) -> None:
                self.input_processor.assign_request_id()

            def step(self) -> Any:
                self.engine_core.get_output()
                return ranks.held()

        class LLM:
            def __init__(self) -> None:
                self.llm_engine = LLMEngine()

            def generate(self) -> Any:
                self.llm_engine.add_request()
                return self.llm_engine.step()

            def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
                return [future.result(30) for future in ranks.collective_rpc(*args, **kwargs)]

            def sleep(self, level: int, mode: str) -> None:
                ranks.sleep()

            def wake_up(self, tags: list[str]) -> None:
                ranks.wake_up()

            def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
                return True

            def get_weight_version(self) -> str:
                return "default"

            def update_weight_version(self, version: str) -> None:
                """Its label."""

        self.given = LLM()


class Wrapped(LLM):
    """TorchRL's LocalLLMWrapper around an LLM."""

    def __init__(self) -> None:
        super().__init__()
        llm = self.given
        self.given = SimpleNamespace(llm_instance=llm, generate=lambda: llm.generate())


class AsyncLLM(Shape):
    """vLLM's AsyncLLM, in an event loop of another thread."""

    def __init__(self) -> None:
        super().__init__()
        ranks = self.ranks
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

        class AsyncLLM:
            vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=2))

            def __init__(self) -> None:
                self.input_processor, self.engine_core = Requests(), Requests()

            async def generate(self) -> Any:
                self.input_processor.assign_request_id()
                return ranks.held()

            async def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
                futures = ranks.collective_rpc(*args, **kwargs)
                return [await asyncio.wrap_future(future) for future in futures]

            async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
                ranks.sleep()

            async def is_paused(self) -> bool:
                return ranks.is_paused

            async def wake_up(self, tags: list[str]) -> None:
                ranks.wake_up()

            async def get_weight_version(self) -> str:
                return "default"

            async def update_weight_version(self, version: str) -> None:
                """Its label."""

        self.given = AsyncLLM()

    def _run(self, call: Callable[[], Any]) -> Any:
        async def run() -> Any:
            found = call()
            return await found if asyncio.iscoroutine(found) else found

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def generate(self) -> Any:
        return self._run(lambda: self.given.generate())

    def create(self, scheme: Any, **options: Any) -> Any:
        return self._run(lambda: scheme.create_receiver(self.given, **options))

    def close(self) -> None:
        super().close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class AsyncVLLM(Shape):
    """TorchRL's AsyncVLLM of two replicas, which are actors: `remote` calls answer with futures."""

    def __init__(self) -> None:
        super().__init__()
        self.replicas.append(Ranks())
        actors = [_actor(ranks) for ranks in self.replicas]
        replicas = self.replicas

        class AsyncVLLM:
            def __init__(self) -> None:
                self.actors = actors

            def collective_rpc(self, *args: Any) -> Any:
                return [actor.collective_rpc_v1.remote(*args) for actor in self.actors]

            def generate(self) -> Any:
                return self._generate_impl()

            def _generate_impl(self) -> Any:
                return [held for ranks in replicas for held in ranks.held()]

            def reset_prefix_cache(self) -> None:
                """Nothing to reset."""

        self.given = AsyncVLLM()


def _actor(ranks: Ranks) -> Any:
    methods = {"collective_rpc_v1": ranks.collective_rpc, "sleep": ranks.sleep, "wake_up": ranks.wake_up}
    return SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})


SHAPES: dict[str, type[Shape]] = {kind.__name__: kind for kind in (Collective, LLM, Wrapped, AsyncLLM, AsyncVLLM)}
