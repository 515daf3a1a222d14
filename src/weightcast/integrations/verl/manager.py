"""verl's `CheckpointEngineManager` with failure handling: replicas resume, or are reported as torn.

Invariants: after `update_weights`, whatever it raises, each replica generates again, except those whose workers may
have parts of two versions; once a worker has failed, waits for the others end by the deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError
from verl.checkpoint_engine.base import CheckpointEngineManager, _worker_cls
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

from weightcast.errors import InstallError, WeightcastError
from weightcast.host.deadline import number_of_seconds
from weightcast.integrations.rollout.transfer import RolloutOptions
from weightcast.integrations.verl import BACKEND

logger = logging.getLogger(__name__)


class WeightcastCheckpointManager(CheckpointEngineManager):  # type: ignore[misc]
    """Manager for `rollout.checkpoint_manager_class`, with the backend "weightcast" or "naive".

    `torn_replicas`: those that stay paused until an update succeeds. Raises ValueError for another backend.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: list[Any]) -> None:
        if config.backend not in (BACKEND, "naive"):
            raise ValueError(
                f"the backend is {config.backend!r}, which {type(self).__name__} does not support: set "
                f"rollout.checkpoint_engine.backend to {BACKEND!r}, or leave checkpoint_manager_class out"
            )
        super().__init__(config, actor_wg, replicas)
        self.torn_replicas: list[Any] = []
        options = config.engine_kwargs.get(BACKEND, {})
        self._deadline_seconds = number_of_seconds(
            "deadline_seconds", options.get("deadline_seconds", RolloutOptions().deadline_seconds)
        )

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Update the weights like verl's own manager. Raises the trainer's error, else the first rollout worker's.

        Raises InstallError with the names of replicas that may have parts of two versions; these stay paused.
        """
        if self.backend != BACKEND:
            return dict(await super().update_weights(global_steps))
        replicas, torn = list(self.replicas), [*self.torn_replicas]
        try:
            for call in ("abort_all_requests", "release_kv_cache"):
                _raise_first(await self._outcomes(getattr(replica, call)() for replica in replicas))
            workers = [worker for replica in replicas for worker in replica.workers]
            rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))
            # What verl's `build_process_group` does, with a deadline.
            metadata = await self._on_all(rollout, "prepare")
            sizes = self.actor_wg.world_size, rollout.world_size
            await self._on_all(rollout, "init_process_group", *self.backend_cls.build_topology(*sizes, metadata))
            refs = self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend)
            refs += rollout.update_weights(global_steps=global_steps)
            torn = replicas  # assumed until the outcome is known, since this wait may be cancelled
            outcomes = await self._outcomes(refs, is_bounded=False)
            trainers, rollouts = outcomes[: self.actor_wg.world_size], outcomes[self.actor_wg.world_size :]
            torn = self._torn(replicas, trainers, rollouts)
            _raise_first(outcomes, torn=torn)
            await self._on_all(rollout, "finalize")
        finally:
            self.torn_replicas = torn
            errors = await self._resume([replica for replica in replicas if replica not in torn])
        if errors:
            raise errors[0]
        return {name: value for metrics in trainers for name, value in (metrics or {}).items()}

    async def _on_all(
        self, rollout: Any, method: str, on_trainers: Mapping[str, Any] = {}, on_rollouts: Mapping[str, Any] = {}
    ) -> list[Any]:
        """Call a method of all workers' engines, by name. Arguments are lists with one value for each worker."""
        refs = []
        for workers, arguments in ((self.actor_wg, on_trainers), (rollout, on_rollouts)):
            refs += workers.execute_checkpoint_engine(method=[method] * workers.world_size, **arguments)
        outcomes = await self._outcomes(refs)
        _raise_first(outcomes)
        return outcomes

    async def _outcomes(self, calls: Iterable[Awaitable[Any]], *, is_bounded: bool = True) -> list[Any]:
        """Return each call's result or exception. A call that has not ended by the deadline is cancelled.

        Unless `is_bounded`, the deadline begins only when a call has failed.
        """
        tasks = [asyncio.ensure_future(call) for call in calls]
        first_timeout = self._deadline_seconds if is_bounded else None
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=first_timeout, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=self._deadline_seconds)
            for task in pending:
                task.cancel()
        late = TimeoutError(
            f"a worker or a replica gave no answer for {self._deadline_seconds:g} s; if it is still starting, wait, or "
            f"set a larger engine_kwargs.{BACKEND}.deadline_seconds"
        )
        return [(task.exception() or task.result()) if task.done() else late for task in tasks]

    def _torn(self, replicas: Sequence[Any], trainers: Sequence[Any], rollouts: Sequence[Any]) -> list[Any]:
        """Return the replicas whose workers may have parts of two versions, or different ones."""
        # If a worker did not answer, the trainer's error says whether any was asked to install.
        is_untouched = any(_is_untouched(outcome) for outcome in trainers)
        torn, begin = [], 0
        for replica in replicas:
            own = rollouts[begin : begin + len(replica.workers)]
            begin += len(replica.workers)
            kept = [_is_untouched(each) or (is_untouched and isinstance(each, Exception)) for each in own]
            is_torn = not all(kept) or replica in self.torn_replicas
            if is_torn and any(isinstance(each, BaseException) for each in own):
                torn.append(replica)
        return torn

    async def _resume(self, replicas: Sequence[Any]) -> list[BaseException]:
        """Resume each replica, also after another one has failed. Errors are logged and returned."""

        async def resume(replica: Any) -> None:
            await replica.resume_kv_cache()
            await replica.resume_generation()

        errors = []
        for replica, done in zip(replicas, await self._outcomes(map(resume, replicas)), strict=True):
            if isinstance(done, BaseException):
                logger.error("replica %s could not be resumed: %s", replica.replica_rank, done)
                errors.append(done)
        return errors


def _raise_first(outcomes: Sequence[Any], *, torn: Sequence[Any] = ()) -> None:
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    if not errors:
        return
    error = next((each for each in errors if isinstance(each, WeightcastError)), errors[0])
    if torn:
        names = ", ".join(str(replica.replica_rank) for replica in torn)
        message = f"replicas {names} may have parts of two versions, and stay paused until an update succeeds"
        raise InstallError(f"{message}: {error}", torn=True) from error
    # Other workers report only a lost connection if a worker has died: show its RayActorError as the cause.
    raise error from next((each for each in errors if each is not error and isinstance(each, RayActorError)), None)


def _is_untouched(outcome: Any) -> bool:
    """Return whether a worker failed before any worker was asked to install, and so still has its old weights."""
    return isinstance(outcome, WeightcastError) and not isinstance(outcome, InstallError)
