"""The publisher's end of the collective transport: one flat broadcast per bucket to every receiver at once.

Invariants: a slot is rewritten only when its former broadcast is over, and never while a broken group may still read
it; a group in which anything went wrong is left, and made again without those that were lost, within the same update;
the others then go on from the first bucket that one of them lacks. All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightcast import process_group
from weightcast.errors import PeerError, UnsupportedError
from weightcast.format.bucket import HEADER_BYTES, BucketBuffer, place
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host.shared_memory import SealedMemory
from weightcast.transports.collective.broadcast_group import send_to_all
from weightcast.transports.collective.membership import GroupSender, GroupUpdate
from weightcast.transports.collective.records import Address, UpdateAborted, parse_endpoint
from weightcast.transports.kept_memory import KeptMemory

_NUM_SLOTS = 2


class CollectiveSender(GroupSender):
    """Implements `Sender`. Memory: two buckets, on the GPU with NCCL, kept for the next update.

    `deadline_seconds` bounds each wait, and each broadcast from its beginning to its end.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        deadline_seconds: float = 60.0,
        device: torch.device | str | None = None,
    ) -> None:
        """Listen at the URL's host and port. Raises ValueError, UnsupportedError, OSError."""
        backend, host, port = parse_endpoint(url)
        process_group.require(backend)
        device = torch.device((device or "cuda") if backend == "nccl" else "cpu")
        if backend == "nccl" and device.type != "cuda":
            raise UnsupportedError(f"nccl moves no memory of {device}: use gloo:// or ipc://")
        try:
            super().__init__(run, backend, host, port, device=device, deadline_seconds=deadline_seconds)
        except OSError as exc:
            what = f"{url!r} can't be listened at: {exc.strerror}; write an address of this host and a free port, or 0"
            raise OSError(exc.errno, what) from exc
        self.address = Address(backend, host, self.listener.port, self.listener.secret).url
        self._slots = KeptMemory(
            (lambda size: SealedMemory.allocate(size).tensor())
            if device.type == "cpu"
            else (lambda size: torch.empty(size, dtype=torch.uint8, device=device))
        )
        process_group.close_at_exit(self)

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        """Begin an update: wait for `peers` to be connected, and for their group, which is kept while they stay."""
        self._begin_open(version, peers)
        with self.condition:
            self._await_connected(peers)
            members = [member for member in map(self._member, peers) if member is not None]
        self._num_updates += 1
        arena_layout = place(manifest, num_slots=_NUM_SLOTS, staged=False)
        update = GroupUpdate(self._num_updates, version, manifest, staged, arena_layout, members=members)
        self._update = update
        self._form(update)
        self._prepare_slots(update)

    def buffer(self, index: int) -> BucketBuffer:
        """Where bucket `index` is to be packed. Waits until the broadcast of its slot's former content is over."""
        update, epoch = self._require_next(index), self.epoch
        if update.members and epoch is not None:
            free = index - _NUM_SLOTS + 1
            is_late = not self._wait_for(update, lambda: epoch.is_quiet(free))
            if is_late or self._is_in_trouble(update):
                self._recover(update, is_late=is_late)
                self._prepare_slots(update)
            else:
                epoch.land(free)
        return self._slots.buffer(index)

    def send(self, index: int, num_bytes: int) -> int:
        """Begin to broadcast the bucket. The last waits until everybody has all of them.

        Raises ValueError unless it is as long as the plan says: receivers wait for that many bytes.
        """
        update = self._require_next(index)
        if num_bytes != (expected := HEADER_BYTES + update.manifest.buckets[index]):
            raise ValueError(f"{num_bytes} bytes of bucket {index} were to be broadcast, expected {expected}")
        if not update.is_rewound:
            update.next = index + 1
            if update.members:
                self._broadcast(update, index)
        update.is_rewound = False
        return update.next

    def _broadcast(self, update: GroupUpdate, index: int) -> None:
        epoch, is_late = self.epoch, False
        assert epoch is not None

        def is_over() -> bool:
            return epoch.is_quiet() and all(member.whole_update == update.number for member in update.members)

        try:
            epoch.send(index, self._slots.buffer(index).flat(HEADER_BYTES + update.manifest.buckets[index]))
            if update.is_whole:
                is_late = not self._wait_for(update, is_over)
            is_lost = is_late or self._is_in_trouble(update)
        except PeerError:
            is_lost = True
        if is_lost:
            self._recover(update, is_late=is_late)
            self._prepare_slots(update)
        elif update.is_whole:
            epoch.land()

    def _tell_aborted(self, update: GroupUpdate) -> None:
        """The group is closed, since some may be waiting in it."""
        if not update.is_whole and update.members:
            send_to_all(update.members, UpdateAborted(update.number, update.aborted or ""))
            self._leave()

    def _disconnect(self) -> None:
        self._leave()
        self.listener.close()
        self._slots.free()

    def _require_next(self, index: int) -> GroupUpdate:
        update = self._require_update()
        if not update.is_rewound:
            update.check_next(index)
        return update

    def _prepare_slots(self, update: GroupUpdate) -> None:
        if self._slots_are_lost:
            self._slots.free()
            self._slots_are_lost = False
        self._slots.prepare(update.arena_layout)
