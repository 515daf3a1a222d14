"""The publisher's end of the collective transport: each bucket is one flat broadcast to all receivers.

Invariants: a bucket is broadcast only when every receiver waits for it; a slot is rewritten only when its former
broadcast is over, and never while a broken group may still read it. After any failure in a group the sender closes it.
The workers that caused the failure are lost, each with its reason, and so are the other workers of their engines, since
all workers of an engine install a version or none does. The update then begins again for the survivors, in a new group
and from the first bucket on. If it fails twice and no worker caused that, all are lost.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from weightcast import process_group, registry
from weightcast.errors import (
    PeerDiedError,
    PeerError,
    PeersLostError,
    PeerTimeoutError,
    UnsupportedError,
    UpdateAbortedError,
    WeightcastError,
    listed,
    to_record,
)
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, arena_layout_of
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host import device as host_device
from weightcast.host.closing import close_at_exit
from weightcast.host.deadline import GRACE_SECONDS, Deadline
from weightcast.host.descriptors import shortage, shortage_now
from weightcast.links.link import LinkListener
from weightcast.transports.collective import records
from weightcast.transports.collective.group import BroadcastGroup, GroupMember, GroupSettings, engine_of
from weightcast.transports.kept_memory import MemoryToSend
from weightcast.transports.records import BeginUpdate, UpdateAborted
from weightcast.transports.sending import MAX_REASON_CHARACTERS, SendingEnd, SentUpdate, unlocked

_NUM_SLOTS = 2
"""One is packed while the other is broadcast."""


@dataclasses.dataclass(slots=True, eq=False)
class GroupUpdate(SentUpdate):
    """The update in progress. `num_fruitless` counts interruptions in a row for which no peer was to blame."""

    num_fruitless: int = 0


class CollectiveSender(SendingEnd[GroupUpdate, GroupMember]):
    """Implements `Sender`. Memory: two buckets, on the GPU with NCCL, kept for the next update.

    `deadline_seconds` limits each wait, and each broadcast from its start to its end.
    """

    peer_type = GroupMember

    def __init__(
        self,
        url: str,
        *,
        run: str,
        listener: LinkListener,
        deadline_seconds: float = 60.0,
        device: torch.device | str | None = None,
    ) -> None:
        """Make a sender whose groups connect through the URL's host. Raises ValueError, UnsupportedError."""
        backend, (host, _) = registry.scheme(url), registry.endpoint(url)
        if url.partition("://")[2].strip("/") != urllib.parse.urlsplit(url).netloc.rpartition("@")[2]:
            raise ValueError(f"{url!r} has more than an address; write {backend}://HOST:PORT")
        process_group.require(backend)
        device = torch.device((device or "cuda") if backend == "nccl" else "cpu")
        if backend == "nccl" and device.type != "cuda":
            raise UnsupportedError(f"nccl sends GPU memory, and the weights are on {device}: use gloo:// or ipc://")
        super().__init__(run, listener, deadline_seconds, records.FromReceiver)
        self.num_groups = 0
        self._group: BroadcastGroup | None = None
        """Reused for the next update if its members stay."""
        self._settings = GroupSettings(backend, host, device, deadline_seconds, self.condition)
        self._slots = MemoryToSend(device, "sending this update")
        self._slots_are_lost = False
        """True if a broadcast of a closed group may still read the slots."""
        close_at_exit(self)

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> int:
        """Begin an update, or begin it again after a loss: wait until `peers` have opened it and have joined a group.

        An update in progress begins again even if this sender has lost no peer: another origin's sender may have.
        """
        with self.condition:
            self._require_open(version)
            update, former = None, self._update
            if former is not None and former.is_open and former.version == version:
                if former.is_interrupted or not former.is_done:
                    self._leave()
                    # If none of `peers` took part, they have connected since, or take the version in another form.
                    update = former if former.peers.intersection(peers) or not peers else None
                former.is_interrupted = False
            if update is None:
                self._begin_open(version)
                arena_layout = arena_layout_of(manifest, num_slots=_NUM_SLOTS, staged=False)
                taking_part = self._await_opened(peers, version)
                update = GroupUpdate(version, manifest, staged, len(manifest.buckets), arena_layout, taking_part)
                self._update = update
            update.next = 0
            update.peers &= set(peers)
            self._have_group(update)
            group = self._group
            if self._slots_are_lost:
                self._slots.free()
                self._slots_are_lost = False
            self._slots.prepare(update.arena_layout)
            if group is not None:
                begin = BeginUpdate(version.number, staged, update.num_buckets)
                for member in group.members:
                    member.progress = records.Progress(group.number, version.number)
                    self._post(member, begin)
            if update.is_done:
                update.peers.clear()
            return 0

    def buffer(self, index: int) -> BucketBuffer:
        """Return memory to pack bucket `index` into. Waits until the broadcast of its slot's former content is over."""
        with self.condition:
            update, group = self._require_update(index), self._group
            if group is not None:
                free = index - _NUM_SLOTS + 1
                self._await(update, group, lambda: group.is_quiet(free))
            return self._slots.buffer(index)

    def send(self, index: int, num_bytes: int) -> None:
        """Begin to broadcast the bucket once all receivers wait for it; with the last one, wait until it is received.

        Raises ValueError unless `num_bytes` is the length in the plan, which receivers wait for.
        """
        with self.condition:
            update, group = self._require_update(index), self._group
            if num_bytes != (expected := HEADER_BYTES + update.manifest.buckets[index]):
                raise ValueError(f"num_bytes of bucket {index} is {num_bytes}, expected {expected}")
            if group is not None:
                self._await(update, group, lambda: all(m.progress.num_awaited > index for m in group.members))
                try:
                    group.send(index, self._slots.buffer(index).flat(num_bytes))
                except PeerError as exc:
                    self._interrupt_broken(update, group, str(exc))
            update.next = index + 1
            if group is None:
                return

            def is_received() -> bool:
                return group.is_quiet() and all(m.progress.num_received == update.num_buckets for m in group.members)

            # Notice a broken group here already, and not only at the next bucket.
            self._await(update, group, lambda: not update.is_done or is_received())
            if update.is_done:
                # All receivers have all buckets: this update can't lose a peer any more.
                update.peers.clear()

    def release(self) -> None:
        """Free the slots, unless a closed group may still read them; see `Sender.release`."""
        with self.condition:
            self._require_open()
            if not self._slots_are_lost:
                self._slots.free()
                host_device.empty_cache(self._settings.device)

    def _free(self) -> None:
        self._leave()
        self._slots.close()

    # --- records of peers ---

    def _on_other(self, peer: GroupMember, record: Any) -> None:
        update, group = self._update, self._group
        match record:
            case records.Joining():
                peer.joining = record
            case records.JoinFailed():
                peer.left = record
                is_meant = group is not None and record.epoch == group.number
                if record.is_own and is_meant and update is not None and peer.name in update.peers:
                    self._lose(peer.name, peer.failure())
            case records.Progress(epoch, number, num_received) if group is not None:
                if (epoch, number) == (peer.progress.epoch, peer.progress.version):
                    peer.progress = record
                    for reader in group.readers.get(peer, ()):
                        reader.link.send(records.Arrived(number, num_received))

    def _on_ended(self, peer: GroupMember, update: GroupUpdate) -> None:
        if peer.name in update.peers and peer.progress.num_received < update.num_buckets:
            what = f"{peer.name} ended version {update.version.number} before it had received all buckets"
            self._lose(peer.name, UpdateAbortedError(what))

    def _on_aborted(self, update: GroupUpdate) -> None:
        """Tell the peers, and close the group if some may be waiting in it."""
        is_done = not update.peers
        super()._on_aborted(update)
        if not is_done:
            self._leave()

    def _lose(self, name: str, error: WeightcastError) -> None:
        """Remove the member and the other workers of its engine from the update."""
        update, reason = self._update, f"{name}, a worker of the same engine, was lost: {error}"
        others = [] if update is None else [o for o in update.peers if o != name and engine_of(o) == engine_of(name)]
        for lost, why in [(name, error), *((other, UpdateAbortedError(reason)) for other in others)]:
            super()._lose(lost, why)
            if update is not None and lost in self._peers:
                self._peers[lost].link.send(UpdateAborted(update.version.number, str(why)[:MAX_REASON_CHARACTERS]))

    # --- the group ---

    def _readers(self, update: GroupUpdate) -> dict[GroupMember, list[GroupMember]]:
        """Return the members that join the group, each with the workers that read its memory.

        In a staged update those are the other workers of its engine on its host; else there are none.
        """
        joined: dict[object, GroupMember] = {}
        readers: dict[GroupMember, list[GroupMember]] = {}
        members = [self._peers[name] for name in update.peers]
        for member in sorted(members, key=lambda m: (engine_of(m.name), m.link.engine_rank)):
            first = joined.setdefault((engine_of(member.name), member.link.host) if update.staged else member, member)
            readers.setdefault(first, [])
            if first is not member:
                readers[first].append(member)
        return readers

    def _have_group(self, update: GroupUpdate) -> None:
        """Make sure that the group is of exactly the update's peers. Raises PeersLostError if some can't connect."""
        readers = self._readers(update)
        if self._group is not None and self._group.readers == readers and not self._is_in_trouble(update, self._group):
            return
        self._leave()
        if not readers:
            return
        self.num_groups += 1
        try:
            with unlocked(self.condition):  # serving the store may take a while
                group: BroadcastGroup | str = BroadcastGroup(self.num_groups, self._settings, readers)
        except (PeerError, OSError) as exc:
            short = shortage(exc) or shortage_now()
            group = f"can't make a group: {short}" if short else to_record(exc).message
        if isinstance(group, str):
            self._interrupt(update, {}, group)
        self._group = group
        if self._closed:
            self._leave()
        self._require_open()
        group.invite()
        self._await_answers(update, group, group.joined)
        group.invite_readers()
        self._await_answers(update, group, group.members)
        # Only now: a member that waits in gloo for another that never connects can't be woken.
        group.connect()
        # No member is to blame if connecting takes longer than the deadline: all have answered.
        self._await(update, group, lambda: group.is_connected, list)

    def _leave(self) -> None:
        """Close the group without waiting for broadcasts that are under way."""
        group, self._group = self._group, None
        if group is not None:
            self._slots_are_lost |= not group.is_quiet()
            group.close()

    def _is_in_trouble(self, update: GroupUpdate, group: BroadcastGroup) -> bool:
        """Return true if the group has failed, or its members are not the update's peers any more."""
        is_left = any(member.left.epoch == group.number for member in group.members)
        return bool(group.error()) or is_left or update.peers != group.names

    def _await(
        self,
        update: GroupUpdate,
        group: BroadcastGroup,
        is_done: Callable[[], bool],
        late: Callable[[], Sequence[GroupMember]] | None = None,
        what: str = "took no bucket",
    ) -> None:
        """Wait until `is_done()`. Raises PeersLostError if the group fails, or at the deadline.

        At the deadline the members of `late()` are to blame, by default those that the others wait for; `what` says
        what they have failed to do.
        """
        deadline = Deadline(self._deadline_seconds)
        poll_seconds = host_device.POLL_SECONDS if self._settings.backend == "nccl" else self._deadline_seconds
        self._listen()
        while not (self._is_in_trouble(update, group) or is_done()):
            if deadline.has_passed:
                blamed = self._slow(update, group) if late is None else late()
                errors = {member: self._timed_out(member.name, what) for member in blamed}
                self._interrupt(update, errors, f"no progress for {self._deadline_seconds:g} s")
            self._wait(min(deadline.remaining_seconds, poll_seconds))
        if self._is_in_trouble(update, group):
            self._interrupt_broken(update, group, group.error() or "a member has left the group of receivers")

    def _await_answers(self, update: GroupUpdate, group: BroadcastGroup, members: Sequence[GroupMember]) -> None:
        """Wait for answers to an invitation. Raises PeersLostError if members can't join, or don't answer."""

        def silent() -> list[GroupMember]:
            return [member for member in members if member.joining.epoch != group.number]

        self._await(update, group, lambda: not silent(), silent, "answered no invitation to a group")

    # --- losses ---

    def _interrupt_broken(self, update: GroupUpdate, group: BroadcastGroup, cause: str) -> NoReturn:
        """Close a group that failed, and raise PeersLostError without the member that caused it.

        Waits a little for that member's record, or the end of its link, which may arrive after the failure.
        """

        def failed() -> list[GroupMember]:
            # In a connected group every member fails with the first one, so that their records don't show who it was.
            return [] if group.is_connected else [m for m in group.members if m.left.epoch == group.number]

        deadline = Deadline(min(GRACE_SECONDS, self._deadline_seconds))
        self._listen()
        while update.peers == group.names and not failed() and not deadline.has_passed:
            self._wait(deadline.remaining_seconds)
        self._interrupt(update, {member: member.failure() for member in failed()}, cause)

    def _interrupt(self, update: GroupUpdate, blamed: Mapping[GroupMember, WeightcastError], cause: str) -> NoReturn:
        """Close the group, drop the peers that are to blame, and raise PeersLostError.

        If there are none for the second time in a row, all peers are lost.
        """
        group = self._group
        if blamed or (group is not None and update.peers != group.names):
            update.num_fruitless = 0
        else:
            update.num_fruitless += 1
        if update.num_fruitless > 1:
            every = [self._peers[name] for name in update.peers]
            blamed = {m: PeerDiedError(f"{m.name}: {cause}", peer=m.name) for m in every}
        for member, error in blamed.items():
            if member.name in update.peers:
                self._lose(member.name, error)
            if isinstance(error, PeerTimeoutError):
                self._drop(member, error, may_be_reading=False)
        self._leave()
        update.is_interrupted = True
        lost = listed([f"{name}: {error}" for name, error in self._failures.items()]) or f"no peer, but failed: {cause}"
        raise PeersLostError(f"version {update.version.number} has lost {lost}", sorted(update.peers))

    def _slow(self, update: GroupUpdate, group: BroadcastGroup) -> list[GroupMember]:
        """Return the members that the others wait for.

        Those are the members that have received everything that was broadcast and don't wait for the next bucket. If
        there are none, or no next bucket, those that have received less than others, but only if the update failed in
        a former group, too: gloo wakes neither end of a connection that broke in the middle of a message, so that a
        healthy member may wait for bytes that can't arrive.
        """
        members, following = group.members, update.next
        if following < update.num_buckets:
            busy = [m for m in members if m.progress.num_received == following == m.progress.num_awaited]
            if busy:
                return busy
        if not update.num_fruitless:
            return []
        furthest = max(member.progress.num_received for member in members)
        return [member for member in members if member.progress.num_received < furthest]
