"""The seam of transports: how buckets get from a publisher to workers, and what a pair of ends must do.

One update. P: the publisher, on the trainer. W: a worker, in the engine's process; it has made its Receiver at `init`.

    W  Receiver.open(...)                when the version is offered
    P  Sender.prepare(...)               at any time before, if the next update is known
    P  Sender.open(...)                  waits until the peers' receivers have opened the version
    P  for each bucket k                 Sender.buffer(k), fill, encode, Sender.send(k, n)
    W                                    next(Receiver) -> Bucket k
    W  Receiver.end()                    when it has installed the version, or given it up
    P  Sender.commit()                   if an engine has installed it, or there are none; else Sender.abort(reason)
    P  Sender.close()                    only at the end of the publisher's life; W likewise Receiver.close()

If P's calls raise PeersLostError: P Sender.open(...) again, same version, for the survivors; buckets begin again at the
one that it returns; a receiver takes that for the same update. Any other failure: P Sender.abort(reason); W
Receiver.end().
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch

from weightcast.errors import WeightcastError
from weightcast.format.bucket import BucketBuffer
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.links.link import LinkListener, WorkerLink
from weightcast.seams.versions import VersionReader, VersionWriter


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """A header and a payload that have arrived, unchecked (see `bucket.check_bucket`)."""

    index: int
    buffer: BucketBuffer


class Sender(VersionWriter, Protocol):
    """The publisher's end of a transport. One thread calls it. Every wait inside has a deadline.

    `failures` has the error of each peer
    that was lost (that died, stalled or left) since the version was opened. If a loss disturbs others, `open`,
    `buffer` or `send` raises PeersLostError: each time with fewer survivors, or once in a row with the same ones, if
    nobody is to blame for what has broken. With `staged`, what was sent stays readable until every peer has ended the
    update.
    """

    @property
    def failures(self) -> Mapping[str, WeightcastError]: ...

    @property
    def memory_seconds(self) -> float:
        """How long calls have waited for memory of this process, all together."""
        return 0.0

    def prepare(self, manifest: Manifest, *, staged: bool) -> None:
        """Take the memory that a first update of this manifest needs, and that takes time to be had.

        Returns before it is there: `open` and `buffer` wait for it. Does nothing if the sender has memory already.
        Raises InsufficientMemoryError.
        """
        return

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Begin an update for these peers; return the first bucket to send: 0, or their number if all were sent.

        Raises PeersLostError; InsufficientMemoryError before any byte moves.
        """

    def buffer(self, index: int) -> BucketBuffer:
        """Room for bucket `index`, one object while the manifest stays. Waits until every living peer released it.

        Raises PeersLostError.
        """

    def send(self, index: int, num_bytes: int) -> None:
        """Send the first `num_bytes` of `buffer(index)`, header and encoded payload.

        Raises PeersLostError; ValueError for a length that can't be sent.
        """

    def connected(self, peers: Sequence[str]) -> Sequence[str]:
        """Those of these peers whose receivers are connected now. Does not wait."""

    def release(self) -> None:
        """Give back, between updates, memory that is kept for the next one, which allocates it again.

        Memory that a tensor refers to stays. Waits until readers have released it, with the sender's deadline.
        """
        return

    def abort(self, reason: str) -> None:
        """End the update: every peer's receiver raises UpdateAbortedError with this reason. Idempotent."""

    def close(self) -> None:
        """Free everything. Idempotent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Portion:
    """Which buckets one of several ranks of an engine on one host reads and checks.

    `memory`: where they find the memory of the first of them (`Receiver.common_memory`).
    """

    buckets: frozenset[int]
    memory: str = ""

    @classmethod
    def of(cls, manifest: Manifest, index: int, num_ranks: int, memory: str = "") -> Portion:
        """That of the rank of this index: each bucket in turn is the rank's that has the fewest bytes so far."""
        loads, own = [0] * num_ranks, set()
        for bucket, num_bytes in enumerate(manifest.buckets):
            rank = loads.index(min(loads))
            loads[rank] += num_bytes
            if rank == index:
                own.add(bucket)
        return cls(frozenset(own), memory)


class Receiver(VersionReader, Protocol):
    """A worker's end of a transport. It opens no connection but a collective one its groups: it is handed a link."""

    def common_memory(self) -> str:
        """Return where the engine's other ranks here find memory of this end, to read versions into; "" for none."""
        return ""

    def read_together(self, manifest: Manifest, portion: Portion) -> bool:
        """Have an engine's ranks on one host read the same memory, each checking its share; return whether they do.

        Called before `open` of a staged version. The other ranks' buckets need their headers when they are handed out,
        and their payloads once each rank has had its share. Raises UnsupportedError, InsufficientMemoryError.
        """
        return False

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Prepare for an update. Does not wait for the sender."""

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket in order, once, valid until the next is asked for; when staged, until `end`.

        Raises PeerDiedError, PeerTimeoutError or UpdateAbortedError.
        """

    def reread(self, bucket: Bucket) -> bool:
        """Have a bucket that an engine has written into show the sender's bytes again; False where that can't be."""
        return False

    def release(self) -> None:
        """Between updates: give back memory that is kept for the next one. Does nothing during an update."""
        return

    def end(self) -> None:
        """Release every bucket; wakes an iteration, which raises UpdateAbortedError. Idempotent, from any thread."""

    def close(self) -> None:
        """Disconnect and free everything; wakes an iteration that waits. Idempotent, from any thread."""


Origins = Literal["one", "host", "any"]
"""Hosts on which a trainer of several ranks may have senders beside the first rank's, each for buckets of its own:
none, the first rank's host, or any host."""


class MakeSender(Protocol):
    """Makes the publisher's end for the URL that the user gave. `run`: the publisher's; `device`: of the weights.

    `listener`: of the links of the workers that this sender sends to, to which no worker is connected yet.
    """

    def __call__(
        self, url: str, *, run: str, listener: LinkListener, device: torch.device, deadline_seconds: float
    ) -> Sender: ...


class MakeJoinedSender(Protocol):
    """Makes the sender of another origin, which writes where the first one's does; workers don't connect to it."""

    def __call__(self, url: str, *, run: str, device: torch.device, deadline_seconds: float) -> Sender: ...


class MakeReceiver(Protocol):
    """Makes a worker's end for a sender's address. Called in a background thread.

    `run`: the publisher's, or empty for any, where the transport keeps versions. `peer`: how the sender calls this
    receiver. `link`: to that sender, not open yet; None for one that follows versions, without a publisher. `device`:
    of the engine rank that it works for; the thread's own current device means nothing. `deadline_seconds`: how long
    nothing of an update may come.
    """

    def __call__(
        self, url: str, *, run: str, peer: str, link: WorkerLink | None, device: torch.device, deadline_seconds: float
    ) -> Receiver: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Transport:
    """Registry entry of a URL's scheme."""

    sender: MakeSender
    receiver: MakeReceiver
    same_host: bool  # whether both ends must share one
    default_bucket_size_bytes: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"cpu": 64 << 20, "cuda": 512 << 20}
    )
    """By device type. "cache", where engines read buckets in place: see `largest_bucket_size`."""
    origins: Origins = "one"
    mappable_on_gpu: Literal["always", "staged", "never"] = "never"
    """Installs in which buckets of weights on a GPU lie in host memory that other trainer ranks of the host can map
    (`host.memory.SharedMemory`), as those of weights on a CPU must. Else each rank has a sender of its own."""
    keeps_versions: bool = False
    """True if its ends are a `VersionWriter` and a `VersionReader` that keep versions for readers that come later."""
    joined_sender: MakeJoinedSender | None = None
    """Makes the senders of other ranks' origins, where all write to one place. A receiver gets all from the publishing
    rank's."""
