"""The engines of one publisher, and the steps of an update for each of them.

Invariants: one engine's failure is noted in its own result and fails no other engine; a requested pause is lifted on
every path, by this process or, for an engine without a lease, by the watchdog.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal

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
from weightcast.format.manifest import PROTOCOL, TensorSpec
from weightcast.format.messages import (
    Accepted,
    Failed,
    HeldWeights,
    InitInfo,
    Installed,
    LocalRanks,
    Offer,
    Received,
    UpdateInfo,
    WeightInfo,
)
from weightcast.host.deadline import GRACE_SECONDS, POLL_SECONDS, Deadline, to_its_end
from weightcast.host.descriptors import shortage_now
from weightcast.links.link import Link, LinkListener
from weightcast.links.watchdog import Watchdog
from weightcast.seams.client import ClientSender, EngineClient, ServesTraffic, TwoPhaseInstall

_MAX_PARALLEL = 64


class PauseEnd(enum.Enum):
    """The request that still has to end an engine's pause, also over a new connection."""

    NONE = enum.auto()
    """No pause was requested, or it was lifted."""
    RESUME = enum.auto()
    QUARANTINE = enum.auto()
    """Its workers may have different versions, and only the pause keeps the engine from serving them."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineState:
    """State of one engine, as far as the publisher knows it.

    `version`: number of the version that the engine last reported, None if it had none. `state`: "new" (no publish has
    contacted it yet), "connected", "failed" (it did not install its last update, `last_error` says why) or "lost" (its
    connection has ended; the next publish connects it again).
    """

    name: str
    version: int | None
    state: Literal["new", "connected", "failed", "lost"]
    last_error: ErrorRecord | None


class FleetMember:
    """One engine: its client, the links of its workers, and its result in the update in progress."""

    def __init__(
        self, client: EngineClient, run: str, watchdog: Watchdog, deadline_seconds: float, *, owned: bool
    ) -> None:
        """`run`: the publisher's. `watchdog`: resumes an engine without a lease if this process dies.

        Raises TypeError for a client that has `pause` but lacks the rest of `ServesTraffic`, so is never paused.
        """
        if callable(getattr(client, "pause", None)) and not isinstance(client, ServesTraffic):
            raise TypeError(
                f"{type(client).__name__} has pause() but lacks resume() or recovery_requests(), so its engine would "
                "generate during installs: derive it from weightcast.seams.client.ServesTraffic"
            )
        self.client = client
        self._given = client
        self.name = client.name
        self.owned = owned
        self.links: list[Link] = []
        self.sender: ClientSender | None = None
        """The client's own sender, for an engine without weightcast workers; None: the publisher's transport."""
        self.info: WeightInfo | None = None
        self.result = EngineResult()
        self.adapter = ""
        """The adapter that is published; empty for the model."""
        self.version = -1
        """The version offered in the update in progress; -1 before the offer."""
        self.serves: int | None = None
        """Number of the version that the engine last reported; None if it had none."""
        self.instance = ""
        """Id of the engine, equal for two URLs of one engine; empty if the engine reports none."""
        self.has_proven = False
        """True if its weights have been compared with the sent ones since it connected, and were equal."""
        self.dtypes: Mapping[str, str] = {}
        """The engine's dtypes by tensor name, for the specs of the last `ask_dtypes`."""
        self._dtypes_of: Sequence[TensorSpec] | None = None
        self._is_connected = False
        """True if its workers have connected; else the next publish asks for its `info`, and they have to."""
        self._is_paused = False
        """True if the engine has confirmed a pause, over this connection, that has not been lifted since."""
        self._pause_end = PauseEnd.NONE
        self._local_ranks: dict[str, LocalRanks] | UnsetType = UNSET
        """The engine ranks by host, for hosts with several ranks."""
        self._accepted_manifest = ""
        """Digest of the manifest that its workers accepted last, over their present links."""
        self.base = -1
        """Number of the version whose packed buckets its workers have kept; -1 for none."""
        self.gets_deltas = False
        """True if the update in progress goes to it as deltas on that version."""
        self._paused_at = 0.0
        self._run, self._watchdog, self._deadline_seconds = run, watchdog, deadline_seconds

    def is_of(self, engine: str | EngineClient) -> bool:
        """Return whether this member was made of the engine's URL, or of this very client."""
        return self.owned if isinstance(engine, str) else self._given is engine

    @property
    def is_joined(self) -> bool:
        return self._is_connected and not any(link.ended for link in self.links)

    @property
    def peers(self) -> list[str]:
        """The names of its receivers, as the sender of its buckets knows them."""
        return [link.peer for link in self.links] if self.sender is None else [self.name]

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
        """True if nothing answered at its URL: the engine may be starting."""
        return self.result.error is not None and self.result.error.kind == PeerDiedError.__name__

    def begin(self, adapter: str) -> None:
        """Begin another update with an empty result. `adapter`: see the attribute."""
        self.adapter, self.result, self.version, self.gets_deltas = adapter, EngineResult(), -1, False

    def ask(self, listener: LinkListener) -> None:
        """End the engine's links and ask for its `info`. May be called again for an engine that did not answer."""
        self.result = EngineResult()
        listener.end_links("the publisher connects again", self.name, goes_on=True)
        self.links, self._accepted_manifest, self._dtypes_of = [], "", None
        self._is_connected = self._is_paused = self.has_proven = False
        self.base = -1
        self.client = self._given.connect()
        self.info = self.client.info()
        if self.info.protocol != PROTOCOL:
            found = f"{self.name} speaks protocol {self.info.protocol}, this publisher speaks {PROTOCOL}"
            raise UnsupportedError(f"{found}: install the same version of weightcast in the trainer and the engine")
        instance = "" if self.info.instance is UNSET else self.info.instance
        if self.instance and instance != self.instance:
            # Another engine under its name: this publisher has paused the former one only.
            self._pause_end = PauseEnd.NONE
            self._watchdog.release(self.name)
        self.instance = instance
        _, self.serves = self.info.current(self.adapter)

    def ask_dtypes(self, specs: Sequence[TensorSpec]) -> None:
        """Ask for the engine's dtypes of these tensors, once per connection.

        Raises UnsupportedError if the engine can't report them.
        """
        if self._dtypes_of is specs:
            return
        dtypes = self.client.dtypes(specs)
        if dtypes is None:
            raise UnsupportedError(
                f"{self.name} can't say which dtypes its weights have, which the source's dtype='engine' needs: give "
                "the source a dtype such as dtype=torch.bfloat16, or install weightcast's plugin in the engine"
            )
        self.dtypes, self._dtypes_of = dtypes, specs

    def join(self, listener: LinkListener, init: InitInfo) -> None:
        """Have the engine's workers connect, and wait for their hellos. `ask` comes first.

        Raises EngineBusyError if another run has taken the engine over, ClosedError if the engine has ended the
        session; in both cases no worker would connect. Raises PeerTimeoutError at the deadline.
        """
        assert self.info is not None
        self.client.init(init)
        num_workers, num_unheld, links = self.info.world_size, 0, list[Link]()
        wait = functools.partial(listener.wait, self.name, num_workers)
        for number, _ in enumerate(Deadline(self._deadline_seconds).polls(10 * POLL_SECONDS, GRACE_SECONDS, wait)):
            links = listener.links(self.name)
            if len(links) >= num_workers:
                break
            if number == 0:
                continue
            holder = self._run
            with contextlib.suppress(PeerError):
                holder = self.client.info().holder
            self._require_ours(holder)
            # Only the second answer in a row counts: one engine's workers may not have agreed when the first came.
            num_unheld = 0 if holder else num_unheld + 1
            if num_unheld > 1:
                raise ClosedError(
                    f"{self.name} ended this publisher's session while its workers connected: "
                    + (
                        shortage_now()
                        or "they could not reach the publisher, the engine was asked to end the transfer, or another "
                        "run took the engine over and has ended since; see the engine's log"
                    )
                )
        else:
            raise PeerTimeoutError(
                f"{len(links)} of {num_workers} workers of {self.name} connected to the publisher's link at "
                f"{listener.address} within {self._deadline_seconds:g} s: "
                f"{shortage_now() or 'check that their hosts can reach this address'}",
                peer=self.name,
            )
        self.links = links
        by_host: dict[str, list[Link]] = {}
        for link in self.links:
            by_host.setdefault(link.host, []).append(link)
        several = {
            host: LocalRanks(tuple(link.engine_rank for link in links), links[0].memory)
            for host, links in by_host.items()
            if host and len(links) > 1
        }
        self._local_ranks = several or UNSET
        if self.info.holder or init.takeover:
            # A takeover waits for an install of the former run, and this publish must be above its version.
            self.info = self.client.info()
            self._require_ours(self.info.holder)
        self._is_connected = True

    def _require_ours(self, holder: str) -> None:
        """Raise EngineBusyError if another run has taken the engine over since."""
        if holder not in ("", self._run):
            raise EngineBusyError(
                f"run {holder} took {self.name} over while this publisher connected to it: publish to an engine from "
                "one publisher at a time"
            )

    def offer(self, offer: Offer) -> None:
        """Offer a version. `accepted` follows."""
        self.version = offer.version
        if self.adapter and (self.info is None or "adapters" not in self.info.abilities):
            raise UnsupportedError(
                f"{self.name} takes no adapters: start it with LoRA and weightcast's plugin (vLLM, SGLang and "
                "weightcast serve: --enable-lora), or publish the merged model, ModuleSource(model)"
            )
        is_known = self._accepted_manifest == offer.manifest_digest
        offer = msgspec.structs.replace(offer, manifest=None if is_known else offer.manifest, ranks=self._local_ranks)
        self._accepted_manifest = ""
        self.client.update(offer)

    def update(self, info: UpdateInfo) -> None:
        self.client.update(info)

    def accepted(self, manifest_digest: str, deadline: Deadline) -> None:
        """Wait until every worker has accepted the offer."""
        for link in self.links:
            link.wait(Accepted, self.version, deadline)
        self._accepted_manifest = manifest_digest

    def received(self, num_buckets: int, root: str, deadline: Deadline) -> None:
        """Wait until every worker has received all buckets. Raises IntegrityError if a root digest differs."""
        read_bytes, keeps_base = [], True
        for link in self.links:
            got = link.wait(Received, self.version, deadline)
            if (got.num_buckets, got.root) != (num_buckets, root):
                raise IntegrityError(
                    f"{link.peer} received {got.num_buckets} buckets with root digest {got.root}, but {num_buckets} "
                    f"with root digest {root} were sent: publish again"
                )
            read_bytes.append(got.read_bytes)
            keeps_base &= got.keeps_base
        self.result.read_bytes = read_bytes
        self.base = self.version if keeps_base and self.links else -1

    def pause(self) -> None:
        """Pause the engine. For an engine without a lease, first register its recovery with the watchdog."""
        if self._is_paused or not isinstance(self.client, ServesTraffic):
            return
        self._guard(self.client)
        if self._pause_end is PauseEnd.NONE:
            self._pause_end = PauseEnd.RESUME
        self._paused_at = time.perf_counter()
        self.client.pause(self._run)
        self._is_paused = True

    def _guard(self, client: ServesTraffic) -> None:
        """Register the requests by which the watchdog resumes an engine without a lease if this process dies."""
        if requests := client.recovery_requests(self._run):
            self._watchdog.keep(self.name, requests)

    def held(self, names: Sequence[str] = ()) -> HeldWeights | None:
        """Return the engine's digests of the offered version. Raises ControlError if it serves another one by now."""
        held = self.client.held(names)
        if held is not None and (held.run, held.weight_version) != (self._run, str(self.version)):
            found = f"version {held.weight_version} of run {held.run or 'none'}"
            raise ControlError(
                f"{self.name} now serves {found}, so the digests of version {self.version} can't be compared: publish "
                "to an engine from one publisher at a time",
                peer=self.name,
            )
        return held

    def quarantine(self, reason: str) -> None:
        """Have an engine with wrong weights refuse to serve. A Ctrl-C meanwhile is raised afterwards."""
        self.fail(IntegrityError(reason))
        self.result.differs = True
        try:
            to_its_end(functools.partial(self.client.quarantine, reason), name="weightcast-quarantine")
        except WeightcastError as exc:
            raise IntegrityError(
                f"{reason}; {self.name} may serve these weights, since it was not reached to refuse them: {exc}"
            ) from exc

    def resume(self) -> None:
        """Lift the pause, or quarantine a two-phase engine whose workers may have different versions.

        Raises WeightcastError unless the engine has failed already: the first error says more, and the next publish
        resumes the engine.
        """
        if self._pause_end is PauseEnd.NONE:
            return
        assert isinstance(self.client, ServesTraffic)
        error = self.result.error
        try:
            if self._pause_end is PauseEnd.QUARANTINE and isinstance(self.client, TwoPhaseInstall):
                self.client.quarantine("not all of its workers rolled back" if error is None else error.message)
            else:
                self.client.resume(self._run)
                self._pause_end = PauseEnd.NONE
                self._is_paused = False
        except WeightcastError:
            if error is None:
                raise
            return
        self.result.pause_seconds = time.perf_counter() - self._paused_at
        self._watchdog.release(self.name)

    def install(self, resumes: bool) -> None:
        """Pause the engine, have it install the offered version, resume it. A failure is noted, not raised.

        If a reply or a worker's link is lost, ask the engine for its version. Without `resumes` the engine stays
        paused after the install, and its recovery requests are fetched again, since they may have changed.
        """
        try:
            # An adapter is added between two steps, and requests that run keep theirs.
            if self.client.paused_seconds is None and not self.adapter:
                self.pause()
            try:
                try:
                    self.client.finish(self.version)
                except (PeerTimeoutError, PeerDiedError) as exc:
                    if not self._has_installed(exc):
                        raise
                if self.client.paused_seconds is not None:
                    self.result.pause_seconds = self.client.paused_seconds
                for link in self.links:
                    try:
                        installed = link.wait(Installed, self.version, Deadline(self._deadline_seconds))
                    except (PeerTimeoutError, PeerDiedError) as exc:
                        # A two-phase engine's workers install separately: one's version is no proof for another's.
                        if isinstance(self.client, TwoPhaseInstall) or not self._has_installed(exc):
                            raise
                        self.result.installed_bytes.append(0)
                    else:
                        self.result.install_seconds = max(self.result.install_seconds, installed.seconds)
                        self.result.installed_bytes.append(installed.installed_bytes)
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

    def _has_installed(self, error: PeerError) -> bool:
        """Return whether the engine has installed the offered version, although a message that says so is missing.

        An engine that was silent for the deadline is not asked, which could take as long again: only messages of its
        workers count that have come by now.
        """
        if isinstance(error, PeerTimeoutError) and self.links:
            return all(any(isinstance(v, Installed) for v in link.verdicts(self.version)) for link in self.links)
        return self._serves()

    def _go_back(self) -> None:
        """Second phase of a two-phase install: roll all workers back if one did not install."""
        if not isinstance(self.client, TwoPhaseInstall):
            return
        is_paused = self._pause_end is not PauseEnd.NONE
        if is_paused:
            # Reset below, once every worker has reported over its link.
            self._pause_end = PauseEnd.QUARANTINE
        with contextlib.suppress(WeightcastError):
            self.client.settle(self.version, keep=False)
        for link in self.links:
            with contextlib.suppress(WeightcastError):
                link.wait(Failed, self.version, Deadline(self._deadline_seconds))
        failed = [[v.error for v in link.verdicts(self.version) if isinstance(v, Failed)] for link in self.links]
        is_torn = any(each.torn or each.kind == EngineTornError.__name__ for failures in failed for each in failures)
        if is_paused and all(failed) and not is_torn:
            self._pause_end = PauseEnd.RESUME

    def fail(self, error: Exception) -> None:
        """Note why this engine failed. A worker's own error takes precedence over the loss of a peer.

        The links of a peer that died or stalled are ended: if the peer wakes up, it aborts the update.
        """
        verdicts = (verdict for link in self.links for verdict in link.verdicts(self.version))
        version_error = next((verdict.error for verdict in verdicts if isinstance(verdict, Failed)), None)
        is_explained = isinstance(error, PeerError) and version_error is not None
        self.result.error = version_error if is_explained else to_record(error)
        self.result.ok, self.base = False, -1
        if not self.links:
            # No link would show that the engine has died: have the next update ask it again.
            self._is_connected = self._is_paused = False
        if isinstance(error, (PeerTimeoutError, PeerDiedError)):
            for link in self.links:
                link.end(f"the publisher dropped this engine from the update: {error}", goes_on=True)

    def close(self) -> None:
        """Close the client if the publisher made it from a URL. It closes the client that `connect` returned, too."""
        if self.owned:
            self._given.close()

    def notice(self, version: int) -> None:
        """Mark the engine as done if it serves this version of the run already."""
        self.version = version
        self.result.ok = self._serves(is_settled=True)

    def _serves(self, *, is_settled: bool = False) -> bool:
        """Return whether the engine reports `version`. With `is_settled` it must also be serving.

        The workers of a two-phase engine serve a version only after they were told that all of them have it.
        """
        with contextlib.suppress(PeerError):
            info = self.client.info()
            return info.current(self.adapter) == (self._run, self.version) and not (is_settled and info.torn)
        return False


class Fleet:
    """All engines of a publisher. `each` calls them and notes failures in their results."""

    def __init__(self) -> None:
        self.members: Sequence[FleetMember] = ()
        """Replaced and never changed, so that any thread may iterate over it."""
        self._others: Sequence[FleetMember] = ()
        """The publisher's other members, if this fleet has only one (see `only`)."""
        self._pool = ThreadPoolExecutor(max_workers=_MAX_PARALLEL, thread_name_prefix="weightcast-fleet")
        self._calls: list[Future[None]] = []

    def add(self, member: FleetMember) -> None:
        """Raise ValueError if the fleet has an engine of that name already."""
        if any(member.name == other.name for other in self.members):
            raise ValueError(f"{member.name} is in the fleet already: name each engine once, each by its own name")
        self.members = (*self.members, member)

    def only(self, name: str) -> Fleet:
        """Return a fleet of only the member of that name. Raises ValueError if there is none."""
        part = copy.copy(self)
        part._others = self.members
        part.members = [part.pop(name)]
        return part

    def pop(self, name: str) -> FleetMember:
        """Remove and return the member of that name. Raises ValueError if there is none."""
        found = [member for member in self.members if member.name == name]
        if not found:
            names = ", ".join(member.name for member in self.members) or "no engines"
            raise ValueError(f"{name} is not in the fleet; it has {names}")
        self.members = [member for member in self.members if member.name != name]
        return found[0]

    def refuse_doubles(self, newcomers: Sequence[FleetMember]) -> None:
        """Fail the second name of an engine that is named twice: each name's init would end the other's session."""
        everybody = (*self._others, *self.members)
        known = {member.instance: member for member in everybody if member.is_joined and member.instance}
        for member in newcomers:
            if member.result.error is None and member.instance:
                first = known.setdefault(member.instance, member)
                if first is not member:
                    what = f"{member.name} and {first.name} are the same engine: name it once in `engines`"
                    member.fail(RefusedError(what))

    def healthy(self, members: Sequence[FleetMember] | None = None) -> list[FleetMember]:
        """Return those of these members, by default of all, that have not failed and do not serve the version yet."""
        return [m for m in (self.members if members is None else members) if m.result.error is None and not m.result.ok]

    def each(
        self,
        call: Callable[..., None],
        members: Iterable[FleetMember],
        *args: Any,
        notes: bool = True,
        in_turn: bool = False,
        also_done: bool = False,
    ) -> None:
        """Make `call(member, *args)` for the healthy ones of these members, concurrently or `in_turn` in this thread.

        `also_done`: also for those that have failed or serve the version already. An error becomes that member's
        result; without `notes` it is ignored. A caller's own client may raise any exception: only its engine fails.
        Wait for workers' messages in turn: one thread reads for all, and each message would wake all threads that wait.
        """
        todo = []
        for member in members:
            if also_done or (member.result.error is None and not member.result.ok):
                todo.append(member)
        if len(todo) > 1 and not in_turn:
            options = {"notes": notes, "also_done": True}
            self._calls[:] = [self._pool.submit(self.each, call, [member], *args, **options) for member in todo]
            for future in self._calls:
                future.result()
            return
        for member in todo:
            try:
                call(member, *args)
            except Exception as exc:
                if notes:
                    member.fail(exc)

    def wait(self) -> None:
        """Wait for calls that a Ctrl-C has left running in threads, so that none changes a member afterwards."""
        wait(self._calls)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
        with contextlib.ExitStack() as stack:
            # Close every member, also after one member's client has raised.
            for member in self.members:
                stack.callback(member.close)
