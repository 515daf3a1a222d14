"""The seam of transports: how buckets get from a publisher to workers, and the contract of sender and receiver.

One update. P: the publisher, on the trainer. W: a worker, in the engine's process; it has made its Receiver at `init`.

    W  Receiver.open(...)                when the version is offered
    P  Sender.prepare(...)               at any time before, if the next update is known
    P  Sender.open(...)                  waits until the peers' receivers have opened the version
    P  for each bucket k                 Sender.buffer(k), fill, encode, Sender.send(k, n)
    W                                    next(Receiver) -> Bucket k
    W  Receiver.end()                    when it has installed or aborted the version
    P  Sender.commit()                   if an engine has installed it, or there are none; else Sender.abort(reason)
    P  Sender.close()                    only when the publisher is closed; W likewise Receiver.close()

If P's calls raise PeersLostError, P calls Sender.open(...) again, with the same version, for the survivors, and sends
the buckets again from the one that it returns; for a receiver it is still the same update. After any other failure P
calls Sender.abort(reason) and W calls Receiver.end().
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
    """A header and a payload that have arrived and are not yet checked (see `bucket.check_bucket`)."""

    index: int
    buffer: BucketBuffer


class Sender(VersionWriter, Protocol):
    """The publisher's end of a transport. One thread calls it. Every wait has a deadline.

    If the loss of a peer affects others, `open`, `buffer` or `send` raises PeersLostError: each time with fewer
    survivors, or once in a row with the same ones, if no peer caused the failure. With `staged`, sent buckets stay
    readable until every peer has ended the update.
    """

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        """Error of each peer that was lost (died, stalled or disconnected) since the version was opened, by name."""

    @property
    def memory_seconds(self) -> float:
        """Total time in which calls have waited for memory of this process."""
        return 0.0

    def prepare(self, manifest: Manifest, *, staged: bool) -> None:
        """Allocate the memory for a first update of this manifest in advance, if allocating takes time.

        Returns before the memory is there: `open` and `buffer` wait for it. Does nothing if the sender has memory
        already. Raises InsufficientMemoryError.
        """
        return

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Begin an update for these peers; return the first bucket to send, the number of buckets if all were sent.

        Of deltas the manifest has the lengths of what is sent, and no tensors. A version may be opened once as deltas
        and, when their peers have ended it or it is given up for them, in full for other peers.

        Raises PeersLostError; InsufficientMemoryError before any byte is sent.
        """

    def buffer(self, index: int) -> BucketBuffer:
        """Return memory for bucket `index`, the same object while the manifest stays.

        Waits until every living peer has released the memory's former content. Raises PeersLostError.
        """

    def send(self, index: int, num_bytes: int) -> None:
        """Send the first `num_bytes` of `buffer(index)`, header and encoded payload.

        Raises PeersLostError; ValueError for a length that can't be sent.
        """

    def connected(self, peers: Sequence[str]) -> Sequence[str]:
        """Return those of `peers` whose receivers are connected now. Does not wait."""

    def release(self) -> None:
        """Between updates: free the memory that is kept for the next one, which allocates it again.

        Memory that a tensor refers to stays. Waits until readers have released it, up to the sender's deadline.
        """
        return

    def abort(self, reason: str) -> None:
        """Abort the update: every peer's receiver raises UpdateAbortedError with this reason. Idempotent."""

    def close(self) -> None:
        """Free everything. Idempotent."""


@dataclasses.dataclass(frozen=True, slots=True)
class Portion:
    """The buckets that one of several ranks of an engine on one host reads and checks.

    `memory` is the location of the first rank's memory (`Receiver.common_memory`), which all of them read into.
    """

    buckets: frozenset[int]
    memory: str = ""

    @classmethod
    def of(cls, manifest: Manifest, index: int, num_ranks: int, memory: str = "") -> Portion:
        """Return the portion of the rank `index`: each bucket goes to the rank that has the fewest bytes so far."""
        loads, own = [0] * num_ranks, set()
        for bucket, num_bytes in enumerate(manifest.buckets):
            rank = loads.index(min(loads))
            loads[rank] += num_bytes
            if rank == index:
                own.add(bucket)
        return cls(frozenset(own), memory)


class Receiver(VersionReader, Protocol):
    """A worker's end of a transport. It uses the session's link, and opens no other connection except for groups."""

    def common_memory(self) -> str:
        """Return the location of memory that the engine's other ranks on this host can read into; "" for none."""
        return ""

    def read_together(self, manifest: Manifest, portion: Portion) -> bool:
        """Make an engine's ranks on one host read the same memory, each checking its portion; return False if not.

        Called before `open` of a staged version. Buckets of other ranks need only their headers when they are yielded;
        their payloads are there once each rank has read its portion. Raises UnsupportedError, InsufficientMemoryError.
        """
        return False

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Prepare for an update. Does not wait for the sender."""

    def __iter__(self) -> Iterator[Bucket]:
        """Yield every bucket in order, once, valid until the next is requested; when staged, until `end`.

        Raises PeerDiedError, PeerTimeoutError or UpdateAbortedError.
        """

    def reread(self, bucket: Bucket) -> bool:
        """Make a bucket that an engine has written into show the sender's bytes again; return False if it can't."""
        return False

    def release(self) -> None:
        """Between updates: free the memory that is kept for the next one. Does nothing during an update."""
        return

    def end(self) -> None:
        """Release every bucket; wakes an iteration, which raises UpdateAbortedError. Idempotent, from any thread."""

    def close(self) -> None:
        """Disconnect and free everything; wakes an iteration that waits. Idempotent, from any thread."""


Origins = Literal["one", "host", "any"]
"""Hosts on which other ranks of the trainer may have senders, each for its own origin's buckets: "one" none (only the
first rank sends), "host" the first rank's host, "any" any host."""


class MakeSender(Protocol):
    """Makes the publisher's end of a transport.

    `url` is the one that the user gave, `run` the publisher's, `device` that of the weights. Workers connect to
    `listener`, to which none is connected yet.
    """

    def __call__(
        self, url: str, *, run: str, listener: LinkListener, device: torch.device, deadline_seconds: float
    ) -> Sender: ...


class MakeJoinedSender(Protocol):
    """Makes the sender of another origin, which writes to the same version as the first one's. No worker connects."""

    def __call__(self, url: str, *, run: str, device: torch.device, deadline_seconds: float) -> Sender: ...


class MakeReceiver(Protocol):
    """Makes a worker's end of a transport. Called in a background thread.

    `url`: the sender's. `run`: the publisher's; empty for any run, if the transport keeps versions. `peer`: the
    sender's name for this receiver. `link`: the link to that sender, not open yet; None for a receiver that follows
    versions without a publisher. `device`: that of the engine rank (the thread's own current device may be another).
    `deadline_seconds`: longest time in which nothing of an update arrives.
    """

    def __call__(
        self, url: str, *, run: str, peer: str, link: WorkerLink | None, device: torch.device, deadline_seconds: float
    ) -> Receiver: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Transport:
    """Registry entry of a URL's scheme."""

    sender: MakeSender
    receiver: MakeReceiver
    same_host: bool  # True if both ends must be on one host
    default_bucket_size_bytes: Mapping[str, int] = dataclasses.field(
        default_factory=lambda: {"cpu": 64 << 20, "cuda": 512 << 20}
    )
    """By device type; "cache" is for engines that read buckets in place: see `largest_bucket_size`."""
    origins: Origins = "one"
    mappable_on_gpu: Literal["always", "staged", "never"] = "never"
    """Install modes in which buckets of weights on a GPU are in host memory that other trainer ranks of the host can
    map (`host.memory.SharedMemory`). In the other modes each rank is an origin. Buckets of weights on a CPU must always
    be in such memory."""
    keeps_versions: bool = False
    """True if its ends are a `VersionWriter` and a `VersionReader`, which keep versions for later readers."""
    joined_sender: MakeJoinedSender | None = None
    """Makes the senders of other origins, if all origins write to one version. A receiver then gets the buckets of all
    origins from the publishing rank's sender."""
