"""One publish: the steps of an update, over the whole fleet. Made for one version and used once.

Invariants: bytes are packed once; whoever fails is out of this update and nobody waits for it twice; every pause is
lifted before `run` returns or raises, and whatever was begun on an engine is aborted there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import torch

from weightcast.format.bucket import Layout, root_digest
from weightcast.format.manifest import MAX_VERSION, TensorSpec, WeightVersion
from weightcast.format.messages import Abort, InitInfo, InstallMode, Offer, Seal
from weightcast.links.link import LinkListener
from weightcast.links.watchdog import Watchdog
from weightcast.seams.client import ClientSender, Fingerprint, SenderContext
from weightcast.seams.source import Regions
from weightcast.seams.transport import Sender, VersionedSender
from weightcast.trainer.fleet import Fleet, FleetMember
from weightcast.trainer.group.assignment import SeenRegions, tiling
from weightcast.trainer.packer import Packer
from weightcast.trainer.report import PublishReport, StageSeconds

OnProgress = Callable[[int, int], None]
Verify = Literal["engines"]


@dataclasses.dataclass(frozen=True, slots=True)
class PublishOptions:
    """What a publisher and its engines agree on for every update of a run."""

    run: str
    install: InstallMode
    undo: bool
    takeover: bool
    deadline_seconds: float
    lease_seconds: float
    verify: Verify | None = None


class Connections:
    """What connects a publisher with its engines: with their workers, and what their clients bring besides."""

    def __init__(self, sender: Sender, listener: LinkListener, device: torch.device) -> None:
        self.sender = sender
        self.listener = listener
        self.device = device
        self.client_senders: list[ClientSender] = []
        self._senders_lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def packing_stream(self) -> Iterator[None]:
        """On a GPU: a side stream that starts where the trainer's is now, so that packing overlaps with its work."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def add_client_sender(self, member: FleetMember, context: SenderContext) -> None:
        """Have the member's client bring the sender that it needs, if it needs one."""
        with self._senders_lock:
            sender = member.make_sender(self.client_senders, context)
            if sender is not None and sender not in self.client_senders:
                self.client_senders.append(sender)

    def close(self) -> None:
        self.listener.close()
        for sender in (self.sender, *self.client_senders):
            sender.close()


class BucketPacker(Protocol):
    """Fills buckets: a Packer, or with several trainer ranks a GatheringPacker."""

    def pack(self, index: int, buffer: torch.Tensor, version: WeightVersion) -> bytes | torch.Tensor: ...


class PackPlan:
    """A layout and the packer for the source's present views."""

    def __init__(self, specs: Sequence[TensorSpec], layout: Layout, bucket_size_bytes: int) -> None:
        self.specs = specs
        self.layout = layout
        self.bucket_size_bytes = bucket_size_bytes
        self.manifest_digest = layout.manifest.digest()
        self.num_bytes = layout.manifest.num_bytes
        self._regions: SeenRegions | None = None
        self._packer: BucketPacker | None = None

    def is_of(self, regions: Regions) -> bool:
        """Whether the packer was made for these very views, with which the specs can't have changed either."""
        return self._regions is not None and self._regions.is_of(regions)

    def use(self, regions: Regions, packer: BucketPacker) -> None:
        """Have `packer` pack these regions, which other trainer ranks complete."""
        self._regions, self._packer = SeenRegions(regions), packer

    def packer(self, regions: Regions) -> BucketPacker:
        """Raises IncompatibleWeightsError unless the regions, equal ones counted once, tile every tensor."""
        if self._packer is None or self._regions is None or self._regions.regions is not regions:
            self._packer = Packer(self.layout, tiling(self.specs, regions))
            self._regions = SeenRegions(regions)
        return self._packer


@dataclasses.dataclass(frozen=True, slots=True)
class PublishInputs:
    """What a publish is made of on the rank that publishes. `start`: when it began, by `time.perf_counter`."""

    start: float
    version: int | None
    regions: Regions
    connections: Connections
    pack_plan: PackPlan


class PublishRun:
    """One version's way to every engine of a fleet. `number` is the version's, once it is known."""

    def __init__(
        self, options: PublishOptions, fleet: Fleet, watchdog: Watchdog, *, above: int, on_progress: OnProgress | None
    ) -> None:
        """`above`: the number of the publisher's last version."""
        self.number = -1
        self._options = options
        self._fleet = fleet
        self._watchdog = watchdog
        self._above = above
        self._on_progress = on_progress or _ignore
        self._seconds = StageSeconds()
        self._fingerprints: dict[str, tuple[FleetMember, Fingerprint]] = {}

    def run(self, inputs: PublishInputs) -> PublishReport:
        """Publish under the number of the inputs, by default one above the last and above every engine's version.

        Returns a report that names each engine's failure. Raises only what ends the update for everybody.
        """
        self._seconds.gather = time.perf_counter() - inputs.start
        self._connections, self._pack_plan = inputs.connections, inputs.pack_plan
        self._manifest = inputs.pack_plan.layout.manifest
        options, packer = self._options, inputs.pack_plan.packer(inputs.regions)
        for member in self._fleet:
            member.begin()
        try:
            with self._timed("offer"):
                self._join()
                sender = self._connections.sender
                kept = sender.newest_version() if isinstance(sender, VersionedSender) else -1
                newest = max((kept, *(member.newest_version for member in self._fleet)))
                self.number = _above(newest, self._above) if inputs.version is None else inputs.version
                self._offer()
            root = self._send(packer)
            with self._timed("seal"):
                num_buckets, secret = len(self._manifest.buckets), self._connections.listener.secret
                seal = Seal(options.run, self.number, num_buckets, root, secret)
                self._fleet.each(lambda member: member.client.update(seal))
            installed = self._healthy_of(None)
            self._fleet.each(self._install(resumes=True), installed)
            self._verify(installed)
            for client_sender in self._connections.client_senders:
                self._publish_by_client_sender(client_sender, packer)
            with self._timed("seal"):
                self._commit(sender)
        except BaseException as exc:
            self._give_up(exc)
            raise
        finally:
            self._fleet.each(self._resume, list(self._fleet))
        # Engines that failed on our side, and may be alive, drop what they hold. Best effort.
        abort = self._abort("this engine's update failed at the publisher")
        for member in self._fleet:
            if member.result.error is not None and member.is_joined:
                with contextlib.suppress(Exception):
                    member.client.update(abort)
        self._seconds.pause = max((m.result.pause_seconds for m in self._fleet), default=0.0)
        self._seconds.total = time.perf_counter() - inputs.start
        return PublishReport(
            run=options.run,
            version=self.number,
            num_bytes=self._pack_plan.num_bytes,
            num_tensors=len(self._manifest.tensors),
            num_buckets=len(self._manifest.buckets),
            install=options.install,
            seconds=self._seconds,
            engines={member.name: member.result for member in self._fleet},
        )

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self._seconds, stage, getattr(self._seconds, stage) + time.perf_counter() - start)

    def _join(self) -> None:
        """Connect whoever has no link, or is lost to the sender."""
        newcomers = [member for member in self._fleet if not (member.is_joined and self._is_attended(member))]
        self._fleet.each(lambda member: member.ask(self._connections.listener), newcomers)
        self._fleet.refuse_doubles(newcomers)
        self._fleet.each(self._join_member, [member for member in newcomers if member.result.error is None])
        for member in self._fleet:
            for link in member.links:
                link.forget()

    def _is_attended(self, member: FleetMember) -> bool:
        """Whether all its workers' receivers are connected, as far as the sender can say."""
        sender, peers = self._connections.sender, [link.peer for link in member.links]
        return len(sender.connected(peers)) == len(peers)

    def _join_member(self, member: FleetMember) -> None:
        options, listener = self._options, self._connections.listener
        info = InitInfo(
            run=options.run,
            engine=member.name,
            transport=self._connections.sender.address,
            link=listener.address,
            secret=listener.secret,
            lease_seconds=options.lease_seconds,
            takeover=options.takeover,
            deadline_seconds=options.deadline_seconds,
            publisher=f"pid {os.getpid()} on {socket.gethostname()}"[:4096],
        )
        member.join(listener, info, options.deadline_seconds)
        address, device = self._connections.sender.address, self._connections.device
        self._connections.add_client_sender(
            member, SenderContext(address, options.run, device, options.deadline_seconds, self._watchdog)
        )

    def _offer(self) -> None:
        options = self._options
        offer = Offer(
            options.run,
            self.number,
            self._pack_plan.manifest_digest,
            self._manifest,
            install=options.install,
            undo=options.undo,
            secret=self._connections.listener.secret,
        )
        if options.install == "streaming":
            self._fleet.each(self._pause, self._healthy_of(None))
        self._fleet.each(lambda member: member.offer(offer, options.deadline_seconds))

    @property
    def _pause(self) -> Callable[[FleetMember], None]:
        return functools.partial(FleetMember.pause, run=self._options.run, watchdog=self._watchdog)

    @property
    def _resume(self) -> Callable[[FleetMember], None]:
        return functools.partial(FleetMember.resume, run=self._options.run, watchdog=self._watchdog)

    def _install(self, *, resumes: bool) -> Callable[[FleetMember], None]:
        return functools.partial(
            FleetMember.install,
            version=self.number,
            run=self._options.run,
            watchdog=self._watchdog,
            deadline_seconds=self._options.deadline_seconds,
            resumes=resumes,
        )

    def _send(self, packer: BucketPacker) -> str:
        """Pack and send every bucket, then wait until everyone has them; return the root digest."""
        sender, num_buckets = self._connections.sender, len(self._manifest.buckets)
        version = WeightVersion(self._options.run, self.number)
        members = self._healthy_of(None)
        peers = [link.peer for member in members for link in member.links]
        # Who keeps versions for later does not know who takes them; but what all engines refused is not kept.
        keeps = isinstance(sender, VersionedSender) and (not len(self._fleet) or bool(self._fleet.healthy()))
        if not peers and not keeps:
            return ""
        with self._timed("send"):
            sender.open(self._manifest, version, peers=peers, staged=self._options.install == "staged")
        digests = self._send_buckets(sender, packer, version, set() if keeps else set(peers))
        with self._timed("send"):
            self._fleet.take_failures(sender.failures)
            root, deadline = root_digest(self._pack_plan.manifest_digest, digests), self._options.deadline_seconds
            self._fleet.each(lambda member: member.received(self.number, num_buckets, root, deadline))
            self._fleet.take_failures(sender.failures)
        return root

    def _send_buckets(
        self, sender: Sender, packer: BucketPacker, version: WeightVersion, peers: set[str]
    ) -> list[bytes | torch.Tensor]:
        """Pack and send every bucket, or until all of `peers` are lost; return the digests."""
        num_buckets = len(self._manifest.buckets)
        digests: list[bytes | torch.Tensor] = [b""] * num_buckets
        index, ends = 0, list(itertools.accumulate(self._manifest.buckets, initial=0))
        with self._connections.packing_stream():
            while index < num_buckets:
                with self._timed("send"):
                    buffer = sender.buffer(index)
                with self._timed("pack"):
                    digests[index] = packer.pack(index, buffer, version)
                with self._timed("send"):
                    index = sender.send(index)
                self._on_progress(ends[index], ends[-1])
                if peers and sender.failures.keys() >= peers:
                    break
        return digests

    def _commit(self, sender: Sender) -> None:
        """Have a sender that keeps versions keep this one, if an engine has installed it, or there are none to."""
        if not isinstance(sender, VersionedSender):
            return
        if not len(self._fleet) or any(member.result.ok for member in self._fleet):
            sender.commit()
        else:
            sender.abort(f"no engine has installed version {self.number}")

    def _healthy_of(self, sender: Sender | None) -> list[FleetMember]:
        """The members without a failure that take what this sender brings; None: the publisher's transport."""
        return [member for member in self._fleet.healthy() if member.sender is sender]

    def _publish_by_client_sender(self, sender: ClientSender, packer: BucketPacker) -> None:
        """The whole update for the engines of a sender that their clients have brought."""
        is_staged = sender.is_staged
        try:
            if not is_staged:
                self._fleet.each(self._pause, self._healthy_of(sender))
            peers = [member.name for member in self._healthy_of(sender)]
            if peers:
                version = WeightVersion(self._options.run, self.number)
                with self._timed("send"):
                    sender.open(self._manifest, version, peers=peers, staged=is_staged)
                self._send_buckets(sender, packer, version, set(peers))
                self._fleet.take_failures_of(sender)
            # It stands still until it was compared with others.
            self._fleet.each(self._install(resumes=False), self._healthy_of(sender))
            self._verify(self._healthy_of(sender))
        finally:
            self._fleet.each(self._resume, [member for member in self._fleet if member.sender is sender])

    def _verify(self, members: Sequence[FleetMember]) -> None:
        """Compare what engines say that they hold with the first one of the same kind."""
        if self._options.verify is None:
            return
        found: dict[str, Fingerprint | None] = {}

        def ask(member: FleetMember) -> None:
            found[member.name] = member.client.fingerprint()

        self._fleet.each(ask, [member for member in members if member.result.error is None])
        for member in members:
            fingerprint = found.get(member.name)
            if fingerprint is None or member.result.error is not None:
                continue
            first, expected = self._fingerprints.setdefault(fingerprint.kind, (member, fingerprint))
            if fingerprint != expected:
                reason = f"it holds {fingerprint.value}, {first.name} holds {expected.value} at the same version"
                self._fleet.each(functools.partial(FleetMember.quarantine, reason=reason), [member])

    def _abort(self, reason: str) -> Abort:
        return Abort(self._options.run, max(self.number, 0), reason, self._connections.listener.secret)

    def _give_up(self, exc: BaseException) -> None:
        """The publish itself failed: end the update everywhere. A Ctrl-C does not wait for answers."""
        reason = f"{type(exc).__name__}: {exc}"[:4000]
        for sender in (self._connections.sender, *self._connections.client_senders):
            sender.abort(reason)
        if not isinstance(exc, Exception):
            for member in self._fleet:
                self._connections.listener.drop(member.name, reason)
            return
        abort = self._abort(reason)
        for member in self._fleet:
            if member.is_joined:
                with contextlib.suppress(Exception):
                    member.client.update(abort)


def _above(newest: int, last: int) -> int:
    """The number after `last`, this run's, and `newest`, of whichever run, unless there can be none after that.

    Raises ValueError if this run has no number left.
    """
    if last >= MAX_VERSION:
        raise ValueError(
            f"no version number is left above {last}, this publisher's last one: make another publisher, whose run may "
            "begin anew, and leave the numbers to it"
        )
    return 1 + max(last, newest if newest < MAX_VERSION else -1)


def _ignore(done_bytes: int, total_bytes: int) -> None:
    """Nobody watches the progress."""
