"""verl's `CheckpointEngine` over a publisher on the trainer's first rank and a worker in each rollout worker.

Invariants: every trainer rank takes its weights to their end, whatever fails, since each of them is gathered by all;
after a failure nothing is kept, and the next update connects anew; errors that leave here can be pickled, for Ray.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any, cast

import msgspec
import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine

from weightcast import registry
from weightcast.errors import InstallError, PublishError
from weightcast.format.messages import InstallMode
from weightcast.format.plan import fitting_bucket_size
from weightcast.host.closing import on_failure
from weightcast.host.deadline import number_of_seconds
from weightcast.integrations.verl.rollout import Named, RolloutEngine, RolloutServer
from weightcast.integrations.verl.workers import RolloutWorkers
from weightcast.sources.stream import IteratorSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher
from weightcast.trainer.report import PublishReport

DEADLINE_SECONDS = 300.0
_LEASE_SECONDS = 30.0
_LAST_CALL_SECONDS = 5.0
_UNFIT = ("memory:", "file:")
"""Of one process; and what keeps versions, which a trainer that goes back to an earlier step would write again."""


class WeightcastCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """verl makes one in each worker; `bucket_size` and `is_master` are its own arguments, the others `engine_kwargs`.

    `transport`: the URL of the sender on the trainer's first rank; by default nccl:// or gloo:// at a free port of its
    host, as the weights are on a GPU or not. `install`: "staged" gives verl the tensors when all workers have all of
    them, "streaming" bucket by bucket. `deadline_seconds`: of each single wait, verl's loading of a tensor included.
    `host`: where a worker listens and is reached; by default Ray's address of its node. `keep_connected`: connections
    and buffers are kept from update to update. Raises ValueError or TypeError.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool | None = None,
        *,
        transport: str | None = None,
        install: InstallMode = "staged",
        deadline_seconds: float = DEADLINE_SECONDS,
        host: str | None = None,
        keep_connected: bool = True,
    ) -> None:
        if bucket_size < 1 << 20:
            raise ValueError(
                f"the bucket size is {bucket_size} bytes: set "
                "rollout.checkpoint_engine.update_weights_bucket_megabytes to at least 1"
            )
        if transport is not None:
            registry.transport(transport)
            if transport.startswith(_UNFIT):
                raise ValueError(
                    f"transport is {transport!r}, which does not carry an update of verl's: leave it out, or set "
                    "engine_kwargs.weightcast.transport to gloo://HOST:PORT, nccl://HOST:PORT, or ipc:// on one host"
                )
        self._options = PublishOptions(
            bucket_size_bytes=bucket_size,
            install=install,
            takeover=True,
            deadline_seconds=number_of_seconds("deadline_seconds", deadline_seconds),
            lease_seconds=min(_LEASE_SECONDS, deadline_seconds),
        )
        self._is_trainer = is_master is not None
        self._transport = transport
        self._host = host
        self._keep_connected = keep_connected
        self._endpoints: Sequence[tuple[str, str]] = ()
        self._source = IteratorSource()
        self._publisher: Publisher | None = None
        self._workers: RolloutWorkers | None = None
        self._engine: RolloutEngine | None = None
        self._server: RolloutServer | None = None

    # --- before each update ---

    def prepare(self) -> dict[str, Any]:
        """A rollout worker says where it can be reached, and the token that only the trainer is to have."""
        if self._is_trainer:
            return {}
        if self._engine is None or self._server is None:
            is_on_gpu = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
            self._engine = RolloutEngine(device=device, deadline_seconds=self._options.deadline_seconds)
            self._server = RolloutServer(self._engine, self._own_host())
        self._engine.expect()
        return {"endpoint": (self._server.url, self._server.token)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Trainer rank 0 is told all rollout workers, and each of these its rank. Raises ValueError if one has no
        server: it was made as a trainer's.
        """
        endpoints = [prepared.get("endpoint") for prepared in metadata[actor_wg_world_size:]]
        if len(endpoints) != rollout_world_size or not all(endpoints):
            raise ValueError(
                f"{len(endpoints)} rollout workers have prepared, {sum(map(bool, endpoints))} of them with a server; "
                f"expected {rollout_world_size}: is_master is for trainer ranks only"
            )
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
        self, rank: int, rollout_world_size: int | None, endpoints: Sequence[tuple[str, str]]
    ) -> None:
        """Take this worker's part. Nothing is connected before weights are sent."""
        if rollout_world_size is not None:
            assert self._engine is not None, "prepare comes before init_process_group"
            self._engine.worker.engine_rank, self._engine.worker.world_size = rank, rollout_world_size
            return
        self._is_trainer = True
        if self._server is not None:
            self._server.close()
            self._server = None
        if list(endpoints) != list(self._endpoints):
            self._disconnect()
            self._endpoints = endpoints

    # --- an update ---

    @torch.no_grad()
    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> dict[str, Any]:
        """Publish the weights as version `global_steps`; rank 0 returns what it measured, the others nothing.

        Blocks. Raises InstallError if a rollout worker may hold some of the new version, else another WeightcastError
        or what the generator raised: every rollout worker has what it had.
        """
        weights = iter(weights)
        try:
            return _metrics(self._publish(weights, global_steps)) if self._endpoints else {}
        finally:
            for _ in weights:
                pass

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[Named]:
        """The tensors of version `global_steps`; see `RolloutEngine.receive`, which blocks and raises."""
        assert self._engine is not None, "prepare comes before receive_weights"
        return self._engine.receive(global_steps)

    def finalize(self) -> None:
        if not self._keep_connected:
            self._disconnect()

    def _publish(self, weights: Iterable[Named], version: int | None) -> PublishReport:
        with on_failure(self._forget):
            if self._publisher is not None and version is not None and version <= self._publisher.version:
                # A trainer that went back to an earlier step counts from there, as another run.
                self._disconnect()
            self._source.use(weights)
            if self._publisher is None:
                self._connect()
            assert self._publisher is not None
            assert self._workers is not None
            self._workers.has_finished = False
            try:
                return self._publisher.publish(version)
            except PublishError as exc:
                (error,) = exc.failures.values()
                if not self._workers.has_finished and self._options.install == "staged":
                    raise error from exc
                raise InstallError(f"rollout workers may hold parts of two versions: {error}", torn=True) from exc

    def _connect(self) -> None:
        scheme = "gloo" if self._source.device.type == "cpu" else "nccl"
        host = self._own_host()
        url = f"{scheme}://[{host}]:0" if ":" in host else f"{scheme}://{host}:0"
        deadline_seconds, largest_bytes = self._options.deadline_seconds, cast(int, self._options.bucket_size_bytes)
        num_bytes = sum(spec.num_bytes for spec in self._source.specs())
        self._workers = RolloutWorkers(self._endpoints, timeout_seconds=deadline_seconds)
        self._publisher = Publisher(
            self._source,
            transport=self._transport or url,
            engines=[self._workers],
            trainer_group=None,
            options=dataclasses.replace(self._options, bucket_size_bytes=fitting_bucket_size(num_bytes, largest_bytes)),
        )

    def _disconnect(self) -> None:
        for part in (self._publisher, self._workers):
            if part is not None:
                part.close()
        self._publisher = self._workers = None

    def _forget(self) -> None:
        """Close all connections, and have the rollout workers wait no longer. The next update learns the specs."""
        self._disconnect()
        workers = RolloutWorkers(self._endpoints, timeout_seconds=_LAST_CALL_SECONDS)
        workers.shutdown()
        workers.close()
        self._source = IteratorSource()

    def _own_host(self) -> str:
        return self._host or str(ray.util.get_node_ip_address()).strip("[]")  # type: ignore[no-untyped-call]


def _metrics(report: PublishReport) -> dict[str, Any]:
    stages = {f"weightcast/{name}_seconds": value for name, value in msgspec.structs.asdict(report.seconds).items()}
    return {
        **stages,
        "weightcast/version": report.version,
        "weightcast/num_bytes": report.num_bytes,
        "weightcast/num_buckets": report.num_buckets,
        "weightcast/gb_per_second": report.gb_per_second,
    }
