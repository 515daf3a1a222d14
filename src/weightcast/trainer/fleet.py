"""The engines of one publisher, and the steps of an update that each takes on its own.

Invariants: one engine's failure is its own result and never another's; a pause that was asked for is lifted on every
path, by this process or, where the engine has no lease, by the watchdog.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
from msgspec import UNSET

from weightcast.errors import (
    ClosedError,
    EngineBusyError,
    EngineTornError,
    ErrorRecord,
    IntegrityError,
    PeerDiedError,
    PeerError,
    PeerTimeoutError,
    RefusedError,
    WeightcastError,
    detached,
    to_record,
)
from weightcast.format.manifest import MAX_VERSION
from weightcast.format.messages import Accepted, Failed, InitInfo, Installed, Offer, Received, WeightInfo
from weightcast.links.link import Link, LinkListener
from weightcast.links.watchdog import Watchdog
from weightcast.seams.client import (
    BringsSender,
    ClientSender,
    EngineClient,
    SenderContext,
    ServesTraffic,
    TwoPhaseInstall,
)
from weightcast.seams.transport import Sender
from weightcast.trainer.report import EngineResult

_MAX_PARALLEL = 64
_LAST_WORD_SECONDS = 1.0
"""For the word of a worker whose receiver has gone: it comes on another connection."""


class FleetMember:
    """One engine: its client, the links of its workers, and its result in the update in progress."""

    def __init__(self, client: EngineClient, *, owned: bool) -> None:
        """Raises TypeError for a client that can pause its engine, but would not be asked to."""
        if callable(getattr(client, "pause", None)) and not isinstance(client, ServesTraffic):
            raise TypeError(
                f"{type(client).__name__} has pause() but lacks resume(), recovery_requests() or quarantine(): derive "
                "it from weightcast.seams.client.ServesTraffic, or its engine would generate during installs"
            )
        self.client = client
        self._given = client
        self.name = client.name
        self.owned = owned
        self.links: list[Link] = []
        self.sender: ClientSender | None = None
        """What its client brings, where it has no workers of ours; None: it takes the publisher's transport."""
        self.info: WeightInfo | None = None
        self.result = EngineResult()
        self.version = -1
        """The version that was offered in the update in progress; -1 before that."""
        self.instance = ""
        """The engine itself, however it is called; empty for one that does not say."""
        self.is_paused = False
        """Whether a pause was asked for and not lifted; `_stands_still`: of the very engine that is connected now."""
        self._stands_still = False
        self._is_torn = False
        self._is_connected = False
        self._known_manifest = ""
        self._paused_at = 0.0
        self._num_unheld = 0

    @property
    def is_joined(self) -> bool:
        return self._is_connected and all(link.is_alive for link in self.links)

    @property
    def newest_version(self) -> int:
        """The number of the version it had when it was asked last; -1 for none."""
        text = "" if self.info is None else self.info.weight_version
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_VERSION))
        return int(text) if is_number and int(text) < MAX_VERSION else -1

    def begin(self) -> None:
        """Another update: nothing of it is known yet."""
        self.result, self.version = EngineResult(), -1

    def ask(self, listener: LinkListener) -> None:
        """Let go of what was connected, and ask what the engine is now."""
        listener.drop(self.name, "the publisher connects again")
        self.links, self._known_manifest = [], ""
        self._stands_still = self._is_connected = False
        self.client = self._given.connect()
        self.info = self.client.info()
        self.instance = "" if self.info.instance is UNSET else self.info.instance

    def join(self, listener: LinkListener, init: InitInfo, deadline_seconds: float) -> None:
        """Have the workers of an engine that was asked connect, and wait for their hellos."""
        assert self.info is not None
        self._num_unheld = 0
        self.client.init(init)
        self.links = listener.wait(
            self.name, self.info.world_size, deadline_seconds, ask=lambda: self._require_held(init.run)
        )
        # Again: a takeover waits for an install of the former run, whose version counts.
        self.info = self.client.info()
        self._require_ours(init.run, self.info.holder)
        self._is_connected = True

    def _require_ours(self, run: str, holder: str) -> None:
        """Raises EngineBusyError if another run has taken the engine since."""
        if holder not in ("", run):
            raise EngineBusyError(f"run {holder} took {self.name} over while this publisher connected to it")

    def _require_held(self, run: str) -> None:
        """Raises EngineBusyError, ClosedError if the engine is not this run's any more: its workers don't come then."""
        holder = run
        with contextlib.suppress(PeerError):
            holder = self.client.info().holder
        self._require_ours(run, holder)
        # Twice in a row: workers of one engine that are asked in between may not agree yet.
        self._num_unheld = 0 if holder else self._num_unheld + 1
        if self._num_unheld > 1:
            raise ClosedError(
                f"{self.name} has let this publisher go while it connected: it could not reach the publisher, was told "
                "to end the transfer, or another run took it over and has let it go too; its log says which"
            )

    def make_sender(self, known: Sequence[ClientSender], context: SenderContext) -> ClientSender | None:
        """The sender that its client brings, one of `known` or a new one; None if it brings none."""
        self.sender = self.client.sender(known, context) if isinstance(self.client, BringsSender) else None
        return self.sender

    def disconnect(self) -> None:
        """Have the next update connect it again: who has no link that ends is asked anew what it is."""
        self._is_connected = False

    def offer(self, offer: Offer, deadline_seconds: float) -> None:
        """Offer a version and wait until every worker has accepted."""
        self.version = offer.version
        known, self._known_manifest = self._known_manifest, ""
        is_known = known == offer.manifest_digest
        self.client.update(msgspec.structs.replace(offer, manifest=None) if is_known else offer)
        for link in self.links:
            link.wait(Accepted, offer.version, deadline_seconds)
        self._known_manifest = offer.manifest_digest

    def received(self, version: int, num_buckets: int, root: str, deadline_seconds: float) -> None:
        """Wait until every worker has everything. Raises IntegrityError if one has something else."""
        for link in self.links:
            got = link.wait(Received, version, deadline_seconds)
            if (got.num_buckets, got.root) != (num_buckets, root):
                raise IntegrityError(f"{link.peer} has {got.num_buckets} buckets of root {got.root}, sent was {root}")

    def pause(self, run: str, watchdog: Watchdog) -> None:
        """Stand still for `run`; where no lease ends that, have the watchdog ready to."""
        if self._stands_still or not isinstance(self.client, ServesTraffic) or self._has("install"):
            return
        self._arm(self.client, run, watchdog)
        self.is_paused, self._paused_at = True, time.perf_counter()
        self.client.pause(run)
        self._stands_still = True

    def _arm(self, client: ServesTraffic, run: str, watchdog: Watchdog) -> None:
        """Have the watchdog end the pause if this process dies, where no lease does."""
        if not self._has("lease") and (requests := client.recovery_requests(run)):
            watchdog.hold(self.name, requests)

    def quarantine(self, reason: str) -> None:
        """It holds other weights than it should."""
        fail(self, IntegrityError(reason))
        if isinstance(self.client, ServesTraffic):
            self.client.quarantine(reason)

    def resume(self, run: str, watchdog: Watchdog) -> None:
        """Lift the pause, but for an engine that can't refuse to serve what an install has left torn.

        Raises WeightcastError unless the engine has failed already: what went wrong first says more, and the next
        publish resumes it.
        """
        if not self.is_paused:
            return
        assert isinstance(self.client, ServesTraffic)
        try:
            if not (self._is_torn and isinstance(self.client, TwoPhaseInstall)):
                self.client.resume(run)
                self.is_paused = self._stands_still = False
            else:
                error = self.result.error
                self.client.quarantine("not all of its workers went back" if error is None else error.message)
        except WeightcastError:
            if self.result.error is None:
                raise
            return
        self.result.pause_seconds = time.perf_counter() - self._paused_at
        watchdog.release(self.name)

    def install(self, version: int, run: str, watchdog: Watchdog, deadline_seconds: float, *, resumes: bool) -> None:
        """Pause the engine, have it install the version, resume it. A failure is noted, not raised.

        A lost reply is made good by asking. Without `resumes` the engine stays paused: it has installed what it was
        paused for, and its recovery requests are asked for again.
        """
        try:
            self.pause(run, watchdog)
            try:
                start, pause_seconds = time.perf_counter(), None
                try:
                    pause_seconds = self.client.finish(version)
                except (PeerTimeoutError, PeerDiedError):
                    if not self._serves(run, version):
                        raise
                if self._has("install"):
                    # The answer was lost, or is of an engine that does not say it: not longer than the request.
                    self.result.pause_seconds = time.perf_counter() - start if pause_seconds is None else pause_seconds
                for link in self.links:
                    self._await_installed(link, version, run, deadline_seconds)
            except WeightcastError:
                self._go_back(version, deadline_seconds)
                raise
            if isinstance(self.client, TwoPhaseInstall):
                self.client.settle(version, keep=True)
            self._is_torn = False
            self.result.ok = True
            if not resumes and self.is_paused and isinstance(self.client, ServesTraffic):
                self._arm(self.client, run, watchdog)
        except WeightcastError as exc:
            fail(self, exc)
        finally:
            if resumes:
                self.resume(run, watchdog)

    def _await_installed(self, link: Link, version: int, run: str, deadline_seconds: float) -> None:
        """Wait for a worker's word; a link that was lost on the way is made good by asking."""
        try:
            installed = link.wait(Installed, version, deadline_seconds)
        except (PeerTimeoutError, PeerDiedError):
            # Where workers can't agree by themselves, what one says of itself says nothing of another.
            if isinstance(self.client, TwoPhaseInstall) or not self._serves(run, version):
                raise
        else:
            self.result.install_seconds = max(self.result.install_seconds, installed.seconds)

    def _go_back(self, version: int, deadline_seconds: float) -> None:
        """Where workers can't agree by themselves: no one keeps what another did not install."""
        if not isinstance(self.client, TwoPhaseInstall):
            return
        # Until each worker has said on its link what became of it.
        self._is_torn = True
        with contextlib.suppress(WeightcastError):
            self.client.settle(version, keep=False)
        for link in self.links:
            with contextlib.suppress(WeightcastError):
                link.wait(Failed, version, deadline_seconds)
        told = [link.failures(version) for link in self.links]
        self._is_torn = not all(told) or any(_is_torn(failure) for failures in told for failure in failures)

    def _has(self, ability: str) -> bool:
        return self.info is not None and ability in self.info.abilities

    def _serves(self, run: str, version: int) -> bool:
        with contextlib.suppress(PeerError):
            info = self.client.info()
            return (info.run, info.weight_version) == (run, str(version))
        return False


def _is_torn(failure: ErrorRecord) -> bool:
    return failure.torn or failure.kind == EngineTornError.__name__


class Fleet:
    """All members, driven concurrently: a call on each, the failures sorted out."""

    def __init__(self) -> None:
        self._members: dict[str, FleetMember] = {}
        self._pool = ThreadPoolExecutor(max_workers=_MAX_PARALLEL, thread_name_prefix="weightcast-fleet")

    def __iter__(self) -> Iterator[FleetMember]:
        return iter(list(self._members.values()))

    def __len__(self) -> int:
        return len(self._members)

    def add(self, member: FleetMember) -> None:
        """Raises ValueError if an engine of that name is there already."""
        if member.name in self._members:
            raise ValueError(f"{member.name} is in the fleet already")
        self._members[member.name] = member

    def pop(self, name: str) -> FleetMember:
        """Raises ValueError if there is none of that name."""
        if name not in self._members:
            raise ValueError(f"{name} is not in the fleet; it has {', '.join(self._members) or 'no engines'}")
        return self._members.pop(name)

    def refuse_doubles(self, newcomers: Sequence[FleetMember]) -> None:
        """One engine under two names has one place: each init would end the other's. The first name has it."""
        known = {member.instance: member for member in self if member.is_joined and member.instance}
        for member in newcomers:
            if member.result.error is None and member.instance:
                first = known.setdefault(member.instance, member)
                if first is not member:
                    what = f"{member.name} and {first.name} are one and the same engine: name it once in `engines`"
                    fail(member, RefusedError(what))

    def healthy(self) -> list[FleetMember]:
        """The members without a failure in this update."""
        return [member for member in self if member.result.error is None]

    def each(self, call: Callable[[FleetMember], None], members: Iterable[FleetMember] | None = None) -> None:
        """Run `call` on each healthy member at once; a library error becomes that member's result."""
        todo = self.healthy() if members is None else list(members)
        if len(todo) == 1:
            self._one(call, todo[0])
            return
        for future in [self._pool.submit(self._one, call, member) for member in todo]:
            future.result()

    @staticmethod
    def _one(call: Callable[[FleetMember], None], member: FleetMember) -> None:
        try:
            call(member)
        except WeightcastError as exc:
            fail(member, exc)
        except Exception as exc:
            # A client of the caller's own may raise anything; it is that engine's failure and nobody else's.
            fail(member, detached(exc))

    def take_failures(self, failures: Mapping[str, WeightcastError]) -> None:
        """Sort a sender's failures, by peer, to the members whose workers those are.

        A receiver that left of its own accord (UpdateAbortedError) is left out: its worker says why over its link.
        """
        for member in self.healthy():
            if member.sender is not None:
                continue
            lost = [failures[p] for p in (link.peer for link in member.links) if isinstance(failures.get(p), PeerError)]
            if lost:
                if isinstance(lost[0], PeerDiedError):
                    for link in member.links:
                        link.hear_out(member.version, _LAST_WORD_SECONDS)
                fail(member, lost[0])

    def take_failures_of(self, sender: Sender) -> None:
        """The same of a sender that clients have brought: its peers are the members."""
        failures = sender.failures
        for member in self.healthy():
            if member.sender is sender and member.name in failures:
                fail(member, failures[member.name])

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        for member in self:
            if member.owned:
                member.client.close()


def fail(member: FleetMember, error: WeightcastError) -> None:
    """Note why this engine does not take the version. What its own worker said explains more than a lost peer.

    A peer that died or stalled loses its links: should it wake, it learns from that to give the update up.
    """
    version_error = next((f for link in member.links for f in link.failures(member.version)), None)
    if isinstance(error, PeerError) and version_error is not None:
        member.result.error = version_error
    else:
        member.result.error = to_record(error)
    member.result.ok = False
    if not member.links:
        member.disconnect()
    if isinstance(error, (PeerTimeoutError, PeerDiedError)):
        for link in member.links:
            link.end(f"the publisher gave this engine up: {error}")
