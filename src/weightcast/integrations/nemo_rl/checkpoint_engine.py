"""NeMo-RL's `CheckpointEngine`, implemented by a `RolloutTransfer`. Its errors can be pickled, for Ray.

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
from weightcast.integrations.rollout.transfer import Framework, RolloutTransfer, endpoints_of

_OPTIONS = 'policy.generation.refit_cfg["weightcast.integrations.nemo_rl:NemoCheckpointEngine"]'


class NemoCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine that NeMo-RL creates in each policy worker and each rollout worker.

    `bucket_size`: NeMo-RL's argument. `options`: the other entries of `refit_cfg` for this class, which are
    `RolloutOptions`; `host` is by default Ray's address of the node. Raises ValueError or TypeError.
    """

    cleanup_after_load = True
    shard_expert_weights = False

    def __init__(self, bucket_size: int, **options: Any) -> None:
        framework = Framework("NeMo-RL", _OPTIONS, ray.util.get_node_ip_address)
        self._transfer = RolloutTransfer(bucket_size, framework, options, batch_bytes=bucket_size)
        self._is_policy = False

    def get_target_weight_layout(self) -> None:
        """Return None: policy ranks send whole tensors."""
        return

    def prepare(self) -> dict[str, Any]:
        """Return the endpoint of a worker that may be a rollout worker."""
        return {} if self._is_policy else {"endpoint": self._transfer.endpoint()}

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        """Take over the rollout workers' endpoints. Nothing is connected before weights are sent.

        `metadata`: the result of each worker's `prepare`, policy workers first.

        Raises ValueError if a rollout worker has no endpoint.
        """
        remedy = "call prepare() on every worker"
        endpoints = endpoints_of(metadata, train_world_size, rollout_world_size, remedy)
        self._is_policy = True
        self._transfer.send_to(endpoints if worker_rank == 0 else [])

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: Sequence[Any]
    ) -> None:
        """Take this rollout worker's rank."""
        self._transfer.receive_as(rollout_rank, rollout_world_size)

    async def send_weights(self, weights: Iterable[Named]) -> None:
        """Publish the weights, numbered one above the last version.

        Raises what `RolloutTransfer.send` raises, which runs in another thread. A cancelled task ends when that has
        ended.
        """
        await in_thread(functools.partial(self._transfer.send, weights, None))

    async def receive_weight_batches(self) -> AsyncGenerator[list[Named], None]:
        """Yield batches of about `bucket_size` bytes, each valid until the next is requested.

        Waits for the first one in another thread. Raises what `RolloutEngine.receive` raises. Cancelling the task
        aborts the update.
        """
        receive = functools.partial(self._transfer.receive, None)
        batches: AsyncIterator[list[Named]] = await in_thread(receive, on_cancel=self._transfer.cancel_receive)
        async with contextlib.aclosing(batches):  # type: ignore[type-var]
            async for batch in batches:
                yield batch

    def finalize(self) -> None:
        self._transfer.finish()

    def close(self) -> None:
        """Close sender and receiver. NeMo-RL does not call it: its workers end with their process."""
        self._transfer.close()
