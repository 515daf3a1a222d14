"""One worker of an engine: the publisher's session, the update in progress, and the control calls.

Invariants: at most one run holds the worker, at most one update is in progress; no call waits for the publisher
(background threads do); however a session ends (shutdown, takeover, the publisher's death, the end of its lease), its
update is aborted and its pause lifted, after an install in progress. Errors are raised to the caller and sent over the
link.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from weightcast import registry
from weightcast.engines.gate import Gate
from weightcast.errors import (
    ClosedError,
    EngineBusyError,
    EngineTornError,
    IncompleteUpdateError,
    ManifestError,
    PeerDiedError,
    PeerTimeoutError,
    StaleVersionError,
    UnsupportedError,
    UpdateAbortedError,
    WeightcastError,
    from_record,
    to_record,
    trace_of,
)
from weightcast.format.bucket import DTYPE_NAMES
from weightcast.format.manifest import MAX_BYTES, PROTOCOL, Manifest, TensorSpec, WeightVersion, digest_of
from weightcast.format.messages import (
    Abort,
    Accepted,
    Failed,
    HeldWeights,
    InitInfo,
    Installed,
    InstallMode,
    Offer,
    Received,
    Seal,
    UpdateInfo,
    WeightInfo,
)
from weightcast.format.tensor_digest import tensor_digest
from weightcast.host import device as host_device
from weightcast.host.closing import awaited_at_exit, close_at_exit
from weightcast.host.memory import host_identity
from weightcast.seams.adapters import ServesAdapters
from weightcast.seams.engine import Engine, ExposesTensors, SaysDtypes, Undoable
from weightcast.seams.install_map import Mapped
from weightcast.seams.transport import Portion
from weightcast.serving.adapters import AdapterTable, AdapterUpdate
from weightcast.serving.admission import admit, check_undo, present_specs, require_engine
from weightcast.serving.install import Install, device_of_weights
from weightcast.serving.install_map import RecordedMap, held_weights
from weightcast.serving.session import PublisherSession
from weightcast.serving.update import Agree, State, Update

logger = logging.getLogger(__name__)


class StageMetrics(Protocol):
    """Metrics of a worker's offers, receives, seals, installs and whole updates, by the label `stage`.

    `stage_seconds`: a prometheus_client Histogram, or an object with its methods. `stage_failures`: a Counter,
    likewise.
    """

    stage_seconds: Any
    stage_failures: Any


@contextlib.contextmanager
def observed(metrics: StageMetrics | None, stage: str) -> Iterator[None]:
    """Time a stage of an update, and count it as failed if it raises."""
    start, ok = time.perf_counter(), False
    try:
        yield
        ok = True
    finally:
        if metrics is not None:
            metrics.stage_seconds.labels(stage).observe(time.perf_counter() - start)
            if not ok:
                metrics.stage_failures.labels(stage).inc()


class Worker:
    """Implements the control protocol for one `Engine`. Every method may be called from any thread.

    `installs`: the install modes that the engine supports. `settles`: an install can be rolled back until `settle`, and
    its undo copy is kept until then. `engine_rank` and `world_size` may be changed while no run holds the worker.
    Raises TypeError if `engine` is not an engine.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        gate: Gate,
        engine_rank: int = 0,
        world_size: int = 1,
        metrics: StageMetrics | None = None,
        install_deadline_seconds: float = 60.0,
        installs: Sequence[InstallMode] = ("staged", "streaming"),
        settles: bool = False,
        agree: Agree | None = None,
    ) -> None:
        require_engine(engine)
        self.engine = engine
        self.gate = gate
        self.engine_rank = engine_rank
        self.world_size = world_size
        self._metrics = metrics
        self.install_deadline_seconds = install_deadline_seconds
        self._installs = installs
        self._settles = settles
        self._agree = agree
        self._unsettled: Update | None = None
        layers = engine.adapters if isinstance(engine, ServesAdapters) else None
        self.adapters = None if layers is None else AdapterTable(layers)
        self._lock = threading.Lock()
        self._init_lock = threading.Lock()
        self._session: PublisherSession | None = None
        self._closed = False
        self.instance = secrets.token_hex(16)
        self._offered: WeightVersion | None = None
        self._offered_by: PublisherSession | None = None
        """The session of that offer, until it ends."""
        self._was_dropped = False
        """True if its publisher had said by then that its run goes on without this engine."""
        self._num_missed = 0
        """Number of versions that were offered since the one that is served was installed."""
        close_at_exit(self)
        registry.transport("ipc://")  # a publisher's default: imported now, since its first publish would wait for that

    def info(self) -> WeightInfo:
        """Return the engine's abilities and its present state."""
        version, session, offered_by = self.gate.version, self._session, self._offered_by
        is_dropped = self._was_dropped if offered_by is None else offered_by.is_dropped
        has_map = isinstance(self.engine, Mapped) and isinstance(self.engine.install_map, RecordedMap)
        able = {
            "lease": True,
            "streaming": "streaming" in self._installs,
            "undo": isinstance(self.engine, Undoable),
            "inspect": isinstance(self.engine, ExposesTensors),
            "prove": isinstance(self.engine, ExposesTensors) or has_map,
            "dtypes": True,
            "adapters": self.adapters is not None,
        }
        return WeightInfo(
            weight_version="default" if version is None else str(version.number),
            run="" if version is None else version.run,
            holder="" if session is None else session.info.run,
            paused=self.gate.is_paused,
            torn=self.gate.torn,
            world_size=self.world_size,
            abilities=tuple(name for name, has in able.items() if has),
            instance=self.instance,
            offered=UNSET if self._offered is None else self._offered,
            num_missed=self._num_missed or UNSET,
            adapters=UNSET if self.adapters is None else self.adapters.versions(),
            dropped=True if is_dropped else UNSET,
        )

    def init(self, info: InitInfo) -> None:
        """Begin a run's session, which connects in the background. A run's second init replaces its first session.

        Raises UnsupportedError (protocol, transport), EngineBusyError if another run holds the worker and `takeover` is
        False.
        """
        if info.protocol != PROTOCOL:
            raise UnsupportedError(
                f"the publisher speaks protocol {info.protocol}, this engine speaks {PROTOCOL}: install the same "
                "version of weightcast in the trainer and the engine"
            )
        try:
            registry.transport(info.transport)
        except (ValueError, ImportError) as exc:
            raise UnsupportedError(f"this engine has no such transport: {exc}") from exc
        with self._init_lock:
            device = device_of_weights(self.engine)
            former, session = (
                self._session,
                PublisherSession(info, self.engine_rank, device, self._on_end, is_alone=self.world_size == 1),
            )
            if former is not None:
                # The secret must be equal, too: every client can read the run's id in `info`.
                is_same = info.run == former.info.run and former.is_of(info.secret)
                if is_same:
                    error: WeightcastError = UpdateAbortedError("the update's publisher connected again")
                elif info.takeover or former.is_abandoned:
                    error = EngineBusyError(f"run {info.run} took the engine over")
                else:
                    raise EngineBusyError(
                        f"{former.who()}. Close that publisher, end its process, or pass takeover=True "
                        f"(asked by run {info.run})"
                    )
                self._release(former, error)
                if is_same:
                    session.last_offered = former.last_offered
            with self._lock:
                if self._closed:
                    raise ClosedError("this engine is shutting down")
                self._session = session
            if former is not None:
                self._lift_pause(former)
        threading.Thread(target=session.connect, name="weightcast-init", daemon=True).start()

    def update(self, info: UpdateInfo) -> None:
        """Handle an offer, a seal or an abort. Returns at once. An error is raised, and sent over the link as well.

        Raises RefusedError, with nothing changed, if the message lacks the secret of the publisher that holds the
        worker.
        """
        match info:
            case Offer() | Seal():
                with observed(self._metrics, "offer" if isinstance(info, Offer) else "seal"):
                    session = self._require_session(info.run)
                    try:
                        session.require_publisher(info)
                        if isinstance(info, Seal):
                            self._seal(session, info)
                        else:
                            with session.offering:
                                self._offer(session, info)
                    except Exception as exc:
                        record = to_record(exc)
                        if session.is_of(info.secret):
                            session.send(Failed(info.version, record))
                        session.require_going_on()
                        raise
            case Abort():
                session = self._require_session(info.run)
                session.require_publisher(info)
                if session.update is not None and session.update.version.number == info.version:
                    session.update.abort(UpdateAbortedError(f"the publisher aborted the update: {info.reason}"))

    def finish(self, number: int, run: str = "") -> WeightVersion:
        """Install the sealed update of this number. Idempotent; waits only for the current step of generation.

        Any client may call it, since a sealed update may be installed. `run`: by default the one that holds the engine.
        Raises IncompleteUpdateError (not sealed), InstallError, StaleVersionError (another number or another run).
        """
        session = self._require_session(run or None)
        version = WeightVersion(session.info.run, number)
        if self.serves(version):
            return version
        try:
            with observed(self._metrics, "install"):
                update = self._current(session, number)
                try:
                    seconds = update.install()
                except Exception as exc:
                    # If the update goes on (the caller was too early), only the caller gets the error.
                    if (record := update.error) is not None:
                        session.send(Failed(number, record))
                        logger.warning("version %d was not installed: %s%s", number, record.message, trace_of(exc))
                    raise
                if update.offer.target is UNSET:
                    self._num_missed = 0
                if self._settles:
                    self._unsettled = update
                elif self.adapters is not None and update.offer.target is UNSET:
                    self.adapters.retire()
                if self._metrics is not None:
                    self._metrics.stage_seconds.labels("update").observe(time.perf_counter() - update.offered_at)
                # One INFO line per engine: its other ranks install the same version.
                logger.log(logging.DEBUG if self.engine_rank else logging.INFO, "%s", update.describe(seconds))
                session.send(Installed(number, seconds, update.installed_bytes))
        except IncompleteUpdateError:
            # Another caller may have installed it while this one waited.
            if not self.serves(version):
                raise
        return version

    @property
    def offered_adapter(self) -> str:
        """Return the name of the adapter that the update in progress is of; empty for the model, or without one."""
        session = self._session
        target = UNSET if session is None or session.update is None else session.update.offer.target
        return target.name if target else ""

    def serves(self, version: WeightVersion) -> bool:
        """Return whether this is the version of the model, or the current one of an adapter."""
        is_adapter = self.adapters is not None and self.adapters.serves(version)
        return is_adapter or (self.gate.version == version and not self.gate.torn)

    def require_installable(self, version: WeightVersion) -> None:
        """Raise what `finish` would raise, with nothing changed, unless it can install this version or already has.

        That is ClosedError, StaleVersionError, UpdateAbortedError or IncompleteUpdateError.
        """
        update = self._current(self._require_session(version.run), version.number)
        if update.state not in (State.SEALED, State.INSTALLED):
            raise update.unsealed()

    def settle(self, version: WeightVersion, *, keep: bool) -> None:
        """Second phase of a two-phase install: keep a version that all workers installed, or roll back.

        Needs `settles`.

        Idempotent: only the first call for a version that returns counts. The next offer keeps the version, too.
        Without an undo copy a roll-back leaves the engine torn. Does nothing if this worker did not install the
        version. Raises PeerTimeoutError, with nothing changed, if a step does not end by the deadline: call it again.
        """
        update = self._unsettled
        if update is not None and update.version == version:
            update.settle(keep=keep)
            if keep and self.adapters is not None and update.offer.target is UNSET:
                self.adapters.retire()
            self._unsettled = None

    @property
    def unsettled(self) -> WeightVersion | None:
        """Return the version that is installed and not settled yet, if there is one."""
        update = self._unsettled
        return None if update is None else update.version

    @property
    def failure(self) -> WeightcastError | None:
        """Return the error with which the update in progress was aborted, or its session has ended; else None."""
        session = self._session
        if session is None:
            return None
        record = session.ended if session.update is None else session.update.error or session.ended
        return None if record is None else from_record(record)

    def send_failed(self, version: WeightVersion, error: WeightcastError) -> None:
        """Report over the link that a version has failed, if another worker's error has decided that."""
        session = self._session
        if session is not None and session.info.run == version.run:
            session.send(Failed(version.number, to_record(error)))

    def pause(self, mode: str, run: str = "") -> None:
        """Close the gate for a run, whose pause ends with its session, or for a person (empty `run`).

        `gate.resume` opens it again.
        """
        if run:
            self._require_session(run)
        self.gate.pause(mode, owner=run, deadline_seconds=self.install_deadline_seconds)
        session = self._session
        if run and (session is None or session.info.run != run):
            self.gate.resume(owner=run)
            raise ClosedError(f"the session of run {run} ended while it paused the engine, so the pause was lifted")

    def abort_streaming(self, error: WeightcastError) -> None:
        """Abort the update in progress if it is streaming, also after all of it has come."""
        session = self._session
        if session is not None and session.update is not None and session.update.is_streaming:
            session.abort_update(error)

    def shutdown(self) -> None:
        """End the session of the run that holds the worker. Idempotent; the engine goes on serving."""
        session = self._session
        if session is not None:
            self._on_end(session, "the engine was asked to end the transfer")

    def close(self) -> None:
        """End the session and every wait for the gate, before the engine exits. Idempotent."""
        with self._lock:
            self._closed = True
        self.shutdown()
        self.gate.close()

    # --- the calls, each under a hold ---

    def _require_session(self, run: str | None = None) -> PublisherSession:
        session = self._session
        if session is None:
            raise ClosedError("no publisher holds this engine: send /init_weight_transfer_engine first")
        if run is not None and session.info.run != run:
            raise StaleVersionError(
                f"the update is from run {run}, but run {session.info.run} holds this engine: publish from that run "
                "only"
            )
        return session

    def _current(self, session: PublisherSession, number: int) -> Update:
        update = session.update
        if update is None or update.version.number != number:
            found = "none" if update is None else f"version {update.version.number}"
            raise StaleVersionError(f"version {number} is not the update in progress ({found})")
        if update.state is State.ABORTED:
            raise UpdateAbortedError(f"version {number} was aborted: {update.error.message if update.error else ''}")
        return update

    def _seal(self, session: PublisherSession, seal: Seal) -> None:
        version = WeightVersion(seal.run, seal.version)
        if session.update is None and self.gate.version == version and not self.gate.torn:
            # Its publisher has connected again to an engine that has the run's last version.
            self._offered, self._offered_by, self._was_dropped = version, session, False
            self._num_missed = 0
            return
        update = self._current(session, seal.version)
        if session.is_abandoned:  # as when this process was stopped, and the request waited until it went on
            raise PeerDiedError(
                f"version {seal.version} is not sealed: its publisher has ended the link to this engine, and with it "
                "the update; publish again",
                peer="trainer",
            )
        update.seal(seal)

    def _offer(self, session: PublisherSession, offer: Offer) -> None:
        receiver = session.require_receiver()
        served = self.gate.version
        has_served = served is not None and served.run == offer.run and not self.gate.torn
        # A publisher that has connected again may offer its last version again, of which nothing is in transit any
        # more.
        was_offered = session.last_offered if session.update is not None else session.last_offered - 1
        newest = max(was_offered, served.number if served is not None and has_served else -1)
        if self.adapters is not None:
            newest = max(newest, self.adapters.newest(offer.run))
        if session.update is not None and session.update.offer == offer and not session.update.has_ended():
            return  # the same offer, sent again by a client or a proxy whose connection was closed
        if offer.version <= newest:
            raise StaleVersionError(
                f"version {offer.version} was offered after version {newest} (a replayed request?): offer a higher "
                "version"
            )
        if offer.target is UNSET:
            version = WeightVersion(offer.run, offer.version)
            self._num_missed += version != self._offered
            self._offered, self._offered_by, self._was_dropped = version, session, False
        if offer.install not in self._installs:
            raise UnsupportedError(
                f"install={offer.install!r} was requested, but {type(self.engine).__name__} does not support it: "
                f"publish with install={' or '.join(map(repr, self._installs))}"
            )
        if offer.target is not UNSET:
            self._require_adapters(offer)
        if session.update is not None and session.update.is_streaming:
            # Checking an offer may use the model, to which the former update still writes.
            session.end_update(UpdateAbortedError(f"version {offer.version} was offered in its place"))
        install = self._install(session, offer)
        manifest, portion, base = install.layout.manifest, None, None
        local = None if offer.ranks is UNSET else offer.ranks.get(host_identity())
        if local is not None and self.engine_rank in local.ranks:
            portion = Portion.of(manifest, local.ranks.index(self.engine_rank), len(local.ranks), local.memory)
        if offer.base is not None or offer.keeps_base:
            base = session.base_of(offer, manifest, portion)
        session.base = base
        if offer.undo and offer.target is UNSET:
            check_undo(manifest, self.engine)
        session.last_offered = offer.version
        session.end_update(UpdateAbortedError(f"version {offer.version} was offered in its place"))
        if self._unsettled is not None:
            self.settle(self._unsettled.version, keep=True)
        session.update = update = Update(
            offer,
            install,
            receiver=receiver,
            gate=self.gate,
            deadline_seconds=self.install_deadline_seconds,
            settles=self._settles,
            base=base,
            portion=portion,
            agree=self._agree,
        )
        try:
            update.open()
            # If the session ended before this update was there, nobody has aborted the update.
            session.require_going_on()
        except BaseException as exc:
            update.abort(exc)
            raise
        session.send(Accepted(offer.version))
        session.receiving = awaited_at_exit(functools.partial(self._receive, session, update), "weightcast-receive")

    def _install(self, session: PublisherSession, offer: Offer) -> Install:
        """Return the install of an offer. A layout that this session has used before is not checked again."""
        engine = self.engine
        if offer.target is not UNSET and self.adapters is not None:
            engine = AdapterUpdate(self.adapters, offer.target, lambda: self.gate.version)
        known = session.install
        if (
            known is not None
            and known.is_for(offer.manifest_digest, engine)
            # Streaming waits for the device's kernels before the next look at the tensors; staged, right after that.
            and (offer.install == "staged" or known.device == device_of_weights(engine))
        ):
            return known
        if known is not None and known.manifest_digest == offer.manifest_digest:
            manifest = known.layout.manifest
        elif offer.manifest is None:
            raise ManifestError(
                "the offer has no manifest, and this session has not received one with its digest: send the manifest"
            )
        else:
            manifest = Manifest.decode(offer.manifest)
            if (digest := digest_of(offer.manifest)) != offer.manifest_digest:
                raise ManifestError(
                    f"the manifest has digest {digest}, but the offer names {offer.manifest_digest}: send the offer "
                    "again"
                )
        session.require_origins(manifest)
        session.install = admit(manifest, offer.manifest_digest, engine)
        return session.install

    def _require_adapters(self, offer: Offer) -> None:
        """Raise unless this engine can take another version of the offered adapter."""
        assert offer.target is not UNSET
        if self.adapters is None:
            raise UnsupportedError(
                f"the adapter {offer.target.name!r} was offered, but {type(self.engine).__name__} serves none here: "
                "start the engine with --enable-lora, or publish the merged model"
            )
        if offer.install != "staged":
            raise UnsupportedError("an adapter is installed as a whole: publish it with install='staged'")
        if self.gate.torn:
            raise EngineTornError(f"the model is torn, so that no adapter helps: {self.gate.torn}")
        self.adapters.require_room(offer.target, WeightVersion(offer.run, offer.version))

    def _receive(self, session: PublisherSession, update: Update) -> None:
        number, device = update.version.number, session.device
        # On a separate stream, so that waits for buckets do not delay the engine's kernels.
        own_stream = (
            contextlib.nullcontext() if device.type == "cpu" else host_device.own_stream(device, session.stream)
        )
        try:
            with observed(self._metrics, "receive"), own_stream:
                root = update.receive()
        except BaseException as exc:
            # If this side has aborted the update, its reason counts: the receiver's error says only that it was ended.
            update.abort(exc)
            record = update.error or to_record(exc)
            session.send(Failed(number, record))
            logger.warning("version %d was not received: %s%s", number, record.message, trace_of(exc))
            if isinstance(exc, PeerTimeoutError):
                # A publisher that hangs lifts no pause, and its heartbeats may go on.
                self._lift_pause(session)
            if session.ended is not None:
                # Closed again, since this thread may have made views of a bucket after the first close.
                session.close()
            return
        session.send(Received(number, update.num_buckets, root, update.read_bytes, update.keeps_base))

    # --- the end of a hold ---

    def _on_end(self, session: PublisherSession, reason: str) -> None:
        # Released first: while an install is in progress no other run may hold the engine and write into it.
        self._release(session, UpdateAbortedError(f"the publisher of run {session.info.run[:8]} is gone: {reason}"))
        with self._lock:
            if self._session is session:
                self._session = None
        self._lift_pause(session)

    def _release(self, session: PublisherSession, error: WeightcastError) -> None:
        """Abort the session's update, lift its pause, disconnect. An install in progress is finished first."""
        session.ended = session.ended or to_record(error)
        session.abort_update(error)
        if self._offered_by is session:
            self._was_dropped, self._offered_by = session.is_dropped, None
        session.close()
        self._lift_pause(session)

    def _lift_pause(self, session: PublisherSession) -> None:
        """Lift the run's pause at the end of its session, unless the run has connected again."""
        current = self._session
        if current is None or current is session or current.info.run != session.info.run:
            self.gate.resume(owner=session.info.run)

    def dtypes(self, specs: Sequence[TensorSpec]) -> dict[str, str]:
        """Return, by record name, the engine's dtype of each of these tensors that it knows.

        If the engine's loader has to be recorded for that, generation waits. Raises UnsupportedError.
        """
        held = present_specs(self.engine)
        if held is not None:
            by_name = {name: spec.dtype for spec in held for name in spec.names}
            return {
                s.name: next(by_name[n] for n in s.names if n in by_name) for s in specs if by_name.keys() & s.names
            }
        if not isinstance(self.engine, SaysDtypes):
            what = f"{type(self.engine).__name__} can't say which dtypes its weights have, which dtype='engine' needs"
            raise UnsupportedError(f"{what}: give the source a dtype such as dtype=torch.bfloat16, or no dtype")
        with self.gate.exclusive(deadline_seconds=self.install_deadline_seconds):
            return dict(self.engine.dtypes(specs))

    def held(self, names: Collection[str] = (), start: int = 0, limit_bytes: int = MAX_BYTES) -> HeldWeights:
        """Return digests of the engine's tensors (or of those in `names`), from index `start` on, up to `limit_bytes`.

        All are of one version, since generation waits meanwhile. Raises UnsupportedError, EngineTornError; ValueError
        for names that the engine does not have.
        """
        install_map = self.engine.install_map if isinstance(self.engine, Mapped) else None
        if isinstance(install_map, RecordedMap):
            with self.gate.exclusive(deadline_seconds=self.install_deadline_seconds):
                found, following = install_map.held(start, limit_bytes, names)
                info = self.info()
            held = held_weights(info.run, info.weight_version, {self.engine_rank: found}, with_blocks=bool(names))
            return msgspec.structs.replace(held, next=following)
        if not isinstance(self.engine, ExposesTensors):
            raise UnsupportedError(
                f"the weights of {type(self.engine).__name__} can't be read: give it the methods of ExposesTensors"
            )
        with self.gate.exclusive(deadline_seconds=self.install_deadline_seconds):
            if self.gate.torn:
                raise EngineTornError(self.gate.torn)
            info, specs = self.info(), {spec.name: spec for spec in present_specs(self.engine) or ()}
            weights, num_bytes = HeldWeights(info.run, info.weight_version, [], {}), 0
            for number, (name, tensor) in enumerate(self.engine.tensors()):
                if number < start or (names and name not in names):
                    continue
                num_bytes += tensor.nbytes
                if weights.tensors and num_bytes > limit_bytes:
                    return msgspec.structs.replace(weights, next=number)
                spec = specs.get(name) or TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
                weights.tensors.append(spec)
                weights.digests[name] = tensor_digest(tensor)
        unknown = sorted(set(names) - weights.digests.keys())
        if unknown and not start:
            raise ValueError(
                f"this engine has no tensor {', '.join(unknown[:8])} ({len(unknown)} unknown names): ask for names of "
                "the model"
            )
        return weights
