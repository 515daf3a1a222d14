"""The seams: what a source of weights, a transport, an engine and an engine's client must do.

One update, and who calls what. P: the publisher, on the trainer. W: a worker, in the engine's process.

    P  Source.regions(), .specs()        specs only when regions gave another object
    P  EngineClient.init(info)           W connects its link and makes its Receiver, in the background
    P  EngineClient.update(Offer)        W  Engine.specs(), then Receiver.open(...), then answers on the link
    P  Sender.open(...)                  waits until the peers' receivers are there
    P  for each bucket:
           Sender.buffer(k), fill, Sender.send(k), which says what comes next
                                         W  next(Receiver) -> Bucket k, checked; streaming: Engine.load(...)
    P  waits for Received on every link
    P  EngineClient.update(Seal)
    P  Pausable.pause()                  streaming: before the first bucket instead
    P  EngineClient.finish()             W  staged: Engine.load(...); then Engine.commit(version), Receiver.end()
    P  Settling.settle(...)              where the workers of an engine can't agree by themselves
    P  Pausable.resume()
    P  Replayable.commit()               if an engine has installed it, or there are none; else Sender.abort(reason)
    P  Sender.close()                    only at the end of the publisher's life; W likewise Receiver.close()

Engines that bring a sender of their own (`SelfSupplied`) come after all others: paused, sent to, finished, resumed.

Any failure: EngineClient.update(Abort), Sender.abort(reason); W: Receiver.end(), Engine.discard().

Optional abilities are Protocols of one method, asked with `isinstance`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from weightcast.control.messages import InitInfo, UpdateInfo, WeightInfo
from weightcast.errors import WeightcastError
from weightcast.guard import Guard, RescueRequest
from weightcast.manifest import Manifest, Region, TensorSpec, WeightVersion

Held: TypeAlias = tuple[Region, torch.Tensor]
"""A view of memory of this trainer rank, and its place in the global tensor; the view has the region's sizes."""

Regions: TypeAlias = Mapping[str, Sequence[Held]]
"""What a trainer rank holds of each tensor, by its record's name. What it holds nothing of may be absent."""


class Source(Protocol):
    """Where weights come from: one trainer rank's share of a model in checkpoint form."""

    def specs(self) -> Sequence[TensorSpec]:
        """Names, dtypes and global shapes of the whole model; the same on all trainer ranks.

        Returns the same object as long as nothing has changed, so that a publisher can keep its plan.
        """
        ...

    def regions(self) -> Regions:
        """This rank's views, each with its region in the global tensor. No copy and no communication.

        A rank reports everything that it holds, replicas too: `gather` has one rank contribute each region.

        Returns the same object as long as every view is still of the same memory, of the same specs: a publisher then
        does not ask for the specs again.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Bucket `index`: `buffer` is a flat uint8 tensor, the payload and its trailer (see `bucket.check_trailer`)."""

    index: int
    buffer: torch.Tensor


class Sender(Protocol):
    """The publisher's end of a transport. One thread calls it. Every wait inside has a deadline.

    `address` is the URL that a `Receiver` connects to. `failures` names the peers that were dropped since `open`,
    each with its error: a peer that dies, stalls past its deadline or leaves never stops the others.
    With `staged`, what was sent stays readable until every peer has ended the update.
    """

    address: str

    @property
    def failures(self) -> Mapping[str, WeightcastError]: ...

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        """Begin an update for these peers. Raises InsufficientMemoryError before any byte moves."""
        ...

    def buffer(self, index: int) -> torch.Tensor:
        """Where bucket `index` is to be packed: `slot_size_bytes(manifest)` bytes, or just enough for this bucket.

        Waits until every living peer has released the buffer's former content. The same index gives the same tensor
        object in every update while the manifest stays, so that views of it can be kept.
        """
        ...

    def send(self, index: int) -> int:
        """Tell the peers that the bucket in `buffer(index)` is whole. A peer's failure is noted, not raised.

        Returns the bucket to be packed and sent next: index + 1, or an earlier one, of the same bytes as before, where
        the loss of a peer has cost others what was on its way. The number of buckets: there is none left.
        """
        ...

    def abort(self, reason: str) -> None:
        """End the update: every peer's receiver raises UpdateAbortedError with this reason. Idempotent."""
        ...

    def close(self) -> None:
        """Free everything. Idempotent."""
        ...


class Receiver(Protocol):
    """A worker's end of a transport. It connects when it is made (in the background thread of `init`)."""

    def open(self, manifest: Manifest, version: WeightVersion, *, staged: bool) -> None:
        """Prepare for an update. Does not wait for the sender."""
        ...

    def __iter__(self) -> Iterator[Bucket]:
        """Every bucket in order, once. Raises PeerDiedError, PeerTimeoutError or UpdateAbortedError.

        A bucket is valid until the next is asked for; when staged, its payload until `end`.
        """
        ...

    def end(self) -> None:
        """The update is over, in whichever way: every bucket is released; the connection stays.

        Wakes an iteration, which raises UpdateAbortedError. Idempotent, from any thread.
        """
        ...

    def close(self) -> None:
        """Disconnect and free everything; wakes an iteration that waits. Idempotent, from any thread."""
        ...


@runtime_checkable
class Replayable(Protocol):
    """A sender that keeps versions for readers that come later. It knows no peers, and sends without any.

    With its last bucket sent, a version can be read by the engines that it was offered to; with `commit` it is the
    newest, for all. Without, the next `open`, `abort` or `close` gives it up. `newest_version` is the number that the
    next one must be above, so that what was given up does not come again under its number; -1 for none.
    """

    def newest_version(self) -> int: ...

    def commit(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A version that a transport keeps: what an offer and a seal would have told of it. `committed_at`: Unix time."""

    version: WeightVersion
    manifest: Manifest
    manifest_digest: str
    root: str
    committed_at: float


@runtime_checkable
class Replaying(Protocol):
    """A receiver of a transport that keeps versions, which needs no offer to read them.

    `newest` gives the newest version, unless that is `known` or there is none, and holds it until `end`. Never waits.
    """

    def newest(self, known: WeightVersion | None) -> Kept | None: ...


@runtime_checkable
class Renewable(Protocol):
    """A receiver that, after `renew`, writes into other memory: an engine keeps tensors of the last update."""

    def renew(self) -> None: ...


@runtime_checkable
class Rereadable(Protocol):
    """A receiver whose buckets an engine may have written into by mistake: `reread` shows the sender's bytes again."""

    def reread(self, bucket: Bucket) -> bool: ...


@runtime_checkable
class Attended(Protocol):
    """A sender that can say which of these peers are connected to it now. Does not wait."""

    def connected(self, peers: Sequence[str]) -> Sequence[str]: ...


class PerDevice(Protocol):
    """A transport whose receivers can choose among senders of several trainer ranks, one for each device of a host.

    `label` names the device that a sender's memory is on, the same in every process; empty: unknown. `join` makes the
    URL for receivers: each connects to the address of its own device's label, and to `default` if there is none. Such
    senders are `Attended`, and never ask for a bucket again.
    """

    def label(self, device: torch.device) -> str: ...

    def join(self, default: str, addresses: Mapping[str, str]) -> str: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Transport:
    """A registered pair: `sender(url, deadline_seconds=...)` and `receiver(url, peer=..., deadline_seconds=...)`.

    `default_bucket_size_bytes`: by device type ("cpu", "cuda"). `same_host`: both ends share one. `per_device`: several
    trainer ranks may have a sender each; None: only the publishing rank has one.
    """

    sender: Callable[..., Sender]
    receiver: Callable[..., Receiver]
    default_bucket_size_bytes: Mapping[str, int]
    same_host: bool
    per_device: PerDevice | None = None


@runtime_checkable
class Engine(Protocol):
    """Serves a model, in the process that holds it. Calls come from one thread at a time."""

    def specs(self) -> Sequence[TensorSpec] | None:
        """What it would accept, or None if it cannot know; then `load` must refuse what it cannot take.

        Returns the same object as long as nothing has changed, so that an offer is checked once.
        """
        ...

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take tensors in checkpoint form, whole load groups. They are valid only during the call; don't write to them.

        Called once per install when staged, once per bucket when streaming, never while the engine generates.
        """
        ...

    def commit(self, version: WeightVersion) -> None:
        """Every tensor was loaded: drop caches, serve `version`. Raises IncompleteUpdateError if one is missing."""
        ...

    def discard(self) -> None:
        """The update is given up: forget what `load` noted. The weights themselves are restored by an undo, or torn."""
        ...


@runtime_checkable
class RegionLoader(Protocol):
    """An engine that can take a part of a tensor, so that a tensor larger than a bucket is not put together first."""

    def load_region(self, name: str, region: Region, part: torch.Tensor) -> None: ...


@runtime_checkable
class Casting(Protocol):
    """An engine that was asked to take other dtypes than its own; `offered` and `held` are dtype names."""

    def can_cast(self, offered: str, held: str) -> bool: ...


@runtime_checkable
class Validating(Protocol):
    """An engine that can try an offer without touching its model, where `specs` can't say all that it accepts.

    `validate` raises IncompatibleWeightsError, whose problems name every tensor that is unknown, unfit or missing.
    Called in the thread of the offer, once per manifest and object of `specs`.
    """

    def validate(self, manifest: Manifest) -> None: ...


@runtime_checkable
class Undoable(Protocol):
    """An engine that can go back: `snapshot` copies the live weights to host memory and returns what restores them."""

    def snapshot(self) -> Callable[[], None]: ...


@runtime_checkable
class Readable(Protocol):
    """An engine whose live weights can be read, in checkpoint form, while it is paused or between its steps."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class EngineClient(Protocol):
    """One engine's control routes, from the trainer's side. Every call has a deadline and raises PeerError.

    `name` is how errors and reports call the engine. `abilities` in `info()` says what it can do besides.
    """

    name: str

    def info(self) -> WeightInfo: ...

    def init(self, info: InitInfo) -> None: ...

    def update(self, info: UpdateInfo) -> None: ...

    def finish(self, version: int) -> float | None:
        """Install the sealed version. With the ability "install": the seconds that the engine stood still for it."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class Negotiable(Protocol):
    """A client of an address where engines of several kinds may answer: it asks, and returns the client for this one.

    Asked whenever a publisher connects, since another kind may have been started there. Raises ControlError.
    """

    def negotiate(self) -> EngineClient: ...


@runtime_checkable
class Settling(Protocol):
    """A client whose engine's workers can't all agree on an install: it is told what became of it everywhere.

    Called after every `finish`, once all workers have answered or failed to. With `keep` all have installed; without,
    one has not: those that installed go back if they can, and every worker tells on its link that it failed.
    """

    def settle(self, version: int, *, keep: bool) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Supply:
    """What a publisher tells whoever makes a sender: its transport's URL, its run, where the weights are, its guard."""

    url: str
    run: str
    device: torch.device
    deadline_seconds: float
    guard: Guard


@runtime_checkable
class SelfSupplied(Protocol):
    """A client whose engine has no worker of ours and a data plane of its own: it brings the `Sender` for that.

    Asked whenever a publisher connects. `known` are the senders that others have brought: engines of one kind share
    one, and each sender is packed for once. Its peers are the clients' names. Such an engine stands still while it is
    sent to, unless the sender is `Staging`; then `finish` follows as ever. Raises UnsupportedError.
    """

    def sender(self, known: Sequence[Sender], supply: Supply) -> Sender: ...


@runtime_checkable
class Staging(Protocol):
    """A brought sender that can say whether its engines serve on until the install."""

    @property
    def is_staged(self) -> bool: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Fingerprint:
    """One value for all weights that an engine holds. Of two engines of one `kind`, equal weights have equal values."""

    kind: str
    value: str


@runtime_checkable
class Fingerprinted(Protocol):
    """A client whose engine can say what it holds, as of now: it was just updated. None: this one can't."""

    def fingerprint(self) -> Fingerprint | None: ...


@runtime_checkable
class Distrusted(Protocol):
    """A client that can keep an engine from serving weights which are not what others hold.

    Called before the engine is resumed, where it stands still. The next complete update heals it.
    """

    def distrust(self, reason: str) -> None: ...


@runtime_checkable
class Pausable(Protocol):
    """A client whose engine serves traffic that must stand still during an install. `run` owns the pause."""

    def pause(self, run: str) -> None: ...

    def resume(self, run: str) -> None: ...


@runtime_checkable
class Rescuable(Protocol):
    """A client whose pause no lease ends: `rescue` says what the guard process sends if the publisher dies."""

    def rescue(self, run: str) -> Sequence[RescueRequest]: ...
