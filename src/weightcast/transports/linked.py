"""Both ends of transports whose peers are connected by links: control records, to peers that have the secret.

Links are read under the condition of the end, by any thread that waits on it or by the link's own, so that all of this
happens under it; a peer that has gone is told apart from one that is silent. How bytes move is the transport's own.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from weightcast import registry
from weightcast.errors import ManifestError, WeightcastError
from weightcast.format.messages import Digest256, Heartbeat, Hello
from weightcast.host.closing import on_failure
from weightcast.host.memory import host_identity
from weightcast.links.link import Link, LinkListener, ReadingCondition, WorkerLink
from weightcast.transports.receiving import CONNECT_SECONDS, PeerReceiver, V
from weightcast.transports.records import FromPeer, FromSender
from weightcast.transports.sending import ConnectedPeer, SendingEnd, U, sign_seconds

FromLinked: TypeAlias = Hello | FromPeer
ToLinked: TypeAlias = Heartbeat | FromSender


@dataclasses.dataclass(slots=True, eq=False)
class LinkedPeer(ConnectedPeer):
    """A peer that connects again has another link, and is another peer."""

    link: Link


L = TypeVar("L", bound=LinkedPeer)


class LinkedSender(SendingEnd[U, L], Generic[U, L]):
    """Listens at an address of this host. `peer_type`: what it makes for each receiver."""

    peer_type: type[L]
    same_host = False
    """True if all receivers are on this host: they connect to a Unix socket, over which descriptors can be sent."""

    def __init__(self, url: str, *, run: str, deadline_seconds: float, records: Any, **options: Any) -> None:
        """Listen at the URL's host and port. `records`: the union of what receivers may send. `options`: of the base.

        Raises ValueError, or OSError if the address can't be had.
        """
        scheme, host, port = parse_endpoint(url)
        sign = sign_seconds(deadline_seconds)
        self._listener = LinkListener(
            run, host=None if self.same_host else host, port=port, heartbeat_seconds=sign, messages=records
        )
        with on_failure(self._listener.close):
            condition = self._listener.condition
            super().__init__(run, deadline_seconds=deadline_seconds, condition=condition, **options)
        self.address = Address(scheme, self._listener.address, self._listener.secret).url

    def close(self) -> None:
        try:
            super().close()
        finally:
            # Not under the condition, which the listener's thread takes.
            self._listener.close()

    def _post(self, peer: L, record: msgspec.Struct, *, wait: bool = True) -> bool:
        """A link never waits for room: a peer that reads no more has ended."""
        peer.link.send(record)
        self._drop_if_gone(peer)
        return peer.link.is_alive

    def _listen(self) -> None:
        for link in self._listener.links():
            known = self._peers.get(link.peer)
            if known is None or known.link is not link:
                if known is not None:
                    self._hear(known)
                self._on_connected(self.peer_type(link.peer, link=link))
        for peer in list(self._peers.values()):
            self._hear(peer)

    def _hear(self, peer: L) -> None:
        for record in peer.link.pop_messages():
            self._on_record(peer, record)
        self._drop_if_gone(peer)

    def _drop_if_gone(self, peer: L) -> None:
        if peer.link.ended:
            self._drop(peer, peer.died(peer.link.ended), may_be_reading=not peer.link.has_left)

    def _drop(self, peer: L, error: WeightcastError, *, may_be_reading: bool) -> None:
        peer.link.end(f"the publisher gave this receiver up: {error}")
        super()._drop(peer, error, may_be_reading=may_be_reading)


class LinkedReceiver(PeerReceiver[V]):
    """Hears its sender in the thread that waits, or in the link's."""

    def __init__(
        self, url: str, *, peer: str, run: str, deadline_seconds: float, records: Any, lease_seconds: float = 0.0
    ) -> None:
        """Connect to a sender's address. `records`: the union of what it may send. `lease_seconds`: after how long a
        silent sender has gone, by default `deadline_seconds`.

        All else that records need must be there already. Raises PeerDiedError, ManifestError.
        """
        address = parse_address(url)
        condition = ReadingCondition()
        super().__init__(run, deadline_seconds, condition)
        self._publisher = f"the publisher at {address.url.rpartition('/')[0]}"
        connect_seconds = min(deadline_seconds, CONNECT_SECONDS)
        # Held, so that nothing is read before there is a link.
        with condition:
            self._link = WorkerLink(
                address.link,
                Hello(run, peer, 0, address.secret, host=host_identity()),
                lease_seconds=lease_seconds or deadline_seconds,
                on_end=self._on_end,
                on_message=self._on_message,
                messages=records,
                connect_seconds=connect_seconds,
                condition=condition,
            )
        with on_failure(self._link.close):
            # What is offered to this worker may be sent at once: by then the sender must know of it.
            self._link.await_welcome(connect_seconds)

    def close(self) -> None:
        super().close()
        self._link.close()

    def _listen(self) -> None:
        self._link.read()
        self._ended = self._ended or self._link.over

    def _tell(self, record: msgspec.Struct) -> None:
        try:
            self._link.send(record)
        except OSError:
            # The link's own thread notices a sender that has gone.
            self._ended = self._ended or "it takes no records"

    def _on_message(self, record: Any) -> None:
        self._on_record(record)

    def _on_end(self, reason: str) -> None:
        with self._condition:
            self._ended = reason
            self._on_over()
            self._condition.notify_all()


# --- addresses ---


class Address(NamedTuple):
    """Address of a sender's links, and the secret that it asks for; printed and logged without the secret."""

    scheme: str
    link: str
    secret: str

    @property
    def url(self) -> str:
        kind, _, where = self.link.partition(":")
        host, _, port = where.rpartition(":")
        where = f"[{host}]:{port}" if kind == "tcp" and ":" in host else where
        return f"{self.scheme}://{where}/{self.secret}"

    @property
    def port(self) -> int:
        """The TCP port."""
        return int(self.link.rpartition(":")[2])


def parse_endpoint(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of what a user writes: `scheme://host:port`, port 0 or none for a free one.

    Raises ValueError.
    """
    scheme, parts = registry.scheme(url), urllib.parse.urlsplit(url)
    try:
        port = parts.port or 0
    except ValueError as exc:
        raise ValueError(f"{url!r}: {exc}") from exc
    if parts.path not in ("", "/") or parts.query or parts.username:
        raise ValueError(f"{url!r} is not the endpoint of a sender; write {scheme}://HOST:PORT")
    host = registry.host(url)
    if host in ("0.0.0.0", "::"):
        raise ValueError(f"{url!r} names no address that engines can connect to: write this host's own")
    return scheme, host, port


def parse_address(url: str) -> Address:
    """Parse a URL that `Address.url` made. Raises ManifestError."""
    try:
        parts = urllib.parse.urlsplit(url)
        secret = msgspec.convert(parts.path.removeprefix("/"), Digest256)
        if parts.netloc.startswith("@"):
            return Address(parts.scheme, f"unix:{parts.netloc}", secret)
        if not parts.hostname or not parts.port:
            raise ValueError("it has no host or port")
        return Address(parts.scheme, f"tcp:{parts.hostname}:{parts.port}", secret)
    except (ValueError, msgspec.ValidationError) as exc:
        shown = url.rpartition("/")[0][:200]
        raise ManifestError(f"{shown!r} is not the address of a sender: {exc}", fault="invalid") from exc
