"""The seam of transports that keep versions, for readers that come later: what their ends can do besides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from weightcast.format.manifest import Manifest, WeightVersion


@runtime_checkable
class VersionedSender(Protocol):
    """A sender that keeps versions for readers that come later, and sends without peers.

    Engines can read a version that was offered once all is sent. Without `commit`, `open`, `abort`, `close` give it up.
    """

    def newest_version(self) -> int:
        """The number that the next version must be above, also of what was given up; -1 for none."""

    def commit(self) -> None:
        """Make the version that was sent the newest, for all."""


@runtime_checkable
class SharedSender(Protocol):
    """A sender that keeps versions where the ranks that lead other origins can write to them, too.

    One update. P: the publishing rank. O: a rank that leads another origin, whose sender is a `JoiningSender`.

        P  SharedSender.share(...)           before `open`, with the whole manifest
        O  JoiningSender.join(...)           before `open`, with what `share` has returned
           open, buffer, send                on all of them, each of its own origin's buckets, numbered from 0
        P  SharedSender.seal(...)            when all have sent all; from then on engines can read the version
    """

    def share(self, manifest: Manifest, version: WeightVersion) -> str:
        """Begin a version of several origins; this sender's is the first one. Returns where others find it."""

    def seal(self, others: Sequence[bytes]) -> None:
        """Every origin has sent all of its buckets. `others`: the digests of the other origins', in order."""


@runtime_checkable
class JoiningSender(Protocol):
    """A sender of another origin than the first, beside a `SharedSender` of another rank, maybe on another host."""

    def join(self, manifest: Manifest, origin: int, place: str) -> None:
        """Write that origin's buckets of the whole manifest's from now on, at the `place` that `share` has named."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version that a transport keeps, with what an offer and a seal would say of it. `committed_at`: Unix time."""

    version: WeightVersion
    manifest: Manifest
    manifest_digest: str
    root: str
    committed_at: float


@runtime_checkable
class VersionedReceiver(Protocol):
    """A receiver of a transport that keeps versions, which needs no offer to read them.

    It has the buckets of all origins, and gives them in the order of the manifest's rounds.
    """

    def newest(self, known: WeightVersion | None) -> StoredVersion | None:
        """The newest version, pinned until `end`; None if there is none or it is `known`. Does not wait."""

    def renew(self) -> None:
        """Write into other memory from now on: an engine keeps tensors of the last update."""
