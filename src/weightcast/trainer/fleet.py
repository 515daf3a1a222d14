"""The engines of one publisher, and the steps of an update that each takes on its own.

Invariants: one engine's failure is its own result and never another's; a pause that was asked for is lifted on every
path, by this process or, where the engine has no lease, by the watchdog.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from weightcast.errors import (
    ClosedError,
    ControlError,
    EngineBusyError,
    EngineResult,
    EngineTornError,
    ErrorRecord,
    IntegrityError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    RefusedError,
    UnsupportedError,
    WeightcastError,
    to_record,
)
from weightcast.format.manifest import MAX_VERSION, PROTOCOL, TensorSpec
from weightcast.format.messages import (
    Accepted,
    Failed,
    HeldWeights,
    InitInfo,
    Installed,
    LocalRanks,
    Offer,
    Received,
    WeightInfo,
)
from weightcast.host.deadline import to_its_end
from weightcast.host.descriptors import shortage_now
from weightcast.links.link import Link, LinkListener
from weightcast.links.watchdog import Watchdog
from weightcast.seams.client import ClientSender, EngineClient, ServesTraffic, TwoPhaseInstall

_MAX_PARALLEL = 64


class Connection(enum.Enum):
    """How far this publisher has come with the engine that a client reaches now."""

    LOST = enum.auto()
    """It has to be asked what it is, and its workers have to connect."""
    JOINED = enum.auto()
    PAUSED = enum.auto()
    """Joined, and it has confirmed a pause that was not lifted since."""


class PauseEnd(enum.Enum):
    """The request that an engine which was asked to pause must still get, also over a new connection."""

    NONE = enum.auto()
    """No pause was asked for, or it was lifted."""
    RESUME = enum.auto()
    QUARANTINE = enum.auto()
    """Its workers may hold parts of two versions, and only the pause keeps it from serving them."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineState:
    """One engine, as far as a publisher knows.

    `version`: the number of the version that it had when the publisher heard of it last, None if there was none.
    `state`: "new" (no publish has asked it yet), "connected", "failed" (it did not take its last update, `last_error`
    says why) or "lost" (its connection has ended; the next publish connects it again).
    """

    name: str
    version: int | None
    state: Literal["new", "connected", "failed", "lost"]
    last_error: ErrorRecord | None


class FleetMember:
    """One engine: its client, the links of its workers, and its result in the update in progress."""

    def __init__(self, client: EngineClient, *, owned: bool) -> None:
        """Raises TypeError for a client that can pause its engine, but would not be asked to."""
        if callable(getattr(client, "pause", None)) and not isinstance(client, ServesTraffic):
            raise TypeError(
                f"{type(client).__name__} has pause() but lacks resume() or recovery_requests(): derive "
                "it from weightcast.seams.client.ServesTraffic, or its engine would generate during installs"
            )
        self.client = client
        self._given = client
        self.name = client.name
        self.owned = owned
        self.links: list[Link] = []
        self.sender: ClientSender | None = None
        """The sender of its client, if it has no workers of ours; None: it takes the publisher's transport."""
        self.info: WeightInfo | None = None
        self.result = EngineResult()
        self.version = -1
        """The version that was offered in the update in progress; -1 before that."""
        self.serves: int | None = None
        """The number of the version that it had when it was heard of last."""
        self.instance = ""
        """The engine itself, however it is called; empty for one that does not say."""
        self.has_proven = False
        """True once its weights were compared with the sent ones since it connected, and were equal."""
        self.dtypes: Mapping[str, str] = {}
        """By a tensor's name, of those that it was asked for last."""
        self._dtypes_of: Sequence[TensorSpec] | None = None
        self._connection = Connection.LOST
        self._pause_end = PauseEnd.NONE
        self._offered_manifest = ""
        self._paused_at = 0.0
        self._run = ""
        self._deadline_seconds = 0.0
        self._watchdog: Watchdog | None = None
        self._is_guarded = False
        """True while the watchdog has requests to send to it."""

    @property
    def is_joined(self) -> bool:
        return self._connection is not Connection.LOST and all(link.is_alive for link in self.links)

    @property
    def state(self) -> EngineState:
        error = self.result.error
        state: Literal["new", "connected", "failed", "lost"]
        if error is not None:
            state = "failed"
        elif self.info is None:
            state = "new"
        else:
            state = "connected" if self.is_joined else "lost"
        return EngineState(self.name, self.serves, state, error)

    @property
    def is_absent(self) -> bool:
        """True if nothing answered when it was asked: it may be starting."""
        return self.result.error is not None and self.result.error.kind == PeerDiedError.__name__

    @property
    def newest_version(self) -> int:
        """The number of the version it had when it was asked last; -1 for none."""
        text = "" if self.info is None else self.info.weight_version
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_VERSION))
        return int(text) if is_number and int(text) < MAX_VERSION else -1

    def begin(self, run: str, deadline_seconds: float, watchdog: Watchdog) -> None:
        """Begin another update, of which nothing is known yet. `watchdog` ends its pauses where no lease does."""
        self._run, self._deadline_seconds, self._watchdog = run, deadline_seconds, watchdog
        self.result, self.version = EngineResult(), -1

    def ask(self, listener: LinkListener) -> None:
        """Drop what was connected, and ask what the engine is now; again if it was absent before."""
        self.result = EngineResult()
        listener.end_links("the publisher connects again", self.name)
        self.links, self._offered_manifest, self._dtypes_of = [], "", None
        self._connection, self.has_proven = Connection.LOST, False
        self.client = self._given.connect()
        self.info = self.client.info()
        if self.info.protocol != PROTOCOL:
            found = f"{self.name} speaks protocol {self.info.protocol}, this publisher speaks {PROTOCOL}"
            raise UnsupportedError(f"{found}: update one end")
        self.instance = "" if self.info.instance is UNSET else self.info.instance
        self.serves = self.newest_version if self.newest_version >= 0 else None

    def ask_dtypes(self, specs: Sequence[TensorSpec]) -> None:
        """Ask what the engine has these tensors in, unless it has said so since `ask`. Raises UnsupportedError."""
        if self._dtypes_of is specs:
            return
        dtypes = self.client.dtypes(specs)
        if dtypes is None:
            raise UnsupportedError(
                f"{self.name} can't say which dtypes its weights have, as dtype='engine' asks: give the source a dtype "
                "(dtype=torch.bfloat16) or none, or serve the engine with weightcast's plugin"
            )
        self.dtypes, self._dtypes_of = dtypes, specs

    def join(self, listener: LinkListener, init: InitInfo) -> None:
        """Have the workers of an engine that was asked connect, and wait for their hellos.

        Raises EngineBusyError or ClosedError if the engine is not this run's any more: its workers don't come then.
        """
        assert self.info is not None
        num_unheld = 0

        def require_session() -> None:
            nonlocal num_unheld
            holder = self._run
            with contextlib.suppress(PeerError):
                holder = self.client.info().holder
            self._require_ours(holder)
            # Twice in a row: workers of one engine that are asked in between may not agree yet.
            num_unheld = 0 if holder else num_unheld + 1
            if num_unheld > 1:
                raise ClosedError(
                    f"{self.name} ended this publisher's session while it connected: "
                    + (
                        shortage_now()
                        or "it could not reach the publisher, was asked to end the transfer, or another run took it "
                        "over and has ended too; its log says which"
                    )
                )

        self.client.init(init)
        self.links = listener.wait(self.name, self.info.world_size, self._deadline_seconds, ask=require_session)
        # Again: a takeover waits for an install of the former run, whose version counts.
        self.info = self.client.info()
        self._require_ours(self.info.holder)
        self._connection = Connection.JOINED

    def _require_ours(self, holder: str) -> None:
        """Raises EngineBusyError if another run has taken the engine since."""
        if holder not in ("", self._run):
            raise EngineBusyError(f"run {holder} took {self.name} over while this publisher connected to it")

    def offer(self, offer: Offer) -> None:
        """Offer a version and wait until every worker has accepted."""
        self.version = offer.version
        known, self._offered_manifest = self._offered_manifest, ""
        is_known = known == offer.manifest_digest
        offer = msgspec.structs.replace(offer, manifest=None if is_known else offer.manifest, ranks=self._local_ranks())
        self.client.update(offer)
        for link in self.links:
            link.wait(Accepted, offer.version, self._deadline_seconds)
        self._offered_manifest = offer.manifest_digest

    def _local_ranks(self) -> dict[str, LocalRanks] | UnsetType:
        """The ranks of this engine by host, where a host has several."""
        by_host: dict[str, list[Link]] = {}
        for link in self.links:
            by_host.setdefault(link.host, []).append(link)
        several = {
            host: LocalRanks(tuple(link.engine_rank for link in links), links[0].memory)
            for host, links in by_host.items()
            if host and len(links) > 1
        }
        return several or UNSET

    def received(self, num_buckets: int, root: str) -> None:
        """Wait until every worker has everything. Raises IntegrityError if one has something else."""
        read_bytes = []
        for link in self.links:
            got = link.wait(Received, self.version, self._deadline_seconds)
            if (got.num_buckets, got.root) != (num_buckets, root):
                raise IntegrityError(f"{link.peer} has {got.num_buckets} buckets of root {got.root}, sent was {root}")
            read_bytes.append(got.read_bytes)
        self.result.read_bytes = read_bytes

    def pause(self) -> None:
        """Have the engine stop serving; where no lease ends that, have the watchdog ready to."""
        is_paused = self._connection is Connection.PAUSED
        if is_paused or not isinstance(self.client, ServesTraffic):
            return
        self._guard(self.client)
        if self._pause_end is PauseEnd.NONE:
            self._pause_end = PauseEnd.RESUME
        self._paused_at = time.perf_counter()
        self.client.pause(self._run)
        self._connection = Connection.PAUSED

    def _guard(self, client: ServesTraffic) -> None:
        """Have the watchdog end the pause if this process dies, where no lease does."""
        assert self._watchdog is not None
        if requests := client.recovery_requests(self._run):
            self._is_guarded = True
            self._watchdog.keep(self.name, requests)

    def held(self, names: Sequence[str] = ()) -> HeldWeights | None:
        """Return the digests of the offered version. Raises ControlError if the engine serves another one by now."""
        held = self.client.held(names)
        if held is not None and (held.run, held.weight_version) != (self._run, str(self.version)):
            found = f"version {held.weight_version} of run {held.run or 'none'}"
            raise ControlError(f"{self.name} serves {found} by now: what was sent can't be proven", peer=self.name)
        return held

    def quarantine(self, reason: str) -> None:
        """It holds other weights than it should. A Ctrl-C is raised once it is done."""
        self.fail(IntegrityError(reason))
        try:
            to_its_end(functools.partial(self.client.quarantine, reason), name="weightcast-quarantine")
        except WeightcastError as exc:
            raise IntegrityError(f"{reason}; it may serve that, since it was not reached to refuse it: {exc}") from exc

    def resume(self) -> None:
        """Lift the pause, but for an engine that can't refuse to serve what an install has left torn.

        Raises WeightcastError unless the engine has failed already: what went wrong first says more, and the next
        publish resumes it.
        """
        if self._pause_end is PauseEnd.NONE:
            return
        assert isinstance(self.client, ServesTraffic)
        error = self.result.error
        try:
            if self._pause_end is PauseEnd.QUARANTINE and isinstance(self.client, TwoPhaseInstall):
                self.client.quarantine("not all of its workers went back" if error is None else error.message)
            else:
                self.client.resume(self._run)
                self._pause_end = PauseEnd.NONE
                if self._connection is Connection.PAUSED:
                    self._connection = Connection.JOINED
        except WeightcastError:
            if error is None:
                raise
            return
        self.result.pause_seconds = time.perf_counter() - self._paused_at
        if self._is_guarded:
            assert self._watchdog is not None
            self._watchdog.release(self.name)
            self._is_guarded = False

    def install(self, *, resumes: bool) -> None:
        """Pause the engine, have it install the version that was offered, resume it. A failure is noted, not raised.

        A lost reply is made good by asking. Without `resumes` the engine stays paused: it has installed what it was
        paused for, and its recovery requests are asked for again.
        """
        try:
            if self.client.paused_seconds is None:
                self.pause()
            try:
                try:
                    self.client.finish(self.version)
                except (PeerTimeoutError, PeerDiedError):
                    if not self._serves():
                        raise
                if self.client.paused_seconds is not None:
                    self.result.pause_seconds = self.client.paused_seconds
                for link in self.links:
                    self._await_installed(link)
            except WeightcastError:
                self._go_back()
                raise
            if isinstance(self.client, TwoPhaseInstall):
                self.client.settle(self.version, keep=True)
            self.result.ok, self.serves = True, self.version
            if self._pause_end is not PauseEnd.NONE:
                self._pause_end = PauseEnd.RESUME
                if not resumes and isinstance(self.client, ServesTraffic):
                    self._guard(self.client)
        except WeightcastError as exc:
            self.fail(exc)
        finally:
            if resumes:
                self.resume()

    def _await_installed(self, link: Link) -> None:
        """Wait for a worker's word; a link that was lost on the way is made good by asking."""
        try:
            installed = link.wait(Installed, self.version, self._deadline_seconds)
        except (PeerTimeoutError, PeerDiedError):
            # Where workers can't agree by themselves, what one says of itself says nothing of another.
            if isinstance(self.client, TwoPhaseInstall) or not self._serves():
                raise
            self.result.installed_bytes.append(0)
        else:
            self.result.install_seconds = max(self.result.install_seconds, installed.seconds)
            self.result.installed_bytes.append(installed.installed_bytes)

    def _go_back(self) -> None:
        """Have all workers go back if one did not install, in engines whose workers can't agree by themselves."""
        if not isinstance(self.client, TwoPhaseInstall):
            return
        is_paused = self._pause_end is not PauseEnd.NONE
        if is_paused:
            # Until each worker has said on its link what became of it.
            self._pause_end = PauseEnd.QUARANTINE
        with contextlib.suppress(WeightcastError):
            self.client.settle(self.version, keep=False)
        for link in self.links:
            with contextlib.suppress(WeightcastError):
                link.wait(Failed, self.version, self._deadline_seconds)
        failed = [link.failures(self.version) for link in self.links]
        is_torn = any(each.torn or each.kind == EngineTornError.__name__ for failures in failed for each in failures)
        if is_paused and all(failed) and not is_torn:
            self._pause_end = PauseEnd.RESUME

    def fail(self, error: Exception) -> None:
        """Note why this engine does not take the version: its worker's error, if there is one, before a lost peer's.

        A peer that died or stalled loses its links: should it wake, it learns from that to give the update up.
        """
        version_error = next((f for link in self.links for f in link.failures(self.version)), None)
        is_explained = isinstance(error, PeerError) and version_error is not None
        self.result.error = version_error if is_explained else to_record(error)
        self.result.ok = False
        if not self.links:
            # Without a link whose end would show it, the next update asks it again what it is.
            self._connection = Connection.LOST
        if isinstance(error, (PeerTimeoutError, PeerDiedError)):
            for link in self.links:
                link.end(f"the publisher gave this engine up: {error}")

    def close(self) -> None:
        """Close the client, if it is the publisher's own: the one that was given, which closes what it has found."""
        if self.owned:
            self._given.close()

    def notice(self, version: int) -> None:
        """If the engine serves this version of the run already, that is its result in the update in progress."""
        self.version = version
        self.result.ok = self._serves(is_settled=True)

    def _serves(self, *, is_settled: bool = False) -> bool:
        """Return whether the engine says that it has `version`. With `is_settled` it must answer requests with it.

        Workers that can't agree by themselves refuse to until they have heard that all others have it too.
        """
        with contextlib.suppress(PeerError):
            info = self.client.info()
            return (info.run, info.weight_version) == (self._run, str(self.version)) and not (is_settled and info.torn)
        return False


class Fleet:
    """All members, driven concurrently: a call on each, the failures sorted out."""

    def __init__(self) -> None:
        self._members: dict[str, FleetMember] = {}
        self._everybody = self._members
        """Also where this is a part of a fleet."""
        self._pool = ThreadPoolExecutor(max_workers=_MAX_PARALLEL, thread_name_prefix="weightcast-fleet")
        self._calls: list[Future[None]] = []

    def __iter__(self) -> Iterator[FleetMember]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: FleetMember) -> None:
        """Raises ValueError if an engine of that name is there already."""
        if member.name in self._members:
            raise ValueError(f"{member.name} is in the fleet already: each engine is named once, by a name of its own")
        self._members[member.name] = member

    def only(self, name: str) -> Fleet:
        """The member of that name alone, for an update of its own. Raises ValueError if there is none."""
        part = copy.copy(self)
        part._members = {name: self._named(name)}
        return part

    def pop(self, name: str) -> FleetMember:
        """Raises ValueError if there is none of that name."""
        member = self._named(name)
        del self._members[name]
        return member

    def _named(self, name: str) -> FleetMember:
        if name not in self._members:
            raise ValueError(f"{name} is not in the fleet; it has {', '.join(self._members) or 'no engines'}")
        return self._members[name]

    def refuse_doubles(self, newcomers: Sequence[FleetMember]) -> None:
        """One engine under two names has one place: each init would end the other's. The first name has it."""
        known = {member.instance: member for member in self._everybody.values() if member.is_joined and member.instance}
        for member in newcomers:
            if member.result.error is None and member.instance:
                first = known.setdefault(member.instance, member)
                if first is not member:
                    what = f"{member.name} and {first.name} are one and the same engine: name it once in `engines`"
                    member.fail(RefusedError(what))

    def healthy(self) -> list[FleetMember]:
        """The members that are still to take this update: neither have they failed, nor do they serve it."""
        return [member for member in self if member.result.error is None and not member.result.ok]

    def each(
        self, call: Callable[[FleetMember], None], members: Iterable[FleetMember] | None = None, *, notes: bool = True
    ) -> None:
        """Run `call` on each healthy member at once; an error becomes that member's result, or without `notes` nothing.

        A client of the caller's own may raise anything; only that engine has failed then.
        """
        todo = self.healthy() if members is None else list(members)
        if len(todo) > 1:
            self._calls[:] = [self._pool.submit(self.each, call, [member], notes=notes) for member in todo]
            for future in self._calls:
                future.result()
            return
        for member in todo:
            try:
                call(member)
            except Exception as exc:
                if notes:
                    member.fail(exc)

    def wait(self) -> None:
        """Wait for the calls that a Ctrl-C has left in threads: what they do to a member must not come later."""
        wait(self._calls)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        with contextlib.ExitStack() as stack:
            # Each, whatever another one's client raises.
            for member in self:
                stack.callback(member.close)
