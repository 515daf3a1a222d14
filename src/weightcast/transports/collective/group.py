"""One torch.distributed group of the sender: its members, and the broadcasts that are under way in it.

Invariants: the members of a group never change; a broken group is closed, not repaired; `close` never waits (a stalled
member can keep a socket busy until the group's timeout, so a background thread closes the group).
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
    """Return the name of the engine that a worker belongs to."""
    return name.partition("#")[0]


@dataclasses.dataclass(slots=True, eq=False)
class GroupMember(ConnectedPeer):
    """A peer as a member of groups.

    `joining`, `left`: the last records that it sent about a group. `progress`: its progress with the present update.
    """

    joining: records.Joining = dataclasses.field(default_factory=lambda: records.Joining(epoch=0))
    left: records.JoinFailed = dataclasses.field(default_factory=lambda: records.JoinFailed(epoch=0, reason=""))
    progress: records.Progress = dataclasses.field(default_factory=records.Progress)

    def failure(self) -> PeerDiedError:
        return PeerDiedError(f"{self.name} could not join the group of receivers: {self.left.reason}", peer=self.name)


class GroupSettings(NamedTuple):
    """Settings of all groups of a sender. `condition` is notified when connecting or a broadcast ends."""

    backend: str
    host: str
    device: torch.device
    deadline_seconds: float
    condition: threading.Condition


class BroadcastGroup:
    """A group of the sender (rank 0) and `joined`. `readers` are the workers that read the memory of each of these."""

    def __init__(
        self, number: int, settings: GroupSettings, readers: Mapping[GroupMember, Sequence[GroupMember]]
    ) -> None:
        """Serve the group's rendezvous store, through which the members connect. Raises PeerError."""
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
        """Ask the members that join the group to prepare for it."""
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
        """Send the other workers the location of the memory to read, once the members that join have sent it."""
        for member, readers in self.readers.items():
            for reader in readers:
                reader.link.send(records.ReadAlong(self.number, member.joining.memory))

    def connect(self) -> None:
        """Begin to connect, in a thread: gloo may take several deadlines to notice that a member has died."""
        for member in self.joined:
            member.link.send(records.Connect(self.number))
        # The thread keeps a reference to the store: `close` drops ours, and torch's group crashes without a store.
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
        """Begin to broadcast a bucket. Raises PeerError if the group has failed."""
        assert self._group is not None
        self._broadcasts[index] = Broadcast(self._group, buffer, self._settings.condition)

    def error(self) -> str:
        """Return the error of the group or of a broadcast; empty if there is none."""
        errors = (broadcast.error for broadcast in self._broadcasts.values())
        return self.connect_error or next((error for error in errors if error), "")

    def is_quiet(self, below: int = _ALL) -> bool:
        """Return true if no broadcast of a bucket below `below` is under way. Forgets those that have succeeded."""
        for index in [index for index, each in self._broadcasts.items() if each.is_over and not each.error]:
            del self._broadcasts[index]
        return all(broadcast.is_over for index, broadcast in self._broadcasts.items() if index < below)

    def close(self) -> None:
        """Disconnect in a background thread, since operations may be under way. Idempotent."""
        self._is_closed = True
        group, self._group = self._group, None
        self._store = None
        self._broadcasts.clear()
        if group is not None:
            awaited_at_exit(group.close, "weightcast-group-end")
