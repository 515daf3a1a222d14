"""Transfer to rollout workers: a publisher on the first trainer rank, a worker in each rollout worker.

Invariants: every trainer rank reads its iterator of weights to the end, also after an error, since all ranks gather
each tensor together; after a failure nothing is kept, and the next update connects again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import msgspec
import torch

from weightcast import registry
from weightcast.control.client import HttpEngine
from weightcast.control.server.app import EngineServer
from weightcast.errors import InstallError, PublishError, PublishReport, WeightcastError, from_record, to_record
from weightcast.format.messages import InitInfo, InstallMode, UpdateInfo, WeightInfo
from weightcast.format.plan import fitting_bucket_size
from weightcast.host.deadline import GRACE_SECONDS, number_of_seconds
from weightcast.host.memory import host_identity
from weightcast.integrations.handed import HandedPublisher, Named, exhaust
from weightcast.integrations.rollout.receiving import RolloutEngine
from weightcast.seams.client import EngineClient
from weightcast.sources.stream import IteratorSource
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.publisher import Publisher

T = TypeVar("T")

_UNFIT = ("memory:", "file:")
"""Unsupported transports: within one process; and stores, to which a resumed trainer would write versions again."""

Endpoint = tuple[str, str, str]
"""A rollout worker's URL, its token, and the identity of its host (see `host_identity`)."""


def endpoints_of(metadata: Sequence[Any], num_trainers: int, num_rollouts: int, remedy: str) -> list[Endpoint]:
    """Return the rollout workers' endpoints. `metadata`: what each worker has prepared, trainer ranks first.

    Raises ValueError, with the remedy, if a rollout worker has none.
    """
    found = [prepared.get("endpoint") for prepared in metadata[num_trainers:] if prepared]
    if len(found) != num_rollouts or not all(found):
        raise ValueError(
            f"{len(metadata)} workers have prepared; after the {num_trainers} trainer ranks {sum(map(bool, found))} "
            f"have an endpoint, expected {num_rollouts} rollout workers: {remedy}"
        )
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Framework:
    """A framework's name, the name of its options in errors, and a function that returns this node's address."""

    name: str
    options: str
    own_host: Callable[[], str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """The options that a framework's configuration sets.

    `transport`: URL of the first trainer rank's sender; by default nccl:// at a free port of its host for weights on a
    GPU, otherwise ipc:// if all rollout workers share memory with it, or else gloo:// at a free port. `install`:
    "staged" passes the tensors to the framework when all workers have received all of them, "streaming" bucket by
    bucket. `deadline_seconds`: limit of each single wait, including the framework's loading of a batch. `host`: address
    at which a worker listens and is reached; by default the framework's address of its node. `keep_connected`: keep
    connections and buffers from update to update.
    """

    transport: str | None = None
    install: InstallMode = "staged"
    deadline_seconds: float = 300.0
    host: str | None = None
    keep_connected: bool = True


class RolloutWorkers(EngineClient):
    """The trainer's client of all rollout workers, which are one engine: updated together or not at all.

    The framework pauses the workers.

    `has_finished`: the workers were asked to install a version, so after a failure some of them may have it.
    """

    def __init__(self, endpoints: Sequence[Endpoint], *, name: str, timeout_seconds: float) -> None:
        """`endpoints`: in the order of the workers' engine ranks."""
        self.name = name
        self.has_finished = False
        self._clients = [HttpEngine(url, token=token, timeout_seconds=timeout_seconds) for url, token, _ in endpoints]
        self._pool = ThreadPoolExecutor(len(self._clients), thread_name_prefix="weightcast-rollout")

    def info(self) -> WeightInfo:
        infos = self._each(HttpEngine.info)
        holders = {info.holder for info in infos}
        return msgspec.structs.replace(
            max(infos, key=lambda info: -1 if info.version is None else info.version),
            holder=holders.pop() if len(holders) == 1 else "",
            instance=infos[0].instance,
        )

    def init(self, info: InitInfo) -> None:
        self._each(lambda client: client.init(info))

    def update(self, info: UpdateInfo) -> None:
        self._each(lambda client: client.update(info))

    def finish(self, version: int) -> None:
        self.has_finished = True
        self._each(lambda client: client.finish(version))

    def shutdown(self) -> None:
        """End the workers' waits, as far as they can be reached."""
        with contextlib.suppress(WeightcastError):
            self._each(HttpEngine.shutdown)

    def close(self) -> None:
        """Close the connections, which the publisher does not do for a given client. Idempotent."""
        self._pool.shutdown(wait=True)
        for client in self._clients:
            client.close()

    def _each(self, call: Callable[[HttpEngine], T]) -> list[T]:
        """Make a call on every worker; return the results. Raises the first error, once all have answered."""
        futures = [self._pool.submit(call, client) for client in self._clients]
        errors = list(filter(None, [future.exception() for future in futures]))
        if errors:
            try:
                raise next((error for error in errors if isinstance(error, WeightcastError)), errors[0])
            finally:
                # A frame that refers to the error it raises is a cycle, which would keep all its frames alive.
                del errors, futures
        return [future.result() for future in futures]


class RolloutTransfer:
    """The transfer of one worker of a framework, which may be a trainer or a rollout worker.

    Call order, for each update:

        endpoint()                       on every worker; the framework sends the results to all workers
        send_to(endpoints), or           on trainer ranks; all except the first get no endpoints
        receive_as(rank, world_size)     on rollout workers
        send(weights, version)           on trainer ranks
        receive(version)                 on rollout workers
        finish()                         on every worker

    `options`: those of `RolloutOptions`, by name. `batch_bytes`: smallest size of a batch for a rollout worker, except
    the last one; 0: one tensor each. Raises ValueError or TypeError.
    """

    def __init__(
        self, bucket_size: int, framework: Framework, options: Mapping[str, Any], *, batch_bytes: int = 0
    ) -> None:
        known = [field.name for field in dataclasses.fields(RolloutOptions)]
        if unknown := [name for name in options if name not in known]:
            raise TypeError(f"{framework.options} has no {', '.join(map(repr, unknown))}; known: {', '.join(known)}")
        self._given = given = RolloutOptions(**options)
        if not isinstance(given.keep_connected, bool):
            raise TypeError(f"{framework.options}.keep_connected is {given.keep_connected!r}; it must be true or false")
        if given.host is not None and not isinstance(given.host, str):
            raise TypeError(f"{framework.options}.host is {given.host!r}; it must be an address (str)")
        if given.transport is not None:
            registry.transport(given.transport)
            if given.transport.startswith(_UNFIT):
                raise ValueError(
                    f"{framework.options}.transport is {given.transport!r}, which {framework.name}'s updates do not "
                    "support: leave it out, or set it to gloo://HOST:PORT, nccl://HOST:PORT, or ipc:// on one host"
                )
        self._options = PublishOptions(
            bucket_size_bytes=bucket_size,
            install=given.install,
            takeover=True,
            deadline_seconds=number_of_seconds("deadline_seconds", given.deadline_seconds),
            lease_seconds=min(PublishOptions().lease_seconds, given.deadline_seconds),
        )
        self._framework = framework
        self._batch_bytes = batch_bytes
        self._endpoints: list[Endpoint] = []
        self._workers: RolloutWorkers | None = None
        self._begin()
        self._engine: RolloutEngine | None = None
        self._server: EngineServer | None = None
        self._token = ""

    # --- before each update ---

    def endpoint(self) -> Endpoint:
        """Return the URL of this rollout worker, with a token that only the trainer may have."""
        if self._engine is None or self._server is None:
            is_on_gpu = torch.cuda.is_available()
            device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
            self._engine = RolloutEngine(
                device=device,
                deadline_seconds=self._options.deadline_seconds,
                batch_bytes=self._batch_bytes,
                deadline_option=f"{self._framework.options}.deadline_seconds",
            )
            host, self._token, worker = self._own_host(), secrets.token_hex(32), self._engine.worker
            self._server = EngineServer(self._engine, host=host, token=self._token, worker=worker).start()
        self._engine.expect()
        return self._server.url, self._token, host_identity()

    def receive_as(self, rank: int, world_size: int) -> None:
        """Make this process rollout worker `rank`. Nothing is connected before weights are sent."""
        assert self._engine is not None, "endpoint comes before receive_as"
        self._engine.worker.engine_rank, self._engine.worker.world_size = rank, world_size

    def send_to(self, endpoints: Sequence[Endpoint]) -> None:
        """Make this process a trainer rank; the first one gets every rollout worker's endpoint, the others none."""
        if self._server is not None:
            self._server.close()
            self._server = None
        endpoints = [(url, token, host) for url, token, host in endpoints]
        if endpoints != self._endpoints:
            self._disconnect()
            self._endpoints = endpoints

    # --- an update ---

    def send(self, weights: Iterable[Named], version: int | None) -> PublishReport | None:
        """Publish the weights, by default numbered one above the last version. Blocks.

        Returns the report on the first rank, None on the others. Raises InstallError if a rollout worker may have a
        part of the new version. After another WeightcastError, or an exception of the iterator, every rollout worker
        has its former version.
        """
        if not self._endpoints:
            exhaust(weights)
            return None
        if self._workers is not None:
            self._workers.has_finished = False
        try:
            return self._handed.publish(weights, version)
        except PublishError as exc:
            (error,) = exc.failures.values()
            assert self._workers is not None
            if not self._workers.has_finished and self._options.install == "staged":
                raise from_record(to_record(error)) from exc
            raise InstallError(
                f"rollout workers may have parts of two versions: {error}; update them again before they generate",
                torn=True,
            ) from exc

    def receive(self, version: int | None) -> AsyncIterator[list[Named]]:
        """Return a version's tensors in batches; see `RolloutEngine.receive`, which blocks and raises."""
        assert self._engine is not None, "endpoint comes before receive"
        return self._engine.receive(version)

    def cancel_receive(self) -> None:
        """End a `receive` that waits in another thread: it raises UpdateAbortedError."""
        if self._engine is not None:
            self._engine.cancel()

    def finish(self) -> None:
        if not self._given.keep_connected:
            self._disconnect()

    def close(self) -> None:
        """End both ends. Idempotent."""
        self._disconnect()
        if self._server is not None:
            self._server.close()
            self._server = None

    def _begin(self) -> None:
        """Begin with an empty source, so that the next update learns the specs."""
        self._source = IteratorSource()
        self._handed = HandedPublisher(self._source, self._make_publisher, forget=self._forget)

    def _make_publisher(self) -> Publisher:
        if self._workers is not None:
            self._workers.close()
        host, is_on_cpu = self._own_host(), self._source.device.type == "cpu"
        url = f"{'gloo' if is_on_cpu else 'nccl'}://" + (f"[{host}]:0" if ":" in host else f"{host}:0")
        if is_on_cpu and {host for *_, host in self._endpoints} == {host_identity()}:
            url = "ipc://"
        largest_bytes = cast(int, self._options.bucket_size_bytes)
        num_bytes = sum(spec.num_bytes for spec in self._source.specs())
        self._workers = self._clients(self._options.deadline_seconds)
        return Publisher(
            self._source,
            transport=self._given.transport or url,
            engines=[self._workers],
            trainer_group=None,
            options=dataclasses.replace(self._options, bucket_size_bytes=fitting_bucket_size(num_bytes, largest_bytes)),
        )

    def _clients(self, timeout_seconds: float) -> RolloutWorkers:
        name = f"{self._framework.name}'s rollout"
        return RolloutWorkers(self._endpoints, name=name, timeout_seconds=timeout_seconds)

    def _disconnect(self) -> None:
        try:
            self._handed.close()
        finally:
            if self._workers is not None:
                self._workers.close()

    def _forget(self) -> None:
        """Close all connections, and end the rollout workers' waits. The next update learns the specs again."""
        self._disconnect()
        # Rollout workers fail from here on. This rank's error, which says what they have, must reach the framework in
        # time, even if a worker hangs.
        workers = self._clients(min(GRACE_SECONDS, self._options.deadline_seconds / 4))
        workers.shutdown()
        workers.close()
        self._begin()

    def _own_host(self) -> str:
        return self._given.host or self._framework.own_host().strip("[]")
