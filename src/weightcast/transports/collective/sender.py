"""The publisher's end of the collective transport: one flat broadcast per bucket to every receiver at once.

Invariants: a slot is rewritten only when its former broadcast is over, and never while a broken group may still read
it; a group in which anything went wrong is left, and made anew without whoever was lost, within the same update; the
others then go on from the first bucket that one of them lacks. All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weightcast import process_group
from weightcast.errors import ClosedError, PeerError, UnsupportedError, UpdateAbortedError, WeightcastError
from weightcast.format.bucket import TRAILER_BYTES, Buffers, place
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.transports.collective.broadcast_group import BroadcastGroup
from weightcast.transports.collective.members import GroupMembers, send_to_all
from weightcast.transports.collective.membership import GroupUpdate, Membership
from weightcast.transports.collective.records import MAX_REASON_CHARACTERS, Address, UpdateAborted, parse_endpoint

_NUM_SLOTS = 2
_SIGNS_PER_DEADLINE = 4
_MAX_SIGN_SECONDS = 5.0


class CollectiveSender:
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
        self._device = torch.device((device or "cuda") if backend == "nccl" else "cpu")
        if backend == "nccl" and self._device.type != "cuda":
            raise UnsupportedError(f"nccl moves no memory of {self._device}: use gloo:// or ipc://")
        self._run = run
        sign_seconds = min(deadline_seconds / _SIGNS_PER_DEADLINE, _MAX_SIGN_SECONDS)
        self._members = _listen(url, run, host, port, sign_seconds)
        listener = self._members.listener
        self.address = Address(backend, host, listener.port, listener.secret).url
        self._membership = Membership(
            self._members, backend, host, device=self._device, deadline_seconds=deadline_seconds
        )
        self._slots: Buffers | None = None
        self._slots_bytes = 0
        self._update: GroupUpdate | None = None
        self._num_updates = 0
        self._closed = False
        process_group.close_at_exit(self)

    @property
    def failures(self) -> Mapping[str, WeightcastError]:
        return dict(self._membership.failures)

    def connected(self, peers: Sequence[str]) -> list[str]:
        """Those of these peers that are connected now. Does not wait."""
        return [name for name in peers if self._members.get(name) is not None]

    def open(self, manifest: Manifest, version: WeightVersion, *, peers: Sequence[str], staged: bool) -> None:
        """Begin an update: wait for `peers` to be connected, and for their group, which is kept while they stay."""
        self._require_open()
        if version.run != self._run:
            raise ValueError(f"version {version.number} is of run {version.run}, this sender of run {self._run}")
        self.abort("the publisher began another update")
        self._membership.failures = {}
        self._num_updates += 1
        arena_layout = place(manifest, num_slots=_NUM_SLOTS, staged=False)
        members = self._membership.connected(peers)
        self._update = update = GroupUpdate(self._num_updates, version, manifest, staged, arena_layout, members)
        self._membership.form(update)
        self._prepare_slots(update)

    def buffer(self, index: int) -> torch.Tensor:
        """Where bucket `index` is to be packed. Waits until the broadcast of its slot's former content is over."""
        update, epoch = self._require_update(index), self._membership.epoch
        if update.members and epoch is not None:
            free = index - _NUM_SLOTS + 1
            is_late = not self._membership.wait(update, lambda: epoch.is_quiet(free))
            if is_late or self._membership.is_in_trouble(update):
                self._recover(update, is_late=is_late)
            else:
                epoch.land(free)
        return self._slot(update, index)

    def send(self, index: int) -> int:
        """Begin to broadcast the bucket. The last waits until everybody has all of them."""
        update = self._require_update(index)
        if not update.is_rewound:
            update.next = index + 1
            if update.members:
                self._send(update, index)
        update.is_rewound = False
        return update.next

    def _send(self, update: GroupUpdate, index: int) -> None:
        epoch, is_late = self._membership.epoch, False
        assert epoch is not None
        try:
            num_bytes = update.manifest.buckets[index] + TRAILER_BYTES
            epoch.send(index, self._slot(update, index)[:num_bytes], self._members.condition)
            if update.is_whole:
                is_late = not self._membership.wait(update, lambda: _is_over(update, epoch))
            is_lost = is_late or self._membership.is_in_trouble(update)
        except PeerError:
            is_lost = True
        if is_lost:
            self._recover(update, is_late=is_late)
        elif update.is_whole:
            epoch.land()

    def _recover(self, update: GroupUpdate, *, is_late: bool) -> None:
        self._membership.recover(update, is_late=is_late)
        self._prepare_slots(update)

    def abort(self, reason: str) -> None:
        """End the update for every receiver; its group is closed, since some may be waiting in it. Does not wait."""
        update = self._update
        if update is None or not update.is_open or self._closed:
            return
        update.is_open = False
        if not update.is_whole and update.members:
            send_to_all(update.members, UpdateAborted(update.number, reason[:MAX_REASON_CHARACTERS]))
            self._membership.leave()

    def close(self) -> None:
        """Disconnect everybody and free everything. Idempotent."""
        if self._closed:
            return
        self.abort("the publisher was closed")
        self._closed = True
        self._membership.leave()
        self._members.close()
        self._slots = None

    # --- slots ---

    def _prepare_slots(self, update: GroupUpdate) -> None:
        arena_layout, membership = update.arena_layout, self._membership
        if self._slots is None or membership.slots_are_lost or self._slots_bytes < arena_layout.size_bytes:
            membership.slots_are_lost = False
            self._slots_bytes = arena_layout.size_bytes
            self._slots = Buffers(torch.empty(arena_layout.size_bytes, dtype=torch.uint8, device=self._device))
        else:
            self._slots.forget_above(len(arena_layout.slots))

    def _slot(self, update: GroupUpdate, index: int) -> torch.Tensor:
        assert self._slots is not None
        return self._slots.get(index, update.arena_layout.offsets[index], update.arena_layout.sizes_bytes[index])

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("this sender was closed")

    def _require_update(self, index: int) -> GroupUpdate:
        self._require_open()
        update = self._update
        if update is None or not update.is_open:
            raise UpdateAbortedError("no update is open: it was aborted, or open() was not called")
        if not update.is_rewound and (index != update.next or update.is_whole):
            raise ValueError(f"bucket {index} of {update.num_buckets}: bucket {update.next} is the next")
        return update


def _is_over(update: GroupUpdate, epoch: BroadcastGroup) -> bool:
    """Whether everybody has everything, and no broadcast is under way."""
    return epoch.is_quiet() and all(member.whole_update == update.number for member in update.members)


def _listen(url: str, run: str, host: str, port: int, sign_seconds: float) -> GroupMembers:
    try:
        return GroupMembers(run, host, port, sign_seconds)
    except OSError as exc:
        what = f"{url!r} can't be listened at: {exc.strerror}; write an address of this host and a free port, or 0"
        raise OSError(exc.errno, what) from exc
