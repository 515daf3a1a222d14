"""The seam of transports that keep versions, for readers that come later: what their ends can do besides."""

from __future__ import annotations

import dataclasses
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
    """A receiver of a transport that keeps versions, which needs no offer to read them."""

    def newest(self, known: WeightVersion | None) -> StoredVersion | None:
        """The newest version, pinned until `end`; None if there is none or it is `known`. Does not wait."""

    def renew(self) -> None:
        """Write into other memory from now on: an engine keeps tensors of the last update."""
