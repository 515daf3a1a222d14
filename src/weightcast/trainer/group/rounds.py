"""Several trainer ranks as one publisher: the publishing rank leads, the others follow, all end alike.

In round k each origin sends its bucket k. All ranks pack their parts of it (`Pack`); once all have reported that
(`Packed`), the leader of each origin digests its bucket and sends it: the publishing rank when its publish run calls
`send`, another rank in a background thread. A rank whose sender still waits for workers reports that it is busy, and no
round begins while a rank is busy. If a sender has lost peers, the update begins again for the survivors at round 0, on
every origin except those that have sent all of it. To send deltas, the rounds come first (`Encode`): each leader
compares its bucket with its base. It sends its deltas, and all of it to engines that lack the base, without rounds.

Invariants: an error on any rank, or on the publishing rank's engines, ends the publish on every rank; the publishing
rank is never silent for longer than a deadline; after every publish the ranks are either ready for the next exchange or
disconnected, and then they join again; a sender is kept, with its connected workers, for the whole run.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import torch

from weightcast import registry
from weightcast.engines.gate import require_no_step
from weightcast.errors import (
    InsufficientMemoryError,
    PeersLostError,
    PublishReport,
    WeightcastError,
    from_record,
    listed,
    to_record,
)
from weightcast.format.bucket import BucketBuffer, Digest, as_bytes
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import device as host_device
from weightcast.links.link import LinkListener
from weightcast.seams.source import Source
from weightcast.seams.transport import Sender
from weightcast.trainer.background import Turn
from weightcast.trainer.deltas import EncodedBuckets, OriginBase, scratch_of
from weightcast.trainer.group import records
from weightcast.trainer.group.group import is_any_busy
from weightcast.trainer.group.rank import Rank
from weightcast.trainer.packer import finish
from weightcast.trainer.publish_run import AllOrigins, PublishInputs, PublishRun, connect
from weightcast.trainer.sent_digests import SentDigests


class PublishingRank(Rank, AllOrigins):
    """Group rank 0. For the publish run it stands for all ranks, as one `Fill` and one `Sender` of all origins.

    The sender of this rank's own origin is the publisher's (`Connections.sender`); the other ranks own theirs.
    """

    _sender: Sender

    def __init__(self, trainer_group: Any, source: Source, deadline_seconds: float) -> None:
        super().__init__(trainer_group, source, deadline_seconds)
        self.sent: SentDigests | None = None
        self._settings: records.Settings | None = None
        self._others: Sequence[int] = ()
        """The group ranks that lead the other origins."""
        self._other_digests: Sequence[bytes] = ()
        """Digests of the other origins' buckets, once all were sent or encoded."""
        self._statuses: list[records.RankStatus] = []
        """The latest statuses of the other leaders in this update."""
        self._is_own_sent = False
        self._sends: records.Content = "weights"
        self._keeps_base = False
        self._has_encoded = False

    def publish(
        self, run: str, version: int, inputs: Callable[[], PublishInputs], publish_run: PublishRun
    ) -> PublishReport:
        """Publish from all ranks. `run`: this publisher's. `version`: its last one. `inputs`: of this rank only."""
        group = self.group
        self.run, group.version = run, version
        prepared: PublishInputs | None = None
        report: PublishReport | None = None
        with group.error_at_next_exchange():
            prepared = inputs()
            self._read_regions(prepared.regions)
        with self._in_step():
            started = self._start(is_changed=prepared is None or not self._is_agreed(prepared))
            assert prepared is not None, "an exchange with an error raises"
            # Another rank may have lost the group, and with it the agreement, when this rank has not.
            self._has_agreed = not any(start.is_changed for start in started)
            self._complete(started)
            self._agree_on(prepared)
            with group.error_at_next_exchange(), group.keeping_alive():
                self._is_instructing = True
                try:
                    report = publish_run.run(prepared, self)
                finally:
                    group.version = max(version, publish_run.number)
                    with group.uninterrupted():
                        self._is_instructing = False
            interrupt = None if isinstance(group.error, Exception) else group.error
            try:
                group.exchange(records.Nothing() if report is None else records.End(report))
            finally:
                if interrupt is not None:
                    raise interrupt
            assert report is not None, "an exchange with an error raises"
            return report

    # --- as `AllOrigins` ---

    def agree(self, inputs: PublishInputs) -> None:
        """Agree again if the engines' replies have changed the settings (dtypes, kind of server). Check for NaN."""
        self._agree_on(inputs)
        if inputs.checks_finite and inputs.again is None:
            with self.group.uninterrupted():
                self.group.exchange_when_idle(records.Check())
                self._check_finite()
                self.group.exchange(records.Nothing())

    def packed(self) -> None:
        self.group.exchange_when_idle(records.AllPacked())

    def others(self) -> Sequence[bytes]:
        return self._other_digests

    def _settings_of(self, inputs: PublishInputs) -> records.Settings:
        listener = inputs.connections.listener
        return records.Settings(
            self.run,
            inputs.connections.url,
            listener.secret,
            listener.lease_seconds,
            inputs.pack_plan.bucket_size_bytes,
            inputs.maps_buckets(),
            {} if inputs.engine_dtypes is None else dict(inputs.engine_dtypes.by_name),
        )

    def _is_agreed(self, inputs: PublishInputs) -> bool:
        """Return whether all ranks have agreed on these settings and this plan."""
        is_same = self._assignment.layout is inputs.pack_plan.layout and self._settings_of(inputs) == self._settings
        return self._has_agreed and is_same

    def _agree_on(self, inputs: PublishInputs) -> None:
        """Have all ranks agree on the present settings, unless they have; give the publish run the agreed plan."""
        plan, connections, group = inputs.pack_plan, inputs.connections, self.group
        if not self._is_agreed(inputs):
            settings = self._settings_of(inputs)
            with group.uninterrupted():
                group.exchange_when_idle(settings)
                agreed = self._agree(settings)
                self._others = self._assignment.leaders[1:]
            connections.origins = tuple(agreed[rank].address for rank in self._others if agreed[rank].address)
            plan.lay_out(self._assignment.layout)
            self._settings = settings
        plan.use(inputs.regions, self)
        self._sender, self._sends, self._is_own_sent = connections.sender, "weights", False
        self._keeps_base = self._has_encoded = False

    # --- as a `Fill` ---

    def fill(self, index: int, payload: torch.Tensor, version: WeightVersion) -> Digest:
        """Have all ranks pack round `index`, this rank's bucket into `payload`; return the digest of this rank's
        bucket.

        Waits until every rank has packed its part; each wait ends by the deadline. Raises, on all ranks, the error of
        any rank; PeersLostError if another origin's sender has lost peers; PeerError if a rank is lost.
        """
        self.group.version = version.number
        bucket = self._next_bucket(payload)
        self._instruct(records.Pack(index, bucket, proves=self.sent is not None))
        self._pack(bucket, index, payload)
        return self._digest_of(index, payload, self.group.exchange(records.Packed()))

    def _run_rounds(self, first: int) -> None:
        """Run the rounds from `first` on, in which this rank has no bucket. Raises what `fill` raises."""
        for number in range(first, max(map(len, self._assignment.layout.manifest.spans))):
            self._instruct(records.Pack(number, proves=self.sent is not None))
            self.group.exchange(records.Packed())

    # --- as `OtherBases` ---

    def keep_bases(self) -> set[int]:
        reports = self._ask(keeps_base=True)
        for rank, report in zip(self._others, reports, strict=True):
            if report.problem:
                raise InsufficientMemoryError(f"trainer rank {self.group.ranks[rank]}: {report.problem}")
        self._keeps_base = bool(reports)
        return {report.base for report in reports}

    def begin_encoding(self, version: WeightVersion) -> None:
        self.group.version = version.number
        if self._others:
            self.group.exchange_when_idle(records.Encode())

    def encoded(self) -> EncodedBuckets:
        self._run_rounds(len(self._span))
        reports = self._ask()
        self._has_encoded = True
        sizes = [size for report in reports for size in report.encoded_bytes]
        return EncodedBuckets(sizes, self._other_digests, sum(report.num_changed for report in reports))

    # --- as a `Sender` ---

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Failures of all origins' senders, those of other ranks as of their latest statuses."""
        found = [item for status in self._statuses for item in status.failures.items()]
        return {**self._sender.failures, **{name: from_record(record) for name, record in found}}

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Open the update on every origin; after a loss of peers, on every origin that has not sent all of it.

        Raises the error of any rank.
        """
        self.group.version = version.number
        sends: records.Content = "weights"
        if self._has_encoded:
            sends = "base" if manifest.names else "deltas"
        if sends != self._sends:
            self._sends, self._is_own_sent = sends, False
        self._statuses = []
        join_at = self._sender.begin_together(manifest, version)
        if self._others:
            opening = records.Open(tuple(peers), staged, join_at, sends, self._keeps_base)
            self.group.exchange_when_idle(opening)
        if not self._is_own_sent:
            self._sender.open(manifest.of_origin(0), version, peers=peers, staged=staged)
        if sends == "weights" and self._others:
            self._instruct(records.Nothing())
        if self._is_own_sent or not self._span:
            self._send_others(first=0)
        return len(self._span) if self._is_own_sent else 0

    def buffer(self, index: int) -> BucketBuffer:
        """Return the buffer of this rank's own sender for its bucket `index`."""
        return self._sender.buffer(index)

    def send(self, index: int, num_bytes: int) -> None:
        """Send this rank's bucket; after its last one, run the remaining rounds of the other origins."""
        self._sender.send(index, num_bytes)
        if index == self._span[-1]:
            self._is_own_sent = True
            self._send_others(first=index + 1)

    def _send_others(self, first: int) -> None:
        """Run the remaining rounds, if there are any, and wait until all is sent. Raises what `fill` raises."""
        if self._sends == "weights":
            self._run_rounds(first)
        if self._others:
            self._instruct(records.Nothing())
        if self._sends == "weights":
            self._ask()
            self._sender.seal(self._other_digests)

    def connected(self, peers: Sequence[str]) -> list[str]:
        """Return those of these peers that are connected to every origin's sender."""
        found = [self._sender.connected(peers), *(report.connected for report in self._ask(peers))]
        return [name for name in peers if all(name in each for each in found)]

    def abort(self, reason: str) -> None:
        """Abort the update on this rank's sender. The other origins abort it when the publish ends with an error."""
        self._sender.abort(reason)

    def _instruct(self, instruction: records.Record) -> None:
        """Give an instruction once every other origin has opened the update or sent its buckets.

        Notes the failures of their senders. Raises PeersLostError if one has lost peers.
        """
        statuses = self.group.exchange_when_idle(instruction)
        self._statuses = [statuses[rank] for rank in self._others]
        of_each = [set(status.survivors) for status in self._statuses if status.survivors is not None]
        if of_each:
            lost = listed([f"{name}: {error}" for name, error in self.failures.items()])
            found = f"lost {lost}" if lost else "lost its broadcast group, with no peer at fault"
            raise PeersLostError(f"another trainer rank's sender has {found}", sorted(set.intersection(*of_each)))

    def _ask(self, peers: Sequence[str] = (), *, keeps_base: bool = False) -> list[records.OriginReport]:
        """Return the reports of the leaders of the other origins on these peers; see `AskSenders`."""
        reports: list[records.OriginReport] = []
        if self._others:
            with self.group.uninterrupted():
                statuses = self.group.exchange_when_idle(records.AskSenders(tuple(peers), keeps_base))
                answers = self.group.exchange(records.Nothing())
            self._statuses, reports = ([each[rank] for rank in self._others] for each in (statuses, answers))
        self._other_digests = [bytes.fromhex(digest) for report in reports for digest in report.digests]
        for report in reports:
            if self.sent is not None:
                self.sent.by_bucket |= report.sent
        return reports


class FollowingRank(Rank):
    """A rank other than the publishing one. It carries out the publishing rank's instructions.

    If it leads an origin, it has a sender, whose calls may wait for workers. They are made in a background thread, one
    after another; meanwhile this rank takes part in every exchange and reports that it is busy. The publishing rank
    asks for lost peers; the next exchange raises any other error of the thread.

    Memory: that of the sender (see the transport), if it has one; a base of its origin's buckets, if deltas are sent.
    """

    def __init__(self, trainer_group: Any, source: Source, deadline_seconds: float, turn: Turn) -> None:
        super().__init__(trainer_group, source, deadline_seconds)
        self._turn = turn
        self._sender: Sender | None = None
        self._listener: LinkListener | None = None
        self._calls = futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="weightcast-origin")
        self._call: futures.Future[None] | None = None
        """The last call of the sender."""
        self._stream: Any = None
        self._opening: records.Open | None = None
        """The update as it was opened last; None if it is not open."""
        self._survivors: tuple[str, ...] | None = None
        """Peers with which the update can be opened again, once the sender has raised PeersLostError."""
        self._buffer: BucketBuffer | None = None
        """Buffer of the next bucket, once the sender has one free."""
        self._digests: list[str] = []
        """Digests of the buckets that were sent or encoded."""
        self._base: OriginBase | None = None
        self._scratch: BucketBuffer | None = None
        self._sent: SentDigests | None = None
        """Digests of the tensors that were sent or encoded in this publish, if they are to be computed."""

    def publish(
        self, run: str, version: int, inputs: Callable[[], PublishInputs], publish_run: PublishRun
    ) -> PublishReport:
        """Carry out the publishing rank's instructions until the publish ends. `version`: the last one of this rank."""
        group = self.group
        group.version, self._sent, self._digests = version, None, []
        with group.error_at_next_exchange():
            require_no_step("publish or sync")
            self._read_regions(self._source.regions())
        with self._in_step():
            self._complete(self._start(is_changed=not self._has_agreed))
            while True:
                status = records.RankStatus()
                with group.error_at_next_exchange():
                    status = self._status()
                found = group.exchange(status)
                match found[0]:
                    case records.End(report):
                        self._end_update()
                        return report
                    case records.Declined(overlap):
                        self._turn.decline(overlap)
                    case _ if is_any_busy(found):
                        if self._call is not None:
                            # At most a quarter of the deadline, because the other ranks wait meanwhile.
                            futures.wait([self._call], self._deadline_seconds / 4)
                    case records.Settings() as settings:
                        self._agree(settings)
                    case records.Check():
                        self._check_finite()
                    case records.Encode() if self._base is not None:
                        with group.error_at_next_exchange():
                            self._base.begin()
                            self._digests.clear()
                            self._scratch = scratch_of(self._base.manifest, self._scratch)
                            self._survivors, self._buffer = None, self._scratch
                    case records.Open() as opening if self._sender is not None:
                        self._open(self._sender, opening)
                    case records.AskSenders() as question:
                        self._report(question)
                    case records.Pack(number, _, proves):
                        if proves and self._sent is None:
                            self._sent = SentDigests(self._assignment.layout, {})
                        payload = None if self._buffer is None else self._buffer.payload
                        with host_device.beside(self._stream, self._device()):
                            self._pack(found[self._leader].bucket, number, payload)
                    case records.Packed() if self._sender is not None and self._buffer is not None:
                        self._finish(self._sender, self._buffer, found)
                    case records.AllPacked():
                        publish_run.flight.version = group.version
                        publish_run.flight.packed()

    def _status(self) -> records.RankStatus:
        """Return this rank's status for an exchange. Raises the error with which the sender's last call has failed."""
        if self._sender is None:
            return records.RankStatus(self._sums)
        if self._call is not None and not self._call.done():
            return records.RankStatus(is_busy=True)
        if self._call is not None and self._opening is not None:
            try:
                self._call.result()
            except PeersLostError as exc:
                self._survivors, self._buffer = tuple(exc.survivors), None
        bucket = None if self._buffer is None else self._next_bucket(self._buffer.payload)
        failures = {name: to_record(error) for name, error in self._sender.failures.items()}
        return records.RankStatus(bucket=bucket, failures=failures, survivors=self._survivors)

    # --- its sender ---

    def _prepare(self, settings: records.Settings) -> str:
        """Make a sender if this rank leads an origin; keep the present one if it was made for the same run."""
        is_leading = self.group.group_rank in self._assignment.leaders
        if not (is_leading and self.run == settings.run):
            self._close_sender()
        if is_leading and self._sender is None:
            device, run, seconds = self._device(), settings.run, self._deadline_seconds
            transport = registry.transport(settings.url)
            if transport.joined_sender is not None:
                self._sender = transport.joined_sender(settings.url, run=run, device=device, deadline_seconds=seconds)
            else:
                self._listener, self._sender = connect(
                    _own_url(settings.url),
                    run,
                    device,
                    deadline_seconds=seconds,
                    lease_seconds=settings.lease_seconds,
                    secret=settings.secret,
                )
            self._stream = host_device.stream(device)
        return "" if self._listener is None else self._listener.address

    def _open(self, sender: Sender, opening: records.Open) -> None:
        """Open the update, or open it again, unless this origin has sent all of it. Send at once what was encoded."""
        is_whole = self._survivors is None and len(self._digests) == len(self._span)
        if self._opening is not None and is_whole and self._opening.sends == opening.sends:
            return
        self._digests.clear()
        if self._survivors is not None:
            # After a loss, the sender may use other memory.
            self.forget_views()
        self._opening, self._survivors, self._buffer = opening, None, None
        manifest, origin = self._assignment.layout.manifest, self._assignment.origins[self.group.group_rank]
        version, part = WeightVersion(self.run, self.group.version), manifest.of_origin(origin)
        base, payloads = self._base, list[torch.Tensor]()
        if base is not None and opening.sends == "weights":
            if opening.keeps_base:
                base.begin()
            elif base.number != version.number:
                self._base = None
        elif base is not None:
            by_bucket = base.encoded if opening.sends == "deltas" else base.payloads
            payloads = [by_bucket[index] for index in self._span]
            part = part.with_sizes(tuple(payload.nbytes for payload in payloads))

        def open_sender() -> None:
            if opening.join_at:
                sender.join(manifest, origin, opening.join_at)
            sender.open(part, version, peers=opening.peers, staged=opening.staged)
            for number, payload in enumerate(payloads):
                assert base is not None
                index = self._span[number]
                sender.send(number, base.write(index, payload, sender.buffer(number), version))
                self._digests.append(as_bytes(base.digests[index]).hex())

        self._begin(sender, open_sender)

    def _finish(self, sender: Sender, buffer: BucketBuffer, packed: Sequence[Any]) -> None:
        """Digest this rank's bucket, and encode or send it. `packed`: all ranks' statuses after packing it."""
        number, base, index = len(self._digests), self._base, self._span[len(self._digests)]
        keeps_base = self._opening is not None and self._opening.keeps_base
        with self.group.error_at_next_exchange(), host_device.on(self._stream):
            digest = self._digest_of(number, buffer.payload, packed)
            self._digests.append(as_bytes(digest).hex())
            is_last, is_encoding = len(self._digests) == len(self._span), buffer is self._scratch
            self._buffer = buffer if is_encoding and not is_last else None
            if base is not None and is_encoding:
                base.encode(index, buffer.payload, digest, self._sent)
            else:
                manifest, version = self._assignment.layout.manifest, WeightVersion(self.run, self.group.version)
                num_bytes = finish(digest, manifest, version, index, buffer, self._sent, base if keeps_base else None)
                self._begin(sender, functools.partial(sender.send, number, num_bytes))
            if base is not None and is_last and (is_encoding or keeps_base):
                base.complete(self.group.version)

    def _begin(self, sender: Sender, call: Callable[[], None]) -> None:
        """Start a call in the sender's thread, which then waits for the buffer of the next bucket."""

        def run() -> None:
            with host_device.on(self._stream):
                call()
                if len(self._digests) < len(self._span):
                    self._buffer = sender.buffer(len(self._digests))

        self._call = self._calls.submit(run)

    def _report(self, question: records.AskSenders) -> None:
        """Send a report, if this rank leads an origin; first have a base of its buckets, if that is asked for."""
        answer: records.Record = records.Nothing()
        with self.group.error_at_next_exchange():
            if self._sender is not None:
                manifest, problem = self._assignment.layout.manifest, ""
                origin = self._assignment.origins[self.group.group_rank]
                is_kept = self._base is not None and (self._base.manifest, self._base.origin) == (manifest, origin)
                if question.keeps_base and not is_kept:
                    self._base = None
                    try:
                        self._base = OriginBase(manifest, manifest.digest(), origin)
                    except InsufficientMemoryError as exc:
                        problem = str(exc)
                base = self._base
                answer = records.OriginReport(
                    tuple(self._sender.connected(question.peers)),
                    list(self._digests),
                    {} if self._sent is None else self._sent.by_bucket,
                    encoded_bytes=[] if base is None else [payload.nbytes for payload in base.encoded.values()],
                    num_changed=0 if base is None else base.num_changed,
                    base=-1 if base is None else base.number,
                    problem=problem,
                )
        self.group.exchange(answer)

    def _end_update(self, failure: str = "") -> None:
        sender, was_open = self._sender, self._opening is not None
        self._opening, self._buffer = None, None
        if self._base is not None:
            self._base.encoded = {}
        if failure and sender is not None and was_open:
            self._call = self._calls.submit(sender.abort, failure)

    def release(self) -> None:
        """Release the base, and the sender's memory (see `Sender.release`), after its pending calls."""
        self._base = self._scratch = None
        if self._sender is not None:
            self._buffer = None
            self.forget_views()
            self._calls.submit(self._sender.release).result()
            if self._listener is not None:
                self._listener.release_memory()

    def close(self) -> None:
        """Disconnect and free everything, after the sender's pending calls. Idempotent."""
        super().close()
        self._calls.shutdown(wait=True)
        self._close_sender()

    def _close_sender(self) -> None:
        if self._call is not None:
            futures.wait([self._call])
        with contextlib.ExitStack() as stack:
            for part in (self._listener, self._sender):
                if part is not None:
                    stack.callback(part.close)
        self._sender = self._listener = self._buffer = self._base = self._scratch = None


def _own_url(url: str) -> str:
    """Return the URL for this rank's sender: the publishing rank's, with this host's address on the route to it.

    The port is the same, so that one port is to be opened on all hosts. Raises OSError if that host can't be resolved.
    """
    if registry.transport(url).same_host:
        return url
    host, port = registry.endpoint(url)
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Connecting a datagram socket sends nothing; it only looks up the route.
        probe.connect(address)
        own = probe.getsockname()[0]
    return f"{registry.scheme(url)}://{f'[{own}]' if ':' in own else own}:{port}"
