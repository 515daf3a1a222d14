"""The seam of transports that keep versions for later readers: additional methods of their senders and receivers.

`Sender` and `Receiver` derive from these Protocols, whose default methods are for transports that keep nothing.
`Transport.keeps_versions` distinguishes the two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from weightcast.format.manifest import Manifest, WeightVersion


class VersionWriter(Protocol):
    """Additional methods of senders of a transport that keeps versions. They can send without peers.

    Engines can read an offered version once all is sent. `open`, `abort` and `close` discard an uncommitted version.

    Several origins can write to one version. P: the publishing rank. O: the rank that leads another origin, maybe on
    another host; `Transport.joined_sender` makes its sender.

        P  begin_together(...)               before `open`, with the whole manifest
        O  join(...)                         before `open`, with the result of `begin_together`
           open, buffer, send                on all of them, each for its own origin's buckets, numbered from 0
        P  seal(...)                         when all origins have sent all; then engines can read the version
    """

    def newest_version(self) -> int | None:
        """Return the number that the next version must exceed, also after aborted versions; None if it may be any."""
        return None

    def begin_together(self, manifest: Manifest, version: WeightVersion) -> str:
        """Begin a version of several origins, of which this sender has the first one.

        Returns the `place` for the other senders' `join`; "" if origins are independent, without join and seal.
        """
        return ""

    def join(self, manifest: Manifest, origin: int, place: str) -> None:
        """Write this origin's buckets of the whole manifest from now on, at the `place` from `begin_together`."""
        return

    def seal(self, others: Sequence[bytes]) -> None:
        """Seal the version, after every origin has sent all its buckets. `others`: digests of the other origins'."""
        return

    def commit(self) -> None:
        """Make the sent version the newest for all readers."""
        return


@dataclasses.dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version that a transport keeps, with the content of its offer and seal. `committed_at`: Unix time."""

    version: WeightVersion
    manifest: Manifest
    manifest_digest: str
    root: str
    committed_at: float


class VersionReader(Protocol):
    """Additional methods of receivers of a transport that keeps versions, which can be read without an offer.

    Such a receiver gets the buckets of all origins, and yields them in the order of the manifest's rounds.
    """

    def newest(self, known: WeightVersion | None) -> StoredVersion | None:
        """Return the newest version, pinned until `end`; None if there is none or it is `known`. Does not wait."""
        return None
