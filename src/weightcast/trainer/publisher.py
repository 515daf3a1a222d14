"""Publisher: sends the weights of one source over one transport to many engines, each version all or nothing per
engine.

Invariants: versions only grow within this publisher's run; bytes are packed once however many engines take them; a
failure of one engine does not disturb the others' update; every pause is lifted before `publish` returns or raises; of
several trainer ranks only one talks to the engines, and all return the same report or raise the same error.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import torch
import torch.distributed as dist
from msgspec import UNSET

from weightcast import registry
from weightcast.engines.gate import require_no_step
from weightcast.errors import (
    ClosedError,
    ErrorRecord,
    PublishInFlightError,
    PublishReport,
    UpdateAbortedError,
    WeightcastError,
    import_of_extra,
    publish_error,
    to_record,
)
from weightcast.format.adapters import AdapterTarget
from weightcast.format.manifest import ITEMSIZE_BYTES, MAX_VERSION, TensorSpec, WeightVersion
from weightcast.format.plan import fitting_bucket_size, largest_bucket_size
from weightcast.host import device as host_device
from weightcast.host.closing import Closeable, ClosedOnExit, awaited_at_exit, on_failure
from weightcast.host.deadline import GRACE_SECONDS, run_into
from weightcast.host.descriptors import shortage
from weightcast.links.watchdog import Watchdog
from weightcast.seams.adapters import AdapterSource
from weightcast.seams.client import BringsSender, EngineClient
from weightcast.seams.directory import EngineDirectory
from weightcast.seams.source import Regions, RevisedSource, Source, StreamSource, TensorStream, casts_to_engines
from weightcast.sources.store import StoreSource
from weightcast.trainer import arguments
from weightcast.trainer.background import Flight, Overlap, PublishHandle, Turn
from weightcast.trainer.deltas import Deltas
from weightcast.trainer.engine_dtypes import EngineDtypes
from weightcast.trainer.fleet import EngineState, Fleet, FleetMember
from weightcast.trainer.options import Adapter, PublishOptions
from weightcast.trainer.packer import Packer, PackPlan
from weightcast.trainer.publish_run import (
    Connections,
    OnProgress,
    PublishedVersion,
    PublishInputs,
    PublishRun,
)
from weightcast.trainer.stream_packer import StreamPacker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from weightcast.trainer.group.rounds import FollowingRank, PublishingRank
    from weightcast.trainer.metrics import MetricsTarget, PublisherMetrics

logger = logging.getLogger(__name__)
_NOTHING_YET = "nothing was published yet by this publisher: call publish() first"


class Publisher(ClosedOnExit):
    """Sends a source's weights to running engines.

    With several trainer ranks, create one on every rank (several publishers: in the same order everywhere), and call
    `publish` on every rank. Rank 0 of the group talks to the engines; the other ranks ignore `engines` and `transport`.

    Memory in this process: the transport's slots (streaming: a few buckets) or arena (staged: one model in host
    memory). With several trainer ranks, each sending rank has these: one per host, or every rank that can't map the
    memory of its host's sending rank.

    Close it by `with` or `close()`. Garbage collection closes it too, but a saved traceback keeps it alive.
    Thread-safe: concurrent calls are serialised.
    """

    def __init__(
        self,
        source: Source | StreamSource,
        *,
        transport: str = "ipc://",
        engines: Sequence[str | EngineClient] | EngineDirectory = (),
        token: str | None = None,
        trainer_group: ProcessGroup | Literal["auto"] | None = "auto",
        options: PublishOptions | None = None,
        metrics: MetricsTarget | None = None,
    ) -> None:
        """Create a publisher. Nothing is connected or allocated before the first `publish` or `prepare`.

        `engines`: URLs or EngineClient objects; more can be added later. Or an `EngineDirectory`, which is asked for
        the present engines by every `publish`, `sync` and `prepare`. `token`: the bearer token for engines given as
        URLs. `trainer_group`: the ranks that have the model together and publish together; "auto" stands for
        torch.distributed's default group, if it is initialised at the first `publish` or `prepare`; None: this rank
        publishes alone. `options`: how engines are updated; by default `PublishOptions()`. `metrics`: HOST:PORT at
        which the publishing rank serves Prometheus metrics from the first `publish` or `prepare` on, or a registry of
        prometheus-client that has them then.

        Raises ValueError for an unknown transport or an engine named twice, TypeError for arguments of other types.
        """
        arguments.require_source(source)
        arguments.require_engines(engines)
        arguments.require_trainer_group(trainer_group)
        if not isinstance(options, PublishOptions | None):
            raise TypeError(f"options is a {type(options).__name__}; it must be a PublishOptions(...) or None")
        if not (metrics is None or isinstance(metrics, str) or hasattr(metrics, "register")):
            raise TypeError(f"metrics is {arguments.shown(metrics)}; it must be 'HOST:PORT' or a CollectorRegistry")
        if isinstance(metrics, str):
            arguments.metrics_address(metrics)
        self.run = secrets.token_hex(16)
        self._version = -1
        """The number of the last version; -1 before the first."""
        self.last_report: PublishReport | None = None
        """Report of the last publish that returned or raised PublishError; other errors have no report."""
        self._source = source
        self._url = transport
        self._transport = registry.transport(transport)
        self._token = token
        self._options = PublishOptions() if options is None else options
        arguments.require_target(source, self._options.target is not None)
        self._metrics_target = metrics
        self._metrics: PublisherMetrics | None = None
        self._turn = Turn()
        self._fleet = Fleet()
        self._directory = engines if isinstance(engines, EngineDirectory) else None
        self._directory_error: ErrorRecord | None = None
        self._watchdog = Watchdog(self._options.deadline_seconds)
        self._connections: Connections | None = None
        self._pack_plan: PackPlan | None = None
        self._engine_dtypes = EngineDtypes() if casts_to_engines(source) else None
        self._deltas = self._new_deltas()
        self._published: PublishedVersion | None = None
        """The last version, if all of it was sent."""
        self._trainer_group = trainer_group
        self._group: PublishingRank | FollowingRank | None = None
        self._is_joined = False
        self._closed = False
        self._num_published = 0
        """Number of versions of which all was sent."""
        self._process = 0
        """Id of the process that has the connections, whose threads a forked child lacks; 0 while there are none."""
        self._owned: list[Closeable] = [self._watchdog]
        """Owners of connections, threads or processes, in the order in which they are closed, the watchdog last.

        The caller's objects are not among them: they may refer to this publisher, and would keep it alive.
        """
        self._drop: weakref.finalize[..., Publisher] | None = None
        with on_failure(self.close):
            for engine in () if isinstance(engines, EngineDirectory) else engines:
                self._fleet.add(self._member_of(engine))

    @property
    def version(self) -> int | None:
        """The number of the last version, also of one that failed; None before the first publish."""
        return None if self._version < 0 else self._version

    # --- the fleet ---

    @property
    def engines(self) -> list[EngineState]:
        """The last known state of each engine, also during a publish; empty on a rank that does not publish.

        Does not block and contacts no engine.
        """
        return [member.state for member in self._fleet.members]

    def add_engine(self, engine: str | EngineClient, *, sync: bool = False) -> None:
        """Add an engine. The next publish connects it; with `sync`, this call does, and sends it the last version.

        Does nothing on a trainer rank that does not publish. Raises ValueError if the fleet has the engine already, or
        if the engines come from a directory, TypeError for an argument of another type. With `sync`, raises what
        `Publisher.sync` raises, and the engine stays in the fleet.
        """
        with self._acquired():
            self._require_no_directory()
            if sync and self._version < 0:
                raise ValueError(_NOTHING_YET)
            if not self._is_following:
                self._fleet.add(self._member_of(engine))
        if sync:
            self.sync(engine)

    def _member_of(self, engine: str | EngineClient) -> FleetMember:
        if isinstance(engine, str):
            client = registry.http_client(engine, token=self._token, timeout_seconds=self._options.deadline_seconds)
        else:
            arguments.require_client(engine)
            client = engine
        seconds = self._options.deadline_seconds
        return FleetMember(client, self.run, self._watchdog, seconds, owned=isinstance(engine, str))

    def remove_engine(self, engine: str | EngineClient) -> None:
        """Disconnect an engine. It keeps its version, and another publisher may take it.

        Until it is offered another version, `GET /weight_ready` answers that it is not ready.

        Does nothing on a trainer rank that does not publish. Raises ValueError if the engine is not in the fleet, or if
        the engines come from a directory.
        """
        if not isinstance(engine, str):
            arguments.require_client(engine)
        name = _name_of(engine)
        with self._acquired():
            self._require_no_directory()
            if not self._is_following:
                self._let_go([self._fleet.pop(name)])

    def _let_go(self, members: Sequence[FleetMember]) -> None:
        """Disconnect engines that are no members any more. Blocks at most for the deadline."""
        if self._connections is not None:
            for member in members:
                reason = "the engine was removed from the fleet"
                self._connections.listener.end_links(reason, member.name, goes_on=True)
        # An engine that did not answer may still be paused, and this is the last request to it.
        self._fleet.each(FleetMember.resume, members, notes=False, also_done=True)
        for member in members:
            self._watchdog.release(member.name)
            member.close()

    def _require_no_directory(self) -> None:
        if self._directory is not None:
            kind = type(self._directory).__name__
            raise ValueError(f"the engines come from {kind}, which engines= was given: add or remove them there")

    def _follow_directory(self, directory: EngineDirectory) -> None:
        """Let go the engines that have left the directory, and add those that have come.

        If it fails, keep the present engines. Raises WeightcastError if there are none; ValueError, with all engines
        kept, if it lists none and the transport keeps no versions.
        """
        self._directory_error = None
        try:
            present: dict[str, str | EngineClient] = {}
            for engine in directory.engines():
                if present.setdefault(name := _name_of(engine), engine) is not engine and not isinstance(engine, str):
                    raise ValueError(f"two engines are named {name}: give each client a name of its own")
            kept = {m.name for m in self._fleet.members if m.name in present and m.is_of(present[m.name])}
            joining = [self._member_of(engine) for name, engine in present.items() if name not in kept]
        except Exception as exc:
            said = f"{type(directory).__name__} did not say which engines there are: {exc}"
            if not self._fleet.members:
                raise WeightcastError(f"{said}; no engine is known from before") from exc
            logger.warning("%s; the engines are those of the last publish", said)
            self._directory_error = to_record(exc)
            return
        if not present and not self._transport.keeps_versions:
            raise ValueError(
                f"{type(directory).__name__} lists no engines, and {self._url} keeps nothing for later: publish again "
                "when it lists some, or into a store (file:///DIR)"
            )
        self._let_go([self._fleet.pop(member.name) for member in self._fleet.members if member.name not in kept])
        for member in joining:
            self._fleet.add(member)

    def _departed(self, failed: Sequence[FleetMember]) -> list[FleetMember]:
        """Return those of these engines that have left the directory since the publish began."""
        present: set[str] | None = None
        if self._directory is not None:
            with contextlib.suppress(Exception):
                present = set(map(_name_of, self._directory.engines()))
        return [] if present is None else [member for member in failed if member.name not in present]

    def release(self) -> None:
        """Release the memory that is kept between publishes, here and in the engines' workers; a publish allocates it
        again.

        That is the transport's slots (streaming: device memory on GPUs) or arena (staged: host memory). Use it to give
        a colocated engine's KV cache the memory between updates. Blocks until the engines' workers have released
        theirs, at most for the deadline. With several trainer ranks call it on every rank. `file://` and clients' own
        senders keep their memory. Does nothing before the first publish. Raises ClosedError.
        """
        with self._acquired():
            if self._pack_plan is not None:
                self._pack_plan.forget_views()
            if self._deltas is not None:
                self._deltas.release()
            if self._connections is not None:
                self._connections.release()
            elif self._group is not None:
                self._group.release()

    def close(self) -> None:
        """Disconnect every engine and free everything. Idempotent; does nothing in a forked child."""
        if self._process not in (0, os.getpid()):
            return
        self._turn.acquire(publishes=False)
        with contextlib.ExitStack() as stack:
            stack.callback(self._turn.release)
            if self._closed:
                return
            self._closed = True
            if self._drop is not None:
                self._drop.detach()
            # All of these, also after one has raised; the last one is called first.
            parts: list[Closeable] = [self._watchdog, self._fleet, *reversed(self._owned[:-1])]
            for part in parts:
                stack.callback(part.close)
            if self._pack_plan is not None:
                # A saved exception may refer to the packer, whose views would keep the arena mapped.
                stack.callback(self._pack_plan.forget_views)
            if self._deltas is not None:
                stack.callback(self._deltas.release)

    @property
    def _is_following(self) -> bool:
        """True if another trainer rank publishes and has the engines, as far as it is known at this point."""
        if self._is_joined or self._trainer_group is None or not (dist.is_available() and dist.is_initialized()):
            return self._group is not None and not self._group.group.is_publishing
        return dist.get_rank(None if self._trainer_group == "auto" else self._trainer_group) > 0

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this publisher was closed: make another one")

    def _require_here(self) -> None:
        if self._process not in (0, os.getpid()):  # a forked child has only a copy
            raise ClosedError(
                f"this publisher is of pid {self._process}, which this process (pid {os.getpid()}) was forked from: "
                "publish in that process, or close the publisher there and make one here"
            )

    @contextlib.contextmanager
    def _acquired(self, *, publishes: bool = False) -> Iterator[None]:
        """Let only this thread use the publisher. Raises ClosedError."""
        self._require_here()  # first: in a forked child, the lock may be held by a thread of the parent
        self._turn.acquire(publishes=publishes)
        try:
            self._require_open()
            yield
        finally:
            self._turn.release()

    # --- one publish ---

    def prepare(self) -> None:
        """Prepare the first publish while the trainer trains: plan the buckets and how each is packed, and allocate the
        transport's memory.

        Reads the source's specs and regions; `publish` notices tensors that have moved since. The memory (see the
        class; `release` and `close` free it) is populated in the background, as far as this host or container has room;
        otherwise the first publish does that. Connects no engine. Allocates nothing if only the first publish can know
        the size: with several trainer ranks, for a source that streams its tensors or has dtype="engine", and for
        engines whose clients have their own senders. Raises InsufficientMemoryError if the memory does not fit, and
        what `publish` raises before it connects an engine.
        """
        with self._acquired():
            if not self._is_joined:
                self._join_trainer_group()
            if self._group is None and not isinstance(self._source, StreamSource):
                inputs = self._inputs()
                has_brought = any(isinstance(member.client, BringsSender) for member in self._fleet.members)
                if self._engine_dtypes is None and not has_brought:
                    manifest = inputs.pack_plan.layout.manifest
                    inputs.connections.sender.prepare(manifest, staged=self._options.install == "staged")
                    packer = inputs.pack_plan.packer(inputs.regions)
                    if isinstance(packer, Packer) and inputs.connections.device.type == "cpu":
                        packer.prepare()

    def publish(
        self,
        version: SupportsIndex | None = None,
        *,
        wait_ready_seconds: float = 0.0,
        on_progress: OnProgress | None = None,
    ) -> PublishReport:
        """Make every engine serve the source's present weights; block until they do.

        `version` must be above this publisher's last one and at most 2^63 - 1; by default it is one above the highest
        version of the engines and the store. Don't change the weights during the call. A version that every engine
        refused does not become the store's newest. Extra memory: see the class. `wait_ready_seconds`: how long to wait,
        for all engines together, for engines that are starting (nothing listens at their URL, or it answers 502, 503 or
        504). `on_progress(done_bytes, total_bytes)` is called after each bucket.

        With several trainer ranks call it on every rank; all get the same report or error. The arguments of the
        publishing rank count. An error of another rank names that rank.

        Raises PublishError if an engine did not install the version; its `failures` and `report` say which engine and
        why (with `on_failure="report"` the report is returned instead). ValueError for a version that is not above the
        last, without engines if the transport keeps no versions, and for a source without tensors if it does.
        IncompatibleWeightsError if the source's tensors differ from its specs, or among trainer ranks.
        InsufficientMemoryError if the transport's arena does not fit. NotFiniteError (`check_finite`).
        UpdateAbortedError if an engine was lost and the source streams its tensors, which can't be sent again to the
        others. PeerError if a trainer rank dies, stalls or does not publish. OSError if file descriptors run out at the
        start. After any of these the next publish goes to every engine again.
        """
        with self._acquired(publishes=True):
            inputs = functools.partial(self._inputs, version)
            return self._publish(inputs, on_progress, wait_ready_seconds)

    @overload
    def start(
        self,
        version: SupportsIndex | None = None,
        *,
        overlap: Literal["wait", "raise"] = "wait",
        wait_ready_seconds: float = 0.0,
        on_progress: OnProgress | None = None,
    ) -> PublishHandle: ...

    @overload
    def start(
        self,
        version: SupportsIndex | None = None,
        *,
        overlap: Overlap,
        wait_ready_seconds: float = 0.0,
        on_progress: OnProgress | None = None,
    ) -> PublishHandle | None: ...

    def start(
        self,
        version: SupportsIndex | None = None,
        *,
        overlap: Overlap = "wait",
        wait_ready_seconds: float = 0.0,
        on_progress: OnProgress | None = None,
    ) -> PublishHandle | None:
        """Publish in the background: return once the weights may change again; engines install later.

        Blocks until all is packed: over `ipc://` into the arena, from which engines read while the trainer trains on;
        over gloo and NCCL, which have slots for a few buckets, until all is sent; into a store until all is written; to
        engines whose clients have their own senders until these have all buckets. `report.seconds.stall` is that time.
        A background thread reads the source, calls `on_progress` and publishes.

        One publish is in flight at a time, so versions never queue behind a slow fleet. `overlap` says what a call does
        while another publish is in flight: "wait" for its end, "skip" this one (return None), or "raise"
        PublishInFlightError. `with` and `close` wait for a publish in flight.

        With several trainer ranks call it on every rank in place of `publish`, with the same `overlap`. It returns when
        the weights of all ranks may change. All ranks skip, raise or publish as the publishing rank does.

        Raises what `publish` raises if the publish ends before all is packed; later errors are raised by the handle's
        `result`. Raises ValueError with `install="streaming"`, which writes to engines while buckets are packed.
        """
        if overlap not in ("wait", "skip", "raise"):
            raise ValueError(f"overlap is {overlap!r}; it must be 'wait', 'skip' or 'raise'")
        if self._options.install == "streaming":
            raise ValueError(
                "start() needs install='staged': with install='streaming' engines are paused while buckets are packed, "
                "so a publish can't go on in the background; call publish()"
            )
        require_no_step("start")
        flight, future = self._fly(overlap, version, wait_ready_seconds, on_progress)
        with on_failure(flight.cancel):
            is_packed = flight.wait_until_packed()
        return PublishHandle(flight, future) if is_packed or future.result() is not None else None

    async def publish_async(
        self,
        version: SupportsIndex | None = None,
        *,
        wait_ready_seconds: float = 0.0,
        on_progress: OnProgress | None = None,
    ) -> PublishReport:
        """Publish as `publish` does, in a background thread, without blocking the event loop.

        Don't change the weights before it returns. Cancelling the awaiting task cancels the publish (see
        `PublishHandle.cancel`), except with `install="streaming"`; the publish may end later, and the next one waits
        for its end.
        """
        flight, future = self._fly("wait", version, wait_ready_seconds, on_progress)
        with on_failure(flight.cancel):
            return await PublishHandle(flight, future)

    def _fly(
        self,
        overlap: Overlap,
        version: SupportsIndex | None,
        wait_ready_seconds: float,
        on_progress: OnProgress | None,
    ) -> tuple[Flight, Future[PublishReport | None]]:
        """Start a publish in a background thread. The future's result is None if it was declined."""
        self._require_here()
        # Cancelling a streamed version half-way would leave engines torn.
        can_cancel = self._options.install == "staged" and not self._is_following
        flight = Flight(is_background=True, can_cancel=can_cancel)
        future = Future[PublishReport | None]()
        future.set_running_or_notify_cancel()  # so that cancelling an await does not cancel the future
        present_stream = host_device.present_stream()

        def publish() -> PublishReport | None:
            try:
                if self._is_following:
                    instead = self._turn.acquire_unless_declined()
                elif self._turn.acquire(publishes=True, waits=overlap == "wait"):
                    instead = None
                elif self._group is None or self._group.decline(overlap):
                    instead = overlap
                else:
                    # The other ranks can't be told, since the publish in flight begins or ends there: wait for it.
                    self._turn.acquire(publishes=True)
                    instead = None
                if instead == "raise":
                    raise PublishInFlightError(
                        "a publish of this publisher is in flight: wait for its handle's result(), or pass "
                        "overlap='wait' or 'skip'"
                    )
                if instead is not None:
                    return None
                try:
                    self._require_open()
                    with present_stream():
                        inputs = functools.partial(self._inputs, version)
                        return self._publish(inputs, on_progress, wait_ready_seconds, flight)
                finally:
                    self._turn.release()
            except Exception as exc:
                if flight.is_packed and not isinstance(exc, UpdateAbortedError):
                    # `result` may never be called.
                    logger.warning("the publish of version %s in the background failed: %s", flight.version, exc)
                raise
            finally:
                flight.over()

        # In the caller's context, so that `on_event` finds the caller's span.
        context = contextvars.copy_context()
        awaited_at_exit(functools.partial(context.run, run_into, future, publish), "weightcast-publish")
        return flight, future

    def sync(
        self,
        engine: str | EngineClient | None = None,
        *,
        wait_ready_seconds: float = 0.0,
        on_progress: OnProgress | None = None,
    ) -> PublishReport:
        """Send the last version again to one engine of the fleet, under its number; block until the engine serves it.

        Use it for an engine that was added since, failed then, or was started again; the others are not disturbed. An
        engine that serves the version already is sent nothing; if this publisher had dropped it, it is ready again.
        Without `engine`, do so for all engines of the fleet, such as those that have come into its directory.
        `wait_ready_seconds`, `on_progress`: see `publish`. The report has these engines only.

        The sent bytes are those still staged (from a store: the stored version), else the source's weights. If these
        have changed since, the engine's update fails and the engine keeps its version: publish a new one. A source that
        streams its tensors is not read again: if the version is neither staged nor stored, UpdateAbortedError is
        raised. An engine that installs bucket by bucket over its server's own routes (stock SGLang, except by its disk
        route) fails with UnsupportedError: publish a new version.

        With several trainer ranks call it on every rank. Raises ValueError before the first publish, for an engine that
        is not in the fleet, if the last publish did not send a whole version, and with `install="streaming"` unless a
        store keeps the version. Otherwise raises what `publish` raises.
        """
        with self._acquired(publishes=True):
            if self._version < 0:
                raise ValueError(_NOTHING_YET)
            inputs = functools.partial(self._inputs, is_again=True, only=engine)
            return self._publish(inputs, on_progress, wait_ready_seconds)

    def rollback(self, version: SupportsIndex | None = None) -> PublishReport:
        """Publish an earlier version of the store once more, as a new version; block until engines serve it.

        It needs a publisher into a store, `file:///DIR`. `version`: number of the earlier version, by default the one
        before the newest (see `weightcast.rollback`). It is first read into host memory, one model. The source is not
        used; the next publish sends its weights again. Raises VersionNotFoundError if the store no longer has the
        version, ValueError for another transport or with several trainer ranks, otherwise what `publish` raises.
        """
        with self._acquired(publishes=True):
            if not self._transport.keeps_versions:
                raise ValueError(
                    f"{self._url} keeps no versions to go back to: publish into a store (file:///DIR), or publish the "
                    "old weights from a checkpoint with SafetensorsSource(DIR)"
                )
            if self._options.target is not None:
                raise ValueError(
                    "rollback() is for models: publish the earlier adapter again, or have requests name it"
                )
            if not self._is_joined:
                self._join_trainer_group()
            if self._group is not None:
                raise ValueError(
                    "rollback() is for one trainer rank, but several publish together here: close this publisher on "
                    "every rank, and on one of them publish StoreSource(url, version=...) with a Publisher that has "
                    "trainer_group=None and the same engines; for engines that follow the store, call "
                    "weightcast.rollback"
                )
            number = None if version is None else arguments.integer("version", version)
            source = StoreSource(self._url, previous=number is None, version=number)
            return self._publish(functools.partial(self._inputs, stored=source), None)

    def _publish(
        self,
        inputs: Callable[[], PublishInputs],
        on_progress: OnProgress | None,
        wait_ready_seconds: float = 0.0,
        flight: Flight | None = None,
    ) -> PublishReport:
        """Publish from all ranks, with the publishing rank's inputs."""
        if not self._is_joined:
            # Not earlier: torch.distributed may be initialised after this publisher is made.
            self._join_trainer_group()
        group, last = self._group, self._version
        run = PublishRun(
            publisher_run=self.run,
            options=self._options,
            above=last,
            proves_all=self._num_published % self._options.verify_every == 0,
            wait_ready_seconds=wait_ready_seconds,
            on_progress=on_progress,
            flight=Flight() if flight is None else flight,
        )
        try:
            if group is None:
                report = run.run(inputs())
            else:
                report = group.publish(self.run, last, inputs, run)
        except Exception as exc:
            if self._metrics is not None:
                self._metrics.add_failure(exc)
            raise
        finally:
            self._version = max(last, run.number)
            if isinstance(self._source, StreamSource) and self._pack_plan is not None:
                # After a failure the rest of the stream is dropped, since its exporter may keep memory alive.
                self._pack_plan.use({}, StreamPacker(self._pack_plan.layout, None))
            if group is not None:
                self._version, self.run = max(self._version, group.group.version), group.run or self.run
            self._published = run.published or (self._published if run.number in (-1, last) else None)
            self._num_published += run.published is not None and run.number > last
        self.last_report = report
        if self._metrics is not None:
            self._metrics.add(report)
        if not report.ok and self._options.on_failure == "raise":
            raise publish_error(report)
        return report

    def _join_trainer_group(self) -> None:
        """Find out whether other ranks publish with this one. Connects nothing. Raises ValueError."""
        if self._trainer_group is not None and dist.is_available() and dist.is_initialized():
            group = None if self._trainer_group == "auto" else self._trainer_group
            if dist.get_rank(group) < 0:
                raise ValueError(
                    "this rank is not in trainer_group: make the publisher only on the ranks of that group"
                )
            if dist.get_world_size(group) > 1:
                if isinstance(self._source, StreamSource):
                    raise ValueError(
                        f"{type(self._source).__name__} streams its tensors, which only one rank can publish: make a "
                        "Publisher with trainer_group=None on one rank, and have the other ranks only take part in the "
                        "export"
                    )
                from weightcast.trainer.group.rounds import FollowingRank, PublishingRank

                source, seconds = self._source, self._options.deadline_seconds
                if dist.get_rank(group) == 0:
                    self._group = PublishingRank(group, source, seconds)
                else:
                    self._group = FollowingRank(group, source, seconds, self._turn)
                self._owned.insert(0, self._group)
        self._close_when_dropped()
        self._is_joined = True

    def _close_when_dropped(self) -> None:
        """Close what this publisher owns when nothing refers to it any more, if that happens in this process."""
        if self._drop is not None:
            self._drop.detach()
        self._drop = weakref.finalize(self, _drop, self._owned, os.getpid())
        self._drop.atexit = False

    def _inputs(
        self,
        version: SupportsIndex | None = None,
        *,
        is_again: bool = False,
        only: str | EngineClient | None = None,
        stored: StoreSource | None = None,
    ) -> PublishInputs:
        """Return the inputs of a publish that need no communication with engines: members, regions, connections, plan.

        `is_again`: publish the last version again. `only`: the only engine. `stored`: published in place of the
        source.

        The sender and the listener are made at the first publish, when the device of the weights is known.
        """
        start = time.perf_counter()
        require_no_step("publish or sync")
        if self._metrics is None and self._metrics_target is not None:
            self._serve_metrics(self._metrics_target)
        number = None if version is None else arguments.integer("version", version)
        if number is not None and not 0 <= number <= MAX_VERSION:
            raise ValueError(f"version is {number}; it must be from 0 to {MAX_VERSION}")
        if number is not None and number <= self._version:
            raise ValueError(
                f"version {number} is not above {self._version}, the last one of this publisher: leave `version` out, "
                "or pass a higher number"
            )
        if self._directory is not None:
            self._follow_directory(self._directory)
        fleet = self._fleet if only is None else self._fleet.only(_name_of(only))
        again = self._published if is_again else None
        if is_again and again is None:
            raise ValueError(f"version {self.version} was not sent completely to any engine: publish a new version")
        if again is not None and self._options.install == "streaming" and not again.is_stored:
            raise ValueError(
                f"version {self.version} can't be sent again: with install='streaming' an engine is changed before all "
                "weights were compared with that version, and no store keeps it; publish a new version"
            )
        source = self._source if stored is None else stored
        regions: Regions = {}
        revisions: Mapping[str, int] = {}
        stream: TensorStream | None = None
        if not isinstance(source, StreamSource):
            regions = source.regions()
            if self._deltas is not None and self._group is None and isinstance(source, RevisedSource):
                revisions = source.revisions()
        elif again is None:
            stream = source.stream()
        pack_plan, connections = self._pack_plan, self._connections
        is_known = pack_plan is not None and pack_plan.seen.is_of(regions)
        if connections is None or not is_known:
            device = _device_of(regions) if stream is None else stream.device
            if stored is not None and not isinstance(self._source, StreamSource):
                device = _device_of(self._source.regions())  # the next publish sends these
        if connections is not None:
            device = connections.device
        if pack_plan is None or not is_known:
            pack_plan = self._ready_pack_plan(device, source)
        if isinstance(source, StreamSource):
            tensors = None if stream is None else stream.tensors
            check = self._options.check_finite
            pack_plan.use(regions, StreamPacker(pack_plan.layout, tensors, check_finite=check))
        elif self._group is None and not is_known:
            arguments.require_alone(source)
            # This checks the regions before a sender exists, which may write to a store.
            pack_plan.packer(regions)
        if connections is None:
            connections = self._connect(device)
        if not self._fleet.members and not self._transport.keeps_versions:
            raise ValueError(
                f"there is no engine to publish to, and {self._url} keeps nothing for later: pass engines=[...], or "
                "call add_engine first (a store, file:///DIR, needs none)"
            )
        return PublishInputs(
            start,
            number,
            regions,
            connections,
            pack_plan,
            fleet,
            again,
            maps_buckets=functools.partial(self._maps_buckets, device),
            checks_finite=self._options.check_finite,
            engine_dtypes=self._engine_dtypes if stored is None else None,
            target=UNSET if self._options.target is None else self._target(self._options.target),
            deltas=self._deltas,
            revisions=revisions,
            directory_error=self._directory_error,
            departed=self._departed,
        )

    def _connect(self, device: torch.device) -> Connections:
        """Listen for workers, and make the sender, for weights on this device. Raises OSError."""
        try:
            self._connections = Connections(
                self._url,
                self.run,
                device,
                deadline_seconds=self._options.deadline_seconds,
                lease_seconds=self._options.lease_seconds,
                has_several_ranks=self._group is not None,
            )
        except OSError as exc:
            if reason := shortage(exc):
                raise OSError(exc.errno, reason) from exc
            raise
        self._process = os.getpid()
        self._owned.insert(-1, self._connections)
        # Again, since the process may have been forked meanwhile.
        self._close_when_dropped()
        return self._connections

    def _maps_buckets(self, device: torch.device) -> bool:
        """Return whether trainer ranks of one host can pack into each other's buckets, for weights on this device."""
        # Clients' own senders have their buckets in host memory.
        is_brought = self._fleet.members and all(isinstance(m.client, BringsSender) for m in self._fleet.members)
        if device.type == "cpu" or (is_brought and not self._transport.keeps_versions):
            return True
        return self._transport.mappable_on_gpu in ("always", self._options.install)

    def _target(self, target: Adapter) -> AdapterTarget:
        """Return the adapter to update, with the source's present settings."""
        assert isinstance(self._source, AdapterSource), "checked by `require_target`"
        base = UNSET if target.base is None else WeightVersion(*target.base)
        return AdapterTarget(target.name, self._source.lora_config, int(target.keep), base)

    def _new_deltas(self) -> Deltas | None:
        """Return the deltas that the options ask for. Raises ValueError if there can be none with delta="always"."""
        delta, transport, against = self._options.delta, self._transport, ""
        if delta is None:
            return None
        if transport.keeps_versions:
            against = f"{self._url} keeps versions for readers (full_every in its URL makes deltas of them)"
        elif self._options.target is not None:
            against = "an adapter is sent as a whole"
        elif self._options.install != "staged":
            against = 'engines install with install="streaming"'
        if against and delta == "always":
            raise ValueError(f'{against}, so delta="always" is impossible: publish with delta=None')
        if not against and transport.same_host:
            against = f"over {self._url} engines read this process's memory, which takes less time than a delta"
        return Deltas(delta, against)

    def _serve_metrics(self, target: MetricsTarget) -> None:
        """Raises OSError if the address is taken, ModuleNotFoundError without prometheus-client."""
        with import_of_extra():
            from weightcast.trainer.metrics import PublisherMetrics
        # Weakly: clients may refer to this publisher, which the metrics would keep alive.
        fleet, scheme = weakref.ref(self._fleet), self._url.partition("://")[0]

        def states() -> list[EngineState]:
            present = fleet()
            return [] if present is None else [member.state for member in present.members]

        self._metrics = PublisherMetrics(target, states, scheme)
        self._owned.insert(-1, self._metrics)

    def _ready_pack_plan(self, device: torch.device, source: Source | StreamSource) -> PackPlan:
        """Return the plan for the source's specs; it is made again only if the specs have changed."""
        specs = source.specs()
        if self._engine_dtypes is not None and source is self._source:
            specs = self._engine_dtypes.cast(specs)
        if self._pack_plan is None or self._pack_plan.specs is not specs:
            _require_specs(specs)
            if self._transport.keeps_versions:
                arguments.require_tensors(specs)
            size, install = self._options.bucket_size_bytes, self._options.install
            if size is None:
                sizes, is_alone = self._transport.default_bucket_size_bytes, self._group is None
                largest = largest_bucket_size(sizes, device.type, install, is_alone=is_alone)
                size = fitting_bucket_size(sum(spec.num_bytes for spec in specs), largest)
            self._pack_plan = PackPlan(specs, size)
        return self._pack_plan


def _name_of(engine: str | EngineClient) -> str:
    return engine.rstrip("/") if isinstance(engine, str) else engine.name


def _require_specs(specs: object) -> None:
    """Raise TypeError unless a source's specs() returned a sequence of valid TensorSpecs."""
    what = (
        "specs() of the source must return a sequence of TensorSpec, such as TensorSpec('weight', 'bfloat16', (8, 4))"
    )
    if not isinstance(specs, Sequence):
        raise TypeError(f"{what}; it returned {arguments.shown(specs)}")
    shapes = set[object]()
    for spec in specs:
        if not isinstance(spec, TensorSpec):
            raise TypeError(f"{what}; one of them is {arguments.shown(spec)}")
        name: Any = spec.name
        shape: Any = spec.shape
        is_shape = isinstance(shape, tuple) and (shape in shapes or all(isinstance(size, int) for size in shape))
        if not (isinstance(name, str) and spec.dtype in ITEMSIZE_BYTES and is_shape):
            raise TypeError(f"{what}; one of them is {spec!r:.200}")
        shapes.add(shape)


def _device_of(regions: Regions) -> torch.device:
    try:
        devices = set(map(torch.device, {tensor.device for held in regions.values() for _, tensor in held}))
    except (AttributeError, TypeError, ValueError):
        what = "regions() of the source must return a mapping of names to sequences of (Region, tensor)"
        raise TypeError(f"{what}; it returned a {type(regions).__name__}") from None
    # A view on the meta device is refused by name when the regions are checked.
    return next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))


def _drop(owned: list[Closeable], process: int) -> None:
    """Close what a garbage-collected publisher left open. Does nothing in a forked child, which has only a copy."""
    if process != os.getpid() or sys.is_finalizing():
        return
    for part in owned:
        if isinstance(part, Connections):
            part.listener.end_links("the publisher was garbage-collected without close()")
    # In a new thread, since a collection can interrupt any thread, also one that closing waits for.
    closing = threading.Thread(target=_close_all, args=(owned,), name="weightcast-dropped", daemon=True)
    with contextlib.suppress(RuntimeError):  # at exit the interpreter starts no more threads
        closing.start()
        if not threading.current_thread().name.startswith("weightcast"):
            closing.join(GRACE_SECONDS)


def _close_all(owned: list[Closeable]) -> None:
    for part in owned:
        with contextlib.suppress(Exception):
            part.close()
