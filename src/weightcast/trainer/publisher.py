"""Publisher: one source of weights, one transport, many engines; each version whole or not at all, engine by engine.

Invariants: versions only grow within this publisher's run; bytes are packed once however many engines take them; a
failure on one engine leaves the others' update alone; every pause is lifted before `publish` returns or raises; of
several trainer ranks one knows engines and transport, and all return the same report or raise the same error.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

import torch
import torch.distributed as dist

from weightcast import registry
from weightcast.engines.gate import require_no_step
from weightcast.errors import ClosedError, PublishReport, UpdateAbortedError, publish_error
from weightcast.format.bucket import Layout
from weightcast.format.manifest import ITEMSIZE_BYTES, MAX_VERSION, TensorSpec
from weightcast.format.plan import fitting_bucket_size, largest_bucket_size, plan
from weightcast.host import device as host_device
from weightcast.host.closing import Closeable, ClosedOnExit, awaited_at_exit, on_failure
from weightcast.host.deadline import GRACE_SECONDS, run_into
from weightcast.host.descriptors import shortage
from weightcast.links.watchdog import Watchdog
from weightcast.seams.client import BringsSender, EngineClient
from weightcast.seams.source import Regions, Source, StreamSource, TensorStream, casts_to_engines
from weightcast.sources.store import StoreSource
from weightcast.trainer import arguments
from weightcast.trainer.background import Flight, Overlap, PublishHandle, Turn, require_skip
from weightcast.trainer.engine_dtypes import EngineDtypes
from weightcast.trainer.finite import require_finite
from weightcast.trainer.fleet import EngineState, Fleet, FleetMember
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.packer import PackPlan, held_shards
from weightcast.trainer.publish_run import (
    Connections,
    OnProgress,
    PublishedVersion,
    PublishInputs,
    PublishRun,
    listen,
)
from weightcast.trainer.stream_packer import StreamPacker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from weightcast.trainer.group.rounds import FollowingRank, PublishingRank

logger = logging.getLogger(__name__)
_NOTHING_YET = "nothing was published yet: call publish() first"


class Publisher(ClosedOnExit):
    """Moves a source's weights into running engines.

    With several trainer ranks, create one on every rank (several publishers: in the same order everywhere), and call
    `publish` on every rank. Rank 0 of the group talks to the engines; the other ranks ignore `engines` and `transport`.

    Memory on this side: the transport's slots (streaming) or arena (staged), stated there; nothing of the model's size
    besides. With several trainer ranks: the transport's slots or arena on each rank that sends: one of each host, where
    ranks can map each other's memory; each rank that can't.
    One that nothing refers to any more closes itself; a traceback that is kept refers to it. Use `with`, or `close`.
    Thread-safe: concurrent calls wait for each other.
    """

    def __init__(
        self,
        source: Source | StreamSource,
        *,
        transport: str = "ipc://",
        engines: Sequence[str | EngineClient] = (),
        token: str | None = None,
        trainer_group: ProcessGroup | Literal["auto"] | None = "auto",
        options: PublishOptions | None = None,
    ) -> None:
        """Nothing is connected and nothing allocated before the first `publish`, or `prepare`.

        `engines`: URLs, or EngineClient objects; others may be added later. `token`: the bearer token of engines given
        as URLs. `trainer_group`: the ranks that hold the model together and publish together; "auto" is
        torch.distributed's default group, if there is one at the first of these; None: this rank publishes alone.
        `options`: how engines are updated; by default `PublishOptions()`.

        Raises ValueError for an unknown transport or an engine named twice, TypeError for what is none of these.
        """
        arguments.require_source(source)
        arguments.require_engines(engines)
        arguments.require_trainer_group(trainer_group)
        if not isinstance(options, PublishOptions | None):
            raise TypeError(f"options is a {type(options).__name__}; pass PublishOptions(...)")
        self.run = secrets.token_hex(16)
        self.version = -1
        self.last_report: PublishReport | None = None
        """Of the last publish that had one: not of one that raised another error than PublishError."""
        self._source = source
        self._url = transport
        self._transport = registry.transport(transport)
        self._token = token
        self._options = PublishOptions() if options is None else options
        self._turn = Turn()
        self._fleet = Fleet()
        self._watchdog = Watchdog()
        self._connections: Connections | None = None
        self._pack_plan: PackPlan | None = None
        self._engine_dtypes = EngineDtypes() if casts_to_engines(source) else None
        self._published: PublishedVersion | None = None
        """The last version, if it was sent whole."""
        self._trainer_group = trainer_group
        self._group: PublishingRank | FollowingRank | None = None
        self._is_joined = False
        self._closed = False
        self._num_published = 0
        """Versions that were sent whole."""
        self._process = 0
        """The one that has the connections; 0 while there are none."""
        self._owned: list[Closeable] = [self._watchdog]
        """Owners of connections, threads or processes, in the order in which they are closed, the watchdog last.

        Nothing of the caller's, which may refer to this publisher.
        """
        self._drop = weakref.finalize(self, _drop, self._owned, os.getpid())
        self._drop.atexit = False
        with on_failure(self.close):
            for engine in engines:
                self._add(engine)

    # --- the fleet ---

    @property
    def engines(self) -> list[EngineState]:
        """The state of each engine as far as it is known, also during a publish; empty on a rank that does not publish.

        Does not wait, and asks no engine.
        """
        return [member.state for member in self._fleet]

    def add_engine(self, engine: str | EngineClient, *, sync: bool = False) -> None:
        """Add an engine; the next publish connects it, or with `sync` this call, which sends it the last version.

        Does nothing on a trainer rank that another one publishes for. Raises ValueError if it is there already,
        TypeError for what is no engine; with `sync` what `sync` raises: it is in the fleet still.
        """
        with self._turn.acquired():
            self._require_open()
            if sync and self.version < 0:
                raise ValueError(_NOTHING_YET)
            if not self._is_following:
                self._add(engine)
        if sync:
            self.sync(engine)

    def _add(self, engine: str | EngineClient) -> None:
        if isinstance(engine, str):
            timeout_seconds = self._options.deadline_seconds
            client = registry.http_client(engine, token=self._token, timeout_seconds=timeout_seconds)
        else:
            arguments.require_client(engine)
            client = engine
        self._fleet.add(FleetMember(client, owned=isinstance(engine, str)))

    def remove_engine(self, engine: str | EngineClient) -> None:
        """Disconnect an engine: it keeps the version it has, and another publisher may take it.

        Does nothing on a trainer rank that another one publishes for. Raises ValueError if it is not in the fleet.
        """
        if not isinstance(engine, str):
            arguments.require_client(engine)
        name = _name_of(engine)
        with self._turn.acquired():
            if self._is_following:
                return
            member = self._fleet.pop(name)
            if self._connections is not None:
                self._connections.listener.end_links("the engine was removed from the fleet", name)
            # Only one that did not answer is paused still, and this is the last request to it.
            self._fleet.each(FleetMember.resume, [member], notes=False)
            self._watchdog.release(name)
            member.close()

    def release(self) -> None:
        """Give back the memory that is kept for the next publish, which takes it again: here, and in engines' workers.

        That is the transport's slots (streaming) or arena (staged): on GPUs device memory at both ends, as for the KV
        cache of an engine beside the trainer; on CPUs host memory. Waits until engines have released it, with the
        deadline; they let go in the background. With several trainer ranks call it on every rank. Memory of
        `file://` and of senders that clients bring is kept. Does nothing before the first publish. Raises ClosedError.
        """
        self._require_here()
        with self._turn.acquired():
            self._require_open()
            if self._pack_plan is not None:
                self._pack_plan.forget_views()
            if self._connections is not None:
                self._connections.release()
            elif self._group is not None:
                self._group.release()

    def close(self) -> None:
        """Disconnect every engine and free everything. Idempotent; does nothing in a forked child."""
        if self._is_copy:
            return
        with self._turn.acquired():
            if self._closed:
                return
            self._closed = True
            self._drop.detach()
            with contextlib.ExitStack() as stack:
                # Each, whatever another one's GPU raises; what is named last is closed first.
                stack.callback(self._watchdog.close)
                stack.callback(self._fleet.close)
                if self._pack_plan is not None:
                    # An exception that the caller keeps may refer to the packer, whose views would keep the arena
                    # mapped.
                    stack.callback(self._pack_plan.forget_views)
                if self._connections is not None:
                    stack.callback(self._connections.close)
                if self._group is not None:
                    stack.callback(self._group.close)

    @property
    def _is_following(self) -> bool:
        """True if another trainer rank publishes and has the engines, as far as torch.distributed says so by now."""
        if self._is_joined or self._trainer_group is None or not (dist.is_available() and dist.is_initialized()):
            return self._group is not None and not self._group.is_publishing
        return dist.get_rank(None if self._trainer_group == "auto" else self._trainer_group) > 0

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this publisher was closed")

    @property
    def _is_copy(self) -> bool:
        """True in a process that was forked from the publishing one: it has none of its threads and connections."""
        return self._process not in (0, os.getpid())

    def _require_here(self) -> None:
        if self._is_copy:
            raise ClosedError(
                f"this publisher is of pid {self._process}, which this process (pid {os.getpid()}) was forked from: "
                "publish there, or close that publisher and make one here"
            )

    # --- one publish ---

    def prepare(self) -> None:
        """Make ready for the first publish, while the trainer trains: plan it, and take the memory that it needs.

        Reads the source's specs and regions, and plans. The transport's memory (see the class; `release` and `close`
        give it back) is populated in the background, as far as this host or container has room; without this call the
        first publish begins with that. Connects no engine. It takes no memory where only the first publish knows how
        much: with several trainer ranks, for a source that streams its tensors or has dtype="engine", and for engines
        whose clients bring a sender. Raises InsufficientMemoryError if it does not fit; otherwise what `publish` raises
        before it connects an engine.
        """
        self._require_here()
        with self._turn.acquired():
            self._require_open()
            if not self._is_joined:
                self._join_trainer_group()
            if self._group is None and not isinstance(self._source, StreamSource):
                inputs = self._inputs(None)
                if self._engine_dtypes is None and not self._has_brought_senders:
                    manifest = inputs.pack_plan.layout.manifest
                    inputs.connections.sender.prepare(manifest, staged=self._options.install == "staged")

    def publish(
        self,
        version: SupportsIndex | None = None,
        *,
        wait_ready_seconds: float = 0.0,
        on_progress: OnProgress | None = None,
    ) -> PublishReport:
        """Make every engine serve the source's weights as they are now; blocks until they do.

        `version` must be above this publisher's last, and at most 2^63 - 1; by default it is one above the highest in
        the fleet and the store. Don't change the weights meanwhile. A version that every engine refused is not the
        store's newest. Extra memory: see the class. `wait_ready_seconds`: how long, all together, to wait for
        engines that are starting (nothing listens at their URL yet, or 502, 503 or 504 is answered there); an engine
        that refuses is not waited for. `on_progress(done_bytes, total_bytes)` is called after each bucket.

        With several trainer ranks every rank calls it, and each gets the same report or error; the arguments are those
        of the publishing rank. An error that another rank brought names that rank.

        Raises PublishError if an engine did not take it, whose `failures` and `report` say which and why (with
        `on_failure="report"` the report is returned instead); ValueError for a version that does not grow, where there
        is no engine and the transport keeps nothing for later, and where a store would keep a version without tensors;
        IncompatibleWeightsError if the source's tensors are not what its specs say, or not the same on all ranks;
        InsufficientMemoryError if the transport's arena does not fit; NotFiniteError (`check_finite`);
        UpdateAbortedError if the source streams its tensors and a bucket is needed again, for the engines that remain
        when one was lost on the way; PeerError if a trainer rank dies, stalls or does not publish; OSError if there is
        no file descriptor left to begin with. After any of these the next publish goes to every engine again.
        """
        self._require_here()  # first: the turn may be one that a thread of the other process has
        with self._turn.acquired(publishes=True):
            inputs = self._new_version(version, wait_ready_seconds, on_progress)
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
        """Publish in the background: return once the weights may change again, not once engines have installed them.

        Blocks until all is packed: over `ipc://` into the arena, from which engines read while the trainer trains on;
        over gloo and NCCL, whose slots hold two buckets, until all is sent; into a store until all is written; for
        engines whose clients bring a sender, until that has all. `report.seconds.stall` says how long that took. The
        publish itself, with the source and `on_progress`, runs in a thread of its own.

        One publish is in flight at a time. `overlap`: what a call does while another one is: "wait" for its end,
        "skip" this one (return None), or "raise" PublishInFlightError. So versions never queue behind a slow fleet.
        `with` and `close` wait for a publish in flight.

        With several trainer ranks every rank calls it, in the place of `publish`, and each returns when the weights of
        all may change; pass the same `overlap` on each. All skip, raise or publish alike, as the publishing rank does.

        Raises what `publish` raises if the publish ends before all is packed; later it is raised by the handle's
        `result`. ValueError with `install="streaming"`, where engines are written to as buckets are packed.
        """
        if overlap not in ("wait", "skip", "raise"):
            raise ValueError(f"overlap is {overlap!r}; it must be 'wait', 'skip' or 'raise'")
        if self._options.install == "streaming":
            raise ValueError(
                "a publish in the background needs install='staged': with install='streaming' engines are paused while "
                "buckets are packed, so that there is nothing to go on with: call publish"
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
        """Publish as `publish` does, in a thread of its own, without blocking the event loop.

        Don't change the weights before it returns. If the awaiting task is cancelled, so is the publish (see
        `PublishHandle.cancel`), unless `install="streaming"`; it may end later, and the next one waits for that.
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
        """Publish in a thread of its own, when its turn comes; the future has None if it was declined."""
        self._require_here()
        # A streamed version that ends half-way would leave engines torn.
        can_cancel = self._options.install == "staged" and not self._is_following
        flight = Flight(is_background=True, can_cancel=can_cancel)
        future = Future[PublishReport | None]()
        future.set_running_or_notify_cancel()  # so that nobody who awaits it cancels it
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
                    # The publish in flight has not begun on the other ranks, or ends just now.
                    self._turn.acquire(publishes=True)
                    instead = None
                if instead is not None:
                    require_skip(instead)
                    return None
                try:
                    with present_stream():
                        inputs = self._new_version(version, wait_ready_seconds, on_progress)
                        return self._publish(inputs, on_progress, wait_ready_seconds, flight)
                finally:
                    self._turn.release()
            except Exception as exc:
                if flight.is_packed and not isinstance(exc, UpdateAbortedError):
                    # Perhaps nobody asks for the result.
                    logger.warning("version %s was not published in the background: %s", flight.version, exc)
                raise
            finally:
                flight.over()

        awaited_at_exit(functools.partial(run_into, future, publish), "weightcast-publish")
        return flight, future

    def _new_version(
        self, version: SupportsIndex | None, wait_ready_seconds: float, on_progress: OnProgress | None
    ) -> Callable[[], PublishInputs]:
        """Return a function that refuses wrong arguments and makes the inputs of a new version."""

        def inputs() -> PublishInputs:
            arguments.require_call(wait_ready_seconds, on_progress)
            return self._inputs(None if version is None else arguments.integer("version", version))

        return inputs

    def sync(
        self, engine: str | EngineClient, *, wait_ready_seconds: float = 0.0, on_progress: OnProgress | None = None
    ) -> PublishReport:
        """Bring one engine of the fleet to the last version now, which gets no new number; blocks until it serves it.

        For an engine that was added since, failed then, or was started again; the others serve on. One that serves the
        version already is left alone. `wait_ready_seconds`, `on_progress`: as of `publish`. The report is of this
        engine alone. Its bytes are those that are staged still (or, from a store, the stored version), else the
        source's weights, which must not have changed since: where they have, the engine's update fails, it keeps what
        it has, and a new version must be published. Of a source that streams its tensors only bytes that are staged or
        stored can be sent again: else UpdateAbortedError, the engine keeps what it has, and no stream is taken. An
        engine that takes weights bucket by bucket by routes of its own (stock SGLang but for its disk route) fails with
        UnsupportedError: publish a new version.

        With several trainer ranks every rank calls it, as `publish`. Raises ValueError before the first publish, for an
        engine that is not in the fleet, if the last publish sent no whole version, and with `install="streaming"`
        unless a store keeps the version: publish a new one; otherwise what `publish` raises.
        """
        self._require_here()
        with self._turn.acquired(publishes=True):
            self._require_open()
            if self.version < 0:
                raise ValueError(_NOTHING_YET)

            def inputs() -> PublishInputs:
                arguments.require_call(wait_ready_seconds, on_progress)
                return self._inputs(None, of=_name_of(engine))

            return self._publish(inputs, on_progress, wait_ready_seconds)

    def rollback(self, version: SupportsIndex | None = None) -> PublishReport:
        """Publish a version that the store still holds once more, as a new version; blocks until engines serve it.

        For a publisher into a store, `file:///DIR`. `version`: its number; by default the one before the newest (see
        `weightcast.rollback`). It is read whole first: host memory of one version. The source is left alone, and the
        next publish sends its weights again. Raises VersionNotFoundError if the store does not hold it any more,
        ValueError for another transport or with several trainer ranks; otherwise what `publish` raises.
        """
        self._require_here()
        with self._turn.acquired(publishes=True):
            self._require_open()
            if not self._transport.keeps_versions:
                raise ValueError(
                    f"{self._url} keeps no versions to go back to: publish into a store (file:///DIR), or publish the "
                    "old weights from a checkpoint, SafetensorsSource(DIR)"
                )
            if not self._is_joined:
                self._join_trainer_group()
            if self._group is not None:
                raise ValueError(
                    "several trainer ranks publish together, and a version of a store is read by one: close this "
                    "publisher on every rank, and on one of them publish StoreSource(url, version=...) by a Publisher "
                    "with trainer_group=None and the same engines, or call weightcast.rollback where engines follow"
                )
            number = None if version is None else arguments.integer("version", version)
            source = StoreSource(self._url, previous=number is None, version=number)
            return self._publish(lambda: self._inputs(None, stored=source), None)

    def _publish(
        self,
        inputs: Callable[[], PublishInputs],
        on_progress: OnProgress | None,
        wait_ready_seconds: float = 0.0,
        flight: Flight | None = None,
    ) -> PublishReport:
        """Have all ranks publish what the publishing rank's inputs say."""
        self._require_open()
        if not self._is_joined:
            # At the first publish, not before: torch.distributed may be initialised after this publisher is made.
            self._join_trainer_group()
        group, last = self._group, self.version
        run = PublishRun(
            self.run,
            self._options,
            self._watchdog,
            above=last,
            proves_all=self._num_published % self._options.verify_every == 0,
            wait_ready_seconds=wait_ready_seconds,
            on_progress=on_progress,
            flight=Flight() if flight is None else flight,
        )
        try:
            if group is None:
                prepared = inputs()
                report = run.run(prepared, functools.partial(self._on_engines_asked, prepared))
            else:
                report = group.publish(self.run, last, inputs, run)
        finally:
            self.version = max(last, run.number)
            if isinstance(self._source, StreamSource) and self._pack_plan is not None:
                # What remains of a stream, after a failure, may be an exporter's that keeps memory until it is freed.
                self._pack_plan.use({}, StreamPacker(self._pack_plan.layout, None))
            if group is not None:
                self.version, self.run = max(self.version, group.group.version), group.run or self.run
            self._published = run.published or (self._published if run.number in (-1, last) else None)
            self._num_published += run.published is not None and run.number > last
        self.last_report = report
        if not report.ok and self._options.on_failure == "raise":
            raise publish_error(report)
        return report

    def _on_engines_asked(self, inputs: PublishInputs) -> None:
        """When the engines have said what they are, before anything is offered: cast to what they have; look for NaN.

        Raises ValueError, NotFiniteError.
        """
        if inputs.engine_dtypes is not None:
            specs = self._source.specs()
            inputs.engine_dtypes.ask(inputs.fleet, specs, is_again=inputs.again is not None)
            if inputs.engine_dtypes.cast(specs) is not inputs.pack_plan.specs:
                inputs.pack_plan.cast(inputs.engine_dtypes.cast(specs))
        if inputs.checks_finite and inputs.again is None and not isinstance(self._source, StreamSource):
            require_finite(inputs.pack_plan.specs, held_shards(inputs.pack_plan.specs, inputs.regions))

    def _join_trainer_group(self) -> None:
        """Find out whether other ranks publish with this one; nothing is connected yet. Raises ValueError."""
        if self._trainer_group is not None and dist.is_available() and dist.is_initialized():
            group = None if self._trainer_group == "auto" else self._trainer_group
            if dist.get_rank(group) < 0:
                raise ValueError("this rank is not in trainer_group: make the publisher on its ranks only")
            if dist.get_world_size(group) > 1:
                if isinstance(self._source, StreamSource):
                    raise ValueError(
                        f"{type(self._source).__name__} streams its tensors, which one rank publishes: make a "
                        "Publisher with trainer_group=None there, and have the other ranks only take part in the export"
                    )
                from weightcast.trainer.group.rounds import FollowingRank, PublishingRank

                source, seconds = self._source, self._options.deadline_seconds
                if dist.get_rank(group) == 0:
                    self._group = PublishingRank(group, source, seconds)
                else:
                    self._group = FollowingRank(group, source, seconds, self._turn)
                self._owned.insert(0, self._group)
        self._is_joined = True

    def _inputs(
        self, version: int | None, *, of: str | None = None, stored: StoreSource | None = None
    ) -> PublishInputs:
        """Return a publish's inputs that this process makes alone: regions, connections, plan. No communication.

        `of`: the name of the only engine, which is to have the last version. `stored`: what is published in place of
        the source.

        The sender and the listener are made at the first publish, when the device of the weights is known.
        """
        start = time.perf_counter()
        require_no_step("publish or sync")
        if version is not None:
            if not 0 <= version <= MAX_VERSION:
                raise ValueError(f"version {version} is not from 0 to {MAX_VERSION}")
            if version <= self.version:
                raise ValueError(f"version {version} is not above {self.version}, the last one of this publisher")
        fleet, again = (self._fleet, None) if of is None else (self._fleet.only(of), self._published)
        if of is not None and again is None:
            raise ValueError(f"version {self.version} was not sent whole to any engine: publish a new version")
        if again is not None and self._options.install == "streaming" and not again.is_stored:
            raise ValueError(
                f"version {self.version} can't be sent again: with install='streaming' an engine is written to before "
                "all of it is known to be unchanged, and no store keeps it: publish a new version"
            )
        source = self._source if stored is None else stored
        regions: Regions = {}
        stream: TensorStream | None = None
        if not isinstance(source, StreamSource):
            regions = source.regions()
        elif again is None:
            stream = source.stream()
        pack_plan, connections = self._pack_plan, self._connections
        is_known = pack_plan is not None and pack_plan.is_of(regions)
        if connections is None or not is_known:
            device = _device_of(regions) if stream is None else stream.device
            if stored is not None and not isinstance(self._source, StreamSource):
                device = _device_of(self._source.regions())  # of what comes after it
        if connections is not None:
            device = connections.device
        if pack_plan is None or not is_known:
            pack_plan = self._ready_pack_plan(device, source)
        if self._group is None:
            arguments.require_alone(source)
        if isinstance(source, StreamSource):
            tensors = None if stream is None else stream.tensors
            check = self._options.check_finite
            pack_plan.use(regions, StreamPacker(pack_plan.layout, tensors, check_finite=check))
        elif self._group is None:
            # Before there is a sender, which may write.
            pack_plan.packer(regions)
        if self._connections is None:
            seconds = self._options.deadline_seconds
            try:
                listener = listen(self._url, self.run, self._options.lease_seconds)
                with on_failure(listener.close):
                    sender = self._transport.sender(
                        self._url, run=self.run, listener=listener, device=device, deadline_seconds=seconds
                    )
            except OSError as exc:
                if reason := shortage(exc):
                    raise OSError(exc.errno, reason) from exc
                raise
            keeps_versions = self._transport.keeps_versions
            self._connections = Connections(
                self._url,
                sender,
                listener,
                device,
                keeps_versions=keeps_versions,
                has_several_ranks=self._group is not None,
            )
            self._process = os.getpid()
            self._owned.insert(-1, self._connections)
            # Again: this process may have been forked since this publisher was made.
            self._drop.detach()
            self._drop = weakref.finalize(self, _drop, self._owned, os.getpid())
            self._drop.atexit = False
        if not len(self._fleet) and not self._transport.keeps_versions:
            raise ValueError(
                f"there is no engine to publish to, and {self._url} keeps nothing for later: pass engines=[...], or "
                "call add_engine first (a store, file:///DIR, needs none)"
            )

        def maps_buckets() -> bool:
            # Those that clients' own senders give, where no others are packed, are in host memory.
            is_brought = bool(len(fleet)) and all(isinstance(member.client, BringsSender) for member in fleet)
            if device.type == "cpu" or (is_brought and not self._transport.keeps_versions):
                return True
            return self._transport.mappable_on_gpu in ("always", self._options.install)

        return PublishInputs(
            start,
            version,
            regions,
            self._connections,
            pack_plan,
            fleet,
            again,
            url=self._url,
            maps_buckets=maps_buckets,
            checks_finite=self._options.check_finite,
            engine_dtypes=self._engine_dtypes if stored is None else None,
        )

    @property
    def _has_brought_senders(self) -> bool:
        return any(isinstance(member.client, BringsSender) for member in self._fleet)

    def _ready_pack_plan(self, device: torch.device, source: Source | StreamSource) -> PackPlan:
        """The plan for the source's specs: made once, and again when they have changed."""
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
            self._pack_plan = PackPlan(specs, Layout(plan(specs, size)), size)
        return self._pack_plan


def _name_of(engine: str | EngineClient) -> str:
    return engine.rstrip("/") if isinstance(engine, str) else engine.name


def _require_specs(specs: object) -> None:
    """Raises TypeError unless a source's specs() returned tensors by name, dtype and shape."""
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
    # A view on the meta device is refused by name, when the regions are looked at.
    return next((d for d in devices if d.type not in ("cpu", "meta")), torch.device("cpu"))


def _drop(owned: list[Closeable], process: int) -> None:
    """Close what a publisher had that was not closed. A forked child has a copy of it only, and does nothing."""
    if process != os.getpid() or sys.is_finalizing():
        return
    for part in owned:
        if isinstance(part, Connections):
            part.listener.end_links("the publisher was dropped")
    # In a thread of its own: a collection may come at any point of any thread, also of one that is waited for here.
    closing = threading.Thread(target=_close_all, args=(owned,), name="weightcast-dropped", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter starts no thread any more
        closing.start()
        if not threading.current_thread().name.startswith("weightcast"):
            closing.join(GRACE_SECONDS)


def _close_all(owned: list[Closeable]) -> None:
    for part in owned:
        with contextlib.suppress(Exception):
            part.close()
