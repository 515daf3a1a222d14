"""Device memory that a sender shares with receivers on the same GPU, by CUDA IPC.

Invariants: a handle travels as plain fields, once to each receiver, and is opened once; readiness is an interprocess
event recorded on the stream that packed the bucket, and waited for by the stream that reads it; a bucket is released
only when the receiver's stream has done its work on it. The handles are those of torch's `_share_cuda_`, which keeps
the memory until every receiver has let go of it.
"""

from __future__ import annotations

import torch

from weightcast.errors import InsufficientMemoryError, UnsupportedError
from weightcast.format.bucket import Buffers
from weightcast.transports.ipc.records import CudaArena
from weightcast.transports.receiving import MappedArena
from weightcast.transports.sending import OwnedArena


class OwnedCudaArena(OwnedArena):
    """The sender's end. Costs `size_bytes` of device memory at once."""

    def __init__(self, generation: int, size_bytes: int, device: torch.device) -> None:
        """Raises InsufficientMemoryError if the device hasn't that much left."""
        self._events: dict[int, tuple[torch.cuda.Event, bytes]] = {}
        try:
            self._whole = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as exc:
            free, _ = torch.cuda.mem_get_info(device)
            raise InsufficientMemoryError(
                f"the arena of this update needs {size_bytes} bytes, {device} has {free} left: use smaller buckets"
            ) from exc
        super().__init__(generation, self._whole, device)

    def announcement(self) -> tuple[CudaArena, None]:
        """A record for one receiver: every call counts one more reader of the memory."""
        (_, handle, size, offset, counter_handle, counter_offset, event, sync) = (
            self._whole.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
        )
        record = CudaArena(
            generation=self.generation,
            size_bytes=self.size_bytes,
            device=uuid_of(self.device),
            handle=handle,
            storage_size_bytes=size,
            storage_offset_bytes=offset,
            ref_counter_handle=counter_handle,
            ref_counter_offset=counter_offset,
            event_handle=event,
            event_sync_required=sync,
        )
        return record, None

    def mark_ready(self, slot: int) -> bytes:
        """Record the slot's event behind everything queued on the current stream; return its handle."""
        with torch.cuda.device(self.device):
            if slot not in self._events:
                event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
                event.record()
                self._events[slot] = event, event.ipc_handle()  # type: ignore[no-untyped-call]
            else:
                self._events[slot][0].record()
        return self._events[slot][1]

    def close(self, *, free: bool) -> None:
        """The memory is given back when every receiver has let go of it, too."""
        # A bucket that was given up may still be being packed, on a stream that the allocator does not know of.
        torch.cuda.synchronize(self.device)
        del self._whole
        self._events.clear()
        super().close(free=free)


class MappedCudaArena(MappedArena):
    """The receiver's end."""

    def __init__(self, record: CudaArena) -> None:
        """Raises UnsupportedError if this process does not see the GPU, or may not open the memory."""
        self.generation = record.generation
        self.size_bytes = record.size_bytes
        self._device = _find_device(record.device)
        self._events: dict[bytes, torch.cuda.Event] = {}
        try:
            with torch.cuda.device(self._device):
                storage = torch.UntypedStorage._new_shared_cuda(
                    self._device.index,
                    record.handle,
                    record.storage_size_bytes,
                    record.storage_offset_bytes,
                    record.ref_counter_handle,
                    record.ref_counter_offset,
                    record.event_handle,
                    record.event_sync_required,
                )
        except RuntimeError as exc:
            raise UnsupportedError(
                f"the publisher's arena on {self._device} can't be opened here: {exc}. CUDA shares memory between two "
                "processes of one GPU that are in one container and may trace each other; the trainer must not use "
                'expandable_segments or cudaMallocAsync (PYTORCH_CUDA_ALLOC_CONF). Or publish with install="staged"; '
                "in one process use memory://"
            ) from exc
        whole = torch.empty(0, dtype=torch.uint8, device=self._device)
        self.buffers = Buffers(whole.set_(storage, 0, (record.size_bytes,), (1,)))

    def reset(self) -> None:
        """Wait until nothing on this device reads it: an update that was given up may have been loading."""
        torch.cuda.synchronize(self._device)

    def wait_ready(self, event: bytes) -> None:
        """Have the current stream wait until the bucket is whole. Does not block the caller."""
        if event not in self._events:
            self._events[event] = torch.cuda.Event.from_ipc_handle(self._device, event)  # type: ignore[no-untyped-call]
        self._events[event].wait(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        """Wait until the current stream has done everything queued on it."""
        torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Let go of it; the mapping stays as long as a tensor needs it."""
        self._events.clear()


def _find_device(uuid: str) -> torch.device:
    """This process's device of that UUID: indices differ between processes, by CUDA_VISIBLE_DEVICES."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        if uuid_of(device) == uuid:
            return device
    raise UnsupportedError(
        f"the publisher's arena is on GPU {uuid}, this process sees {[uuid_of(d) for d in devices] or 'no GPU'}: make "
        'that GPU visible here, or publish with install="staged", which goes by host memory'
    )


def uuid_of(device: torch.device) -> str:
    """What names a GPU in every process, whatever its index there."""
    return str(torch.cuda.get_device_properties(device).uuid)
