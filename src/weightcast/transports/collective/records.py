"""What sender and receivers of the collective transport tell each other beside the broadcasts; and its addresses.

JSON records in the link's frames. Nothing is told per bucket: the plan of the offer says what is broadcast.
"""

from __future__ import annotations

import urllib.parse
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from weightcast import registry
from weightcast.errors import ManifestError
from weightcast.format.manifest import VersionNumber
from weightcast.format.messages import Digest256, Heartbeat, Hello, ShortText

BACKENDS = ("gloo", "nccl")

Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Rank = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]


# --- sender -> receiver -----------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag="join", tag_field="kind"):
    """Be of group `epoch`, whose store is at `host` and `port`, and connect when told to; leave the former group.

    `readers`: the workers of the same engine and host that read along, from memory that this one shares with them.
    """

    epoch: Index
    group_rank: Rank
    group_size: Rank
    host: ShortText
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=864000)]
    readers: Annotated[tuple[ShortText, ...], msgspec.Meta(max_length=1 << 12)] = ()


class Connect(msgspec.Struct, frozen=True, tag="connect", tag_field="kind"):
    """Everybody has answered the invitation: connect to the others of group `epoch` now."""

    epoch: Index


class ReadAlong(msgspec.Struct, frozen=True, tag="read_along", tag_field="kind"):
    """Join no group: another worker of this host receives for both, and shares its memory at `address`."""

    epoch: Index
    address: ShortText


class BeginUpdate(msgspec.Struct, frozen=True, tag="begin", tag_field="kind"):
    """From now on group `epoch` is sent the buckets of a version, from bucket `first` on.

    The same `update` again, after another `Join`: it goes on there; buckets that a receiver has are sent once more.
    """

    epoch: Index
    update: Index
    version: VersionNumber
    staged: bool
    num_buckets: Index
    first: Index = 0


class UpdateAborted(msgspec.Struct, frozen=True, tag="aborted", tag_field="kind"):
    """The update is over; its group is being closed."""

    update: Index
    reason: ShortText


class KeepAlive(msgspec.Struct, frozen=True, tag="waiting", tag_field="kind"):
    """The sender waits for somebody, and lives."""


class ProgressQuestion(msgspec.Struct, frozen=True, tag="ask", tag_field="kind"):
    """How far are you?"""

    question: Index


ToReceiver: TypeAlias = (
    Heartbeat | Join | Connect | ReadAlong | BeginUpdate | UpdateAborted | KeepAlive | ProgressQuestion
)


# --- receiver -> sender -----------------------------------------------------------------------


class HostIdentity(msgspec.Struct, frozen=True, tag="here", tag_field="kind"):
    """The first after the hello. Receivers of equal `host` can share memory."""

    host: ShortText


class Opened(msgspec.Struct, frozen=True, tag="opened", tag_field="kind"):
    """The receiver waits for this version."""

    version: VersionNumber


class Joining(msgspec.Struct, frozen=True, tag="joining", tag_field="kind"):
    """The receiver is ready to connect to group `epoch`, or reads along with one that is.

    Of `update` it has the first `num_received` buckets. `shared`: where others read along, if they were named.
    """

    epoch: Index
    update: Index = 0
    num_received: Index = 0
    shared: ShortText = ""


class JoinFailed(msgspec.Struct, frozen=True, tag="join_failed", tag_field="kind"):
    """The receiver could not connect to group `epoch`."""

    epoch: Index
    reason: ShortText
    is_own: bool = False


class AllReceived(msgspec.Struct, frozen=True, tag="whole", tag_field="kind"):
    """Every bucket of `update` has arrived here."""

    update: Index


class UpdateEnded(msgspec.Struct, frozen=True, tag="ended", tag_field="kind"):
    """The receiver takes no more of `update`, or of a `version` that it had opened and that has not begun (0)."""

    version: VersionNumber
    update: Index


class Progress(msgspec.Struct, frozen=True, tag="answer", tag_field="kind"):
    """To `ProgressQuestion`. `is_waiting`: it waits for its next bucket, and is not itself what the others wait for."""

    question: Index
    update: Index
    num_received: Index
    is_waiting: bool


FromReceiver: TypeAlias = Hello | HostIdentity | Opened | Joining | JoinFailed | AllReceived | UpdateEnded | Progress


# --- addresses --------------------------------------------------------------------------------


class Address(NamedTuple):
    """Where a sender is reached, and the secret that it asks for; printed and logged without it."""

    backend: str
    host: str
    port: int
    secret: str

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.backend}://{host}:{self.port}/{self.secret}"


def parse_endpoint(url: str) -> tuple[str, str, int]:
    """Backend, host and port of what a user writes: `gloo://host:port`, port 0 or none for a free one.

    Raises ValueError.
    """
    backend, parts = registry.scheme(url), urllib.parse.urlsplit(url)
    try:
        port = parts.port or 0
    except ValueError as exc:
        raise ValueError(f"{url!r}: {exc}") from exc
    if backend not in BACKENDS or parts.path not in ("", "/") or parts.query or parts.username:
        raise ValueError(f"{url!r} is not the endpoint of a collective sender; write {backend}://HOST:PORT")
    host = registry.host(url)
    if host in ("0.0.0.0", "::"):
        raise ValueError(f"{url!r} names no address that engines can connect to: write this host's own")
    return backend, host, port


def parse_address(url: str) -> Address:
    """What `Address.url` made. Raises ManifestError."""
    try:
        parts = urllib.parse.urlsplit(url)
        secret = msgspec.convert(parts.path.removeprefix("/"), Digest256)
        if parts.scheme not in BACKENDS or not parts.hostname or not parts.port:
            raise ValueError("it has no backend, host or port")
        return Address(parts.scheme, parts.hostname, parts.port, secret)
    except (ValueError, msgspec.ValidationError) as exc:
        shown = url.rpartition("/")[0][:200]
        raise ManifestError(f"{shown!r} is not the address of a collective sender: {exc}", fault="invalid") from exc
