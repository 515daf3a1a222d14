"""verl's workers as Ray actors, and a manager of them, from the test's side."""

from __future__ import annotations

import concurrent.futures
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import ray
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import RolloutConfig

from real_verl.workers import Rollout, Trainer, config

START_SECONDS = 240.0


def _verls_own_kit() -> Any:
    """The module that verl's own tests of checkpoint engines share. Its package is called `tests`, as this folder's."""
    files = importlib.metadata.files("verl") or []
    (path,) = [file.locate() for file in files if str(file) == "tests/checkpoint_engine/test_utils.py"]
    spec = importlib.util.spec_from_file_location("verls_checkpoint_engine_kit", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


verls_kit = _verls_own_kit()


class KitRollout(verls_kit.CheckpointEngineWorkerTest):
    """verl's own test worker, under a name that other processes can import."""


class Replica(verls_kit.MockReplica):
    """`log`: which calls its servers were sent since the last look."""

    log: list[str]

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.log = ["abort"]

    async def release_kv_cache(self) -> None:
        self.log.append("release")

    async def resume_kv_cache(self) -> None:
        self.log.append("resume_kv_cache")

    async def resume_generation(self) -> None:
        self.log.append("resume_generation")

    @property
    def is_serving(self) -> bool:
        return self.log == ["abort", "release", "resume_kv_cache", "resume_generation"]


def group(cls: type, num: int, **kwargs: Any) -> RayWorkerGroup:
    """Workers that have started: that takes longer than the deadline of an update, where the machine is busy."""
    pool = RayResourcePool(process_on_nodes=[num], use_gpu=False, max_colocate_count=1)
    group = RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(cls), **kwargs), device_name="cpu"
    )
    ray.get([worker.__ray_ready__.remote() for worker in group.workers], timeout=START_SECONDS)
    return group


class Cluster:
    """Trainer ranks and rollout workers, which are started once, and a manager of some of them."""

    def __init__(self, num_trainers: int, num_rollouts: int) -> None:
        self.rollout_config = RolloutConfig(name="vllm", checkpoint_engine=config())
        self.trainers = group(Trainer, num_trainers, config=config())
        self.rollouts = group(Rollout, num_rollouts, rollout_config=self.rollout_config)
        self._pool = concurrent.futures.ThreadPoolExecutor(1)

    def begin(self, manager: type, replicas: Sequence[int], **kwargs: Any) -> None:
        """New engines everywhere; `replicas`: the number of workers of each."""
        self.config, begin = config(**kwargs), 0
        self.trainers.renew(self.config)
        self.trainers.setup()
        self.rollouts.renew(self.config)
        self.rollouts.setup()
        self.replicas = []
        for rank, num_workers in enumerate(replicas):
            replica = Replica(replica_rank=rank, config=self.rollout_config, model_config=SimpleNamespace())
            replica.workers = self.rollouts.workers[begin : begin + num_workers]
            replica.log = []
            begin += num_workers
            self.replicas.append(replica)
        self.manager = manager(self.config, self.trainers, list(self.replicas))

    def update(self, step: int) -> dict[str, Any]:
        return dict(self.manager.update_weights(global_steps=step))

    def update_in_background(self, step: int) -> concurrent.futures.Future[dict[str, Any]]:
        return self._pool.submit(self.update, step)

    def steps(self) -> list[int | None]:
        """Which step each rollout worker of the manager's replicas holds."""
        return [step for _, step, _ in self.states()]

    def states(self) -> list[tuple[int, int | None, int]]:
        """Of every rollout worker of the manager's: its pid, the step that it holds, how many updates verl began."""
        return list(ray.get([worker.state.remote() for replica in self.manager.replicas for worker in replica.workers]))

    def renew_trainers(self) -> None:
        """Start one trainer in the place of all of them, of which some have died."""
        for worker in self.trainers.workers:
            ray.kill(worker)
        self.trainers = self.manager.actor_wg = group(Trainer, 1, config=self.config)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
