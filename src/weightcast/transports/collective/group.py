"""One group of the sender, from its making to its end: its members, and the broadcasts that are under way in it.

Invariants: a group is of exactly the members that it was made for; it is never mended, only closed; closing never waits
(a stalled member can keep a socket busy until the group's timeout, so a thread of its own sees it off).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from weightcast.errors import PeerDiedError, to_record
from weightcast.host.closing import awaited_at_exit
from weightcast.process_group import Broadcast, ProcessGroup, Store, serve_store
from weightcast.transports.collective import records
from weightcast.transports.sending import ConnectedPeer

_ALL = 1 << 62


def engine_of(name: str) -> str:
    """Workers of one engine have its name in common."""
    return name.partition("#")[0]


@dataclasses.dataclass(slots=True, eq=False)
class GroupMember(ConnectedPeer):
    """`joining`, `left`: its last word on the group that it was invited to. `progress`: of the present update in it."""

    joining: records.Joining = dataclasses.field(default_factory=lambda: records.Joining(epoch=0))
    left: records.JoinFailed = dataclasses.field(default_factory=lambda: records.JoinFailed(epoch=0, reason=""))
    progress: records.Progress = dataclasses.field(default_factory=records.Progress)

    @property
    def engine_rank(self) -> int:
        return int(self.name.partition("#")[2] or 0)

    def failure(self) -> PeerDiedError:
        return PeerDiedError(f"{self.name} could not connect to the group: {self.left.reason}", peer=self.name)


class GroupSettings(NamedTuple):
    """Settings of all groups of a sender. `condition` is notified of the end of connecting and of broadcasts."""

    backend: str
    host: str
    device: torch.device
    deadline_seconds: float
    condition: threading.Condition


class BroadcastGroup:
    """A group of the sender (rank 0) and `joined`; `readers` says who reads along with each of these."""

    def __init__(
        self, number: int, settings: GroupSettings, readers: Mapping[GroupMember, Sequence[GroupMember]]
    ) -> None:
        """Serve the group's store; `invite` says what the members need to connect. Raises PeerError."""
        self.number = number
        self.joined = tuple(readers)
        self.readers = dict(readers)
        self.members = (*self.joined, *(reader for each in readers.values() for reader in each))
        self.names = frozenset(member.name for member in self.members)
        self.connect_error = ""
        self._broadcasts: dict[int, Broadcast] = {}
        self._settings = settings
        self._is_closed = False
        self._group: ProcessGroup | None = None
        self._store: Store | None
        self._store, self._port = serve_store(settings.host, settings.deadline_seconds)

    def invite(self) -> None:
        """Tell those who are to join."""
        for position, member in enumerate(self.joined):
            join = records.Join(
                epoch=self.number,
                group_rank=position + 1,
                group_size=len(self.joined) + 1,
                host=self._settings.host,
                port=self._port,
                deadline_seconds=self._settings.deadline_seconds,
                is_read_along=bool(self.readers[member]),
            )
            member.link.send(join)

    def invite_readers(self) -> None:
        """Tell the others where to read, once those who joined have said so."""
        for member, readers in self.readers.items():
            for reader in readers:
                reader.link.send(records.ReadAlong(self.number, member.joining.memory))

    def connect(self) -> None:
        """Begin to connect, in a thread: gloo may take several deadlines to find out that a member has died."""
        for member in self.joined:
            member.link.send(records.Connect(self.number))
        # The store is handed over: `close` drops it, and torch's group crashes without one.
        awaited_at_exit(functools.partial(self._connect, self._store), "weightcast-group")

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    def _connect(self, store: Store) -> None:
        group: ProcessGroup | None = None
        error = ""
        try:
            group = ProcessGroup(
                self._settings.backend,
                store,
                rank=0,
                size=len(self.joined) + 1,
                timeout_seconds=self._settings.deadline_seconds,
                host=self._settings.host,
                device=self._settings.device,
            )
        except Exception as exc:
            error = to_record(exc).message
        with self._settings.condition:
            self.connect_error = error
            if not self._is_closed:
                self._group, group = group, None
            self._settings.condition.notify_all()
        if group is not None:
            group.close()

    def send(self, index: int, buffer: torch.Tensor) -> None:
        """Begin to broadcast a bucket. Raises PeerError if the group is broken."""
        assert self._group is not None
        self._broadcasts[index] = Broadcast(self._group, buffer, self._settings.condition)

    def error(self) -> str:
        """How the group or a broadcast has failed; empty if none has."""
        errors = (broadcast.error for broadcast in self._broadcasts.values())
        return self.connect_error or next((error for error in errors if error), "")

    def is_quiet(self, below: int = _ALL) -> bool:
        """Return whether no broadcast of a bucket below `below` is under way. Forgets those over without an error."""
        for index in [index for index, each in self._broadcasts.items() if each.is_over and not each.error]:
            del self._broadcasts[index]
        return all(broadcast.is_over for index, broadcast in self._broadcasts.items() if index < below)

    def close(self) -> None:
        """Disconnect, in the background: operations may be under way. Idempotent."""
        self._is_closed = True
        group, self._group = self._group, None
        self._store = None
        self._broadcasts.clear()
        if group is not None:
            awaited_at_exit(group.close, "weightcast-group-end")
