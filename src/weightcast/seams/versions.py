"""The seam of transports that keep versions, for readers that come later: what their ends do besides.

`Sender` and `Receiver` derive from these Protocols; as the methods are here, they are those of every other transport,
which keeps nothing. `Transport.keeps_versions` says which one it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from weightcast.format.manifest import Manifest, WeightVersion


class VersionWriter(Protocol):
    """Further methods of senders of a transport that keeps versions. They send without peers.

    Engines can read an offered version once all is sent. `open`, `abort` and `close` discard an uncommitted version.

    The ranks that lead other origins than the first can write to the same version. P: the publishing rank. O: another
    one, maybe on another host, whose sender is made by `Transport.joined_sender`.

        P  share(...)                        before `open`, with the whole manifest
        O  join(...)                         before `open`, with what `begin_together` has returned
           open, buffer, send                on all of them, each of its own origin's buckets, numbered from 0
        P  seal(...)                         when all have sent all; from then on engines can read the version
    """

    def newest_version(self) -> int | None:
        """The number that the next version must be above, also of what was given up; None if it may be any."""
        return None

    def begin_together(self, manifest: Manifest, version: WeightVersion) -> str:
        """Begin a version of several origins; this sender's is the first one.

        Returns where others find it; "" if each origin is sent by itself, and nothing is to be joined and sealed.
        """
        return ""

    def join(self, manifest: Manifest, origin: int, place: str) -> None:
        """Write that origin's buckets of the whole manifest's from now on, at `place`, which `begin_together` names."""
        return

    def seal(self, others: Sequence[bytes]) -> None:
        """Every origin has sent all of its buckets. `others`: the digests of the other origins', in order."""
        return

    def commit(self) -> None:
        """Make the version that was sent the newest, for all."""
        return


@dataclasses.dataclass(frozen=True, slots=True)
class StoredVersion:
    """A version that a transport keeps, with what an offer and a seal would say of it. `committed_at`: Unix time."""

    version: WeightVersion
    manifest: Manifest
    manifest_digest: str
    root: str
    committed_at: float


class VersionReader(Protocol):
    """Further methods of receivers of a transport that keeps versions, which they can read without an offer.

    Such a receiver has the buckets of all origins, and yields them in the order of the manifest's rounds.
    """

    def newest(self, known: WeightVersion | None) -> StoredVersion | None:
        """The newest version, pinned until `end`; None if there is none or it is `known`. Does not wait."""
        return None
