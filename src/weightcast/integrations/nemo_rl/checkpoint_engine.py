"""NeMo-RL's `CheckpointEngine` over a `RolloutTransfer`. Errors that leave here can be pickled, for Ray.

Source of the contract: `nemo_rl/utils/checkpoint_engines/base.py` of August 2026.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from typing import Any

import ray
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from weightcast.integrations.handed import Named
from weightcast.integrations.rollout.threads import in_thread
from weightcast.integrations.rollout.transfer import Framework, RolloutTransfer

_OPTIONS = 'policy.generation.refit_cfg["weightcast.integrations.nemo_rl:NemoCheckpointEngine"]'


class NemoCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """NeMo-RL makes one in each policy worker and in each rollout worker; `bucket_size` is its own argument.

    The others are what `refit_cfg` has for this class besides: the `RolloutOptions`, `host` by default
    Ray's address of the node. Raises ValueError or TypeError.
    """

    cleanup_after_load = True
    shard_expert_weights = False

    def __init__(self, bucket_size: int, **options: Any) -> None:
        framework = Framework("NeMo-RL", _OPTIONS, ray.util.get_node_ip_address)
        self._transfer = RolloutTransfer(bucket_size, framework, options, batch_bytes=bucket_size)
        self._is_policy = False

    def get_target_weight_layout(self) -> None:
        """Policy ranks send whole tensors."""
        return

    def prepare(self) -> dict[str, Any]:
        """A rollout worker's endpoint; one that is not known to be a policy worker has one too."""
        return {} if self._is_policy else {"endpoint": self._transfer.endpoint()}

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        """`metadata`: what each worker prepared, policy workers first. Nothing is connected before weights are sent.

        Raises ValueError if a rollout worker has no endpoint.
        """
        endpoints = [prepared.get("endpoint") for prepared in metadata[train_world_size:] if prepared]
        if len(endpoints) != rollout_world_size or not all(endpoints):
            raise ValueError(
                f"{len(metadata)} workers have prepared, {sum(map(bool, endpoints))} behind the first "
                f"{train_world_size} with an endpoint; expected {rollout_world_size} rollout workers there"
            )
        self._is_policy = True
        self._transfer.send_to(endpoints if worker_rank == 0 else [])

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        """Take this rollout worker's rank."""
        self._transfer.receive_as(rollout_rank, rollout_world_size)

    async def send_weights(self, weights: Iterable[Named]) -> None:
        """Publish the weights as one version more than the last.

        Raises as `RolloutTransfer.send`, which runs in another thread. A task that is cancelled ends when it has ended.
        """
        await in_thread(functools.partial(self._transfer.send, weights, None))

    async def receive_weight_batches(self) -> AsyncGenerator[list[Named], None]:
        """Batches of about `bucket_size` bytes, each valid until the next is asked for.

        Waits for the first, and raises, as `RolloutEngine.receive`, in another thread. A task that is cancelled gives
        the update up.
        """
        receive = functools.partial(self._transfer.receive, None)
        batches: AsyncIterator[list[Named]] = await in_thread(receive, on_cancel=self._transfer.cancel_receive)
        async with contextlib.aclosing(batches):  # type: ignore[type-var]
            async for batch in batches:
                yield batch

    def finalize(self) -> None:
        self._transfer.finish()

    def close(self) -> None:
        """End both ends; NeMo-RL's workers end with their process instead."""
        self._transfer.close()
