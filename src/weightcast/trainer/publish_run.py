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
from typing import Protocol

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
from weightcast.format.manifest import MAX_VERSION, WeightVersion
from weightcast.format.messages import Abort, Failed, InitInfo, Offer, Seal
from weightcast.host import device as host_device
from weightcast.host.closing import on_failure
from weightcast.host.deadline import GRACE_SECONDS, Deadline, number_of_seconds
from weightcast.links.link import LinkListener
from weightcast.seams.client import BringsSender, ClientSender, SenderContext
from weightcast.seams.source import Regions
from weightcast.seams.transport import Sender
from weightcast.trainer.background import Flight
from weightcast.trainer.deltas import Deltas, OtherBases, PackedDeltas
from weightcast.trainer.engine_dtypes import EngineDtypes
from weightcast.trainer.finite import require_finite
from weightcast.trainer.fleet import Fleet, FleetMember
from weightcast.trainer.options import Phase, PublishEvent, PublishOptions
from weightcast.trainer.packer import Fill, Packer, PackPlan, held_shards, pack
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
        self.packing_stream: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """On a GPU, use a side stream that waits for the trainer's stream, so that packing overlaps with later work.

        At the end the trainer's stream waits for the side stream, so `optimizer.step()` writes only after packing.
        """
        if device.type == "cuda":
            self.packing_stream = functools.partial(host_device.beside, host_device.stream(device), device)
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


class AllOrigins(OtherBases, Fill, Sender, Protocol):
    """Several trainer ranks as one: fills and sends the buckets of all origins.

    A version is committed by the publishing rank's own sender, `Connections.sender`. `sent`: set if the ranks are to
    compute the digests of tensors, too; `others` adds those of the other origins.
    """

    sent: SentDigests | None

    def agree(self, inputs: PublishInputs) -> None:
        """Have all ranks agree on the plan, once the engines' replies are known, and check for NaN and infinity."""

    def packed(self) -> None:
        """Let the weights change on every rank: the source was read for the last time."""

    def others(self) -> Sequence[Digest]:
        """Return the digests of the other origins' buckets, once all were sent."""


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
    _encoded: PackedDeltas | None = None
    """The version as deltas, if it is sent to some engines as such."""
    _digests: Sequence[Digest] | None = None
    """Digests of all buckets, once they were sent."""
    _stage: str = ""
    """The stage that is being timed; empty for none."""
    _stage_began_at: float = 0.0
    _failed: set[str] = dataclasses.field(default_factory=set)
    """Names of the engines whose failure was passed to `on_event`."""

    def run(self, inputs: PublishInputs, origins: AllOrigins | None = None) -> PublishReport:
        """Publish under the number of the inputs, by default one above the last and above every engine's version.

        A version that is published again keeps its number. It is sent only if its buckets, still staged or packed again
        from the source, have the former digests. Engines that serve it already are skipped.

        `origins`: the trainer ranks, if several publish together.

        Returns a report with each engine's failure. Raises only errors that end the update for all engines.
        """
        if self.wait_ready_seconds != 0:
            number_of_seconds("wait_ready_seconds", self.wait_ready_seconds)
        if self.on_progress is not None and not callable(self.on_progress):
            raise TypeError(f"on_progress is {self.on_progress!r}; it must be a function (done_bytes, total_bytes)")
        self._stage, self._stage_began_at = "gather", inputs.start
        self._inputs, self._origins = inputs, origins
        self._connections, self._pack_plan = connections, plan = inputs.connections, inputs.pack_plan
        self._fleet, self._again = fleet, again = inputs.fleet, inputs.again
        self._sender = connections.sender if origins is None else origins
        is_stored = again is not None and again.is_stored
        memory_seconds = connections.sender.memory_seconds
        fleet.wait()
        for member in fleet.members:
            member.begin(inputs.target.name if inputs.target else "")
        try:
            self._begin_stage("offer")
            self._connect()
            self._choose_number()
            offer = self._new_offer()
            if self._encoded is not None:
                self._install(self._transfer(offer, self._encoded), ends=False)
                self._begin_stage("offer")
            self._install(self._transfer(offer))
            for client_sender in connections.client_senders:
                self._update_brought(client_sender)
            if connections.keeps_versions and not is_stored:
                self._begin_stage("seal")
                if not fleet.members or any(member.result.ok for member in fleet.members):
                    connections.sender.commit()
                    is_stored = True
                else:
                    connections.sender.abort(f"no engine has installed version {self.number}")
                self._begin_stage("")
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
        if self._digests is not None:
            digest = plan.manifest_digest
            self.published = PublishedVersion(self.number, digest, self._digests, is_stored, self._sent)
        self._seconds.pause = max((m.result.pause_seconds for m in fleet.members), default=0.0)
        self._seconds.memory = connections.sender.memory_seconds - memory_seconds
        self._seconds.total = time.perf_counter() - self.flight.began_at
        self._seconds.stall = self.flight.stall_seconds if self.flight.is_background else self._seconds.total
        return PublishReport(
            run=self.publisher_run,
            version=self.number,
            num_bytes=plan.num_bytes,
            num_tensors=len(self._manifest.tensors),
            num_buckets=len(self._manifest.buckets),
            install=self.options.install,
            seconds=self._seconds,
            engines={member.name: member.result for member in fleet.members},
            delta=None if inputs.deltas is None else inputs.deltas.report,
            directory_error=inputs.directory_error,
        )

    # --- before the offer ---

    def _connect(self) -> None:
        """Connect the engines that have to connect; plan the buckets for what the engines report.

        These are the engines without a link, and those with a receiver that is not connected to the sender. For a
        version that is published again, every engine that does not serve it connects again, so that late messages of
        the first attempt arrive over an ended link. Engines that are not up yet are asked until they are, or until
        `wait_ready_seconds` have passed.
        """
        inputs, fleet, plan, again = self._inputs, self._fleet, self._pack_plan, self._again
        if again is not None:
            fleet.each(FleetMember.notice, [m for m in fleet.members if m.is_joined], again.number)
        connected = set(self._sender.connected([link.peer for member in fleet.members for link in member.links]))
        newcomers = []
        for member in fleet.healthy():
            is_connected = member.is_joined and connected.issuperset([link.peer for link in member.links])
            if again is not None or not is_connected:
                newcomers.append(member)
        if newcomers:
            absent = newcomers
            for _ in Deadline(self.wait_ready_seconds).polls(0.05, 1.0):
                # This waits in the caller's thread, so that a Ctrl-C ends it at once.
                self.flight.require_wanted()
                fleet.each(FleetMember.ask, absent, self._connections.listener, also_done=True)
                was_asked, absent = absent, [member for member in absent if member.is_absent]
                if not absent:
                    break
                if was_asked is newcomers and self.wait_ready_seconds:
                    what, names = "waiting up to %g s for engines that do not answer yet: %s", [m.name for m in absent]
                    logger.info(what, self.wait_ready_seconds, ", ".join(names))
            fleet.refuse_doubles(newcomers)
        if inputs.engine_dtypes is not None:
            specs = inputs.engine_dtypes.ask(fleet, is_again=again is not None)
            if specs is not plan.specs:
                plan.cast(specs)
        if self._origins is not None:
            self._origins.agree(inputs)
        self._manifest, self._fill = plan.layout.manifest, plan.packer(inputs.regions)
        if isinstance(self._fill, Packer) and inputs.checks_finite and again is None:
            require_finite(plan.specs, held_shards(plan.specs, inputs.regions))
        fleet.each(self._join_member, newcomers)
        for member in fleet.members:
            for link in member.links:
                link.forget_verdicts()
        if isinstance(self._fill, StreamPacker):
            self._fail_other_routes()
        if self._manifest.origins:
            self._fail_brought_routes()

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

    def _choose_number(self) -> None:
        """Set the number of the version. Engines that serve it already are skipped from now on."""
        inputs, fleet, again = self._inputs, self._fleet, self._again
        if again is not None:
            self.number = number = again.number
            connected = fleet.healthy()
            fleet.each(FleetMember.notice, fleet.members, number)
            # An engine that was dropped after its install is not ready until it learns that this version is the last.
            root = root_digest(again.manifest_digest, again.digests)
            seal = Seal(self.publisher_run, number, len(again.digests), root, inputs.connections.listener.secret)
            serving = [m for m in connected if m.result.ok and m.links and inputs.target is UNSET]
            fleet.each(FleetMember.update, serving, seal, also_done=True)
            if again.manifest_digest != self._pack_plan.manifest_digest:
                self._fail_changed(fleet.members)
        elif inputs.version is not None:
            self.number = inputs.version
        else:
            if self.above >= MAX_VERSION:
                raise ValueError(
                    f"no version number is left above {self.above}, this publisher's last one: make another publisher,"
                    " and leave `version` out when you publish"
                )
            # Above the newest version of any run, unless that has the highest number.
            found = [member.serves for member in fleet.members if member.serves is not None]
            stored = inputs.connections.sender.newest_version() if inputs.connections.keeps_versions else None
            newest = max(found if stored is None else [*found, stored], default=-1)
            self.number = 1 + max(self.above, newest if newest < MAX_VERSION else -1)
        self.flight.version = self.number

    def _new_offer(self) -> Offer:
        """Make the version's deltas, if it is to be sent as such, too. Return the offer of the full version."""
        inputs, fleet, again, options = self._inputs, self._fleet, self._again, self.options
        if again is not None:
            self._sent = again.sent
        elif options.verify == "installed" and (self.proves_all or not all(m.has_proven for m in fleet.healthy())):
            self._sent = SentDigests(self._pack_plan.layout, inputs.regions)
        if self._origins is not None:
            self._origins.sent = self._sent if again is None else None
        if options.install == "streaming":
            fleet.each(FleetMember.pause, [member for member in fleet.members if member.sender is None])
        workers: dict[str, int] | UnsetType = UNSET
        if self._manifest.origins:
            workers = Counter(link.host for member in fleet.healthy() for link in member.links)
        keeps_base = False
        if inputs.deltas is not None:
            sent_again = None if again is None else again.number
            keeps_base = inputs.deltas.begin(self._pack_plan, self._origins, sent_again, inputs.revisions)
            if again is None:
                self._begin_stage("pack")
                with self._connections.packing_stream():
                    self._encoded = inputs.deltas.encode(
                        self._fill,
                        self._origins,
                        self._manifest,
                        WeightVersion(self.publisher_run, self.number),
                        [member.base for member in fleet.healthy()],
                        self._sent,
                        self.flight.require_wanted,
                    )
                if self._encoded is not None:
                    self._end_packing()
                self._begin_stage("offer")
        return Offer(
            self.publisher_run,
            self.number,
            self._pack_plan.manifest_digest,
            self._manifest.text,
            keeps_base=keeps_base,
            install=options.install,
            undo=options.undo,
            secret=inputs.connections.listener.secret,
            workers=workers,
            target=inputs.target,
        )

    # --- the update ---

    def _transfer(self, offer: Offer, encoded: PackedDeltas | None = None) -> list[FleetMember]:
        """Offer, send and seal the version to the engines of the publisher's transport: as these deltas to those that
        have the base or, without them, in full to those that remain. Returns these engines.

        Engines that turn out to lack the base connect again. The full version is offered and sealed to the engines of
        clients' senders, too.
        """
        fleet, deltas, is_full = self._fleet, self._inputs.deltas, encoded is None
        listener, memory_seconds = self._connections.listener, self._connections.sender.memory_seconds
        if encoded is not None:
            offer = msgspec.structs.replace(offer, base=encoded.base)
            for member in fleet.healthy():
                member.gets_deltas = member.sender is None and member.base == encoded.base.version
        offered = fleet.members if is_full else [member for member in fleet.members if member.gets_deltas]
        fleet.each(FleetMember.offer, offered, offer)
        deadline = Deadline(self.options.deadline_seconds)
        fleet.each(FleetMember.accepted, offered, offer.manifest_digest, deadline, in_turn=True)
        if encoded is not None:
            errors = [(member, member.result.error) for member in offered]
            lacking = [m for m, error in errors if error is not None and error.kind == WrongBaseError.__name__]
            for member in lacking:
                member.gets_deltas = False
            fleet.each(FleetMember.ask, lacking, listener, also_done=True)
            fleet.each(self._join_member, lacking)
        members = [member for member in offered if member.sender is None and member.gets_deltas is not is_full]
        self._tell("offered", members, ends=is_full)
        start = time.perf_counter()
        root = self._send(None, members, encoded)
        self._begin_stage("seal")
        if deltas is not None and encoded is not None:
            deltas.sent(time.perf_counter() - start, sum(member.result.error is None for member in members))
        elif deltas is not None and self._again is None and self._digests is not None:
            memory_seconds = self._connections.sender.memory_seconds - memory_seconds
            deltas.sent_full(self.number, self._digests, self._seconds.pack + self._seconds.send - memory_seconds)
        seal = Seal(self.publisher_run, self.number, len(self._manifest.buckets), root, listener.secret)
        fleet.each(FleetMember.update, offered if is_full else members, seal)
        self._tell("received", members, ends=is_full)
        self.flight.require_wanted(installs=True)
        return members

    def _send(self, client: ClientSender | None, members: Sequence[FleetMember], encoded: PackedDeltas | None) -> str:
        """Send these engines every bucket, with the sender of a client or, for None, the publisher's; wait until they
        have received all. Fails the engines whose receivers the sender has lost.

        `encoded`: the deltas, for engines that have their base. Returns the root digest; an empty string if no engine
        takes the version, or for a client's sender.
        """
        again, senders = self._again, self._connections.client_senders
        if again is not None and again.is_stored and client is None:
            # The store has the version already, and engines read it from there.
            self._begin_stage("send")
            root = root_digest(again.manifest_digest, again.digests)
        else:
            with self._connections.packing_stream():
                root = self._send_buckets(client, members, encoded)
            if self._encoded is None and client is (senders[-1] if senders else None):
                self._end_packing()
        failures = (client or self._sender).failures
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
        return root

    def _send_buckets(
        self, client: ClientSender | None, members: Sequence[FleetMember], encoded: PackedDeltas | None
    ) -> str:
        """Open the update for these engines and send them every bucket. After a loss, continue with the survivors.

        See `_send`.
        """
        self._begin_stage("send")
        fleet, sender, again = self._fleet, client or self._sender, self._again
        manifest = self._manifest if encoded is None else encoded.manifest
        num_own, version = len(manifest.spans[0]), WeightVersion(self.publisher_run, self.number)
        digests: list[Digest] = [b""] * len(manifest.buckets) if again is None else list(again.digests)
        is_staged = self.options.install == "staged" if client is None else client.is_staged
        peers = [peer for member in fleet.healthy(members) for peer in member.peers]
        # A transport that keeps the version for later readers gets it unless all engines have failed.
        is_kept = client is None and self._connections.keeps_versions and bool(fleet.healthy() or not fleet.members)
        while peers or is_kept:
            try:
                first = sender.open(manifest, version, peers=peers, staged=is_staged)
                for index in manifest.spans[0][first:]:
                    self.flight.require_wanted()
                    buffer = sender.buffer(index)
                    self._begin_stage("pack")
                    num_bytes, digests[index] = self._write(index, buffer, encoded)
                    self._begin_stage("send")
                    if not num_bytes:
                        self._fail_changed(members, sender)
                        return ""
                    sender.send(index, num_bytes)
                    if self.on_progress is not None:
                        # Of all origins, about as much is sent as of this one.
                        sizes = self._manifest.buckets
                        done_bytes = sum(sizes) * sum(sizes[: index + 1]) // sum(sizes[:num_own])
                        self.on_progress(done_bytes, sum(sizes))
                    if peers and sender.failures.keys() >= set(peers):
                        return ""
                break
            except PeersLostError as exc:
                peers = list(exc.survivors)
                self._fill.forget_views()  # the sender may use other memory
        else:
            return ""
        if self._origins is not None and num_own < len(digests):
            encoded = self._encoded
            digests[num_own:] = self._origins.others() if encoded is None else encoded.buckets.digests[num_own:]
            if again is not None and all_bytes(digests) != all_bytes(again.digests):
                self._fail_changed(members, sender)
                return ""
        self._digests = digests
        # Only weightcast's workers report a root digest; for others nothing waits for a GPU's digests.
        # This runs on the stream that computes them.
        return root_digest(self._pack_plan.manifest_digest, digests) if client is None else ""

    def _write(self, index: int, buffer: BucketBuffer, encoded: PackedDeltas | None) -> tuple[int, Digest]:
        """Have `buffer` contain bucket `index`: its delta, the one of the base, the one still staged, or pack it.

        Returns the number of bytes to send and the digest; 0 bytes if the source no longer has the version that is
        published again.
        """
        manifest, version, again = self._manifest, WeightVersion(self.publisher_run, self.number), self._again
        if self._encoded is not None:
            buckets = self._encoded.buckets
            payload = buckets.payloads[index] if encoded is None else encoded.payloads[index]
            return buckets.write(index, payload, buffer, version), buckets.digests[index]
        if again is None:
            base = None if self._inputs.deltas is None else self._inputs.deltas.base_to_fill
            return pack(self._fill, manifest, version, index, buffer, self._sent, base)
        expected = as_bytes(again.digests[index])
        with contextlib.suppress(IntegrityError):
            header = check_bucket(buffer, manifest.buckets[index], version, index)
            # With several origins every rank packs in every round, so this bucket is packed again, too.
            if header.digest == expected and not manifest.origins:
                return HEADER_BYTES + header.encoded_bytes, expected
        num_bytes, digest = pack(self._fill, manifest, version, index, buffer)
        return num_bytes if as_bytes(digest) == expected else 0, digest

    def _end_packing(self) -> None:
        """Let the weights change: the source was read for the last time."""
        if self._origins is not None:
            self._origins.packed()
        self.flight.packed()
        self._tell("packed", ())

    def _install(self, members: Sequence[FleetMember], *, resumes: bool = True, ends: bool = True) -> None:
        """Have the engines install, then compare their weights with the digests of what was sent, if there are any.

        Unless all are to be compared, only those that have not been since they connected. Without `resumes` they stay
        paused. `ends`: see `_tell`.
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
        self._tell("installed", members, ends=ends)

    def _update_brought(self, sender: ClientSender) -> None:
        """Update the engines of a client's sender, from the pause to the resume."""
        members = [member for member in self._fleet.members if member.sender is sender]
        try:
            if not sender.is_staged:
                # Without a stage, part of a changed version could be installed.
                for member in self._fleet.healthy(members) if self._again is not None else ():
                    member.fail(
                        UnsupportedError(
                            f"{member.name} installs weights bucket by bucket, so the source's weights can't be "
                            f"compared with version {self.number} before the engine is changed: publish a new version"
                        )
                    )
                self._fleet.each(FleetMember.pause, members)
            self._send(sender, members, None)
            self._tell("received", members)
            self._install(members, resumes=False)
        finally:
            self._fleet.each(FleetMember.resume, members, also_done=True)

    # --- progress ---

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

    # --- failures ---

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
            for sender in (*self._connections.client_senders, self._sender):
                stack.callback(sender.abort, reason)

    def _abort(self, members: Iterable[FleetMember], reason: str) -> None:
        """Abort the update on these engines, as far as they can be reached."""
        abort = Abort(self.publisher_run, max(self.number, 0), reason, self._connections.listener.secret)
        joined = [member for member in members if member.is_joined]
        self._fleet.each(FleetMember.update, joined, abort, notes=False, also_done=True)
