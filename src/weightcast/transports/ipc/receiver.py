"""A worker's end of the ipc transport: maps the sender's arena once, and is told what in it is whole.

Invariants: a sender that has closed the connection (because this receiver made no progress for too long, say) gives
nothing more; the iterating thread reads the connection, and lets go of the condition while it waits for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from typing import Any

import msgspec
import torch

from weightcast.errors import ManifestError, PeerDiedError, PeerTimeoutError, WeightcastError, from_record
from weightcast.format.manifest import Manifest, WeightVersion
from weightcast.host.closing import on_failure
from weightcast.host.deadline import Deadline
from weightcast.host.descriptors import shortage, shortage_now
from weightcast.links.link import check_same_user
from weightcast.seams.transport import Share
from weightcast.transports.ipc import records
from weightcast.transports.ipc.arena import MappedSharedArena
from weightcast.transports.ipc.channel import SCHEME, Channel
from weightcast.transports.receiving import CONNECT_SECONDS, PUBLISHER, ArenaReceiver, PeerUpdate


class IpcReceiver(ArenaReceiver):
    """Implements `Receiver`. Memory: none of its own, but for a bucket's pages that the engine writes to."""

    def __init__(
        self, url: str, *, peer: str, run: str, deadline_seconds: float = 60.0, device: torch.device | None = None
    ) -> None:
        """Connect as `peer` to a sender's address. `device`: the GPU that reads an arena that lies on a GPU.

        Raises PeerDiedError, PeerTimeoutError, StaleVersionError.
        """
        super().__init__(run, deadline_seconds)
        self._num_waiting = 0
        self._device = device
        self._descriptor: int | None = None
        """That of the record that is being taken, if it came with one that nobody owns yet."""
        self._channel = _connect(url, records.IpcHello(run, peer), min(deadline_seconds, CONNECT_SECONDS))
        with on_failure(self._channel.close):
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def share(self, manifest: Manifest, share: Share) -> bool:
        """The sender's arena is the same memory for all."""
        return True

    def _want(self, manifest: Manifest, version: WeightVersion, staged: bool) -> PeerUpdate:
        # An iteration of the former update was woken by `end`; it must not take what is meant for this one.
        if not self._condition.wait_for(lambda: self._num_waiting == 0, self._deadline_seconds):
            raise PeerTimeoutError("the iteration of the former update did not end", peer=PUBLISHER)
        self._require_open()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        return super()._want(manifest, version, staged)

    def _leave(self, wanted: PeerUpdate) -> None:
        os.eventfd_write(self._wake, 1)
        super()._leave(wanted)

    def _disconnect(self) -> None:
        os.eventfd_write(self._wake, 1)
        if self._num_waiting == 0:
            self._free()

    def _free(self) -> None:
        self._channel.close()
        os.close(self._wake)
        super()._disconnect()

    def _wait(self, wanted: PeerUpdate, seconds: float) -> None:
        """Let go of the condition until there is something to hear, or `end` or `close` wakes us."""
        poller = select.poll()
        poller.register(self._channel, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        self._num_waiting += 1
        self._condition.release()
        try:
            poller.poll(seconds * 1000)
        finally:
            self._condition.acquire()
            self._num_waiting -= 1
            self._condition.notify_all()
            if self._closed and self._num_waiting == 0:
                self._free()

    # --- records ---

    def _listen(self) -> None:
        """Take every record that is there. Raises ManifestError for one that can't be."""
        while not self._ended:
            try:
                packet = self._channel.receive(records.ToReceiver, max_descriptors=1)
                if packet is None:
                    break
                record, self._descriptor = packet
                try:
                    self._on_record(record)
                finally:
                    if self._descriptor is not None:
                        os.close(self._descriptor)
            except EOFError as exc:
                self._give_up(str(exc))
            except BaseException as exc:
                self._give_up(f"it was disconnected: {exc}")
                raise

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

    def _tell(self, record: msgspec.Struct) -> None:
        if self._ended:
            return
        try:
            if not self._channel.send(record):
                self._give_up("it takes no records")
        except EOFError as exc:
            self._give_up(str(exc))

    def _give_up(self, reason: str) -> None:
        """The connection is of no more use; the sender is told by its end."""
        self._ended = reason
        self._channel.close()


def _connect(url: str, hello: records.IpcHello, deadline_seconds: float) -> Channel:
    """Connect to a sender's address and be welcomed. Raises PeerDiedError, PeerTimeoutError or what it refuses with."""
    name = url.removeprefix(SCHEME)
    if not url.startswith(SCHEME) or not name.startswith("@"):
        raise ValueError(f"{url!r} is not the address of an ipc sender; expected {SCHEME}@NAME, as in Sender.address")
    deadline = Deadline(deadline_seconds)
    try:
        channel = Channel(sock := socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    except OSError as exc:
        raise WeightcastError(f"the publisher at {url} can't be connected to: {shortage(exc) or exc}") from exc
    with on_failure(channel.close):
        try:
            # Only where the queue of new connections is full this waits, and the kernel knows how long.
            sock.setblocking(True)
            timeout = struct.pack("ll", int(deadline_seconds), int(deadline_seconds % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
            sock.connect("\0" + name[1:])
            sock.setblocking(False)
            check_same_user(sock)
            channel.send(hello)
            poller = select.poll()
            poller.register(channel, select.POLLIN)
            while (packet := channel.receive(records.ToReceiver)) is None:
                if deadline.has_passed:
                    late = f"the publisher at {url} did not welcome this peer by the deadline"
                    raise PeerTimeoutError(late, peer=PUBLISHER)
                poller.poll(deadline.remaining_seconds * 1000)
        except EOFError as exc:
            raise PeerDiedError(f"the publisher at {url} closed the connection: {exc}", peer=PUBLISHER) from exc
        except OSError as exc:
            raise PeerDiedError(
                f"no publisher of this user answers at {url}: {exc}. ipc:// needs both ends on one host and in one "
                "network namespace (one container or pod, or --network=host)",
                peer=PUBLISHER,
            ) from exc
        record = packet[0]
        if isinstance(record, records.Refused):
            raise from_record(record.error)
        if not isinstance(record, records.Welcome):
            raise ManifestError(f"the publisher at {url} answered a hello with {type(record).__name__}", fault="type")
        return channel
