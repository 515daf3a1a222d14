"""A worker's end of the ipc transport: maps the sender's arena once, and is told what in it is whole.

Invariants: a sender that has ended the connection (because this receiver made no progress for too long, say) gives
nothing more; a thread that reads the link only keeps what it hears, and the iterating thread takes it in: mapping
memory is its work.
"""

from __future__ import annotations

import collections
import contextlib
import os
import time
from typing import Any

import torch

from weightcast.errors import ManifestError, WeightcastError
from weightcast.format.manifest import Manifest
from weightcast.host import device as host_device
from weightcast.host.closing import awaited_at_exit
from weightcast.host.deadline import MAX_SECONDS
from weightcast.host.descriptors import shortage_now
from weightcast.seams.transport import Portion
from weightcast.transports.ipc import records
from weightcast.transports.ipc.arena import MappedSharedArena
from weightcast.transports.linked import LinkedReceiver
from weightcast.transports.receiving import ArenaReceiver, PeerUpdate
from weightcast.transports.records import ArenaClosed, KeepAlive


class IpcReceiver(ArenaReceiver, LinkedReceiver[PeerUpdate]):
    """Implements `Receiver`. Memory: none of its own, but for a bucket's pages that the engine writes to."""

    def __init__(
        self, url: str, *, peer: str, run: str, deadline_seconds: float = 60.0, device: torch.device | None = None
    ) -> None:
        """Connect as `peer` to a sender's address. `device`: the GPU that reads an arena that lies on a GPU.

        Raises PeerDiedError, PeerTimeoutError, ManifestError.
        """
        self._device = device
        self._heard = collections.deque[tuple[Any, int | None]]()
        """Records that were not taken in yet, each with its descriptor."""
        self._descriptor: int | None = None
        """That of the record that is being taken in, if nobody owns it yet."""
        super().__init__(
            url,
            peer=peer,
            run=run,
            deadline_seconds=deadline_seconds,
            records=records.ToReceiver,
            # A staged version may be installing: only where the sender's process has gone is its memory left alone.
            lease_seconds=MAX_SECONDS,
        )

    def read_together(self, manifest: Manifest, portion: Portion) -> bool:
        """The sender's arena is the same memory for all."""
        return True

    def _on_message(self, record: Any) -> None:
        if isinstance(record, KeepAlive):
            self._heard_at = time.monotonic()
        elif not (self._closed or self._ended):
            is_arena = isinstance(record, (records.SharedArena, records.CudaArena))
            self._heard.append((record, self._link.pop_descriptor() if is_arena else None))
        if isinstance(record, ArenaClosed) and self._wanted is None:
            # Not here: memory of a GPU goes once all that is queued there is over.
            awaited_at_exit(self._release_beside, "weightcast-release")

    def _release_beside(self) -> None:
        """Release what the sender has closed, though the engine's thread takes nothing in now."""
        with host_device.own_stream(self._device or torch.device("cpu")), contextlib.suppress(WeightcastError):
            self.release()

    def _listen(self) -> None:
        """Take in every record that is there. Raises ManifestError for one that can't be."""
        super()._listen()
        while self._heard:
            record, self._descriptor = self._heard.popleft()
            try:
                self._on_record(record)
            except BaseException as exc:
                self._give_up(f"it was disconnected: {exc}")
                raise
            finally:
                self._close_descriptor()

    def _on_other(self, record: Any) -> None:
        match record:
            case records.CudaArena():
                # Here: host memory needs none of it.
                from weightcast.transports.ipc.cuda import MappedCudaArena

                self._use_arena(MappedCudaArena(record, self._descriptor, self._device))
            case records.SharedArena():
                descriptor, self._descriptor = self._descriptor, None
                if descriptor is None:
                    if short := shortage_now():
                        raise WeightcastError(f"the publisher's arena can't be opened: {short}")
                    raise ManifestError("an arena was announced without its descriptor", fault="type")
                self._use_arena(MappedSharedArena(record, descriptor))
            case _:
                super()._on_other(record)

    def _give_up(self, reason: str) -> None:
        """The connection is of no more use; the sender is told by its end."""
        super()._give_up(reason)
        self._link.leave()
        self._forget_heard()

    def _disconnect(self) -> None:
        super()._disconnect()
        self._forget_heard()

    def _forget_heard(self) -> None:
        while self._heard:
            _, self._descriptor = self._heard.popleft()
            self._close_descriptor()

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
