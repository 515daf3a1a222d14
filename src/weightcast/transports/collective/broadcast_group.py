"""One group of the sender, from its making to its end: its members, and the broadcasts that are under way in it.

Invariants: a member is known by its link, so that one that has connected again is another one; a group is of exactly
the members that it was made for; it is never mended, only closed; closing never waits (a stalled member can keep a
socket busy until the group's timeout, so a thread of its own sees it off).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import torch

from weightcast.errors import PeerDiedError, UpdateAbortedError, WeightcastError, detached
from weightcast.links.link import Link
from weightcast.process_group import ProcessGroup, Store, in_background, serve_store, translated
from weightcast.transports.collective import records

_ALL = 1 << 62
_RECEIVERS_PATIENCE = 3.0
"""Timeout of a receive, in multiples of the sender's deadline: the sender may be waiting for another receiver.

A receiver's control connection says whether the sender is alive. But gloo does not wake a receive whose connection
broke in the middle of a message: its thread, sockets and buffer live until this timeout.
"""


@dataclasses.dataclass(eq=False)
class GroupMember:
    """One receiver's control connection and what it has told, in order. Nothing here waits."""

    name: str
    link: Link
    host: str = ""
    declined: int | None = None
    ended_update: int = 0
    whole_update: int = 0
    joining: records.Joining = dataclasses.field(default_factory=lambda: records.Joining(epoch=0))
    join_failed: records.JoinFailed = dataclasses.field(default_factory=lambda: records.JoinFailed(epoch=0, reason=""))
    answer: records.Progress | None = None

    @property
    def engine(self) -> str:
        """Workers of one engine have its name in common."""
        return self.name.partition("#")[0]

    @property
    def engine_rank(self) -> int:
        return int(self.name.partition("#")[2] or 0)

    def take_messages(self) -> None:
        for message in self.link.take():
            match message:
                case records.HostIdentity():
                    self.host = message.host
                case records.Opened():
                    self.declined = None
                case records.Joining():
                    self.joining, self.join_failed = message, records.JoinFailed(epoch=0, reason="")
                case records.JoinFailed():
                    self.join_failed = message
                case records.AllReceived():
                    self.whole_update = message.update
                case records.UpdateEnded(update=0):
                    self.declined = message.version
                case records.UpdateEnded():
                    self.ended_update = message.update
                case records.Progress():
                    self.answer = message

    def has_left(self, epoch: int) -> bool:
        """Whether it could not connect to that group, or is in it no more."""
        return self.join_failed.epoch == epoch

    def has_joined(self, epoch: int) -> bool:
        """Whether it has answered the invitation to that group."""
        return self.joining.epoch == epoch

    def has_answered(self, question: int) -> bool:
        return self.answer is not None and self.answer.question == question

    def loss(self, update: int, version: int) -> WeightcastError | None:
        """Why it takes no more of the update, if so."""
        if not self.link.is_alive:
            return PeerDiedError(f"the receiver of {self.name} has gone: {self.link.ended}", peer=self.name)
        if self.whole_update != update and (self.ended_update == update or self.declined == version):
            return UpdateAbortedError(f"{self.name} left the update of version {version}")
        return None


def send_to_all(members: Iterable[GroupMember], message: msgspec.Struct) -> None:
    for member in members:
        member.link.send(message)


class Broadcast:
    """A broadcast under way. `error`: how it failed, once `is_over`. On a CPU its end is told to `condition`."""

    def __init__(self, group: ProcessGroup, buffer: torch.Tensor, condition: threading.Condition) -> None:
        self.error: WeightcastError | None = None
        self._has_landed = False
        self._condition = condition
        self._work = group.broadcast(buffer, root=0)
        self._is_polled = buffer.is_cuda
        if not self._is_polled:
            # A future of NCCL's is done as soon as the broadcast is queued.
            self._work.get_future().add_done_callback(self._land)

    @property
    def is_over(self) -> bool:
        return self._has_landed or (self._is_polled and self._work.is_completed())

    def _land(self, future: torch.futures.Future[object]) -> None:
        error: WeightcastError | None = None
        try:
            with translated("a broadcast"):
                future.value()
        except WeightcastError as exc:
            # A copy: the cause's traceback would keep this frame, and with it the group's sockets.
            error = detached(exc)
        with self._condition:
            self._has_landed, self.error = True, error
            self._condition.notify_all()


class GroupSettings(NamedTuple):
    """What all groups of a sender have in common. `condition` is notified of all that ends."""

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
        """Serve the group's store; `invite` says what the members need to connect."""
        self.number = number
        self.joined = tuple(readers)
        self.readers = dict(readers)
        self.connect_error: WeightcastError | None = None
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
                timeout_seconds=self._settings.deadline_seconds * _RECEIVERS_PATIENCE,
                readers=tuple(reader.name for reader in self.readers[member]),
            )
            member.link.send(join)

    def invite_readers(self) -> None:
        """Tell the others where to read, once those who joined have said so."""
        for member, readers in self.readers.items():
            send_to_all(readers, records.ReadAlong(self.number, member.joining.shared))

    def connect(self) -> None:
        """Begin to connect, in a thread: gloo may take several deadlines to find out that a member has died."""
        # The store is handed over: `close` drops it, and torch's group crashes without one.
        in_background(functools.partial(self._connect, self._store), "weightcast-group")

    @property
    def is_connected(self) -> bool:
        return self._group is not None

    def _connect(self, store: Store) -> None:
        group: ProcessGroup | None = None
        error: WeightcastError | None = None
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
            error = detached(exc)
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

    def error(self) -> WeightcastError | None:
        """How a broadcast has failed, if one has."""
        return next((broadcast.error for broadcast in self._broadcasts.values() if broadcast.error is not None), None)

    def is_quiet(self, below: int = _ALL) -> bool:
        """Whether no broadcast of a bucket below that one is under way."""
        return all(broadcast.is_over for index, broadcast in self._broadcasts.items() if index < below)

    def land(self, below: int = _ALL) -> None:
        """Forget broadcasts below that bucket; they are over."""
        for index in [index for index in self._broadcasts if index < below]:
            del self._broadcasts[index]

    def close(self) -> None:
        """Disconnect, in the background where operations are still under way. Idempotent."""
        self._is_closed = True
        group, self._group = self._group, None
        self._store = None
        is_quiet = self.is_quiet()
        self._broadcasts.clear()
        if group is not None and is_quiet:
            group.close()
        elif group is not None:
            in_background(group.close, "weightcast-group-end")
