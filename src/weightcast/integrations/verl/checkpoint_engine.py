"""verl's `CheckpointEngine`, implemented by a `RolloutTransfer`. Its errors can be pickled, for Ray."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec
import ray
from verl.checkpoint_engine.base import CheckpointEngine

from weightcast.integrations.handed import Named
from weightcast.integrations.rollout.threads import in_thread
from weightcast.integrations.rollout.transfer import Framework, RolloutTransfer, endpoints_of


class WeightcastCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine that verl creates in each worker.

    `bucket_size`, `is_master`: verl's arguments. `options`: its `engine_kwargs`, which are `RolloutOptions`; `host` is
    by default Ray's address of the node. Raises ValueError or TypeError.
    """

    def __init__(self, bucket_size: int, is_master: bool | None = None, **options: Any) -> None:
        if bucket_size < 1 << 20:
            raise ValueError(
                f"the bucket size is {bucket_size} bytes: set "
                "rollout.checkpoint_engine.update_weights_bucket_megabytes to at least 1"
            )
        self._is_trainer = is_master is not None
        framework = Framework("verl", "engine_kwargs.weightcast", ray.util.get_node_ip_address)
        self._transfer = RolloutTransfer(bucket_size, framework, options)

    # --- before each update ---

    def prepare(self) -> dict[str, Any]:
        """Return a rollout worker's endpoint."""
        return {} if self._is_trainer else {"endpoint": self._transfer.endpoint()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give trainer rank 0 the endpoints of all rollout workers, and each rollout worker its rank.

        Raises ValueError if a rollout worker has no endpoint, since it was created as a trainer's.
        """
        remedy = "pass is_master only on trainer ranks"
        endpoints = endpoints_of(metadata, actor_wg_world_size, rollout_world_size, remedy)
        trainers: dict[str, list[Any]] = {
            "rank": list(range(actor_wg_world_size)),
            "rollout_world_size": [None] * actor_wg_world_size,
            "endpoints": [endpoints, *([[]] * (actor_wg_world_size - 1))],
        }
        rollouts: dict[str, list[Any]] = {
            "rank": list(range(rollout_world_size)),
            "rollout_world_size": [rollout_world_size] * rollout_world_size,
            "endpoints": [[]] * rollout_world_size,
        }
        return trainers, rollouts

    def init_process_group(
        self, rank: int, rollout_world_size: int | None, endpoints: Sequence[tuple[str, str, str]]
    ) -> None:
        """Make this worker a trainer rank or a rollout worker. Nothing is connected before weights are sent."""
        if rollout_world_size is not None:
            self._transfer.receive_as(rank, rollout_world_size)
            return
        self._is_trainer = True
        self._transfer.send_to(endpoints)

    # --- an update ---

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> dict[str, Any]:
        """Publish the weights as version `global_steps`; return metrics on rank 0, an empty dict on the others.

        Raises what `RolloutTransfer.send` raises, which runs in another thread. A cancelled task ends when that has
        ended.
        """
        report = await in_thread(functools.partial(self._transfer.send, weights, global_steps))
        if report is None:
            return {}
        stages = {f"weightcast/{name}_seconds": value for name, value in msgspec.structs.asdict(report.seconds).items()}
        return {
            **stages,
            "weightcast/version": report.version,
            "weightcast/num_bytes": report.num_bytes,
            "weightcast/num_buckets": report.num_buckets,
            "weightcast/gb_per_second": report.gb_per_second,
        }

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        """Return the tensors of version `global_steps`; see `RolloutEngine.receive`, which blocks and raises.

        verl does not await this call, and announces an update to its engine before it requests the first tensor. So
        this call blocks: otherwise the engine would wait for an update that has failed.
        """
        return _each(self._transfer.receive(global_steps))

    def finalize(self) -> None:
        self._transfer.finish()


async def _each(batches: AsyncIterator[list[Named]]) -> AsyncIterator[Named]:
    async for batch in batches:
        for named in batch:
            yield named
