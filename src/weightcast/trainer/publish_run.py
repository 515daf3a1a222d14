"""One publish: the steps of an update, over the whole fleet. Made for one version and used once.

Invariants: bytes are packed once for each route; an engine that fails takes no further part in this update; every pause
is lifted before `run` returns or raises, and an update that was begun on a failed engine is aborted there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import torch
from msgspec import UNSET, UnsetType

from weightcast import registry
from weightcast.errors import (
    ErrorRecord,
    IntegrityError,
    PeerDiedError,
    PeerError,
    PeersLostError,
    PublishReport,
    StageSeconds,
    UnsupportedError,
    UpdateAbortedError,
    WeightcastError,
    WrongBaseError,
)
from weightcast.format.adapters import AdapterTarget
from weightcast.format.bucket import (
    HEADER_BYTES,
    BucketBuffer,
    Digest,
    all_bytes,
    as_bytes,
    check_bucket,
    root_digest,
)
from weightcast.format.manifest import MAX_VERSION, Manifest, WeightVersion
from weightcast.format.messages import Abort, Failed, InitInfo, Offer, Seal
from weightcast.host import device as host_device
from weightcast.host.closing import on_failure
from weightcast.host.deadline import GRACE_SECONDS, Deadline, number_of_seconds
from weightcast.links.link import LinkListener
from weightcast.seams.client import BringsSender, ClientSender, SenderContext
from weightcast.seams.source import Regions
from weightcast.seams.transport import Sender
from weightcast.trainer.background import Flight
from weightcast.trainer.deltas import Deltas, PackedDeltas
from weightcast.trainer.engine_dtypes import EngineDtypes
from weightcast.trainer.fleet import Fleet, FleetMember
from weightcast.trainer.options import Phase, PublishEvent, PublishOptions
from weightcast.trainer.packer import Fill, PackPlan, pack
from weightcast.trainer.sent_digests import SentDigests
from weightcast.trainer.stream_packer import StreamPacker

logger = logging.getLogger(__name__)
OnProgress = Callable[[int, int], None]


def connect(
    url: str, run: str, device: torch.device, *, deadline_seconds: float, lease_seconds: float, secret: str = ""
) -> tuple[LinkListener, Sender]:
    """Listen for workers where the transport's URL says, and make the sender to them. Raises ValueError, OSError."""
    transport = registry.transport(url)
    host, port = (None, 0) if transport.same_host else registry.endpoint(url)
    listener = LinkListener(run, host=host, port=port, lease_seconds=lease_seconds, secret=secret)
    with on_failure(listener.close):
        sender = transport.sender(url, run=run, listener=listener, device=device, deadline_seconds=deadline_seconds)
        return listener, sender


class Connections:
    """A publisher's connections: the listener for workers' links, its sender, and the senders of engines' clients."""

    def __init__(
        self,
        url: str,
        run: str,
        device: torch.device,
        *,
        deadline_seconds: float,
        lease_seconds: float,
        has_several_ranks: bool = False,
    ) -> None:
        """`device`: that of the weights. `has_several_ranks`: see `SenderContext`. Raises what `connect` raises."""
        self.url = url
        self._stream = host_device.stream(device) if device.type == "cuda" else None
        self.sender: Sender
        self.listener, self.sender = connect(
            url, run, device, deadline_seconds=deadline_seconds, lease_seconds=lease_seconds
        )
        self.keeps_versions = registry.transport(url).keeps_versions
        self.device = device
        self.has_several_ranks = has_several_ranks
        self.client_senders: list[ClientSender] = []
        self.origins: tuple[str, ...] = ()
        """Addresses of the links of other trainer ranks, one for each further origin."""
        self._senders_lock = threading.Lock()

    def packing_stream(self) -> contextlib.AbstractContextManager[None]:
        """On a GPU, use a side stream that waits for the trainer's stream, so that packing overlaps with later work.

        At the end the trainer's stream waits for the side stream, so `optimizer.step()` writes only after packing.
        """
        return contextlib.nullcontext() if self._stream is None else host_device.beside(self._stream, self.device)

    def add_client_sender(self, member: FleetMember, run: str, deadline_seconds: float) -> None:
        """Get the sender of the member's client, if the client has one."""
        several, sender = self.has_several_ranks, None
        context = SenderContext(self.url, run, self.device, deadline_seconds, has_several_ranks=several)
        with self._senders_lock:
            if isinstance(member.client, BringsSender):
                sender = member.client.sender(self.client_senders, context)
            member.sender = sender
            if sender is not None and sender not in self.client_senders:
                self.client_senders.append(sender)

    def release(self) -> None:
        """Release the transport's memory, and have workers release theirs."""
        self.sender.release()
        self.listener.release_memory()

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            # Close every sender, also after one has raised; the listener last: readers' last records come over it.
            stack.callback(self.listener.close)
            for sender in (*self.client_senders, self.sender):
                stack.callback(sender.close)


@dataclasses.dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version of which every bucket was sent, so that it can be sent again to an engine that comes later.

    `digests`: of its buckets, on a GPU as tensors. `is_stored`: the transport keeps the version for readers. `sent`:
    each tensor's digest, with `verify="installed"`.
    """

    number: int
    manifest_digest: str
    digests: Sequence[bytes | torch.Tensor]
    is_stored: bool
    sent: SentDigests | None


@dataclasses.dataclass(frozen=True, slots=True)
class PublishInputs:
    """The inputs of a publish on the publishing rank. `start`: time at which it began, by `time.perf_counter`.

    `fleet`: the engines to update. `again`: the version to send once more, in place of a new one. `maps_buckets`: True
    if trainer ranks of one host can pack into each other's buckets, as far as the engines are known. `checks_finite`:
    check for NaN and infinity before the offer. `engine_dtypes`: set for a source with dtype="engine". `target`: the
    adapter to update; UNSET for the model. `deltas`: the publisher's, if it may send some. `revisions`: the source's,
    if this rank publishes alone, else empty. `directory_error`: see `PublishReport`. `departed` returns those of failed
    engines that the directory does not have any more.
    """

    start: float
    version: int | None
    regions: Regions
    connections: Connections
    pack_plan: PackPlan
    fleet: Fleet
    again: PublishedVersion | None
    maps_buckets: Callable[[], bool]
    checks_finite: bool
    engine_dtypes: EngineDtypes | None
    target: AdapterTarget | UnsetType
    deltas: Deltas | None
    revisions: Mapping[str, int]
    directory_error: ErrorRecord | None
    departed: Callable[[Sequence[FleetMember]], Sequence[FleetMember]]


@dataclasses.dataclass(eq=False, kw_only=True)
class PublishRun:
    """One publish of one version to a fleet.

    `publisher_run`: the publisher's run. `above`: the number of the publisher's last version. `proves_all`: with
    `verify="installed"`, compare every engine; else only those that have connected since. `wait_ready_seconds`: see
    `Publisher.publish`. `number`: the version's, once it is known. `published`: the version, once all of it was sent.
    """

    publisher_run: str
    options: PublishOptions
    above: int
    proves_all: bool
    wait_ready_seconds: float
    on_progress: OnProgress | None
    flight: Flight
    number: int = -1
    published: PublishedVersion | None = None
    _seconds: StageSeconds = dataclasses.field(default_factory=StageSeconds)
    _sent: SentDigests | None = None
    _digests: Sequence[bytes | torch.Tensor] | None = None
    _stage: str = ""
    """The stage that is being timed; empty for none."""
    _stage_began_at: float = 0.0
    _failed: set[str] = dataclasses.field(default_factory=set)
    """Names of the engines whose failure was passed to `on_event`."""

    def run(
        self,
        inputs: PublishInputs,
        on_known: Callable[[], None] | None = None,
        on_packed: Callable[[], None] | None = None,
    ) -> PublishReport:
        """Publish under the number of the inputs, by default one above the last and above every engine's version.

        A version that is published again keeps its number. It is sent only if its buckets, still staged or packed again
        from the source, have the former digests. Engines that serve it already are skipped.

        `on_known` is called after every engine has reported its `info`, before the offer; `on_packed`, by default the
        flight's, after the source was read for the last time.

        Returns a report with each engine's failure. Raises only errors that end the update for all engines.
        """
        if self.wait_ready_seconds != 0:
            number_of_seconds("wait_ready_seconds", self.wait_ready_seconds)
        if self.on_progress is not None and not callable(self.on_progress):
            raise TypeError(f"on_progress is {self.on_progress!r}; it must be a function (done_bytes, total_bytes)")
        self._stage, self._stage_began_at = "gather", inputs.start
        self._connections, self._pack_plan = inputs.connections, inputs.pack_plan
        self._fleet, self._again = fleet, again = inputs.fleet, inputs.again
        is_stored = again is not None and again.is_stored
        if again is not None:
            self._sent = again.sent
        self._on_packed = self.flight.packed if on_packed is None else on_packed
        options = self.options
        memory_seconds = inputs.connections.sender.memory_seconds
        fleet.wait()
        for member in fleet.members:
            member.begin(inputs.target.name if inputs.target else "")
        deltas = inputs.deltas
        try:
            self._begin_stage("offer")
            newcomers = self._ask()
            if on_known is not None:
                on_known()
            self._manifest, sender = inputs.pack_plan.layout.manifest, inputs.connections.sender
            fill = inputs.pack_plan.packer(inputs.regions)
            fleet.each(self._join_member, newcomers)
            for member in fleet.members:
                for link in member.links:
                    link.forget_verdicts()
            if isinstance(fill, StreamPacker):
                self._fail_other_routes()
            if self._manifest.origins:
                self._fail_brought_routes()
            self._choose_number(inputs)
            is_due = self.proves_all or not all(member.has_proven for member in fleet.healthy())
            if options.verify == "installed" and is_due and again is None:
                self._sent = SentDigests(self._pack_plan.layout, inputs.regions)
            fill.sent = self._sent if again is None else None
            if options.install == "streaming":
                fleet.each(FleetMember.pause, self._members(None))
            workers: dict[str, int] | UnsetType = UNSET
            if self._manifest.origins:
                workers = Counter(link.host for member in fleet.healthy() for link in member.links)
            sent_again = None if again is None else again.number
            offer = Offer(
                self.publisher_run,
                self.number,
                self._pack_plan.manifest_digest,
                self._manifest.text,
                keeps_base=deltas is not None and deltas.begin(self._pack_plan, fill, sent_again, inputs.revisions),
                install=options.install,
                undo=options.undo,
                secret=inputs.connections.listener.secret,
                workers=workers,
                target=inputs.target,
            )
            encoded: PackedDeltas | None = None
            if deltas is not None and again is None:
                self._begin_stage("pack")
                with self._connections.packing_stream():
                    bases = [member.base for member in fleet.healthy()]
                    version = WeightVersion(self.publisher_run, self.number)
                    encoded = deltas.encode(fill, self._manifest, version, bases, self.flight.require_wanted)
                fill = deltas.keeping(fill, encoded)
            if deltas is not None and encoded is not None:
                self._on_packed()
                self._tell("packed", ())
                self._publish_deltas(encoded, offer, deltas)
            self._begin_stage("offer")
            self._offer(offer, fleet.members)
            members = self._members(None)
            self._tell("offered", members)
            if again is not None and is_stored:
                # The store has the version already, and engines read it from there.
                self._begin_stage("send")
                root = root_digest(again.manifest_digest, again.digests)
                self._await_received(None, members, root)
            else:
                is_last = encoded is None and not self._connections.client_senders
                root = self._send(None, members, fill, is_last=is_last)
                self._begin_stage("seal")
                if deltas is not None and again is None and self._digests is not None:
                    seconds = self._seconds.pack + self._seconds.send - (sender.memory_seconds - memory_seconds)
                    deltas.sent_full(self.number, seconds)
            self._seal(members, root)
            self._install(members)
            self._tell("installed", members)
            for client_sender in self._connections.client_senders:
                is_last = encoded is None and client_sender is self._connections.client_senders[-1]
                self._update_brought(client_sender, fill, is_last=is_last)
            if inputs.connections.keeps_versions and not is_stored:
                self._begin_stage("seal")
                if not fleet.members or any(member.result.ok for member in fleet.members):
                    sender.commit()
                    is_stored = True
                else:
                    sender.abort(f"no engine has installed version {self.number}")
            # A failed engine may be alive: abort its update before it is resumed, since its workers may wait for
            # buckets.
            failed = [member for member in fleet.members if member.result.error is not None]
            if failed:
                self._abort(failed, "this engine's update failed at the publisher")
                for member in inputs.departed(failed):
                    member.result.has_left = True
        except BaseException as exc:
            self._give_up(exc)
            raise
        finally:
            fleet.each(FleetMember.resume, fleet.members, also_done=True)
        self._begin_stage("")
        if self._digests is not None:
            digest = self._pack_plan.manifest_digest
            self.published = PublishedVersion(self.number, digest, self._digests, is_stored, self._sent)
        self._seconds.pause = max((m.result.pause_seconds for m in fleet.members), default=0.0)
        self._seconds.memory = sender.memory_seconds - memory_seconds
        self._seconds.total = time.perf_counter() - self.flight.began_at
        self._seconds.stall = self.flight.stall_seconds if self.flight.is_background else self._seconds.total
        return PublishReport(
            run=self.publisher_run,
            version=self.number,
            num_bytes=self._pack_plan.num_bytes,
            num_tensors=len(self._manifest.tensors),
            num_buckets=len(self._manifest.buckets),
            install=options.install,
            seconds=self._seconds,
            engines={member.name: member.result for member in fleet.members},
            delta=None if deltas is None else deltas.report,
            directory_error=inputs.directory_error,
        )

    def _choose_number(self, inputs: PublishInputs) -> None:
        """Set the number of the version. Engines that serve it already are skipped from now on."""
        if self._again is not None:
            self.number = number = self._again.number
            connected = self._fleet.healthy()
            self._fleet.each(FleetMember.notice, self._fleet.members, number)
            # An engine that was dropped after its install is not ready until it learns that this version is the last.
            root = root_digest(self._again.manifest_digest, self._again.digests)
            seal = Seal(self.publisher_run, number, len(self._again.digests), root, inputs.connections.listener.secret)
            serving = [m for m in connected if m.result.ok and m.links and inputs.target is UNSET]
            self._fleet.each(FleetMember.update, serving, seal, also_done=True)
            if self._again.manifest_digest != self._pack_plan.manifest_digest:
                self._fail_changed(self._fleet.members)
        elif inputs.version is not None:
            self.number = inputs.version
        else:
            if self.above >= MAX_VERSION:
                raise ValueError(
                    f"no version number is left above {self.above}, this publisher's last one: make another publisher,"
                    " and leave `version` out when you publish"
                )
            # Above the newest version of any run, unless that has the highest number.
            found = [member.serves for member in self._fleet.members]
            if inputs.connections.keeps_versions:
                found.append(inputs.connections.sender.newest_version())
            newest = max((number for number in found if number is not None), default=-1)
            self.number = 1 + max(self.above, newest if newest < MAX_VERSION else -1)
        self.flight.version = self.number

    def _members(self, sender: ClientSender | None, *, gets_deltas: bool = False) -> list[FleetMember]:
        """Return the engines, failed ones included, that take the same bytes: those of a client's sender or, for None,
        of the publisher's transport; with `gets_deltas` those that take the version as deltas, else all of it.
        """
        return [m for m in self._fleet.members if m.sender is sender and m.gets_deltas == gets_deltas]

    def _update_brought(self, sender: ClientSender, fill: Fill, *, is_last: bool) -> None:
        """Update the engines of a client's sender, from the pause to the resume. `is_last`: see `_send`."""
        members = self._members(sender)
        try:
            if not sender.is_staged:
                self._fail_unstaged(members)
                self._fleet.each(FleetMember.pause, members)
            self._send(sender, members, fill, is_last=is_last)
            self._tell("received", members)
            self._install(members, resumes=False)
            self._tell("installed", members)
        finally:
            self._fleet.each(FleetMember.resume, members, also_done=True)

    def _tell(self, phase: Phase, members: Iterable[FleetMember], *, ends: bool = True) -> None:
        """Call `on_event` for each of these engines that took part in the phase; if that `ends` it, for the publish."""
        if (on_event := self.options.on_event) is None:
            return
        seconds = time.perf_counter() - self.flight.began_at
        for member in members:
            error = member.result.error
            if member.name not in self._failed:
                on_event(PublishEvent(self.number, phase, member.name, error, seconds))
            if error is not None:
                self._failed.add(member.name)
        if ends:
            on_event(PublishEvent(self.number, phase, None, None, seconds))

    def _begin_stage(self, stage: str) -> None:
        """End the stage that is being timed, and begin this one; empty: time none."""
        now = time.perf_counter()
        if self._stage:
            setattr(self._seconds, self._stage, getattr(self._seconds, self._stage) + now - self._stage_began_at)
        self._stage, self._stage_began_at = stage, now

    def _ask(self) -> list[FleetMember]:
        """Ask each member that has to connect for its `info`; return these members.

        They are the members without a link, and those with a receiver that is not connected to the sender. For a
        version that is published again, every member that does not serve it connects again, so that late messages of
        the first attempt arrive over an ended link. Engines that are not up yet are asked until they are, or until
        `wait_ready_seconds` have passed.
        """
        sender, listener = self._connections.sender, self._connections.listener
        newcomers = []
        if self._again is not None:
            number = self._again.number
            self._fleet.each(FleetMember.notice, [m for m in self._fleet.members if m.is_joined], number)
        connected = set(sender.connected([link.peer for member in self._fleet.members for link in member.links]))
        for member in self._fleet.healthy():
            is_connected = member.is_joined and connected.issuperset(link.peer for link in member.links)
            if self._again is not None or not is_connected:
                newcomers.append(member)
        if not newcomers:
            return []
        absent = newcomers
        for _ in Deadline(self.wait_ready_seconds).polls(0.05, 1.0):
            # This waits in the caller's thread, so that a Ctrl-C ends it at once.
            self.flight.require_wanted()
            self._fleet.each(FleetMember.ask, absent, listener, also_done=True)
            was_asked, absent = absent, [member for member in absent if member.is_absent]
            if not absent:
                break
            if was_asked is newcomers and self.wait_ready_seconds:
                names = ", ".join(member.name for member in absent)
                logger.info("waiting up to %g s for engines that do not answer yet: %s", self.wait_ready_seconds, names)
        self._fleet.refuse_doubles(newcomers)
        return newcomers

    def _join_member(self, member: FleetMember) -> None:
        options, connections = self.options, self._connections
        url, listener = connections.url, connections.listener
        info = InitInfo(
            run=self.publisher_run,
            engine=member.name,
            transport=url,
            link=listener.address,
            secret=listener.secret,
            lease_seconds=options.lease_seconds,
            takeover=options.takeover,
            deadline_seconds=options.deadline_seconds,
            publisher=f"pid {os.getpid()} on {socket.gethostname()}"[:4096],
            origins=connections.origins,
        )
        member.join(listener, info)
        connections.add_client_sender(member, self.publisher_run, options.deadline_seconds)

    def _offer(self, offer: Offer, members: Sequence[FleetMember]) -> None:
        """Offer to these engines, and wait until every worker has accepted."""
        self._fleet.each(FleetMember.offer, members, offer)
        deadline = Deadline(self.options.deadline_seconds)
        self._fleet.each(FleetMember.accepted, members, offer.manifest_digest, deadline, in_turn=True)

    def _publish_deltas(self, encoded: PackedDeltas, offer: Offer, deltas: Deltas) -> None:
        """Update the engines that have the base of these deltas. Those that turn out to lack it connect again."""
        for member in self._fleet.healthy():
            member.gets_deltas = member.sender is None and member.base == encoded.base.version
        offer = msgspec.structs.replace(offer, base=encoded.base)
        self._begin_stage("offer")
        self._offer(offer, self._members(None, gets_deltas=True))
        refusing = []
        for member in self._members(None, gets_deltas=True):
            if member.result.error is not None and member.result.error.kind == WrongBaseError.__name__:
                member.gets_deltas = False
                refusing.append(member)
        self._fleet.each(FleetMember.ask, refusing, self._connections.listener, also_done=True)
        self._fleet.each(self._join_member, refusing)
        members = self._members(None, gets_deltas=True)
        self._tell("offered", members, ends=False)
        start, buckets, version = time.perf_counter(), encoded.buckets, WeightVersion(self.publisher_run, self.number)

        def write(index: int, buffer: BucketBuffer) -> int:
            return buckets.write(index, encoded.payloads[index], buffer, version)

        if self._send_buckets(self._connections.sender, encoded.manifest, members, write):
            self._digests = list(buckets.digests)
        self._await_received(None, members, buckets.root)
        self._begin_stage("seal")
        deltas.sent(time.perf_counter() - start, sum(member.result.error is None for member in members))
        self._seal(members, buckets.root, ends=False)
        self._install(members)
        self._tell("installed", members, ends=False)

    def _seal(self, members: Sequence[FleetMember], root: str, *, ends: bool = True) -> None:
        """Seal what these engines have received, so that they can install it; if that `ends` the publish's phase, the
        engines of clients' senders are told, too.
        """
        seal = Seal(
            self.publisher_run, self.number, len(self._manifest.buckets), root, self._connections.listener.secret
        )
        self._fleet.each(FleetMember.update, self._fleet.members if ends else members, seal)
        self._tell("received", members, ends=ends)
        self.flight.require_wanted(installs=True)

    def _install(self, members: Sequence[FleetMember], *, resumes: bool = True) -> None:
        """Have the engines install, then compare their weights with the digests of what was sent, if there are any.

        Unless all are to be compared, only those that have not been since they connected. Without `resumes` they stay
        paused.
        """
        self._begin_stage("")
        sent = self._sent
        todo = [] if sent is None else [m for m in self._fleet.healthy(members) if self.proves_all or not m.has_proven]
        self._fleet.each(FleetMember.install, members, resumes)
        if sent is not None:
            todo = [member for member in todo if member.result.error is None]
            self._fleet.each(functools.partial(sent.prove, sent.by_name()), todo, also_done=True)
            for member in todo:
                member.has_proven = member.result.error is None

    def _send(self, client: ClientSender | None, members: Sequence[FleetMember], fill: Fill, *, is_last: bool) -> str:
        """Pack and send every bucket to these engines, of a client's sender or, for None, of the publisher's transport;
        wait until they have them.

        `is_last`: nothing is packed after this. Returns the root digest; an empty string if no engine takes the
        version, or for a client's sender.
        """
        sender, manifest = client or self._connections.sender, self._manifest
        again, num_own, root = self._again, len(manifest.spans[0]), ""
        digests: list[Digest] = [b""] * len(manifest.buckets) if again is None else list(again.digests)
        version = WeightVersion(self.publisher_run, self.number)

        def write(index: int, buffer: BucketBuffer) -> int:
            if again is not None:
                return self._pack_again(again, index, buffer, version, fill)
            num_bytes, digests[index] = pack(fill, manifest, version, index, buffer)
            return num_bytes

        with self._connections.packing_stream():
            is_sent = self._send_buckets(
                sender,
                manifest,
                members,
                write,
                is_staged=self.options.install == "staged" if client is None else client.is_staged,
                keeps_versions=client is None and self._connections.keeps_versions,
                on_loss=fill.forget_views,
            )
            if is_sent and num_own < len(digests):
                digests[num_own:] = fill.others()
                if again is not None and all_bytes(digests) != all_bytes(again.digests):
                    self._fail_changed(members, sender)
                    is_sent = False
            if is_sent:
                self._digests = digests
                if client is None:
                    # Only weightcast's workers report a root digest; for others nothing waits for a GPU's digests.
                    # This runs on the stream that computes them.
                    root = root_digest(self._pack_plan.manifest_digest, digests)
        if is_last:
            self._on_packed()
            self._tell("packed", ())
        self._await_received(client, members, root)
        return root

    def _send_buckets(
        self,
        sender: Sender,
        manifest: Manifest,
        members: Sequence[FleetMember],
        write: Callable[[int, BucketBuffer], int],
        *,
        is_staged: bool = True,
        keeps_versions: bool = False,
        on_loss: Callable[[], None] = lambda: None,
    ) -> bool:
        """Open the update for these engines and send them every bucket. After a loss, continue with the survivors.

        `write` returns the number of bytes to send, 0 if the source no longer has the version that is published again;
        then the engines have failed. `on_loss` is called when the sender may use other memory. Returns False if not
        all were sent.
        """
        self._begin_stage("send")
        version, fleet = WeightVersion(self.publisher_run, self.number), self._fleet
        peers = [peer for member in fleet.healthy(members) for peer in member.peers]
        # A transport that keeps the version for later readers gets it unless all engines have failed.
        is_kept = keeps_versions and (not fleet.members or bool(fleet.healthy()))
        while peers or is_kept:
            try:
                first = sender.open(manifest, version, peers=peers, staged=is_staged)
                for index in manifest.spans[0][first:]:
                    self.flight.require_wanted()
                    buffer = sender.buffer(index)
                    self._begin_stage("pack")
                    num_bytes = write(index, buffer)
                    self._begin_stage("send")
                    if not num_bytes:
                        self._fail_changed(members, sender)
                        return False
                    sender.send(index, num_bytes)
                    if self.on_progress is not None:
                        self.on_progress(*self._done_bytes(index))
                    if peers and sender.failures.keys() >= set(peers):
                        return False
                return True
            except PeersLostError as exc:
                peers = list(exc.survivors)
                on_loss()
        return False

    def _await_received(self, client: ClientSender | None, members: Sequence[FleetMember], root: str) -> None:
        """Wait until every worker has received all buckets. Fails the engines whose receivers the sender has lost."""
        failures = (client or self._connections.sender).failures
        for member in self._fleet.healthy(members) if failures else ():
            lost = [failures[peer] for peer in member.peers if peer in failures]
            # A receiver that aborted by itself (UpdateAbortedError): its worker reports the reason over its link.
            lost = [error for error in lost if isinstance(error, PeerError) or client is not None]
            if lost:
                if isinstance(lost[0], PeerDiedError):
                    # A worker that has lost another origin's link reports that on this one, maybe a little later.
                    for link in member.links:
                        with contextlib.suppress(WeightcastError):
                            link.wait(Failed, member.version, Deadline(GRACE_SECONDS))
                member.fail(lost[0])
        if client is None:
            num_buckets, deadline = len(self._manifest.buckets), Deadline(self.options.deadline_seconds)
            self._fleet.each(FleetMember.received, members, num_buckets, root, deadline, in_turn=True)

    def _done_bytes(self, index: int) -> tuple[int, int]:
        """Return the bytes of all origins that are about sent with this rank's bucket `index`, and all bytes."""
        sizes, num_own = self._manifest.buckets, len(self._manifest.spans[0])
        return sum(sizes) * sum(sizes[: index + 1]) // sum(sizes[:num_own]), sum(sizes)

    def _fail_other_routes(self) -> None:
        """For a source that streams its tensors, which is packed once, fail the engines of all routes but the first."""
        members = self._fleet.healthy()
        routes = [member.sender for member in members]
        first = None if None in routes else next(iter(routes), None)
        for member in members:
            if member.sender is not first:
                found = "by its server's own routes" if first is None else "by routes of another kind"
                member.fail(
                    UnsupportedError(
                        f"{member.name} takes weights {found}, unlike the other engines, but a source that streams its "
                        "tensors can be sent only once: publish to it from another publisher, or from a source with "
                        "regions()"
                    )
                )

    def _fail_brought_routes(self) -> None:
        """Fail the engines of clients' senders, which need all buckets on one rank."""
        for member in self._fleet.healthy():
            if member.sender is not None:
                member.fail(
                    UnsupportedError(
                        f"{member.name} takes weights by its server's own routes, from the publishing rank, but other "
                        "trainer ranks can't pack into that rank's memory (another host, container, user or GPU): "
                        "install weightcast's plugin in that server, or publish to it from ranks of one host, over "
                        "gloo://"
                    )
                )

    # --- a version that is published again ---

    def _pack_again(
        self, again: PublishedVersion, index: int, buffer: BucketBuffer, version: WeightVersion, fill: Fill
    ) -> int:
        """Have `buffer` contain bucket `index` of the version: still staged there, or packed again.

        Returns the number of bytes to send; 0 if the source's weights have changed.
        """
        manifest, expected = self._manifest, as_bytes(again.digests[index])
        with contextlib.suppress(IntegrityError):
            header = check_bucket(buffer, manifest.buckets[index], version, index)
            # With several origins every rank packs in every round, so this bucket is packed again, too.
            if header.digest == expected and not manifest.origins:
                return HEADER_BYTES + header.encoded_bytes
        num_bytes, digest = pack(fill, manifest, version, index, buffer)
        return num_bytes if as_bytes(digest) == expected else 0

    def _fail_unstaged(self, members: Sequence[FleetMember]) -> None:
        """Fail engines that install bucket by bucket: part of a changed version could be installed."""
        for member in self._fleet.healthy(members) if self._again is not None else ():
            member.fail(
                UnsupportedError(
                    f"{member.name} installs weights bucket by bucket, so the source's weights can't be compared with "
                    f"version {self.number} before the engine is changed: publish a new version"
                )
            )

    def _fail_changed(self, members: Sequence[FleetMember], sender: Sender | None = None) -> None:
        for member in self._fleet.healthy(members):
            member.fail(
                UpdateAbortedError(
                    f"the source's weights have changed since version {self.number}, which {member.name} was to "
                    "install; it keeps its version: publish a new version"
                )
            )
        if sender is not None:
            sender.abort(f"the weights have changed since version {self.number}")

    def _give_up(self, exc: BaseException) -> None:
        """Abort the update on every engine, after the publish itself has failed. A Ctrl-C does not wait for replies."""
        reason = f"{type(exc).__name__}: {exc}"[:4000]
        with contextlib.ExitStack() as stack:
            # All of these, also after one has raised. `wait` comes last: a call that is still running may pause.
            stack.callback(self._fleet.wait)
            if isinstance(exc, Exception):
                stack.callback(self._abort, self._fleet.members, reason)
            else:
                for member in self._fleet.members:
                    stack.callback(self._connections.listener.end_links, reason, member.name)
            for sender in (*self._connections.client_senders, self._connections.sender):
                stack.callback(sender.abort, reason)

    def _abort(self, members: Iterable[FleetMember], reason: str) -> None:
        """Abort the update on these engines, as far as they can be reached."""
        abort = Abort(self.publisher_run, max(self.number, 0), reason, self._connections.listener.secret)
        joined = [member for member in members if member.is_joined]
        self._fleet.each(FleetMember.update, joined, abort, notes=False, also_done=True)
