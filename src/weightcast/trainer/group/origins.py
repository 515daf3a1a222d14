"""Origins: memory that buckets leave from, one for each trainer host, or on GPUs for each device of a host.

One rank leads each origin: its sender's buffers are what the ranks beside it pack into. The publishing rank leads
origin 0, and says what all do next. Invariants: every rank chooses the same origins; every peer is served by the sender
of every origin; in a round each origin sends its next bucket; where a sender has lost peers, the update is opened again
for the survivors on every origin; a sender that was made is kept, with the workers that are connected to it, as long as
the run lasts.
"""

from __future__ import annotations

import socket
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures

import msgspec
import torch

from weightcast import registry
from weightcast.errors import ErrorRecord, PeersLostError, WeightcastError, from_record, listed, to_record
from weightcast.format.bucket import RAW, BucketBuffer, Digest, as_bytes
from weightcast.format.manifest import Manifest, WeightVersion, encode
from weightcast.host import device as host_device
from weightcast.host.memory import host_identity
from weightcast.seams.transport import Origins, Sender
from weightcast.trainer.group.exchange import Instruction, RankStatus, TrainerRanks, in_round
from weightcast.trainer.group.gather import OriginPacker, SharedBuffers, mapped_again
from weightcast.trainer.packer import Shard, finish


class RankPlace(msgspec.Struct, frozen=True):
    """A rank to all: its host, and the GPU that its weights are on, or empty."""

    host: str
    device: str

    @classmethod
    def of(cls, device: torch.device) -> RankPlace:
        gpu = host_device.uuid_of(device) if device.type == "cuda" else ""
        return cls(host_identity(), gpu)


class Opening(msgspec.Struct, frozen=True):
    """The publishing rank to all: an update begins, or goes on, for these peers. `place`: see `Sender.share`."""

    version: int
    peers: tuple[str, ...]
    staged: bool
    place: str = ""


class Question(msgspec.Struct, frozen=True):
    """The publishing rank to those that lead other origins: what do you know, also of these peers?"""

    peers: tuple[str, ...]


class OriginReport(msgspec.Struct, frozen=True):
    """A rank that leads an origin to the publishing one: what its sender knows.

    `connected`: the peers that are. `failures`: by peer. `survivors`: those for whom an update that has lost peers can
    go on, else None. `digests`: of its buckets that were packed last, in hex.
    """

    connected: tuple[str, ...]
    failures: dict[str, ErrorRecord]
    survivors: tuple[str, ...] | None
    digests: str


def choose(places: Sequence[RankPlace], spread: Origins, num_origins: int) -> list[int]:
    """The group ranks that lead an origin, the publishing one first: the first rank of each host, or of each device
    of the publishing rank's host; at most `num_origins`.
    """
    leaders = {_where(places[0], spread): 0}
    if spread != "one":
        for group_rank, place in enumerate(places):
            if spread == "hosts" or place.host == places[0].host:
                leaders.setdefault(_where(place, spread), group_rank)
    return list(leaders.values())[:num_origins]


def homes(places: Sequence[RankPlace], spread: Origins, leaders: Sequence[int]) -> list[int | None]:
    """The origin beside each rank: that of its device, else of its host; None if there is none on its host."""
    beside: list[int | None] = []
    for place in places:
        near = [number for number, leader in enumerate(leaders) if places[leader].host == place.host]
        same = [number for number in near if _where(places[leaders[number]], spread) == _where(place, spread)]
        beside.append(next(iter((*same, *near)), None))
    return beside


def _where(place: RankPlace, spread: Origins) -> tuple[str, ...]:
    return (place.host, place.device) if spread == "devices" else (place.host,)


def own_url(url: str) -> str:
    """The URL of a sender on this host: the publishing rank's, with the address by which this host reaches that one.

    Its port is the same one, so that it is known which to let through. Raises OSError if that host has no address.
    """
    scheme, transport = registry.scheme(url), registry.transport(url)
    if transport.same_host or transport.joined_sender is not None:
        return url
    host, port = registry.host(url), urllib.parse.urlsplit(url).port or 0
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Of a datagram socket this sends nothing, and only looks the route up.
        probe.connect(address)
        own = probe.getsockname()[0]
    return f"{scheme}://[{own}]:{port}" if ":" in own else f"{scheme}://{own}:{port}"


class OriginSender:
    """Origin number `origin`, on the rank that leads it, which is not the publishing one.

    The sender's calls, which may wait for workers, are made in a thread of their own, one after the other; this rank
    takes part in every exchange meanwhile, and only says that it is busy. Peers that are lost are what the publishing
    rank asks for; what else goes wrong in the thread is brought to the next exchange, and so ends the publish on every
    rank.

    One thread calls it. Memory: the sender's slots or arena, stated there.
    """

    def __init__(
        self, ranks: TrainerRanks, sender: Sender, run: str, device: torch.device, deadline_seconds: float
    ) -> None:
        self.run = run
        self.device = device
        self.address = sender.address
        self._ranks = ranks
        self._sender = sender
        self._deadline_seconds = deadline_seconds
        self._pool = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightcast-origin")
        self._task: futures.Future[None] | None = None
        self._is_open = False
        self._version = WeightVersion(run, 0)
        self._lost: PeersLostError | None = None
        self._next = 0
        self._digests: dict[int, bytes] = {}
        self._buffer: BucketBuffer | None = None
        self._stream = host_device.stream(device)

    def use(self, manifest: Manifest, origin: int, packer: OriginPacker) -> None:
        """Send these buckets from now on, packed in this way."""
        self._manifest, self._origin, self._packer = manifest, origin, packer
        self._plan, self._span = manifest.of_origin(origin), manifest.spans[origin]
        self._digests.clear()

    def status(self) -> RankStatus:
        """What this rank brings to an exchange. Raises what went wrong in the update in progress."""
        if self._task is not None and not self._task.done():
            return RankStatus(is_busy=True)
        if self._task is not None and self._is_open:
            try:
                self._task.result()
            except PeersLostError as exc:
                self._lost, self._buffer = exc, None
        status = RankStatus()
        if self._buffer is not None:
            status = self._packer.status(self._span[self._next], self._buffer.payload)
        return status._replace(
            is_lost=self._lost is not None, num_failures=len(self._sender.failures), next_round=self._next
        )

    def open(self, opening: Opening) -> None:
        """Begin the update, or go on with it where this origin has not sent all of it yet."""
        version, lost = WeightVersion(self.run, opening.version), self._lost
        is_same = self._is_open and version == self._version
        if is_same and lost is None and self._next == len(self._span):
            return
        if lost is not None:
            # The sender may go on in other memory.
            self._packer.forget_views()
        self._is_open, self._lost, self._buffer = True, None, None
        self._version = version

        def open_sender() -> None:
            peers, is_staged = opening.peers, opening.staged
            if opening.place:
                self._sender.join(self._manifest, self._origin, opening.place)
            self._next = self._sender.open(self._plan, self._version, peers=peers, staged=is_staged)
            self._ready()

        self._begin(open_sender)

    def shared(self, statuses: Sequence[RankStatus]) -> SharedBuffers | None:
        """What the other ranks of this origin are to map, if it has a bucket in this round."""
        return self._packer.share(self._buffer.payload) if self._has_bucket(statuses) and self._buffer else None

    def pack(self, number: int, statuses: Sequence[RankStatus]) -> None:
        """Write this rank's part of the round's bucket; the next exchange raises what goes wrong. Raises PeerError."""
        if self._has_bucket(statuses):
            assert self._buffer is not None
            with host_device.beside(self._stream, self.device):
                self._packer.pack(self._span[number], self._buffer.payload, statuses)

    def send(self, number: int, statuses: Sequence[RankStatus], packed: Sequence[RankStatus]) -> None:
        """All ranks have packed the round's bucket, and brought `packed` since: send it."""
        if not self._has_bucket(statuses):
            return
        buffer, index = self._buffer, self._span[number]
        assert buffer is not None
        with host_device.on(self._stream):
            digest = self._packer.digest(index, buffer.payload, packed)
            num_bytes, digest = finish(digest, RAW, self._manifest, self._version, index, buffer)
            self._digests[number] = as_bytes(digest)
        self._next += 1
        self._buffer = None

        def send() -> None:
            self._sender.send(number, num_bytes)
            self._ready()

        self._begin(send)

    def _has_bucket(self, statuses: Sequence[RankStatus]) -> bool:
        return statuses[self._ranks.group_rank].offset_bytes >= 0

    def report(self, peers: Sequence[str]) -> None:
        """Tell the publishing rank what it asks for. Raises PeerError."""
        failures = {name: to_record(error) for name, error in self._sender.failures.items()}
        survivors = None if self._lost is None else tuple(self._lost.survivors)
        digests = b"".join(self._digests[number] for number in sorted(self._digests)).hex()
        connected = tuple(self._sender.connected(peers))
        self._ranks.send_message(OriginReport(connected, failures, survivors, digests), 0)

    def wait(self) -> None:
        """Wait until this rank is not busy, at most for a quarter of the deadline: the others wait meanwhile."""
        if self._task is not None:
            futures.wait([self._task], self._deadline_seconds / 4)

    def end(self) -> None:
        """The update has ended everywhere."""
        self._is_open, self._buffer = False, None

    def abort(self, reason: str) -> bool:
        """The publish has failed: end the update, after what is under way. False if none had begun."""
        was_open, self._is_open, self._buffer = self._is_open, False, None
        if was_open:
            self._begin(lambda: self._sender.abort(reason))
        return was_open

    def release(self) -> None:
        """As `Sender.release`, after what is under way."""
        self._buffer = None
        self._packer.forget_views()
        self._pool.submit(self._sender.release).result()

    def close(self) -> None:
        """Free everything; waits for what is under way."""
        self._pool.shutdown(wait=True)
        self._buffer = None
        self._sender.close()

    def _begin(self, call: Callable[[], None]) -> None:
        def run() -> None:
            with host_device.on(self._stream):
                call()

        self._task = self._pool.submit(run)

    def _ready(self) -> None:
        """Wait already for the place of the next bucket, while others are busy with theirs."""
        if self._next < len(self._span):
            self._buffer = self._sender.buffer(self._next)


class GroupPacker:
    """The publishing rank's `Fill`: has every rank pack its part of a round, and hears what other origins have."""

    def __init__(self, ranks: TrainerRanks, manifest: Manifest, leaders: Sequence[int], packer: OriginPacker) -> None:
        """`leaders`: of the origins, this rank first. `packer`: of origin 0."""
        self.reports: dict[int, OriginReport] = {}
        """Of the other ranks that lead an origin, when they were asked last."""
        self.next_rounds: dict[int, int] = {}
        """Of the same ranks: which round each goes on from."""
        self.packer = packer
        self._ranks = ranks
        self._manifest = manifest
        self._leaders = leaders[1:]

    @property
    def num_rounds(self) -> int:
        return max(map(len, self._manifest.spans), default=0)

    def fill(self, index: int, payload: torch.Tensor, version: WeightVersion) -> Digest:
        """Have all ranks pack round `index`, and this rank's bucket of it into `payload`; return that one's digest.

        Waits until every rank has packed its part, each wait at most for the deadline. Raises what any rank raised, on
        all of them, PeersLostError if another origin's sender has lost peers, and PeerError.
        """
        ranks, packer = self._ranks, self.packer
        ranks.version = version.number
        with ranks.uninterrupted():
            statuses = ranks.announce_when_idle(Instruction.BUCKET, index, status=packer.status(index, payload))
            self._require_peers(statuses)
            statuses = in_round(statuses, index)
            statuses = mapped_again(ranks, statuses, shared=packer.share(payload))
        packer.pack(index, payload, statuses)
        return packer.digest(index, payload, ranks.announce(Instruction.PACKED, index))

    def fill_others(self, rounds: range) -> None:
        """Rounds in which this rank has no bucket. Raises as `fill`."""
        for number in rounds:
            with self._ranks.uninterrupted():
                statuses = self._ranks.announce_when_idle(Instruction.BUCKET, number)
                self._require_peers(statuses)
                mapped_again(self._ranks, in_round(statuses, number))
            self._ranks.announce(Instruction.PACKED, number)

    def others(self) -> list[bytes]:
        """See `Fill.others`."""
        self.ask(())
        digests = b"".join(bytes.fromhex(report.digests) for report in self.reports.values())
        return [digests[at : at + 16] for at in range(0, len(digests), 16)]

    def ask(self, peers: Sequence[str]) -> None:
        """Have every other origin's rank say what its sender knows, and which of these peers are connected to it."""
        if self._leaders:
            self._ranks.announce_when_idle(Instruction.ASK, data=encode(Question(tuple(peers))))
            self.reports = {rank: self._ranks.receive_message(OriginReport, rank) for rank in self._leaders}

    def open(self, opening: Opening) -> None:
        """Have every other origin open an update, or go on with it; waits until all have. Raises as `fill`."""
        self.reports.clear()
        if self._leaders:
            self._ranks.version = opening.version
            self._ranks.announce_when_idle(Instruction.OPEN, data=encode(opening))

    def opened(self) -> None:
        """Wait until every other origin has. Raises as `fill`."""
        if self._leaders:
            statuses = self._ranks.announce_when_idle(Instruction.WAIT)
            self._require_peers(statuses)
            self.next_rounds = {rank: statuses[rank].next_round for rank in self._leaders}

    def rebind(self, shards: Sequence[Shard]) -> None:
        self.packer.rebind(shards)

    def forget_views(self) -> None:
        self.packer.forget_views()

    def close(self) -> None:
        self.packer.close()

    def _require_peers(self, statuses: Sequence[RankStatus]) -> None:
        """Raises PeersLostError if another origin's sender has lost peers; hears of others' failures."""
        known = {rank: len(report.failures) for rank, report in self.reports.items()}
        if any(statuses[rank].is_lost or statuses[rank].num_failures > known.get(rank, 0) for rank in self._leaders):
            self.ask(())
        if not any(statuses[rank].is_lost for rank in self._leaders):
            return
        of_each = [set(report.survivors) for report in self.reports.values() if report.survivors is not None]
        failures = {n: from_record(record).args[0] for r in self.reports.values() for n, record in r.failures.items()}
        lost = listed([f"{name}: {text}" for name, text in failures.items()]) or "nobody; its group broke"
        raise PeersLostError(f"another trainer rank's sender has lost {lost}", sorted(set.intersection(*of_each)))


class OriginsSender(Sender):
    """Implements `Sender` for all origins, on the publishing rank. `own` closes with it, others with their ranks."""

    def __init__(self, own: Sender) -> None:
        self.address = own.address
        self._own = own
        self._packer: GroupPacker | None = None
        self._num_buckets = 0
        self._num_sent = 0
        self._is_whole = False
        self._place = ""

    def use(self, packer: GroupPacker) -> None:
        """At the beginning of a publish: speak for the origins of this packer, whose ranks are connected."""
        self._packer, self._num_buckets, self._num_sent = packer, 0, 0

    @property
    def _group(self) -> GroupPacker:
        assert self._packer is not None
        return self._packer

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Of all origins. Of the others' as of the last round; once all were sent, as of now."""
        if self._is_whole:
            self._group.ask(())
        failures = dict(self._own.failures)
        for report in self._group.reports.values():
            failures |= {name: from_record(record) for name, record in report.failures.items()}
        return failures

    @property
    def memory_seconds(self) -> float:
        """Of the publishing rank's own."""
        return self._own.memory_seconds

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Begin an update on every origin, or go on with it. Raises what any of their ranks raises."""
        group, plan = self._group, manifest.of_origin(0)
        self._is_whole = False
        self._place = self._own.share(manifest, version)
        group.open(Opening(version.number, tuple(peers), staged, self._place))
        if not 0 < self._num_buckets == self._num_sent:
            # Else this origin has sent all, and another one has lost peers since.
            self._num_buckets = len(plan.buckets)
            self._num_sent = self._own.open(plan, version, peers=peers, staged=staged)
        group.opened()
        group.fill_others(range(min((self._num_sent, *group.next_rounds.values())), self._num_sent))
        if self._num_sent == self._num_buckets:
            self._send_others()
        return self._num_sent

    def buffer(self, index: int) -> BucketBuffer:
        """The publishing rank's own place for its bucket."""
        return self._own.buffer(index)

    def send(self, index: int, num_bytes: int) -> None:
        """Send the publishing rank's own bucket; with its last one, see to what other origins have still to send."""
        self._own.send(index, num_bytes)
        self._num_sent = index + 1
        if self._num_sent == self._num_buckets:
            self._send_others()

    def _send_others(self) -> None:
        group = self._group
        group.fill_others(range(max((self._num_buckets, *group.next_rounds.values())), group.num_rounds))
        group.opened()
        if self._place:
            self._own.seal(group.others())
        self._is_whole = True

    def connected(self, peers: Sequence[str]) -> list[str]:
        """Those that are connected to every origin."""
        self._group.ask(peers)
        found = self._own.connected(peers)
        return [name for name in found if all(name in report.connected for report in self._group.reports.values())]

    def newest_version(self) -> int:
        """That of the publishing rank's own, which alone decides what version is kept."""
        return self._own.newest_version()

    def commit(self) -> None:
        """Keep the version that all origins have sent."""
        self._own.commit()

    def abort(self, reason: str) -> None:
        """End the update here. The other origins end it when they learn how the publish ended."""
        self._is_whole = False
        self._own.abort(reason)

    def release(self) -> None:
        """Give back the memory of the publishing rank's own."""
        self._own.release()

    def close(self) -> None:
        """Free the publishing rank's own. Idempotent."""
        self._own.close()
