"""One publish: the steps of an update, over the whole fleet. Made for one version and used once.

Invariants: bytes are packed once for each route; an engine that fails is out of this update, and not waited for again;
every pause is lifted before `run` returns or raises, and whatever was begun on an engine is aborted there.
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
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from weightcast.errors import PeerDiedError, PeerError, PeersLostError
from weightcast.format.bucket import root_digest
from weightcast.format.manifest import MAX_VERSION, WeightVersion
from weightcast.format.messages import Abort, InitInfo, Offer, Seal
from weightcast.links.link import LinkListener
from weightcast.links.watchdog import Watchdog
from weightcast.seams.client import BringsSender, ClientSender, Fingerprint, SenderContext
from weightcast.seams.source import Regions
from weightcast.seams.transport import Sender, VersionedSender
from weightcast.trainer.fleet import Fleet, FleetMember
from weightcast.trainer.options import PublishOptions
from weightcast.trainer.packer import BucketPacker, PackPlan
from weightcast.trainer.report import PublishReport, StageSeconds

OnProgress = Callable[[int, int], None]
Fingerprints = dict[str, tuple[FleetMember, Fingerprint]]
_LAST_WORD_SECONDS = 1.0
"""For the word of a worker whose receiver has gone: it comes on another connection."""


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
            sender = (
                member.client.sender(self.client_senders, context) if isinstance(member.client, BringsSender) else None
            )
            member.sender = sender
            if sender is not None and sender not in self.client_senders:
                self.client_senders.append(sender)

    def close(self) -> None:
        self.listener.close()
        for sender in (self.sender, *self.client_senders):
            sender.close()


@dataclasses.dataclass(frozen=True, slots=True)
class PublishInputs:
    """What a publish is made of on the rank that publishes. `start`: when it began, by `time.perf_counter`."""

    start: float
    version: int | None
    regions: Regions
    connections: Connections
    pack_plan: PackPlan


class FleetRoute:
    """The engines of a fleet that take the same bytes: from the publisher's transport, or from a sender of clients'.

    One update: `pause` unless it is staged, the sender's calls for the `peers`, `receive`, `install`, `resume`.
    An engine's failure is noted at the engine.
    """

    def __init__(self, fleet: Fleet, sender: Sender, *, is_staged: bool, is_brought: bool) -> None:
        """`is_staged`: engines serve until the install. `is_brought`: the sender is one of clients'."""
        self.sender = sender
        self.is_staged = is_staged
        self.is_brought = is_brought
        self._fleet = fleet
        self._brought = sender if is_brought else None

    def healthy(self) -> list[FleetMember]:
        """The members without a failure that take what this sender sends."""
        return [member for member in self._fleet.healthy() if member.sender is self._brought]

    def pause(self) -> None:
        self._fleet.each(FleetMember.pause, self.healthy())

    @property
    def is_kept(self) -> bool:
        """Whether a version is sent for readers that come later too: not one that all engines have refused."""
        is_versioned = isinstance(self.sender, VersionedSender) and not self.is_brought
        return is_versioned and (not len(self._fleet) or bool(self._fleet.healthy()))

    def peers(self) -> list[str]:
        """What the sender calls those that are to take the version."""
        return [peer for member in self.healthy() for peer in self._peers(member)]

    def receive(self, num_buckets: int, root: str) -> None:
        """Wait until every worker has what was sent."""
        self._take_failures()
        if not self.is_brought:
            self._fleet.each(lambda member: member.received(num_buckets, root), self.healthy())
            self._take_failures()

    def install(self, fingerprints: Fingerprints | None) -> None:
        """Have the engines install, then compare what they say that they hold, unless `fingerprints` is None.

        `fingerprints`: what the first engine of each kind said; it grows. An engine of a brought sender stays paused.
        """
        members = self.healthy()
        self._fleet.each(functools.partial(FleetMember.install, resumes=not self.is_brought), members)
        if fingerprints is None:
            return
        found: dict[str, Fingerprint | None] = {}

        def ask(member: FleetMember) -> None:
            found[member.name] = member.client.fingerprint()

        self._fleet.each(ask, [member for member in members if member.result.error is None])
        for member in members:
            fingerprint = found.get(member.name)
            if fingerprint is None or member.result.error is not None:
                continue
            first, expected = fingerprints.setdefault(fingerprint.kind, (member, fingerprint))
            if fingerprint != expected:
                reason = f"it holds {fingerprint.value}, {first.name} holds {expected.value} at the same version"
                self._fleet.each(functools.partial(FleetMember.quarantine, reason=reason), [member])

    def resume(self) -> None:
        self._fleet.each(FleetMember.resume, [member for member in self._fleet if member.sender is self._brought])

    def _peers(self, member: FleetMember) -> list[str]:
        return [member.name] if self.is_brought else [link.peer for link in member.links]

    def _take_failures(self) -> None:
        """Sort the sender's failures, by peer, to the members.

        A receiver that left of its own accord (UpdateAbortedError) is left out: its worker says why over its link.
        """
        failures = self.sender.failures
        for member in self.healthy():
            lost = [failures[peer] for peer in self._peers(member) if peer in failures]
            lost = [error for error in lost if isinstance(error, PeerError) or self.is_brought]
            if lost:
                if isinstance(lost[0], PeerDiedError):
                    for link in member.links:
                        link.hear_out(member.version, _LAST_WORD_SECONDS)
                member.fail(lost[0])


class PublishRun:
    """One version's way to every engine of a fleet. `number` is the version's, once it is known."""

    def __init__(
        self,
        run: str,
        options: PublishOptions,
        fleet: Fleet,
        watchdog: Watchdog,
        *,
        above: int,
        on_progress: OnProgress | None,
    ) -> None:
        """`above`: the number of the publisher's last version."""
        self.number = -1
        self._run = run
        self._options = options
        self._fleet = fleet
        self._watchdog = watchdog
        self._above = above
        self._on_progress = on_progress
        self._seconds = StageSeconds()
        self._fingerprints: Fingerprints | None = None if options.verify is None else {}

    def run(self, inputs: PublishInputs) -> PublishReport:
        """Publish under the number of the inputs, by default one above the last and above every engine's version.

        Returns a report that names each engine's failure. Raises only what ends the update for everybody.
        """
        self._seconds.gather = time.perf_counter() - inputs.start
        self._connections, self._pack_plan = inputs.connections, inputs.pack_plan
        self._manifest = manifest = inputs.pack_plan.layout.manifest
        options, secret = self._options, inputs.connections.listener.secret
        packer = inputs.pack_plan.packer(inputs.regions)
        for member in self._fleet:
            member.begin(self._run, options.deadline_seconds, self._watchdog)
        try:
            with self._timed("offer"):
                self._join()
                sender = self._connections.sender
                kept = sender.newest_version() if isinstance(sender, VersionedSender) else -1
                newest = max((kept, *(member.newest_version for member in self._fleet)))
                self.number = _above(newest, self._above) if inputs.version is None else inputs.version
                route = FleetRoute(self._fleet, sender, is_staged=options.install == "staged", is_brought=False)
                if not route.is_staged:
                    route.pause()
                offer = Offer(
                    self._run,
                    self.number,
                    self._pack_plan.manifest_digest,
                    manifest,
                    install=options.install,
                    undo=options.undo,
                    secret=secret,
                )
                self._fleet.each(lambda member: member.offer(offer))
            root = self._send(route, packer)
            with self._timed("seal"):
                seal = Seal(self._run, self.number, len(manifest.buckets), root, secret)
                self._fleet.each(lambda member: member.client.update(seal))
            route.install(self._fingerprints)
            for client_sender in self._connections.client_senders:
                brought = FleetRoute(self._fleet, client_sender, is_staged=client_sender.is_staged, is_brought=True)
                try:
                    if not brought.is_staged:
                        brought.pause()
                    self._send(brought, packer)
                    brought.install(self._fingerprints)
                finally:
                    brought.resume()
            if isinstance(sender, VersionedSender):
                with self._timed("seal"):
                    if not len(self._fleet) or any(member.result.ok for member in self._fleet):
                        sender.commit()
                    else:
                        sender.abort(f"no engine has installed version {self.number}")
        except BaseException as exc:
            self._give_up(exc)
            raise
        finally:
            self._fleet.each(FleetMember.resume, list(self._fleet))
        # Engines that failed on our side, and may be alive, drop what they hold.
        failed = [member for member in self._fleet if member.result.error is not None]
        self._abort(failed, "this engine's update failed at the publisher")
        self._seconds.pause = max((m.result.pause_seconds for m in self._fleet), default=0.0)
        self._seconds.total = time.perf_counter() - inputs.start
        return PublishReport(
            run=self._run,
            version=self.number,
            num_bytes=self._pack_plan.num_bytes,
            num_tensors=len(manifest.tensors),
            num_buckets=len(manifest.buckets),
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
        """Connect each member that has no link, or whose workers' receivers are not all connected to the sender."""
        sender, listener = self._connections.sender, self._connections.listener
        newcomers = []
        for member in self._fleet:
            peers = [link.peer for link in member.links]
            if not member.is_joined or len(sender.connected(peers)) != len(peers):
                newcomers.append(member)
        self._fleet.each(lambda member: member.ask(listener), newcomers)
        self._fleet.refuse_doubles(newcomers)
        self._fleet.each(self._join_member, [member for member in newcomers if member.result.error is None])
        for member in self._fleet:
            for link in member.links:
                link.forget()

    def _join_member(self, member: FleetMember) -> None:
        options, connections = self._options, self._connections
        address, listener = connections.sender.address, connections.listener
        info = InitInfo(
            run=self._run,
            engine=member.name,
            transport=address,
            link=listener.address,
            secret=listener.secret,
            lease_seconds=options.lease_seconds,
            takeover=options.takeover,
            deadline_seconds=options.deadline_seconds,
            publisher=f"pid {os.getpid()} on {socket.gethostname()}"[:4096],
        )
        member.join(listener, info)
        connections.add_client_sender(
            member, SenderContext(address, self._run, connections.device, options.deadline_seconds, self._watchdog)
        )

    def _send(self, route: FleetRoute, packer: BucketPacker) -> str:
        """Pack and send every bucket, and wait until every engine has them; where peers are lost, the others go on.

        Returns the root digest; empty if no engine takes the version, or for a sender of clients'.
        """
        num_buckets, peers, is_kept = len(self._manifest.buckets), route.peers(), route.is_kept
        if not peers and not is_kept:
            return ""
        digests: list[bytes | torch.Tensor] = [b""] * num_buckets
        with self._connections.packing_stream():
            while peers or is_kept:
                try:
                    self._send_buckets(route, peers, packer, digests)
                    break
                except PeersLostError as exc:
                    peers = list(exc.survivors)
        with self._timed("send"):
            # Only our own workers say what they have: for others, nothing waits for the digests of a GPU.
            root = "" if route.is_brought else root_digest(self._pack_plan.manifest_digest, digests)
            route.receive(num_buckets, root)
        return root

    def _send_buckets(
        self, route: FleetRoute, peers: Sequence[str], packer: BucketPacker, digests: list[bytes | torch.Tensor]
    ) -> None:
        """Open the update for these peers and send them every bucket, or until all are lost. Raises PeersLostError."""
        sender, version = route.sender, WeightVersion(self._run, self.number)
        ends = list(itertools.accumulate(self._manifest.buckets))
        with self._timed("send"):
            first = sender.open(self._manifest, version, peers=peers, staged=route.is_staged)
        for index in range(first, len(digests)):
            with self._timed("send"):
                buffer = sender.buffer(index)
            with self._timed("pack"):
                digests[index] = packer.pack(index, buffer, version)
            with self._timed("send"):
                sender.send(index)
            if self._on_progress is not None:
                self._on_progress(ends[index], ends[-1])
            if peers and sender.failures.keys() >= set(peers):
                break

    def _give_up(self, exc: BaseException) -> None:
        """The publish itself failed: end the update everywhere. A Ctrl-C does not wait for answers."""
        reason = f"{type(exc).__name__}: {exc}"[:4000]
        for sender in (self._connections.sender, *self._connections.client_senders):
            sender.abort(reason)
        if isinstance(exc, Exception):
            self._abort(self._fleet, reason)
        else:
            for member in self._fleet:
                self._connections.listener.drop(member.name, reason)

    def _abort(self, members: Iterable[FleetMember], reason: str) -> None:
        """Have these engines drop what they hold, as far as they can be reached."""
        abort = Abort(self._run, max(self.number, 0), reason, self._connections.listener.secret)
        joined = [member for member in members if member.is_joined]
        self._fleet.each(lambda member: member.client.update(abort), joined, notes=False)


def _above(newest: int, last: int) -> int:
    """The number after `last`, this run's, and `newest`, of whichever run, unless there can be none after that.

    Raises ValueError if this run has no number left.
    """
    if last >= MAX_VERSION:
        raise ValueError(
            f"no version number is left above {last}, this publisher's last one: make another publisher, whose run may "
            "begin at any number, and leave the numbers to it"
        )
    return 1 + max(last, newest if newest < MAX_VERSION else -1)
