"""verl's workers on CPUs: a trainer whose weights say their step, rollouts that say what they hold.

Each Ray actor imports this, for seconds: what only the test's own process needs is in `cluster`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.rollout import BaseRollout

BACKEND = "weightcast"
DEADLINE_SECONDS = 20.0
SHAPES = {
    f"layers.{i}.{name}": shape for i in range(24) for name, shape in (("w", (512, 301)), ("b", (7,)), ("e", (0, 3)))
}


def value(step: int, name: str) -> float:
    return step * 100 + sum(map(ord, name)) % 97


def weights(step: int, seconds: float = 0.0) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor is gathered by all trainer ranks, and its memory is used for the next one."""
    memory = torch.empty(512 * 301)
    for name, shape in SHAPES.items():
        tensor = memory[: torch.Size(shape).numel()].view(shape).fill_(value(step, name) / dist.get_world_size())
        dist.all_reduce(tensor)
        time.sleep(seconds / len(SHAPES))
        yield name, tensor if name.endswith("w") else tensor.bfloat16()


class Trainer(Worker):
    """As verl's trainer worker, with weights in place of a model."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="cpu:gloo")
        self.seconds, self.fails_at, self.num_read, self.path = 0.0, "", 0, ""
        self.renew(config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def renew(self, config: CheckpointEngineConfig) -> None:
        kwargs = dict(config.engine_kwargs[BACKEND])
        bucket_size = config.update_weights_bucket_megabytes << 20
        is_master = dist.get_rank() == 0
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            BACKEND, is_master=is_master, bucket_size=bucket_size, **kwargs
        )

    def _weights(self, step: int) -> Iterator[tuple[str, torch.Tensor]]:
        self.num_read = 0
        if self.path:
            from transformers import AutoModelForCausalLM

            yield from AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.bfloat16).state_dict().items()
            return
        for name, tensor in weights(step, self.seconds):
            if name == self.fails_at:
                raise RuntimeError(f"the exporter failed at {name}")
            self.num_read += 1
            yield name, tensor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, Any]:
        return await self.checkpoint_engine.send_weights(self._weights(global_steps or 0), global_steps) or {}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self, seconds: float = 0.0, fails_at: str = "", path: str = "") -> None:
        """How long the weights take, at which it fails, and the checkpoint that they are of instead."""
        self.seconds, self.fails_at, self.path = seconds, fails_at, path

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> tuple[int, int]:
        return os.getpid(), self.num_read


class Model(BaseRollout):
    """A rollout that loads what it is given, in place, and can say which step it holds."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config, SimpleNamespace(), device_mesh=None)
        self.held: dict[str, torch.Tensor] = {}
        self.num_updates, self.fails_at, self.global_steps = 0, "", None

    async def resume(self, tags: list[str]) -> None:
        raise NotImplementedError

    async def release(self) -> None:
        raise NotImplementedError

    async def update_weights(self, weights: Any, global_steps: int | None = None, **kwargs: Any) -> None:
        self.num_updates += 1
        async for name, tensor in weights:
            if name == self.fails_at:
                raise RuntimeError(f"the rollout failed at {name}")
            self.held[name] = tensor.clone()
        self.global_steps = global_steps

    def step(self) -> int | None:
        """Which step all weights are of; None for no weights. Raises AssertionError for a mix."""
        if not self.held:
            return None
        name = next(iter(SHAPES))
        step = round((float(self.held[name].flatten()[0]) - value(0, name)) / 100)
        assert self.held.keys() == SHAPES.keys()
        for name, tensor in self.held.items():
            dtype = torch.float32 if name.endswith("w") else torch.bfloat16
            expected = torch.full(SHAPES[name], value(step, name)).to(dtype)
            assert torch.equal(tensor, expected), f"{name} is not of step {step}"
        return step


class Rollout(CheckpointEngineWorker):
    """verl's own rollout worker, with `Model` behind it."""

    def __init__(self, rollout_config: RolloutConfig) -> None:
        super().__init__(rollout_config, SimpleNamespace(), Model(rollout_config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def renew(self, config: CheckpointEngineConfig) -> None:
        bucket_size = config.update_weights_bucket_megabytes << 20
        kwargs = config.engine_kwargs[BACKEND]
        self.checkpoint_engine = CheckpointEngineRegistry.new(BACKEND, bucket_size=bucket_size, **kwargs)
        self.server_adapter = Model(self.rollout_config)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def state(self) -> tuple[int, int | None, int]:
        return os.getpid(), self.server_adapter.step(), self.server_adapter.num_updates

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def setup(self, fails_at: str = "") -> None:
        self.server_adapter.fails_at = fails_at


def config(**kwargs: Any) -> CheckpointEngineConfig:
    engine_kwargs = {"host": "127.0.0.1", "deadline_seconds": DEADLINE_SECONDS, **kwargs}
    return CheckpointEngineConfig(
        backend=BACKEND, update_weights_bucket_megabytes=1, engine_kwargs={BACKEND: engine_kwargs}
    )
